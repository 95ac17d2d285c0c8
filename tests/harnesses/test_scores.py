"""The figures of an evaluation, against counting and simulation."""

import itertools
import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from titogym.harnesses.evaluation.records import EpisodeRecord
from titogym.harnesses.evaluation.scores import interval, pass_at, score


def record(task: str, attempt: int, reward: float | None, outcome: str = "finished", error=None):
    return EpisodeRecord(
        task,
        attempt,
        outcome,
        reward,
        error,
        2,
        10,
        100,
        {"agent": 1.5},
        {},
        f"episodes/{task}-{attempt}.json",
    )


@given(st.lists(st.booleans(), min_size=1, max_size=7), st.data())
def test_pass_at_k_is_the_share_of_subsets_with_a_pass(passes, data):
    k = data.draw(st.integers(1, len(passes)))
    subsets = list(itertools.combinations(passes, k))
    assert pass_at(k, len(passes), sum(passes)) == pytest.approx(sum(map(any, subsets)) / len(subsets))


@pytest.mark.parametrize("k", [0, 4])
def test_pass_at_k_needs_k_attempts(k):
    with pytest.raises(ValueError, match="3"):
        pass_at(k, 3, 1)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=30), st.integers(1, 20))
def test_an_interval_holds_its_value_and_stays_within_bounds(means, attempts):
    found = interval(means, len(means) * attempts)
    assert 0 <= found.low <= found.value <= found.high <= 1
    assert found.value == pytest.approx(statistics.fmean(means))
    assert found.high - found.low > 0


@pytest.mark.parametrize(
    ("tasks", "attempts", "spread"), [(10, 1, 0.0), (30, 4, 0.3), (30, 4, 0.0), (8, 8, 0.4)]
)
def test_intervals_hold_the_truth_as_often_as_they_say(tasks, attempts, spread):
    """Tasks of unlike difficulty: the mean over the population of tasks is 0.7."""
    choose = random.Random(1)
    held = 0
    trials = 600
    for _ in range(trials):
        means = []
        for _ in range(tasks):
            p = min(1.0, max(0.0, 0.7 + choose.choice((-spread, spread))))
            p = p if spread <= 0.3 else choose.choice((0.4, 1.0))
            means.append(sum(choose.random() < p for _ in range(attempts)) / attempts)
        found = interval(means, tasks * attempts)
        held += found.low <= 0.7 <= found.high
    assert held / trials > 0.92


def test_scores_count_what_was_graded():
    records = [
        record("a", 0, 1.0),
        record("a", 1, 0.5),
        record("b", 0, 0.0, "turn_limit", "The agent reached its limit of 4 turns."),
        record("b", 1, 0.0, "turn_limit", "The agent reached its limit of 9 turns."),
        record("c", 0, None, "setup_error", "no sandbox /tmp/x"),
    ]
    found = score(records)
    assert found.reward is not None
    assert found.reward.value == pytest.approx((0.75 + 0.0) / 2)
    assert {k: estimate.value for k, estimate in found.pass_at.items()} == {1: 0.25, 2: 0.5}
    assert (found.episodes, found.ungraded, found.tokens, found.prompt_tokens) == (5, 1, 50, 500)
    assert found.seconds == 7.5
    assert found.outcomes == {"finished": 2, "turn_limit": 2, "setup_error": 1}
    assert [(cause.outcome, cause.episodes) for cause in found.causes] == [
        ("turn_limit", ("b #0", "b #1")),
        ("setup_error", ("c #0",)),
    ]
    assert score(records, success=0.5).pass_at[1].value == 0.5


def test_nothing_graded_has_no_score():
    found = score([record("a", 0, None, "engine_error", "gone")])
    assert (found.reward, found.pass_at, found.tasks) == (None, {}, ())
