"""The run's task order, and which groups of it are still owed to the trainer."""

import random
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from titogym.envs.task import Task
from titogym.errors import UserError
from titogym.trainer.batch import Group


@dataclass(frozen=True, slots=True)
class Assignment:
    """One group to collect: the task at place `index` of the order, for the `attempt`-th time (from 0)."""

    index: int
    attempt: int
    task: Task


class TaskOrder:
    """An endless seeded order over `tasks`: every epoch is another permutation of all of them.

    Place `i` depends on the seed and on `i` alone, so a cursor is all that a resumed run needs.
    """

    def __init__(self, tasks: Sequence[Task], seed: int) -> None:
        if not tasks:
            raise UserError("There is no task to train on: check environment.source, split and args.")
        self._tasks = list(tasks)
        self._seed = seed
        self._epoch = -1
        self._permutation: list[int] = []

    def __getitem__(self, index: int) -> Task:
        epoch, place = divmod(index, len(self._tasks))
        if epoch != self._epoch:
            self._permutation = list(range(len(self._tasks)))
            random.Random(f"{self._seed}/{epoch}").shuffle(self._permutation)
            self._epoch = epoch
        return self._tasks[self._permutation[place]]


class TaskLedger:
    """Hands out assignments and keeps those that are neither trained on nor given up.

    Its state in a checkpoint makes a resumed run collect again exactly the groups that were in flight: none
    is lost, none is trained on twice. `held` are the groups that wait in a restored buffer.
    """

    def __init__(
        self, order: TaskOrder, state: Mapping[str, Any] | None = None, held: Collection[int] = ()
    ) -> None:
        self._order = order
        self._cursor: int = state["cursor"] if state else 0
        self._owed: dict[int, int] = dict(state["owed"]) if state else {}  # index -> attempt
        self._again = deque(owed for owed in self._owed.items() if owed[0] not in held)

    def next(self) -> Assignment:
        """The next group to collect: those sent round again come first."""
        if self._again:
            index, attempt = self._again.popleft()
        else:
            index, attempt = self._cursor, 0
            self._cursor += 1
        self._owed[index] = attempt
        return Assignment(index, attempt, self._order[index])

    def retry(self, group: Group) -> None:
        """Collect `group` again, under the attempt that it carries."""
        self._owed[group.index] = group.attempt
        self._again.append((group.index, group.attempt))

    def give_back(self, assignment: Assignment) -> None:
        """`assignment` was aborted: collect it again, as the same attempt."""
        self._again.append((assignment.index, assignment.attempt))

    def settle(self, index: int) -> None:
        """The group at `index` was trained on, dropped or discarded: it is no longer owed."""
        del self._owed[index]

    def state(self) -> dict[str, Any]:
        """What `state` of the constructor takes; JSON."""
        return {"cursor": self._cursor, "owed": sorted(self._owed.items())}
