from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.templates import models, strategies
from tests.templates.test_render import BASH
from titogym.templates.conversation import Message, Prefix, ToolCall
from titogym.templates.families import QWEN3
from titogym.templates.family import Family, ReasoningFormat
from titogym.templates.literal import Guard
from titogym.templates.model import ModelAssets, assemble
from titogym.templates.render import NotAppendOnlyError, Renderer
from titogym.templates.seam import Seam, seam, suffix
from titogym.templates.tokenizer import Tokenizer
from titogym.templates.verify import verify

END, NEWLINE, START, USER, EOT, TOOL = 1, 2, 3, 4, 5, 6
CLOSER, SUFFIX = [END, NEWLINE], [START, USER, 70]


@pytest.mark.parametrize(
    ("row", "sampled", "expected"),
    [
        ([70, 71, END], 2, Seam(0, [NEWLINE, *SUFFIX])),  # the usual stop
        ([70, 71], 1, Seam(0, [*CLOSER, *SUFFIX])),  # cut by length
        ([70, 71, END, NEWLINE], 3, Seam(0, SUFFIX)),  # sampled past its stop
        ([70, 71, END, NEWLINE, START], 4, Seam(0, SUFFIX[1:])),
        ([70, END, NEWLINE, START, USER, 71], 5, Seam(0, [*CLOSER, *SUFFIX])),  # forged a turn
        ([70, 71, EOT], 2, Seam(1, [*CLOSER, *SUFFIX])),  # ended by another stop token
        ([70, 71, END, EOT], 3, Seam(1, [NEWLINE, *SUFFIX])),  # never two closers
        ([70, END], 0, Seam(0, [*CLOSER, *SUFFIX])),  # nothing sampled: the prompt is no closer
        ([70, EOT], 0, Seam(0, [*CLOSER, *SUFFIX])),
        ([], 0, Seam(0, [*CLOSER, *SUFFIX])),
    ],
)
def test_a_family_with_a_closer(row, sampled, expected):
    assert seam(row, CLOSER, SUFFIX, frozenset({EOT}), sampled) == expected


@pytest.mark.parametrize(
    ("row", "suffix_ids", "expected"),
    [
        ([70, TOOL], [TOOL, 71], Seam(0, [71])),  # the opener stands at its own place
        ([70, TOOL], [USER, 71], Seam(1, [USER, 71])),  # opened the wrong message
        ([70, USER], [USER, 71], Seam(0, [71])),
        ([70, EOT], [USER, 71], Seam(1, [USER, 71])),
        ([70, 71], [TOOL, 71], Seam(0, [TOOL, 71])),  # cut by length
    ],
)
def test_a_family_whose_openers_close(row, suffix_ids, expected):
    assert seam(row, [], suffix_ids, frozenset({USER, TOOL, EOT}), len(row) - 1) == expected


tokens = st.lists(st.integers(0, 4), max_size=8)


@given(tokens, tokens, tokens, st.frozensets(st.integers(0, 4), max_size=2), st.data())
def test_the_rule(row, closer, added, openers, data):
    """Few different tokens, so that every kind of overlap comes up."""
    sampled = data.draw(st.integers(0, len(row)))
    result = seam(row, closer, added, openers, sampled)
    target = closer + added
    kept_row = row[: len(row) - result.trim]
    joined = kept_row + result.append
    overlap = len(target) - len(result.append)
    # All that the template writes stands at the end, once, and of the row only openers are gone.
    assert joined[len(joined) - len(target) :] == target
    assert result.trim <= sampled
    assert set(row[len(kept_row) :]) <= openers
    # Tokens of the prompt are never taken for what the template writes.
    assert overlap <= sampled - result.trim
    # No more could have been kept, and nothing was dropped that could have stayed.
    for longer in range(overlap + 1, min(len(target), sampled - result.trim) + 1):
        assert kept_row[-longer:] != target[:longer]
    for fewer in range(result.trim):
        less = row[: len(row) - fewer]
        for length in range(1, min(len(target), sampled - fewer) + 1):
            assert less[-length:] != target[:length]
    # An opener is left only where the next message begins with it, or where the prompt wrote it.
    assert overlap > 0 or result.trim == sampled or kept_row[-1] not in openers
    # As much of the row's end as was sampled is all that matters.
    assert seam(row[len(row) - sampled :], closer, added, openers, sampled) == result


@settings(max_examples=60)
@given(strategies.conversations(), st.booleans(), st.sampled_from([None, "<|im_end|>", "<|endoftext|>"]))
def test_whatever_tokens_the_model_chose_the_rest_is_canonical(small_assets, messages, tools, stop):
    """The model may spell its text in other tokens than the tokenizer would: they stay, the rest is exact."""
    prefix = Prefix((BASH,) if tools else ())
    answers = [index for index, message in enumerate(messages) if message.role == "assistant"]
    tokenizer = small_assets.tokenizer
    ends = [*answers, len(messages)]
    row = small_assets.encode(messages[: ends[0]], prefix, add_generation_prompt=True)
    sampled_at = []
    for index, following in pairwise(ends):
        opened = small_assets.encode(messages[:index], prefix, add_generation_prompt=True)
        closed = small_assets.encode(messages[: index + 1], prefix, add_generation_prompt=False)
        body = closed[len(opened) : len(closed) - len(small_assets.closer_ids)]
        output = [token for part in body for token in spelt_out(tokenizer, part)]
        output += [] if stop is None else [tokenizer.token_to_id(stop)]
        sampled_at.append((len(row), output))
        row += output
        added = suffix(small_assets.renderer, tokenizer, messages[index + 1 : following], prefix)
        joined = seam(row, small_assets.closer_ids, added, small_assets.opener_ids, len(output))
        row = row[: len(row) - joined.trim] + joined.append
    expected = small_assets.encode(messages, prefix, add_generation_prompt=True)
    assert tokenizer.decode(row) == tokenizer.decode(expected)
    control, expected_control = ([t for t in ids if t in tokenizer.special_ids] for ids in (row, expected))
    assert control == expected_control
    for at, output in sampled_at:
        kept = output[:-1] if stop == "<|endoftext|>" else output
        assert row[at : at + len(kept)] == kept


def spelt_out(tokenizer: Tokenizer, token: int) -> list[int]:
    """The token as one token per byte; control tokens stay themselves."""
    if token in tokenizer.special_ids:
        return [token]
    letters = [tokenizer.token_to_id(models.LETTERS[byte]) for byte in tokenizer.token_bytes(token)]
    return [letter for letter in letters if letter is not None]


def test_a_suffix_costs_its_own_length(small_assets):
    """However long the tools and the conversation before, the suffix is the same and equally short."""
    new = [Message("user", "Go on.")]
    big = {"type": "function", "function": {"name": "big", "description": "x" * 100_000, "parameters": {}}}
    rendered: list[int] = []

    class Counting(Renderer):
        def render_segments(self, *arguments, **options):
            pieces = super().render_segments(*arguments, **options)
            rendered.append(sum(map(len, pieces)))
            return pieces

    renderer = Counting(small_assets.family, Guard(models.CHATML))
    light = suffix(renderer, small_assets.tokenizer, new, Prefix((BASH,)))
    heavy = suffix(renderer, small_assets.tokenizer, new, Prefix((BASH, big)))
    assert light == heavy
    assert small_assets.tokenizer.decode(light) == (
        "<|im_start|>user\nGo on.<|im_end|>\n" + small_assets.renderer.opener(Prefix())
    )
    assert max(rendered) < 2000


def test_a_suffix_behind_a_template_that_rewrites_is_refused(tmp_path, small_assets):
    (tmp_path / "t.jinja").write_text(
        "{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    renderer = Renderer(replace(QWEN3, template=tmp_path / "t.jinja"), Guard(()))
    with pytest.raises(NotAppendOnlyError, match="rewrites the assistant message before: user") as caught:
        suffix(renderer, small_assets.tokenizer, [Message("user", "x")], Prefix())
    assert list(caught.value.expected) != list(caught.value.found)


# Families of other kinds, in small.

GLM_LIKE = Family(
    name="glm-like",
    template="",
    closer="",
    stop=("<|endoftext|>",),
    openers=("<|user|>", "<|observation|>"),
    reasoning=ReasoningFormat("<think>", "</think>"),
)
GLM_TEMPLATE = r"""
{%- for m in messages -%}
    {%- if m.role == 'tool' -%}
        {{- '<|observation|>' if loop.first or loop.previtem.role != 'tool' -}}
        {{- '\n<tool_response>\n' + m.content + '\n</tool_response>' -}}
    {%- elif m.role == 'assistant' -%}
        {{- '<|assistant|>' -}}{{- joint -}}
        {{- '\n<think>' + m.reasoning_content + '</think>' if m.reasoning_content -}}
        {{- '\n' + m.content -}}
        {%- for call in m.tool_calls or [] -%}
            {{- '\n<tool_call>' + call.function.name + call.function.arguments + '</tool_call>' -}}
        {%- endfor -%}
    {%- else -%}
        {{- '<|' + m.role + '|>\n' + m.content -}}
    {%- endif -%}
{%- endfor -%}
{{- '<|assistant|>' if add_generation_prompt -}}
"""
# The header of a tool's result names the function of the last call, as harmony does.
NAMING_TEMPLATE = r"""
{%- set last = namespace(name='') -%}
{%- for m in messages -%}
    {%- for call in m.tool_calls or [] -%}{%- set last.name = call.function.name -%}{%- endfor -%}
    {{- '<|im_start|>' + m.role + (' ' + last.name if m.role == 'tool' else '') + '\n' -}}
    {{- joint if m.role == 'assistant' -}}
    {{- m.content -}}
    {%- for call in m.tool_calls or [] -%}
        {{- '<tool_call>' + call.function.name + call.function.arguments + '</tool_call>' -}}
    {%- endfor -%}
    {{- '<|im_end|>\n' -}}
{%- endfor -%}
{{- '<|im_start|>assistant\n' if add_generation_prompt -}}
"""


def made_up(tmp_path: Path, family: Family, template: str) -> ModelAssets:
    (tmp_path / "t.jinja").write_text(template)
    family = replace(family, template=tmp_path / "t.jinja", tool_calls=QWEN3.tool_calls)
    specials = ("<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")
    tokenizer = Tokenizer(models.byte_level((*specials, *models.CHATML[1:]), models.TAGS))
    renderer = Renderer(family, Guard((*tokenizer.special_texts, *family.control_texts)))
    return assemble(tmp_path, family, tokenizer, renderer)


def test_openers_close_the_turn(tmp_path):
    assets = made_up(tmp_path, GLM_LIKE, GLM_TEMPLATE)
    assert assets.closer_ids == ()
    assert assets.opener_ids == assets.stop_ids
    assert verify(assets, count=60).counter_example is None


def test_a_result_named_by_its_call_needs_the_real_neighbour(tmp_path):
    naming = replace(QWEN3, name="naming", reasoning=None, kwargs={})
    assets = made_up(tmp_path, replace(naming, folds=frozenset({"tool"})), NAMING_TEMPLATE)
    assert verify(assets, count=60).counter_example is None
    answer = Message("assistant", "", "", (ToolCall("a", "bash", "{}"),))
    new = [Message("tool", "x")]
    named = suffix(assets.renderer, assets.tokenizer, new, Prefix(), neighbour=answer)
    assert "<|im_start|>tool bash\n" in assets.tokenizer.decode(named)
    # Undeclared, the header would lack the name, and verification says so.
    failed = verify(made_up(tmp_path, naming, NAMING_TEMPLATE)).counter_example
    assert failed is not None
    assert failed.check == "seam"
    assert [message.role for message in failed.messages] == ["user", "assistant", "tool"]
