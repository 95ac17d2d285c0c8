"""What a wire protocol is to the gateway: a way in and a way out. One small module each."""

from typing import Any, Protocol

import orjson

from titogym.gateway.errors import RequestError
from titogym.gateway.sessions.turn import Committed, Delta


class Reply(Protocol):
    """Writes one answer, as a stream of server-sent events or whole."""

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


KEEP_ALIVE = b": keep-alive\n\n"


def event(data: Any) -> bytes:
    """One server-sent event without a name."""
    return b"data: " + orjson.dumps(data) + b"\n\n"
