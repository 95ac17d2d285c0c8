"""The connection to Daytona: its SDK, loaded when needed, and what its errors mean.

The SDK tries nothing again by itself. Every call through `Service.patiently` is one that may be made twice.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, TypeVar

from titogym.envs.sandboxes.base import SandboxError
from titogym.envs.sandboxes.creation import Creation, CreationPolicy, Refusal
from titogym.errors import UserError, install_extra

if TYPE_CHECKING:
    from daytona import AsyncDaytona

log = logging.getLogger(__name__)
T = TypeVar("T")

_PASSING = frozenset({408, 409, 429, 500, 502, 503, 504})


class Service:
    """One API key at one API. Options that are None come from DAYTONA_API_KEY, _API_URL and _TARGET."""

    def __init__(
        self, api_key: str | None, api_url: str | None, target: str | None, policy: CreationPolicy
    ) -> None:
        self._api_key, self._api_url, self._target = api_key, api_url, target
        self._client: AsyncDaytona | None = None
        # Commands and files are not to be spread like creations, only tried again.
        self._patience = Creation(
            CreationPolicy(
                rate=1e6, burst=1_000_000, attempts=policy.attempts, pause=policy.pause / 2,
                longest_pause=policy.longest_pause / 2, longest_wait=policy.longest_wait,
            ),
            refusal,
        )  # fmt: skip

    @property
    def client(self) -> "AsyncDaytona":
        """Made in the event loop that uses it. Raises `UserError` without the package or a key."""
        if self._client is None:
            try:
                from daytona import AsyncDaytona, DaytonaConfig, DaytonaError
            except ImportError:
                raise UserError(
                    f"The daytona sandbox needs the package daytona: {install_extra('daytona')}."
                ) from None
            try:
                self._client = AsyncDaytona(
                    DaytonaConfig(api_key=self._api_key, api_url=self._api_url, target=self._target)
                )
            except DaytonaError as error:
                raise UserError(
                    f"There is no access to Daytona: set DAYTONA_API_KEY to a key of your account ({error})."
                ) from None
        return self._client

    async def patiently(self, call: Callable[[], Awaitable[T]], what: str) -> T:
        """`call()`, again while its failure may pass. Raises `SandboxError` naming `what`, or `UserError`."""
        try:
            return await self._patience(call)
        except Exception as error:
            raise failure(error, what) from error

    async def close(self) -> None:
        if self._client is not None:
            client, self._client = self._client, None
            await client.close()  # type: ignore[no-untyped-call]


def refusal(error: Exception) -> Refusal | None:
    """Whether it may pass: too many requests, a failing server, an answer that did not come."""
    from daytona import DaytonaConnectionError, DaytonaError, DaytonaTimeoutError

    if not isinstance(error, DaytonaError):
        return Refusal() if isinstance(error, OSError | asyncio.TimeoutError) else None
    if error.status_code in _PASSING:
        return Refusal(_retry_after(error.headers))
    return Refusal() if isinstance(error, DaytonaConnectionError | DaytonaTimeoutError) else None


def missing(error: BaseException) -> bool:
    """Whether what was asked for does not exist (any more)."""
    from daytona import DaytonaNotFoundError

    return isinstance(error, DaytonaNotFoundError)


def failure(error: Exception, what: str) -> Exception:
    """What to raise in its place."""
    from daytona import DaytonaAuthenticationError, DaytonaError, DaytonaForbiddenError

    if isinstance(error, SandboxError | UserError):
        return error
    if (
        isinstance(error, DaytonaAuthenticationError | DaytonaForbiddenError)
        and error.source != "DAYTONA_DAEMON"
    ):
        return UserError(f"Daytona refuses this API key ({error}): set DAYTONA_API_KEY to a valid one.")
    if isinstance(error, DaytonaError | OSError | asyncio.TimeoutError):
        status = getattr(error, "status_code", None)
        return SandboxError(f"Daytona could not {what}{f' (status {status})' if status else ''}: {error}")
    return error


def _retry_after(headers: Any) -> float | None:
    """Seconds that the service asks to wait. The form with a date is not in its use."""
    for name, value in (headers or {}).items():
        if str(name).lower() == "retry-after":
            try:
                return max(0.0, float(value))
            except ValueError:
                return None
    return None
