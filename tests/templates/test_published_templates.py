"""Where the published templates only append, ours write the same text and the same tokens.

The published side is rendered by transformers, so that nothing of ours stands on both sides.
"""

import json
import re
from dataclasses import asdict, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.templates import real_models, strategies
from tests.templates.test_render import BASH
from titogym.templates import published, registry
from titogym.templates.conversation import Message, Prefix, ToolCall
from titogym.templates.literal import Guard
from titogym.templates.model import load_model_assets
from titogym.templates.render import Renderer


@pytest.fixture(scope="module")
def chat_template():
    """transformers' own rendering of one conversation."""
    from transformers.utils.chat_template_utils import render_jinja_template

    def rendered(template, messages, prefix, prompt=True, parsed=False):
        texts, _ = render_jinja_template(
            [[_plain(message, parsed) for message in messages]],
            bos_token="<|begin_of_text|>",
            tools=list(prefix.tools) or None,
            chat_template=template,
            add_generation_prompt=prompt,
            **prefix.kwargs,
        )
        return texts[0]

    return rendered


def _plain(message: Message, parsed: bool = False):
    plain = {key: value for key, value in asdict(message).items() if value and key != "reasoning"}
    plain["content"] = message.content
    if message.reasoning:
        plain["reasoning_content"] = message.reasoning
    read = json.loads if parsed else str
    if message.tool_calls:
        plain["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": read(call.arguments)},
            }
            for call in message.tool_calls
        ]
    return plain


@st.composite
def kept_by_qwen3(draw):
    """Conversations whose reasoning the published template keeps: it follows the last user message."""
    before = draw(strategies.conversations(text=strategies.words, reasoning=st.just(""), max_exchanges=2))
    turn = [Message("user", draw(strategies.words))]
    for _ in range(draw(st.integers(0, 2))):
        answer = draw(strategies.assistants(text=strategies.words, reasoning=strategies.words))
        if answer.tool_calls:
            turn.append(answer)
            turn += [Message("tool", draw(strategies.words)) for _ in answer.tool_calls]
    return before + turn


@settings(max_examples=80)
@given(kept_by_qwen3(), st.booleans())
def test_qwen3(qwen3, qwen3_dir, chat_template, messages, tools):
    prefix = Prefix((BASH,) if tools else ())
    expected = chat_template(published.chat_template(qwen3_dir), messages, prefix)
    assert qwen3.renderer.render(messages, prefix, add_generation_prompt=True) == expected
    # White space ahead of an answer would merge with the prompt's last token; ours keeps them apart.
    if not any(message.role == "assistant" and message.content[:1].isspace() for message in messages):
        tokens = qwen3.encode(messages, prefix, add_generation_prompt=True)
        assert tokens == qwen3.tokenizer.encode(expected)


@settings(max_examples=20)
@given(strategies.words, st.booleans())
def test_qwen3_asked_not_to_think(qwen3, qwen3_dir, chat_template, text, tools):
    messages = [Message("system", text), Message("user", text)]
    prefix = Prefix((BASH,) if tools else (), {"enable_thinking": False})
    expected = chat_template(published.chat_template(qwen3_dir), messages, prefix)
    assert qwen3.renderer.render(messages, prefix, add_generation_prompt=True) == expected


@settings(max_examples=60)
@given(strategies.conversations(text=strategies.words, reasoning=st.just(""), calls=0))
def test_smollm2(smollm2, smollm2_dir, chat_template, messages):
    expected = chat_template(published.chat_template(smollm2_dir), messages, Prefix())
    assert smollm2.renderer.render(messages, Prefix(), add_generation_prompt=True) == expected


def test_our_own_templates_serve_elsewhere(small_assets, chat_template):
    """A folder with our template renders the same text in transformers, arguments parsed or not."""
    messages = [Message("user", "Count."), Message("assistant", "One.", "Hm."), Message("user", "Go on.")]
    prefix = Prefix((BASH,))
    source = small_assets.family.source()
    assert chat_template(source, messages, prefix) == small_assets.renderer.render(
        messages, prefix, add_generation_prompt=True
    )


def test_the_published_template_of_qwen3_loses_reasoning(qwen3_dir):
    """Why there is a template of ours."""
    own = load_model_assets(qwen3_dir, own_template=True)
    turns = [Message("user", "x"), Message("assistant", "y", "because")]
    before = own.renderer.render(turns, Prefix(), add_generation_prompt=False)
    after = own.renderer.render([*turns, Message("user", "z")], Prefix(), add_generation_prompt=False)
    assert "because" in before
    assert "because" not in after


ROUND = Message("tool", "ok", tool_call_id="c0")
LS = ToolCall("c0", "bash", '{"command": "ls -la", "n": 2}')
# One turn of several steps: what published templates keep, they keep within a turn.
TURN = (
    Message("system", "Be brief."),
    Message("user", "List the files."),
    Message("assistant", "Looking.", "Hm.", (LS,)),
    ROUND,
    Message("assistant", "", "So.", (LS,)),
    ROUND,
)


def without(messages, *fields):
    return [
        replace(message, **dict.fromkeys(fields, "")) if message.role == "assistant" else message
        for message in messages
    ]


@pytest.mark.parametrize(
    ("name", "template", "messages", "kwargs"),
    [
        ("qwen2.5", "qwen2_5", without(TURN, "reasoning"), {}),
        ("qwen2.5", "qwen2_5", without(TURN[1:], "reasoning"), {}),
        ("qwen3-instruct", "qwen3_instruct_2507", without(TURN, "reasoning"), {}),
        ("qwen3.5", "qwen3_5_think", TURN, {}),
        ("qwen3.5", "qwen3_5_nothink", TURN[:2], {"enable_thinking": False}),
        ("nemotron-3", "nemotron_3_nano", TURN, {}),
        ("nemotron-3", "nemotron_3_super", TURN[1:2], {"enable_thinking": False}),
        ("glm-4.5", "glm4moe", TURN, {}),
        ("glm-4.5", "glm4moe", TURN[:2], {"enable_thinking": False}),
        ("llama-3", "llama3_1", without(TURN[:4], "reasoning", "content"), {}),
        ("llama-3", "llama3_1", without(TURN[1:4], "reasoning", "content"), {}),
    ],
)
@pytest.mark.parametrize("tools", [(BASH,), ()], ids=["tools", "no tools"])
def test_where_the_published_template_appends_ours_is_equal(
    name, template, messages, kwargs, tools, chat_template
):
    """Calls are written one to a message, with arguments that JSON writes in one way."""
    if not tools:
        messages = [message for message in messages if message.role in ("system", "user")]
    family = registry.families()[name]
    prefix = Prefix(tools, kwargs)
    expected = chat_template(real_models.chat_template(template), messages, prefix, parsed=True)
    assert Renderer(family, Guard(())).render(messages, prefix, add_generation_prompt=True) == expected


def test_gpt_oss_is_equal_but_for_the_date(chat_template):
    family = registry.families()["gpt-oss"]
    prefix = Prefix((BASH,), {"reasoning_effort": "high"})
    # The published template takes calls without text, and loses an answer's reasoning.
    messages = [*TURN[:2], replace(TURN[2], content="", reasoning=""), replace(ROUND, name="bash")]
    expected = chat_template(real_models.chat_template("gptoss"), messages, prefix, parsed=True)
    date = re.search(r"Current date: (\S+)\n", expected)
    assert date is not None
    dated = Prefix(prefix.tools, {**prefix.kwargs, "current_date": date[1]})
    found = Renderer(family, Guard(())).render(messages, dated, add_generation_prompt=True)
    # Channel and recipient may stand either way about; models write the recipient behind the channel.
    swapped = found.replace(
        "<|channel|>commentary to=functions.bash <|constrain|>json",
        " to=functions.bash<|channel|>commentary json",
    )
    assert swapped == expected
