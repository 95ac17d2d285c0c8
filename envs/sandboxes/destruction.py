"""Destroying surely: tried again when it fails, and told when it fails for good."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from titogym.cancellation import to_its_end
from titogym.envs.sandboxes.base import SandboxError

log = logging.getLogger(__name__)

PAUSES = (0.2, 1.0, 3.0)  # s before each further try


class Destruction:
    """The destroying of one backend's sandboxes. `undestroyed` maps the id of each that is left to why."""

    def __init__(self, pauses: tuple[float, ...] = PAUSES) -> None:
        self.undestroyed: dict[str, str] = {}
        self._pauses = pauses
        self._again: dict[str, Callable[[], Awaitable[None]]] = {}

    async def __call__(self, name: str, destroy: Callable[[], Awaitable[None]]) -> None:
        """Run `destroy`, again where it fails, to its end though the caller is cancelled.

        Raises `SandboxError` when no try helped.
        """
        await to_its_end(self._try(name, destroy))

    async def remaining(self) -> None:
        """Try once more with everything that is left, and log what will not go."""
        for name, destroy in list(self._again.items()):
            try:
                await destroy()
            except Exception as error:
                self._keep(name, destroy, error)
                log.error("sandbox %s could not be destroyed and is left behind: %s", name, error)
            else:
                self._forget(name)

    async def _try(self, name: str, destroy: Callable[[], Awaitable[None]]) -> None:
        for pause in (*self._pauses, None):
            try:
                await destroy()
            except Exception as error:
                self._keep(name, destroy, error)
                if pause is None:
                    raise SandboxError(f"The sandbox {name} could not be destroyed: {error}") from error
                log.warning("sandbox %s was not destroyed (%s): trying again in %g s", name, error, pause)
                await asyncio.sleep(pause)
            else:
                self._forget(name)
                return

    def _keep(self, name: str, destroy: Callable[[], Awaitable[None]], error: Exception) -> None:
        self._again[name] = destroy
        self.undestroyed[name] = f"{type(error).__name__}: {error}"

    def _forget(self, name: str) -> None:
        self._again.pop(name, None)
        self.undestroyed.pop(name, None)
