"""Tool calls that a request insists on, as a grammar for the engine.

How a family writes calls is read off its own template, by rendering made-up calls: so the grammar lets
through what the template would write, and nothing else. The grammar is a structural tag of xgrammar
(https://xgrammar.mlc.ai/docs/structural_tag/structural_tag.html), which engines take beside JSON schemas.
Reasoning comes first where the family reasons.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import orjson

from titogym.gateway.tokens.parsers.tool_calls import HARMONY
from titogym.gateway.tokens.parsers.typed import ArgumentTypes
from titogym.templates.conversation import Message, Prefix, Role, ToolCall
from titogym.templates.family import Family
from titogym.templates.render import Renderer, RenderError

_JSON_KINDS = ("hermes_json", "json_list", "bare_json")
_LAYOUT = {"type": "regex", "pattern": r"\n{0,3}"}  # between reasoning and calls
_MOST_SPACE = 16  # white space in a row within JSON: a weak model would go on with it for ever
_SPACES = ("\n", "", " ", "\n\n", " \n")  # that models write ahead of the mark that ends a call
_NAMES, _KEYS = ("nameq", "namez"), ("keyq", "keyz")
_JSON = ('{"keyq": 71}', '{"keyz": 72}')
_THOUGHT = "thoughtq"

Format = dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Marked:
    """How an argument is written: `key`, its name, `text` or `other`, its value, `end`."""

    key: str
    text: str  # ahead of a string
    other: str  # ahead of any other value
    end: str


@dataclass(frozen=True, slots=True)
class _Form:
    """How calls are written: `begin`, a name, `named`, arguments, and `between` or `end`."""

    begin: str
    named: str
    between: str  # with the next call's opening
    end: str
    numbered: tuple[str, str] | None  # around the number that stands between name and `named`
    marked: _Marked | None  # None: the arguments are one JSON object
    gap: str  # ahead of `begin`
    thoughtful: bool  # reasoning may come first


def forced_calls(
    renderer: Renderer,
    prefix: Prefix,
    *,
    after: Role,
    names: Sequence[str],
    single: bool,
) -> str | None:
    """A structural tag (JSON) that lets an answer call the tools `names` of `prefix`, and do nothing else.

    `after` is the role of the last message; `single` allows one call. None where the family's format
    cannot be had from its template.
    """
    form = _form(renderer, json.dumps(prefix.kwargs), after)
    if form is None:
        return None
    called = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in prefix.tools}
    types = ArgumentTypes(prefix.tools)
    call = _any([_call(form, renderer.family, name, called[name], types) for name in names])
    more: list[Format] = []
    if not single and renderer.family.tool_calls and renderer.family.tool_calls.kind != HARMONY:
        more = [{"type": "star", "content": _sequence(_text(form.between), call)}]
    calls = _sequence(_text(form.begin), call, *more, _text(form.end))
    tag = {"type": "structural_tag", "format": _sequence(*_ahead(renderer, prefix, after, form), calls)}
    return orjson.dumps(tag).decode()


def one_call_stops(renderer: Renderer, prefix: Prefix, after: Role) -> tuple[str, ...] | None:
    """Texts that end an answer behind its first call; () where a call ends it anyway.

    None where several calls share a block: ended in the middle, it would not be read back.
    """
    calls = renderer.family.tool_calls
    if calls is None or calls.kind == HARMONY:
        return ()
    form = _form(renderer, json.dumps(prefix.kwargs), after)
    if form is None or not calls.end or calls.begin not in form.between:
        return None
    inner = "}" if calls.kind == "hermes_json" else calls.marks.end if calls.marks else ""
    if not inner:
        return (calls.end,)
    return tuple(inner + space + calls.end for space in _SPACES)


# --- the grammar ----------------------------------------------------------------------------------


def _call(form: _Form, family: Family, name: str, schema: dict[str, Any], types: ArgumentTypes) -> Format:
    """One call, from its name to the end of its arguments."""
    kind = family.tool_calls.kind if family.tool_calls else ""
    head: list[Format] = [_text(json.dumps(name)[1:-1] if kind in _JSON_KINDS else name)]
    if form.numbered:
        before, after = form.numbered
        head += [_text(before), {"type": "regex", "pattern": "[0-9]{1,4}"}, _text(after)]
    head.append(_text(form.named))
    if form.marked is None:
        return _sequence(*head, _json(schema or {"type": "object"}))
    properties = schema.get("properties")
    if not isinstance(properties, dict):
        free = _argument(form.marked, {"type": "regex", "pattern": "[A-Za-z0-9_.-]{1,64}"}, True, None)
        return _sequence(*head, {"type": "star", "content": free})
    required = schema.get("required")
    required = required if isinstance(required, list) else []
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    for key, declared in properties.items():
        text = types.of(name, key)
        inner = {**declared, **shared} if isinstance(declared, dict) else {}
        is_text = not text or "string" in text
        value = _choices(inner) if is_text else _json(inner)
        argument = _argument(form.marked, _text(key), is_text, value)
        head.append(argument if key in required else {"type": "optional", "content": argument})
    return _sequence(*head)


def _argument(marked: _Marked, key: Format, is_text: bool, value: Format | None) -> Format:
    """`value` None: any text."""
    opening = [_text(marked.key), key]
    mark = marked.text if is_text else marked.other
    if value is None:
        return _sequence(*opening, {**_until(marked.end), "begin": mark})
    return _sequence(*opening, _text(mark), value, _text(marked.end))


def _choices(schema: Mapping[str, Any]) -> Format | None:
    """The texts that a string may be, where it may not be any."""
    choices = [schema["const"]] if "const" in schema else schema.get("enum")
    if not isinstance(choices, list) or not choices or not all(isinstance(c, str) for c in choices):
        return None
    return _any([_text(choice) for choice in choices])


def _ahead(renderer: Renderer, prefix: Prefix, after: Role, form: _Form) -> list[Format]:
    """The reasoning that may come before the calls, or must where the prompt opened it; then layout."""
    layout = form.gap.strip("\n") == ""
    gap = _LAYOUT if layout else _text(form.gap)
    marks = renderer.family.reasoning
    if marks is None or not form.thoughtful:
        return [_LAYOUT] if form.gap and layout else []
    begin, end = marks.begin.strip(), marks.end.strip()
    opener = renderer.opener(prefix, after=after)
    if marks.open_after(opener):
        return [_until(end), gap]
    if end in opener:
        return [gap] if layout else []
    return [{"type": "optional", "content": _sequence(_LAYOUT, {**_until(end), "begin": begin}, gap)}]


def _text(value: str) -> Format:
    return {"type": "const_string", "value": value}


def _until(end: str) -> Format:
    """Any text, up to `end` and past it."""
    return {"type": "tag", "begin": "", "content": {"type": "any_text"}, "end": end}


def _json(schema: Mapping[str, Any]) -> Format:
    return {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": _MOST_SPACE}


def _sequence(*elements: Format) -> Format:
    kept = [element for element in elements if element != _text("")]
    return {"type": "sequence", "elements": kept}


def _any(elements: list[Format]) -> Format:
    return elements[0] if len(elements) == 1 else {"type": "or", "elements": elements}


# --- the family's form ----------------------------------------------------------------------------


@lru_cache(maxsize=256)
def _form(renderer: Renderer, kwargs: str, after: Role) -> _Form | None:
    """None where a made-up call cannot be found in what the template writes."""
    if renderer.family.tool_calls is None:
        return None
    try:
        return _read(_Probe(renderer, json.loads(kwargs), after))
    except (RenderError, ValueError):
        return None


def _read(probe: "_Probe") -> _Form:
    """Raises `ValueError`."""
    calls = probe.family.tool_calls
    assert calls is not None
    numbered, marked = None, None
    if calls.kind == "markup":
        begin, bare = _cut(probe.answer("{}"), _NAMES[0])
        marked, named, end = _markup(probe, bare)
        joint = _cut(probe.answer('{"keyq": "q"}', "{}"), f"q{marked.end}")[1]
        between = _cut(joint, _NAMES[1])[0]
    else:
        begin, rest = _cut(probe.answer(_JSON[0]), _NAMES[0])
        named, end = _cut(rest, _JSON[0])
        between = _cut(_cut(probe.answer(*_JSON), _JSON[0])[1], _NAMES[1])[0]
        if calls.ids:
            before, _, after = calls.ids.partition("{name}")[2].partition("{number}")
            number = f"{before}0{after}"
            if not named.startswith(number):
                raise ValueError("the calls are not numbered as their ids say")
            numbered, named = (before, after), named[len(number) :]
    mark = calls.begin.strip()
    size = begin.index(mark) if mark in begin else len(begin) - len(begin.lstrip("\n"))
    return _Form(begin[size:], named, between, end, numbered, marked, begin[:size], probe.thoughtful)


def _markup(probe: "_Probe", bare: str) -> tuple[_Marked, str, str]:
    """How arguments are written, what is ahead of the first, and what follows the last.

    `bare` follows the name of a call without arguments. What stands between two arguments belongs to the
    second as far as it stands ahead of the first one too.
    """
    both = _cut(probe.answer('{"keyq": "q1", "keyz": "z1"}'), _NAMES[0])[1]
    first, rest = _cut(both, _KEYS[0])
    text, rest = _cut(rest, "q1")
    joint, rest = _cut(rest, _KEYS[1])
    last = _cut(rest, "z1")[1]
    other = _cut(_cut(probe.answer('{"keyq": 71}'), _KEYS[0])[1], "71")[0]
    size = 0
    while size < min(len(first), len(joint)) and first[-1 - size] == joint[-1 - size]:
        size += 1
    key, named = first[len(first) - size :], first[: len(first) - size]
    end = joint[: len(joint) - size]
    if not end or not last.startswith(end) or named + last[len(end) :] != bare:
        raise ValueError("the arguments are not set apart")
    return _Marked(key, text, other, end), named, last[len(end) :]


class _Probe:
    """Has the template write made-up answers."""

    def __init__(self, renderer: Renderer, kwargs: dict[str, Any], after: Role) -> None:
        self.family = renderer.family
        self._renderer = renderer
        self._prefix = Prefix(tools=tuple(map(_tool, _NAMES)), kwargs=kwargs)
        self._asked = [Message("user", "x")]
        self.thoughtful = False  # reasoning was written
        if after == "tool":
            self._asked += [
                Message("assistant", "x", tool_calls=(ToolCall("x", "x", "{}"),)),
                Message("tool", "x", tool_call_id="x"),
            ]
        self._head = renderer.render(self._asked, self._prefix, add_generation_prompt=True)

    def answer(self, *arguments: str) -> str:
        """What is written for an answer that makes these calls, behind its reasoning, up to its closer."""
        calls = tuple(
            ToolCall(f"c{n}", name, given, self._id(name, n))
            for n, (name, given) in enumerate(zip(_NAMES, arguments, strict=False))
        )
        marks = self.family.reasoning
        answered = [*self._asked, Message("assistant", "", _THOUGHT if marks else "", calls)]
        text = self._renderer.render(answered, self._prefix, add_generation_prompt=False)
        if not text.startswith(self._head):
            raise ValueError("the prompt is written differently once it is answered")
        text = text[len(self._head) :].removesuffix(self.family.call_closer or self.family.closer)
        if marks and _THOUGHT in text:
            self.thoughtful = True
            text = _cut(_cut(text, _THOUGHT)[1], marks.end.strip())[1]
        return text

    def _id(self, name: str, number: int) -> str:
        form = self.family.tool_calls
        return form.ids.format(name=name, number=number) if form and form.ids else ""


def _tool(name: str) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {}}
    return {"type": "function", "function": {"name": name, "description": name, "parameters": parameters}}


def _cut(text: str, at: str) -> tuple[str, str]:
    """Raises `ValueError`."""
    before, found, behind = text.partition(at)
    if not found:
        raise ValueError(f"{at} is not written")
    return before, behind
