"""What a client did wrong or cannot have, independent of the wire protocol that says so."""


class RequestError(Exception):
    """A request that the gateway refuses. `message` is one clear sentence for the person who reads it.

    `code` is machine-readable, `param` the request field at fault; with `retry_after` (seconds) the same
    request may succeed later; `exhausted` names the session budget that is used up ("turns", "tokens");
    `overflow` is how many tokens the prompt has, and how many it may have.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        code: str = "invalid_request",
        param: str | None = None,
        retry_after: float | None = None,
        exhausted: str | None = None,
        overflow: tuple[int, int] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.code = code
        self.param = param
        self.retry_after = retry_after
        self.exhausted = exhausted
        self.overflow = overflow


def context_exceeded(
    message: str, exhausted: str | None = None, overflow: tuple[int, int] | None = None
) -> RequestError:
    """The prompt does not fit, or a budget is used up: harnesses know this code and stop or compact."""
    return RequestError(
        message,
        code="context_length_exceeded",
        param="messages",
        exhausted=exhausted,
        overflow=overflow,
    )
