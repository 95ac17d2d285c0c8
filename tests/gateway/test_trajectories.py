"""Training sequences cut from a tree."""

import pytest

from tests.gateway.forest import answer, generation, tree, turn, user
from titogym.errors import UserError
from titogym.gateway.engines.base import VersionSpan
from titogym.gateway.trajectories import cut

U1, A1, U2, A2, U3 = user("1"), answer("a"), user("2"), answer("b"), user("3")


def test_one_leaf_one_trajectory():
    forest = tree()
    turn(forest, [U1], A1, prompt=(1, 2), output=(3, 4), version="v0")
    turn(forest, [U1, A1, U2], A2, prompt=(5,), output=(6, 7), version="v1", finish="length")
    [found] = cut("s", forest)
    assert found.tokens == [1, 2, 3, 4, 5, 6, 7]
    assert found.loss_mask == [0, 0, 1, 1, 0, 1, 1]
    assert found.logprobs == [0, 0, -0.5, -0.5, 0, -0.5, -0.5]
    assert found.version_spans == [(2, 4, "v0"), (5, 7, "v1")]
    assert (found.session_id, found.leaf, found.turns, found.finish_reason) == ("s", "1", 2, "length")
    assert found.provenance["nodes"] == [0, 1]


def test_shared_answers_carry_loss_in_the_earliest_leaf_only():
    forest = tree()
    turn(forest, [U1], A1, "branching", prompt=(1,), output=(2, 3))
    turn(forest, [U1, A1, U2], A2, "branching", prompt=(4,), output=(5,))
    turn(forest, [U1, A1, U3], A2, "branching", prompt=(6,), output=(7,))
    first, second = cut("s", forest)
    assert (first.loss_mask, second.loss_mask) == ([0, 1, 1, 0, 1], [0, 0, 0, 0, 1])
    assert second.logprobs == [0, 0, 0, 0, -0.5]
    assert second.version_spans == [(1, 3, "v0"), (4, 5, "v0")]


def test_superseded_turns_are_dropped_unless_the_picker_keeps_them():
    forest = tree()
    turn(forest, [U1], answer("lost"), output=(9,))
    turn(forest, [U1], A1, output=(3, 4))
    [kept] = cut("s", forest)
    assert kept.tokens == [1, 2, 3, 4]
    assert [t.tokens for t in cut("s", forest, lambda forest: forest.leaves())] == [[1, 2, 9], [1, 2, 3, 4]]


def test_loss_moves_to_the_earliest_kept_leaf():
    forest = tree()
    turn(forest, [U1], A1, "branching", prompt=(1,), output=(2,))
    turn(forest, [U1, A1, U2], A2, "branching", prompt=(4,), output=(5,))
    turn(forest, [U1, A1, U3], A2, "branching", prompt=(6,), output=(7,))
    [only] = cut("s", forest, lambda forest: [forest.nodes[2]])
    assert only.loss_mask == [0, 1, 0, 1]


def test_trimmed_tokens_leave_mask_logprobs_and_spans_with_them():
    forest = tree()
    turn(forest, [U1], A1, prompt=(1,), output=(2, 3))
    turn(forest, [U1, A1, U2], A2, prompt=(4,), output=(5,), trim=1)
    [found] = cut("s", forest)
    assert found.tokens == [1, 2, 4, 5]
    assert found.loss_mask == [0, 1, 0, 1]
    assert found.version_spans == [(1, 2, "v0"), (3, 4, "v0")]


def test_a_span_that_is_trimmed_away_goes():
    forest = tree()
    made = generation(output=(2, 3))
    spans = (VersionSpan(0, 1, "v0"), VersionSpan(1, 2, "v1"))
    first = forest.draft(
        None, turn(tree(), [U1], A1).prefix, (U1,), A1, type(made)(**{**_plain(made), "spans": spans})
    )
    forest.append(first)
    turn(forest, [U1, A1, U2], A2, prompt=(4,), output=(5,), trim=1, version="v1")
    [found] = cut("s", forest)
    assert found.version_spans == [(2, 3, "v0"), (4, 5, "v1")]


def _plain(made):
    return {name: getattr(made, name) for name in made.__slots__}


def test_picker_must_return_leaves():
    forest = tree()
    turn(forest, [U1], A1)
    turn(forest, [U1, A1, U2], A2)
    with pytest.raises(UserError, match="must return leaves"):
        cut("s", forest, lambda forest: forest.nodes)
    with pytest.raises(UserError, match="must return leaves"):
        cut("s", forest, lambda forest: [forest.nodes[-1]] * 2)
    with pytest.raises(UserError, match="picker failed"):
        cut("s", forest, lambda forest: [forest.nodes[7]])


def test_empty_session_has_none():
    assert cut("s", tree()) == []
