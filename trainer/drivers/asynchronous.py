"""The fully asynchronous driver: rollout and training overlap, and meet only in the buffer."""

from titogym.trainer.batch import Group
from titogym.trainer.drivers.base import Driver, timed


class AsynchronousDriver(Driver):
    """Collect in the background; train, update, then evaluate and save where that is due."""

    def _admission(self) -> None:
        return None

    async def _collect(self) -> list[Group]:
        return await self._buffer.take(self._config.rollout.groups_per_step)

    async def _after_update(self, figures: dict[str, float]) -> dict[str, float]:
        added: dict[str, float] = {}
        with timed(added, "time/publish"):
            added |= await self._publish(self._step)
        return added

    async def _between_steps(self) -> None:
        if self._evaluation_is_due():
            await self._evaluate()
        if self._checkpoint_is_due():
            await self._checkpoint()
