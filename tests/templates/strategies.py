"""Hypothesis strategies for conversations."""

import json

from hypothesis import strategies as st

from titogym.templates.conversation import Message, ToolCall

MARKS = ("<|im_end|>", "<|im_start|>", "<think>", "</think>", "<tool_call>", "</tool_call>")
# Ordinary words, the layout characters that tokenizers merge, scripts of all widths, and typed marks.
texts = st.lists(
    st.sampled_from(
        ["the", " ", "\n", "\t", ".", "x", "é", "你", "🎉", '"', "\\", "{", "}", "<", "|", ">", *MARKS]
    ),
    max_size=6,
).map("".join)
words = st.text(st.sampled_from("the .,xé你🎉{}\"'"), max_size=6)

_json = st.recursive(
    st.none() | st.booleans() | st.integers() | words,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(words, inner, max_size=2),
    max_leaves=3,
)
arguments = st.dictionaries(words, _json, max_size=2).map(lambda value: json.dumps(value, ensure_ascii=False))


@st.composite
def assistants(draw, text=texts, reasoning=texts, calls=2):
    issued = tuple(
        ToolCall(f"call_{number}", draw(st.sampled_from(["bash", "read"])), draw(arguments))
        for number in range(draw(st.integers(0, calls)))
    )
    return Message("assistant", draw(text), draw(reasoning), issued)


@st.composite
def exchanges(draw, text=texts, reasoning=texts, calls=2):
    """An assistant message and what may follow it before the next one."""
    answer = draw(assistants(text, reasoning, calls))
    results = [
        Message("tool", draw(text), tool_call_id=call.id, name=call.name)
        for call in draw(st.permutations(answer.tool_calls))
    ]
    roles = draw(st.sampled_from([("user",), ("system", "user"), ("user", "user"), ()]))
    if not results and not roles:
        roles = ("user",)
    return [answer, *results, *(Message(role, draw(text)) for role in roles)]


@st.composite
def conversations(draw, text=texts, reasoning=texts, calls=2, max_exchanges=3):
    """A conversation that ends where the model is asked to answer."""
    opening = [Message("system", draw(text))] if draw(st.booleans()) else []
    opening.append(Message("user", draw(text)))
    return opening + [
        message
        for exchange in draw(st.lists(exchanges(text, reasoning, calls), max_size=max_exchanges))
        for message in exchange
    ]
