"""One turn, independent of the wire protocol: what is asked, and what comes back."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from titogym.gateway.sessions.spec import Sampling
from titogym.gateway.sessions.tree import Node
from titogym.gateway.tokens.parsers.events import Event
from titogym.templates.conversation import Message, Prefix


@dataclass(frozen=True, slots=True)
class TurnRequest:
    """A validated request. `ignored` names request fields that have no effect, each with the reason."""

    prefix: Prefix
    messages: tuple[Message, ...]
    sampling: Sampling
    stream: bool
    calls: bool  # whether the answer may call tools
    ignored: Mapping[str, str] = field(default_factory=dict)


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
    prompt_tokens: int
    cached_tokens: int

    @property
    def completion_tokens(self) -> int:
        return len(self.node.generation.output_ids)

    @property
    def finish_reason(self) -> str:
        """`stop`, `length` or `tool_calls`."""
        reason = self.node.generation.finish
        return "tool_calls" if reason == "stop" and self.node.answer.tool_calls else reason
