"""The synchronous driver: collect, train, save, update, evaluate, one after the other.

Only as many groups start as the step needs, so that every step trains on what the newest weights have
sampled. With `over_sampling_groups` more are started; those that still run when the step has its groups
are aborted and collected again later, and those that have finished wait for the next step.
"""

from collections.abc import Awaitable, Callable

from titogym.trainer.batch import Group
from titogym.trainer.drivers.base import Driver, timed
from titogym.trainer.rollout.buffer import Reason
from titogym.trainer.rollout.worker import Places


class SynchronousDriver(Driver):
    """Collect, train, save, update, evaluate."""

    def _admission(self) -> Callable[[], Awaitable[None]]:
        self._starts = Places(0)  # groups that may still start in this step
        return self._starts.take

    async def _collect(self) -> list[Group]:
        rollout = self._config.rollout
        self._starts.give_back(rollout.groups_per_step + rollout.over_sampling_groups - len(self._buffer))
        groups = await self._buffer.take(rollout.groups_per_step)
        self._starts.close()
        await self._worker.abort()
        return groups

    def _refused(self, group: Group, reason: Reason) -> None:
        super()._refused(group, reason)
        self._starts.give_back()  # another one in its place

    async def _after_update(self, figures: dict[str, float]) -> dict[str, float]:
        added: dict[str, float] = {}
        if self._checkpoint_is_due():
            with timed(added, "time/checkpoint"):
                # The step is not over, but a kill must not lose its record.
                await self._checkpoint(self._recorder.record(self._step, figures))
        with timed(added, "time/publish"):
            added |= await self._publish(self._step)
        return added

    async def _between_steps(self) -> None:
        if self._evaluation_is_due():
            await self._evaluate()
