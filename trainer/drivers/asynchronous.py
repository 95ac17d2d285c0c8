"""The fully asynchronous driver: rollout and training overlap, and meet only in the buffer."""

from collections.abc import Awaitable, Callable

from titogym.trainer.batch import Group
from titogym.trainer.drivers.base import Driver, timed
from titogym.trainer.rollout.buffer import Reason, oldest_version
from titogym.trainer.rollout.deadlines import must_wait
from titogym.trainer.rollout.worker import Places


class AsynchronousDriver(Driver):
    """Collect in the background; train, update, then evaluate and save where that is due."""

    def _admission(self) -> Callable[[], Awaitable[None]] | None:
        if self._config.buffer.on_stale != "wait":
            return None
        limit = self._config.rollout.groups_per_step * self._config.buffer.max_staleness
        self._places = Places(limit - len(self._buffer))
        return self._enter

    async def _enter(self) -> None:
        await self._buffer.room()
        await self._places.take()

    async def _collect(self) -> list[Group]:
        count = self._config.rollout.groups_per_step
        if self._config.buffer.on_stale != "wait":
            return await self._buffer.take(count)
        with self._buffer.waiting_for_groups.running():
            while self._must_wait():
                await self._worker.one_finished()
        groups = await self._buffer.take(count)
        self._places.give_back(count)
        return groups

    def _refused(self, group: Group, reason: Reason) -> None:
        super()._refused(group, reason)
        if self._config.buffer.on_stale == "wait":
            self._places.give_back()

    def _must_wait(self) -> bool:
        return must_wait(
            [oldest_version(group) for group in self._buffer.waiting()],
            self._worker.under_way(),
            version=self._step,
            limit=self._config.buffer.max_staleness,
            per_step=self._config.rollout.groups_per_step,
        )

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
