"""The token tree and its two policies."""

import tracemalloc
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.gateway.forest import PREFIX, answer, generation, place, tree, turn, user
from titogym.gateway.errors import RequestError
from titogym.gateway.sessions.matchers import MATCHERS, matcher
from titogym.gateway.sessions.tree import Tree, conversation, row
from titogym.templates.conversation import Message, Prefix

U1, A1, U2, A2, U3, A3 = user("1"), answer("a"), user("2"), answer("b"), user("3"), answer("c")


def snapshot(forest: Tree):
    return (
        [(node.id, node.children, node.supersedes, node.replayed) for node in forest.nodes],
        set(forest.superseded),
        {key: list(nodes) for key, nodes in forest._ends.items()},
    )


def test_rows_are_put_together_from_what_each_turn_added():
    forest = tree()
    first = turn(forest, [U1], A1, prompt=(1, 2), output=(3, 4))
    second = turn(forest, [U1, A1, U2], A2, prompt=(5,), output=(6, 7), trim=1)
    assert row(first).tolist() == [1, 2, 3, 4]
    assert row(second).tolist() == [1, 2, 3, 5, 6, 7]
    assert second.length == 6
    assert conversation(second) == [U1, A1, U2, A2]
    assert (second.parent, second.turn, second.depth) == (first, 2, 4)
    assert second.messages == (U2,)


def test_memory_grows_with_new_tokens_only():
    """A hundred turns of 256 tokens each: with a row per node this would be 5 MB, and 50 times the tokens."""
    forest = tree()
    tracemalloc.start()
    messages: list[Message] = []
    before = tracemalloc.get_traced_memory()[0]
    for n in range(100):
        messages.append(user(str(n)))
        turn(forest, messages, answer(str(n)), prompt=range(128), output=range(128))
        messages.append(answer(str(n)))
    used = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert forest.nodes[-1].length == 25_600
    assert used < 100 * (256 * 4 + 128 * 4 + 3_000)


def test_other_tools_or_template_arguments_make_another_root():
    forest = tree()
    tool = {"type": "function", "function": {"name": "bash"}}
    turn(forest, [U1], A1, "branching", Prefix(tools=(tool,)))
    assert forest.find(Prefix(tools=(tool,)), [U1, A1, U2]).nodes
    assert forest.find(
        Prefix(tools=({"function": {"name": "bash"}, "type": "function"},)), [U1, A1, U2]
    ).nodes
    for other in (
        PREFIX,
        Prefix(tools=(tool, tool)),
        Prefix(tools=(tool,), kwargs={"enable_thinking": False}),
    ):
        assert not forest.find(other, [U1, A1, U2]).nodes


# --- linear ---------------------------------------------------------------------------------------


def test_first_turn_sent_again_is_a_retry():
    forest = tree()
    lost = turn(forest, [U1], answer("lost"))
    again = turn(forest, [U1], A1)
    assert again.supersedes == lost.id
    assert turn(forest, [U1, A1, U2], A2).parent is again
    assert [forest.counts(node) for node in forest.nodes] == [False, True, True]


def test_history_that_is_one_turn_shorter_is_a_retry():
    forest = tree()
    first = turn(forest, [U1], A1)
    lost = turn(forest, [U1, A1, U2], answer("lost"))
    again = turn(forest, [U1, A1, U2], A2)
    assert (again.parent, again.supersedes) == (first, lost.id)
    assert forest.turns() == 2
    assert forest.sampled_tokens() == 4


def test_bad_answer_that_the_harness_drops_is_sampled_again():
    forest = tree()
    first = turn(forest, [U1], A1)
    bad = turn(forest, [U1, A1, U2], answer("bad"))
    better = turn(forest, [U1, A1, U2, user("that was no valid call")], A2)
    assert (better.parent, better.supersedes) == (first, bad.id)


@pytest.mark.parametrize(
    "messages",
    [
        [U1],  # two turns back
        [U1, A1, user("other")],
        [user("other")],
        [U1, answer("never said"), U2, A2, U3],
        [U1, A1, U2, A2, user("other"), A3, U3, A3, user("4")],
    ],
)
def test_linear_refuses_what_diverges_earlier_and_changes_nothing(messages):
    forest = tree()
    turn(forest, [U1], A1)
    turn(forest, [U1, A1, U2], A2)
    turn(forest, [U1, A1, U2, A2, U3], A3)
    turn(forest, [U1, A1, U2, A2, U3, A3, user("4")], answer("d"))
    before = snapshot(forest)
    with pytest.raises(RequestError, match="leaves the session's conversation") as refused:
        place(forest, messages, "linear")
    assert refused.value.status == 409
    assert snapshot(forest) == before


def test_the_refusal_of_a_history_that_is_too_short_names_what_is_missing():
    forest = tree()
    turn(forest, [U1], A1)
    turn(forest, [U1, A1, U2], A2)
    turn(forest, [U1, A1, U2, A2, U3], A3)
    with pytest.raises(RequestError, match=r"conversation: messages\[1\] is missing"):
        place(forest, [U1], "linear")


def test_answer_that_comes_back_changed_is_no_retry():
    """A harness that rewrites every answer would else push out each turn with the next one."""
    forest = tree()
    turn(forest, [U1], answer("a", "thought"))
    with pytest.raises(RequestError, match="leaves the session's conversation"):
        place(forest, [U1, answer("a"), U2], "linear")
    turn(forest, [U1, answer("a", "thought"), U2], answer("b", "thought"))
    where = r"conversation: messages\[3\] \(assistant\).reasoning differs"
    with pytest.raises(RequestError, match=where):
        place(forest, [U1, answer("a", "thought"), U2, answer("b"), U3], "linear")
    # The answer left out and other words in its place: that is the latest turn tried again.
    assert place(forest, [U1, answer("a", "thought"), U3], "linear").supersedes is forest.nodes[1]


def test_unrelated_first_request_does_not_push_the_first_turn_out():
    forest = tree()
    turn(forest, [U1], A1)
    with pytest.raises(RequestError):
        place(forest, [user("write a title")], "linear")


def test_earlier_attempt_that_the_client_did_receive_can_be_continued():
    forest = tree()
    first = turn(forest, [U1], A1)
    late = turn(forest, [U1, A1, U2], A2)
    again = turn(forest, [U1, A1, U2], answer("not received"))
    third = turn(forest, [U1, A1, U2, A2, U3], A3)
    assert (third.parent, third.supersedes) == (late, again.id)
    assert [node for node in forest.leaves() if forest.counts(node)] == [third]
    assert turn(forest, [U1, A1, U2, A2, U3, A3, user("4")], answer("d")).parent is third
    assert first.children == 2


def test_equal_answers_do_not_confuse_a_linear_session():
    """The same text sampled again and again: the line stays where the latest commits are."""
    forest = tree()
    turn(forest, [U1], A1)
    second = turn(forest, [U1, A1, U2], A2)
    turn(forest, [U1, A1, U2], A2)
    tail = turn(forest, [U1, A1, U2, A2, U3], A3)
    assert tail.parent is not None
    assert tail.parent is not second
    again = turn(forest, [U1, A1, U2, A2, U3], A3)
    assert (again.parent, again.supersedes) == (tail.parent, tail.id)


# --- branching ------------------------------------------------------------------------------------


def test_branching_serves_every_request_at_its_deepest_match():
    forest = tree()
    first = turn(forest, [U1], A1, "branching")
    second = turn(forest, [U1, A1, U2], A2, "branching")
    fork = turn(forest, [U1, A1, user("other")], A3, "branching")
    root = turn(forest, [user("compacted"), U3], A3, "branching")
    written = turn(forest, [U1, answer("never said"), U2], A2, "branching")
    deep = turn(forest, [U1, A1, U2, A2, U3], A3, "branching")
    assert [node.parent for node in (second, fork, root, written, deep)] == [first, first, None, None, second]
    assert written.messages == (U1, answer("never said"), U2)
    assert not forest.superseded


def test_same_request_again_supersedes_its_last_answer_in_branching():
    forest = tree()
    lost = turn(forest, [U1], answer("lost"), "branching")
    again = turn(forest, [U1], A1, "branching")
    assert again.supersedes == lost.id
    turn(forest, [U1, A1, U2], A2, "branching")
    third = turn(forest, [U1], A3, "branching")
    assert third.supersedes == lost.id  # the other one was continued: it stays
    assert forest.counts(again)


# --- against a plain model ------------------------------------------------------------------------

_texts = st.sampled_from(["x", "y"])
_messages = st.builds(
    Message, st.sampled_from(["user", "assistant"]), _texts, st.sampled_from(["", "r", "q"])
).map(lambda m: m if m.role == "assistant" else replace(m, reasoning=""))
_answers = st.builds(answer, _texts, st.sampled_from(["", "r", "q"]))


def naive(forest: Tree, rule, messages) -> set[int]:
    """The deepest nodes by comparing whole conversations, pair by pair."""

    def repeated(node) -> bool:
        held = conversation(node)
        return len(held) <= len(messages) and all(
            rule.key(a) == rule.key(b) and rule.accepts(a, b) for a, b in zip(held, messages, strict=False)
        )

    found = [node for node in forest.nodes if repeated(node)]
    deepest = max((node.depth for node in found), default=0)
    return {node.id for node in found if node.depth == deepest}


@settings(max_examples=60)
@given(st.data(), st.sampled_from(list(MATCHERS)))
def test_lookup_finds_what_a_scan_of_the_forest_finds(data, name):
    forest = Tree(matcher(name))
    for _ in range(data.draw(st.integers(0, 6))):
        parent = data.draw(st.sampled_from([None, *forest.nodes]))
        new = tuple(data.draw(st.lists(_messages, min_size=0 if parent else 1, max_size=2)))
        forest.append(forest.draft(parent, PREFIX, new, data.draw(_answers), generation()))
    if forest.nodes and data.draw(st.booleans()):
        messages = conversation(data.draw(st.sampled_from(forest.nodes)))
        messages = [replace(m, reasoning=data.draw(st.sampled_from(["", m.reasoning]))) for m in messages]
        messages += data.draw(st.lists(_messages, max_size=2))
    else:
        messages = data.draw(st.lists(_messages, min_size=1, max_size=6))
    found = forest.find(PREFIX, messages)
    assert {node.id for node in found.nodes} == naive(forest, MATCHERS[name], messages)
    fresh = Tree(matcher(name)).find(PREFIX, messages)  # nothing is known to it
    assert found.hashes == fresh.hashes
    assert len(found.hashes) == len(messages) + 1


def test_an_empty_answer_that_was_never_sampled_is_passed_over_by_call_ids():
    empty = answer("")
    for name, depth in (("strict", 0), ("call_id", 2)):
        forest = tree(name)
        turn(forest, [U1], A1)
        found = forest.find(PREFIX, [U1, empty, A1, U2])
        assert (found.depth, len(found.messages)) == (depth, 3 if depth else 4)
    turn(forest, [U1, A1, U2], empty)  # the model itself may say nothing
    found = forest.find(PREFIX, [U1, A1, U2, empty, U3])
    assert (found.depth, len(found.messages)) == (4, 5)
