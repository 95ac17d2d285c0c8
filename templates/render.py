"""Conversations to text: a family's Jinja template in a sandbox, compiled once."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from titogym.errors import UserError
from titogym.templates.conversation import Message, Prefix, Role, ToolCall
from titogym.templates.family import Family
from titogym.templates.literal import JOINT, Guard, segments


class RenderError(Exception):
    """The template refused a conversation."""


class NotAppendOnlyError(RenderError):
    """The template wrote earlier messages differently because others follow: `found` ids, not `expected`."""

    def __init__(self, message: str, expected: Sequence[int], found: Sequence[int]) -> None:
        super().__init__(message)
        self.expected = expected
        self.found = found


class Renderer:
    """Renders conversations of one family. Safe to share between threads."""

    def __init__(
        self, family: Family, guard: Guard, *, published: str | None = None, **variables: str
    ) -> None:
        """`published`: the model's own chat template, to render with in place of the family's.

        `variables` are further names that such a template reads (`bos_token`, `eos_token`).
        Raises `UserError` when the template does not compile.
        """
        self.family = family
        self._guard = guard
        self.published = published is not None
        self._markup = family.tool_calls is not None and family.tool_calls.kind == "markup"
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        environment.globals.update(variables)
        try:
            self._template = environment.from_string(family.source() if published is None else published)
        except TemplateError as error:
            raise UserError(f"Family {family.name}: its template does not compile: {error}") from error

    def render(self, messages: Sequence[Message], prefix: Prefix, *, add_generation_prompt: bool) -> str:
        """The conversation as text. Raises `RenderError` when the template refuses it."""
        return "".join(self.render_segments(messages, prefix, add_generation_prompt=add_generation_prompt))

    def render_segments(
        self, messages: Sequence[Message], prefix: Prefix, *, add_generation_prompt: bool
    ) -> list[str]:
        """The same text, cut where no token may reach across so that a client's words stay words.

        Encode it with `tokenizer.encode_segments`. Raises `RenderError`.
        """
        variables = {
            **self._guard.value(prefix.kwargs),
            "joint": JOINT,
            "messages": self._plain_all(messages),
            "tools": self._guard.value(prefix.tools) or None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return segments(self._template.render(variables))
        except (TemplateError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise RenderError(f"the {self.family.name} template refused the conversation: {error}") from error

    def opener(self, prefix: Prefix, *, after: Role = "user") -> str:
        """What the template writes to open an assistant message behind one of role `after`."""
        return _opener(self, json.dumps(prefix.kwargs), after)

    def _opener(self, kwargs: dict[str, Any], after: Role) -> str:
        asked = [Message("user", "x")]
        if after == "tool":
            asked += [
                Message("assistant", "x", tool_calls=(_CALL,)),
                Message("tool", "x", tool_call_id=_CALL.id),
            ]
        prefix = Prefix(kwargs=kwargs)
        closed = self.render(asked, prefix, add_generation_prompt=False)
        return self.render(asked, prefix, add_generation_prompt=True).removeprefix(closed)

    def _plain_all(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """The messages as templates in Hugging Face format read them; what is absent has no key.

        Where the family writes ids, calls and results carry the family's; a result also carries the name
        of the function that it comes from (`call_name`).
        """
        ids = self.family.tool_calls.ids if self.family.tool_calls and not self.published else ""
        known: dict[str, tuple[str, str]] = {}  # the client's id of a call: id to write, name
        count = 0
        plain = []
        for message in messages:
            for call in message.tool_calls:
                written = call.native_id or ids.format(name=call.name, number=count)
                known[call.id] = (written if ids else call.id, call.name)
                count += 1
            plain.append(self._plain(message, known))
        return plain

    def _plain(self, message: Message, known: Mapping[str, tuple[str, str]]) -> dict[str, Any]:
        text = self._guard.text
        plain: dict[str, Any] = {"role": message.role, "content": text(message.content)}
        if message.reasoning:
            plain["reasoning_content"] = text(message.reasoning)
        if message.tool_calls:
            plain["tool_calls"] = [
                {
                    "id": text(known[call.id][0]),
                    "type": "function",
                    "function": {"name": text(call.name), "arguments": self._arguments(call.arguments)},
                }
                for call in message.tool_calls
            ]
        if message.tool_call_id:
            call_id, name = known.get(message.tool_call_id, (message.tool_call_id, message.name))
            plain["tool_call_id"] = text(call_id)
            plain["call_name"] = text(name)
        if message.name:
            plain["name"] = text(message.name)
        return plain

    def _arguments(self, arguments: str) -> Any:
        """Our templates write arguments as they were written; published ones expect the parsed object,
        and so do ours where each argument is marked up. What is no JSON object stays text."""
        if self.published or self._markup:
            try:
                value = json.loads(arguments or "{}")
            except (ValueError, RecursionError):
                value = None
            if (self.published and value is not None) or isinstance(value, dict):
                return self._guard.value(value)
        return self._guard.text(arguments) or "{}"


@lru_cache(maxsize=256)
def _opener(renderer: Renderer, kwargs: str, after: Role) -> str:
    return renderer._opener(json.loads(kwargs), after)


_CALL = ToolCall("x", "x", "{}")


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As the chat templates of Hugging Face models expect it: plain JSON, nothing escaped for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)
