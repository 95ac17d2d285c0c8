"""The four types of `tito_session_mismatch`, where they fall, and why."""

import re
from array import array
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.gateway.forest import tree
from tests.templates.models import write_model_dir
from titogym.gateway.sessions.tree import Generation, Node, Tree, conversation
from titogym.gateway.tokens.mismatch import Mismatch, closed_row, compare
from titogym.gateway.tokens.parsers.answer import AnswerParser
from titogym.gateway.tokens.rows import extend
from titogym.templates.conversation import Message, Prefix, ToolCall
from titogym.templates.family import Family
from titogym.templates.model import ModelAssets, load_model_assets

PREFIX = Prefix(tools=({"type": "function", "function": {"name": "bash"}},))
USER = Message("user", "Look around.")
CALL = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>'
RESULT = Message("tool", "a.txt", tool_call_id="call_x")


def sample(forest: Tree, assets: ModelAssets, new: list[Message], output, **options) -> Node:
    """Extend the tail as the service does; `output` is text or token ids."""
    parent = forest.nodes[-1] if forest.nodes else None
    added = extend(assets, parent, PREFIX, new)
    ids = assets.tokenizer.encode(output) if isinstance(output, str) else output
    parser = AnswerParser(assets.family, assets.tokenizer, stop_ids=assets.stop_ids, opened=added.opened)
    parser.push(ids)
    parser.finish()
    made = Generation(
        trim=added.trim,
        prompt_ids=array("i", added.prompt_ids),
        output_ids=array("i", ids),
        logprobs=array("f", [-1.0] * len(ids)),
        spans=(),
        finish="stop",
        **options,
    )
    node = forest.draft(parent, PREFIX, tuple(new), parser.message(), made)
    forest.append(node)
    return node


def found(forest: Tree, assets: ModelAssets) -> list[Mismatch]:
    return compare(assets, forest.nodes[-1])


def kinds(mismatches: list[Mismatch]) -> list[tuple[str, int, str]]:
    return [(m.type, m.message, m.cause.partition(":")[0]) for m in mismatches]


def test_a_clean_session_has_none(assets):
    forest = tree()
    sample(
        forest,
        assets,
        [Message("system", "You are an agent."), USER],
        f"<think>\nhm\n</think>\n\nI look.\n{CALL}<|im_end|>",
    )
    sample(forest, assets, [RESULT, RESULT, Message("system", "late"), USER], "cut by leng")
    sample(forest, assets, [USER], "done<|im_end|>")
    assert found(forest, assets) == []


def test_another_tokenisation_of_the_same_text(assets):
    """The tokenizer writes `the` as one token; the model sampled three."""
    forest = tree()
    whole = assets.tokenizer.encode("the<|im_end|>")
    letters = [token for letter in "the" for token in assets.tokenizer.encode(letter)]
    assert len(whole) == 2
    sample(forest, assets, [USER], [*letters, whole[-1]])
    sample(forest, assets, [USER], "done<|im_end|>")
    [mismatch] = found(forest, assets)
    assert kinds([mismatch]) == [("assistant_text", 1, "model")]
    assert (mismatch.row_ids, mismatch.rendered_ids) == (letters, whole[:1])
    assert mismatch.row_text == mismatch.rendered_text == "the"
    assert forest.nodes[0].generation.output_ids[0] == letters[0]
    assert mismatch.at == len(forest.nodes[0].generation.prompt_ids)


def test_what_the_parser_does_not_write_back(assets):
    forest = tree()
    sample(forest, assets, [USER], '<tool_call>{"arguments": {}, "name": "bash"}</tool_call><|im_end|>')
    mismatches = found(forest, assets)
    assert {(m.type, m.message, m.cause.partition(":")[0]) for m in mismatches} == {
        ("assistant_text", 1, "parser")
    }


def test_what_the_harness_rewrote(assets):
    forest = tree()
    first = sample(forest, assets, [USER], f"<think>\nhm\n</think>\n\nI look.\n{CALL}<|im_end|>")
    sample(forest, assets, [RESULT], "done<|im_end|>")
    calls = (ToolCall(first.answer.tool_calls[0].id, "bash", '{"command": "ls", "timeout": 5}'),)
    first.replayed = Message("assistant", "I look.", "", calls)
    mismatches = found(forest, assets)
    assert {m.cause for m in mismatches} == {"harness: it rewrote reasoning, tool_calls.arguments"}
    assert {m.message for m in mismatches} == {1}
    assert "timeout" in "".join(m.rendered_text for m in mismatches)


def test_control_tokens_that_the_model_sampled(assets):
    """As text they are words again: the rendering has fewer control tokens."""
    forest = tree()
    sample(forest, assets, [USER], "a<|im_start|>b<|im_end|>")
    sample(forest, assets, [USER], "done<|im_end|>")
    [mismatch] = found(forest, assets)
    assert kinds([mismatch]) == [("special_token_count", 1, "model")]
    assert (mismatch.row_text, mismatch.rendered_text) == ("<|im_start|>", "<|im_start|>")
    assert len(mismatch.row_ids) == 1 < len(mismatch.rendered_ids)


def test_a_stop_token_that_the_template_would_not_write_is_trimmed(assets):
    forest = tree()
    sample(forest, assets, [USER], "a<|endoftext|>")
    assert found(forest, assets) == []
    sample(forest, assets, [USER], "b<|im_end|>")
    assert forest.nodes[1].generation.trim == 1
    assert found(forest, assets) == []


def test_special_token_type(assets):
    """A row whose stop token is another one than the template's, in the same place."""
    forest = tree()
    sample(forest, assets, [USER], "a<|im_end|>")
    other = assets.tokenizer.token_to_id("<|endoftext|>")
    place = list(forest.nodes[0].generation.prompt_ids).index(assets.tokenizer.token_to_id("<|im_end|>"))
    forest.nodes[0].generation.prompt_ids[place] = other
    [mismatch] = found(forest, assets)
    assert kinds([mismatch]) == [("special_token_type", 0, "template")]
    assert mismatch.row_ids[0] == other


@pytest.fixture(scope="module")
def folding(tmp_path_factory) -> ModelAssets:
    """A family whose template is not append-only: it drops earlier answers' text and marks the last user."""
    folder = tmp_path_factory.mktemp("folding")
    template = folder / "folding.jinja"
    template.write_text(
        "{% for m in messages %}{% if loop.last and m.role == 'user' %}[last] {% endif %}"
        "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    family = Family(name="folding", template=str(template), closer="<|im_end|>\n", stop=("<|im_end|>",))
    write_model_dir(folder / "model", family)
    global FOLDING
    FOLDING = family
    return load_model_assets(Path(folder / "model"), "tests.gateway.test_mismatch:FOLDING")


FOLDING: Family


def test_template_that_is_not_append_only(folding):
    forest = tree()
    sample(forest, folding, [USER], "one<|im_end|>")
    sample(forest, folding, [USER], "two<|im_end|>")
    mismatches = found(forest, folding)
    assert {(m.type, m.cause.partition(":")[0]) for m in mismatches} == {("non_assistant_text", "template")}
    assert "[last]" in mismatches[0].row_text


@settings(max_examples=60)
@given(data=st.data())
def test_the_differences_turn_the_row_into_the_rendering(assets, data):
    """Whatever is wrong with a row, nothing is left out and nothing is told twice."""
    forest = tree()
    sample(forest, assets, [Message("system", "the"), USER], "the answer<|im_end|>")
    sample(forest, assets, [USER, USER], f"{CALL}<|im_end|>")
    tokens = st.sampled_from(assets.tokenizer.encode("the <|im_start|><|im_end|><think>x<|endoftext|>"))
    for node in forest.nodes:
        for ids in (node.generation.prompt_ids, node.generation.output_ids):
            for _ in range(data.draw(st.integers(0, 2))):
                start = data.draw(st.integers(0, len(ids)))
                ids[start : start + data.draw(st.integers(0, 3))] = array(
                    "i", data.draw(st.lists(tokens, max_size=3))
                )
    leaf = forest.nodes[-1]
    made = closed_row(assets, leaf)
    for mismatch in reversed(compare(assets, leaf)):
        end = mismatch.at + len(mismatch.row_ids)
        assert made[mismatch.at : end] == mismatch.row_ids
        made[mismatch.at : end] = mismatch.rendered_ids
        assert 0 <= mismatch.message < 6
    assert made == assets.encode(conversation(leaf), PREFIX, add_generation_prompt=False)


def test_message_index_in_a_long_session(assets):
    forest = tree()
    for n in range(30):
        text = "the" if n != 17 else "".join("the")
        ids = assets.tokenizer.encode(f"{text}<|im_end|>")
        if n == 17:
            ids = [token for letter in "the" for token in assets.tokenizer.encode(letter)] + ids[-1:]
        sample(forest, assets, [Message("user", f"question {n}"), Message("system", "x" * n)], ids)
    [mismatch] = found(forest, assets)
    assert kinds([mismatch]) == [("assistant_text", 17 * 3 + 2, "model")]


def test_the_page_on_troubles_names_every_cause():
    root = Path(__file__).parents[2]
    source = (root / "gateway" / "tokens" / "mismatch.py").read_text()
    causes = re.findall(r'"((?:harness|template|seam|parser|stop string|model): [^"{:]+)', source)
    page = (root / "docs" / "troubleshooting.md").read_text()
    assert len(causes) == 8
    assert [cause for cause in causes if f"| `{cause}" not in page] == []
