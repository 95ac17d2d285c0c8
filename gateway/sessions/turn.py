"""One turn, independent of the wire protocol: what is asked, and what comes back."""

from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from titogym.gateway.sessions.spec import Sampling
from titogym.gateway.sessions.tree import Node, Receipt
from titogym.gateway.tokens.parsers.events import CallArguments, CallStart, Content, Event, Reasoning
from titogym.templates.conversation import Message, Prefix

BEGUN = "begun"  # among a receipt's echoes: characters of content that the client had begun the answer with


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Whether the answer may call tools; the names of those of which it `must` call one; and the request
    field that allows it a `single` call, "" where it may make several."""

    may: bool
    must: tuple[str, ...] = ()
    single: str = ""


@dataclass(frozen=True, slots=True)
class TurnRequest:
    """A validated request. `ignored` names request fields that have no effect, each with the reason;
    `schema_field` is the one whose JSON schema the answer follows."""

    prefix: Prefix
    messages: tuple[Message, ...]
    sampling: Sampling
    stream: bool
    choice: ToolChoice = ToolChoice(may=False)
    ignored: Mapping[str, str] = field(default_factory=dict)
    schema_field: str = "response_format"
    begun: Message | None = None  # the beginning of the answer, where the client gives one
    receipt: Receipt = field(default_factory=Receipt)


@dataclass(frozen=True, slots=True)
class Planned:
    """The turn is about to be sampled."""

    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class Delta:
    """What arrived since the delta before: events for a person, and the tokens that they came from."""

    events: Sequence[Event]
    ids: Sequence[int]
    logprobs: Sequence[float]


@dataclass(frozen=True, slots=True)
class Committed:
    """The turn is in the tree and in the journal."""

    node: Node

    @property
    def prompt_tokens(self) -> int:
        return self.node.length - self.completion_tokens

    @property
    def cached_tokens(self) -> int:
        return self.node.generation.cached_tokens

    @property
    def completion_tokens(self) -> int:
        return len(self.node.generation.output_ids)

    @property
    def finish_reason(self) -> str:
        """`stop`, `length` or `tool_calls`."""
        reason = self.node.generation.finish
        return "tool_calls" if reason == "stop" and self.node.answer.tool_calls else reason


Item = Planned | Delta | Committed


class Items(Protocol):
    """The items of one turn, as they come. `aclose` says that nobody reads them any more."""

    def __aiter__(self) -> AsyncIterator[Item]: ...

    def __anext__(self) -> Awaitable[Item]: ...

    def aclose(self) -> Awaitable[None]: ...


def told(node: Node) -> Message:
    """An answer as the client is told it: without what it had begun itself."""
    begun = node.receipt.echo.get(BEGUN, 0)
    return replace(node.answer, reasoning="", content=node.answer.content[begun:]) if begun else node.answer


def again(node: Node) -> list[Item]:
    """A committed turn as if it were sampled now."""
    committed, answer, generation = Committed(node), told(node), node.generation
    events: list[Event] = []
    if answer.reasoning:
        events.append(Reasoning(answer.reasoning))
    if answer.content:
        events.append(Content(answer.content))
    for index, call in enumerate(answer.tool_calls):
        events += (CallStart(index, call.id, call.name), CallArguments(index, call.arguments))
    return [
        Planned(committed.prompt_tokens),
        Delta(events, generation.output_ids, generation.logprobs),
        committed,
    ]
