"""Conversations made to break templates: every kind of append, and the contents that go wrong."""

import itertools
import json
import random
from collections.abc import Iterator
from typing import Any

from titogym.templates.conversation import Message, Prefix, Role, ToolCall
from titogym.templates.family import Family
from titogym.templates.model import ModelAssets
from titogym.templates.render import RenderError

_TEXTS = (
    "x",
    "",
    "Hello, world.",
    "\n",
    " two\n\nparagraphs, and space at the end \n",
    "na\u00efve \u4f60\u597d \u0442\u0435\u0441\u0442 \ud55c\uad6d\uc5b4",
    "\U0001f389\U0001f469\u200d\U0001f469\u200d\U0001f467 \U0001d4b3",
    '{"a": [1, 2.50, null]} <b>&amp;</b> \\n \\" %s {{ x }} {% y %}',
    "\t\r\n\u00a0\u2028end}",
)
_VALUES: tuple[Any, ...] = (
    "ls -la",
    "",
    "echo \"hi\" > 'a b'\n",
    "\u4f60\u597d \U0001f389",
    1.0,
    10**20,
    True,
    None,
    [{"a": {}}],
)
_FOLLOWING: tuple[tuple[Role, ...], ...] = (
    ("user",),
    ("user",),
    ("user", "user"),
    ("system", "user"),
    ("system",),
    (),
)
_TOOLS = tuple(
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Use {name}: \u201cquoted\u201d <|im_end|> & more.",
            "parameters": {"type": "object", "properties": {key: {"type": "string"} for key in keys}},
        },
    }
    for name, keys in (("bash", ("command",)), ("read_file", ("path", "line")), ("finish", ()))
)


def conversations(assets: ModelAssets, count: int, seed: int = 0) -> Iterator[tuple[list[Message], Prefix]]:
    """`count` conversations for a family, the same for the same seed: from 2 messages to 12.

    They use what the family has (tools, reasoning) and every combination of its template arguments.
    """
    rng = random.Random(seed)
    family = assets.family
    arguments = [
        dict(zip(family.kwargs, values, strict=True)) for values in itertools.product(*family.kwargs.values())
    ]
    texts = _texts(assets)
    for number in range(count):
        length = 2 + number * 11 // count
        tools = _TOOLS[: rng.randint(0, len(_TOOLS))] if family.tool_calls else ()
        prefix = Prefix(tools, arguments[number % len(arguments)])
        # A model cannot reason where the prompt has closed its reasoning already.
        closed = family.reasoning is None or family.reasoning.end in _opener(assets, prefix)
        yield _messages(rng, assets, texts, length, reasons=not closed), prefix


def _texts(assets: ModelAssets) -> tuple[str, ...]:
    """The texts above, and what a user may type who has read the family's format."""
    family = assets.family
    marks = [
        text
        for format in (family.reasoning, family.tool_calls)
        if format
        for text in (format.begin, format.end)
    ]
    typed: list[str] = []
    for text in (*family.control_texts, *assets.tokenizer.special_texts[:3]):
        half = len(text) // 2
        typed += [text, f"a{text}{text}b", text[:half], text[half:]]
    return (*_TEXTS, *typed, *marks, family.closer + _opener(assets, Prefix()) + "forged")


def _opener(assets: ModelAssets, prefix: Prefix) -> str:
    try:
        return assets.renderer.opener(prefix)
    except RenderError:  # checking the conversations will tell
        return ""


def _messages(
    rng: random.Random, assets: ModelAssets, texts: tuple[str, ...], length: int, *, reasons: bool
) -> list[Message]:
    family = assets.family
    messages = [Message("system", rng.choice(texts))] if rng.random() < 0.5 else []
    messages.append(Message("user", rng.choice(texts)))
    number = 0  # of the next call
    while len(messages) < length:
        calls = rng.choice((0, 0, 1, 1, 2, 3)) if family.tool_calls else 0
        reasoning = rng.choice(texts) if reasons and rng.random() < 0.6 else ""
        issued = tuple(
            _call(rng, texts, f"call_{len(messages)}_{n}", family, number + n) for n in range(calls)
        )
        number += calls
        messages.append(Message("assistant", rng.choice(texts), reasoning, issued))
        # Results may come in another order than their calls.
        for call in rng.sample(issued, len(issued)):
            messages.append(Message("tool", rng.choice(texts), tool_call_id=call.id, name=call.name))
        messages += [Message(role, rng.choice(texts)) for role in rng.choice(_FOLLOWING)]
    return messages[:length]


def _call(rng: random.Random, texts: tuple[str, ...], call_id: str, family: Family, number: int) -> ToolCall:
    values = rng.sample([*_VALUES, *texts], rng.randint(0, 3))
    arguments = json.dumps({f"key{n}": value for n, value in enumerate(values)}, ensure_ascii=False)
    name = rng.choice(("bash", "read_file"))
    ids = family.tool_calls.ids if family.tool_calls else ""
    return ToolCall(call_id, name, arguments, ids.format(name=name, number=number))
