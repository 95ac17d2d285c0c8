"""What an assistant's answer is made of, in the order in which it is sampled."""

from dataclasses import dataclass, field

from titogym.templates.conversation import Message, ToolCall


@dataclass(frozen=True, slots=True)
class Reasoning:
    text: str


@dataclass(frozen=True, slots=True)
class Content:
    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A tool call begins. `index` counts the answer's calls from 0; `native_id` is the id that the model
    gave it, where its format has ids."""

    index: int
    id: str
    name: str
    native_id: str = ""


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A further piece of the arguments' text of call `index`."""

    index: int
    text: str


Event = Reasoning | Content | CallStart | CallArguments


@dataclass(slots=True)
class Collector:
    """Puts the message together from its events."""

    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[CallStart] = field(default_factory=list)
    arguments: list[list[str]] = field(default_factory=list)

    def add(self, events: list[Event]) -> None:
        for event in events:
            match event:
                case Content(text):
                    self.content.append(text)
                case Reasoning(text):
                    self.reasoning.append(text)
                case CallStart():
                    self.calls.append(event)
                    self.arguments.append([])
                case CallArguments(index, text):
                    self.arguments[index].append(text)

    def message(self) -> Message:
        calls = zip(self.calls, self.arguments, strict=True)
        return Message(
            role="assistant",
            content="".join(self.content),
            reasoning="".join(self.reasoning),
            tool_calls=tuple(
                ToolCall(call.id, call.name, "".join(pieces), call.native_id) for call, pieces in calls
            ),
        )
