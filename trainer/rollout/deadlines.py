"""When the trainer must wait, so that no group becomes too old and long tasks are trained on like others.

A group begun under version `b` may be trained on while the version is at most `b + limit`. Every step
raises the version by one and trains on `per_step` groups, oldest first. So of the groups whose last
chance comes within the next `j` steps after this one, all but `per_step * j` must be in this step; while
fewer of these are finished than that, the trainer waits. (This is the feasibility test of scheduling by
the earliest deadline first.)

As long as at most `per_step * limit` groups are under way or waiting, none is ever rejected.
"""

from collections.abc import Sequence


def must_wait(
    finished: Sequence[float], under_way: Sequence[float], version: int, limit: int, per_step: int
) -> bool:
    """Whether a step under `version` must wait for one more group.

    `finished` and `under_way` are the versions under which groups were begun.
    """
    for later in range(limit + 1):
        due = version - limit + later
        ready = sum(begun <= due for begun in finished)
        together = ready + sum(begun <= due for begun in under_way)
        if min(together - per_step * later, per_step) > ready:
            return True
    return False
