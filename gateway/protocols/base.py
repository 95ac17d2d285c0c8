"""What a wire protocol is to the gateway: a way in and a way out. One small module each."""

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import orjson

from titogym.gateway.errors import RequestError
from titogym.gateway.sessions.tree import Receipt, Tree
from titogym.gateway.sessions.turn import Committed, Delta, TurnRequest
from titogym.templates.family import Family
from titogym.templates.tokenizer import Tokenizer


class Reply(Protocol):
    """Writes one answer, as a stream of server-sent events or whole."""

    keep_alive: bytes  # what goes out in silence, once the stream is open

    def planned(self, prompt_tokens: int) -> None:
        """The length of the prompt is known; nothing is sampled yet."""
        ...

    def open(self) -> bytes:
        """What goes out before the first token."""
        ...

    def delta(self, delta: Delta) -> bytes:
        """The events of what arrived; may be empty."""
        ...

    def close(self, committed: Committed) -> bytes:
        """The last events of a stream."""
        ...

    def whole(self, committed: Committed) -> bytes:
        """The body of an answer that is not streamed."""
        ...

    def failure(self, error: RequestError) -> bytes:
        """The event that ends a stream which cannot go on."""
        ...


@dataclass(frozen=True, slots=True)
class Context:
    """What reading a request needs besides its body. `tree` is the session's; `digest` stands for the
    request and `key` is its idempotency key, where it has one."""

    family: Family
    model: str  # name of the model that is served
    tree: Tree
    digest: str = ""
    key: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)

    def receipt(self, kind: str, **echo: Any) -> Receipt:
        """A receipt for an answer whose id begins with `kind`."""
        return Receipt(id=kind + secrets.token_hex(12), request=self.digest, key=self.key, echo=echo)


class Asked(Protocol):
    """A parsed request: the turn that it asks for, and how its answer is to be written."""

    @property
    def turn(self) -> TurnRequest: ...

    def reply(self, tokenizer: Tokenizer, receipt: Receipt) -> Reply:
        """`receipt` is the turn's own, or that of the turn whose answer this request gets once more."""
        ...


@dataclass(frozen=True, slots=True)
class WireProtocol:
    """`parse` raises `RequestError` for what cannot be served, naming the field."""

    name: str
    parse: Callable[[Any, Context], Asked]
    error_body: Callable[[RequestError], dict[str, Any]]


_SEAL = "titogym."
COMMENT = b": keep-alive\n\n"


def event(data: Any, name: str = "") -> bytes:
    """One server-sent event."""
    head = f"event: {name}\n".encode() if name else b""
    return head + b"data: " + orjson.dumps(data) + b"\n\n"


def seal(answer: str) -> str:
    """A sign of an answer's reasoning, for protocols that have clients send one back as it is."""
    return _SEAL + answer


def unseal(sign: str) -> str:
    """The id of the answer that a sign was made for, "" where it is not ours."""
    return sign.removeprefix(_SEAL) if sign.startswith(_SEAL) else ""
