"""Which groups of tasks a run trained on: each one once, whatever was killed on the way."""

from collections import Counter

from titogym.trainer.runs.directory import RunDirectory
from titogym.trainer.runs.storage import read_groups


def assert_groups_accounted_for(run: RunDirectory, per_step: int) -> None:
    """With every batch kept: no group of tasks was trained on twice, and none is gone without a name."""
    steps = [record["step"] for record in run.metrics()]
    assert steps == list(range(1, len(steps) + 1))
    trained = Counter(group.index for step in steps for group in read_groups(run.batch_path(step)))
    doubled = [index for index, times in trained.items() if times > 1]
    assert not doubled, f"trained on twice: {doubled}"
    assert trained.total() == len(steps) * per_step
    state = run.load_state(steps[-1])["ledger"]
    owed = {index for index, _ in state["owed"]}
    assert not owed & trained.keys()
    dropped = {event["group"] for event in run.events() if event["kind"] == "group_dropped"}
    lost = set(range(state["cursor"])) - owed - trained.keys() - dropped
    assert not lost, f"neither trained on, nor owed, nor dropped by name: {sorted(lost)}"
