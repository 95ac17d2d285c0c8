"""A family derived from what a model folder ships: its chat template, probed with conversations.

Conversations are rendered by the model's own template. That is honest only where the template appends, so
it is tried before it is used, and refused with the reason where it rewrites what stood before.
"""

import re
from pathlib import Path

from titogym.errors import UserError
from titogym.templates import published
from titogym.templates.conversation import Message, Prefix, ToolCall
from titogym.templates.families import BUILT_IN
from titogym.templates.family import Family, ReasoningFormat, ToolCallFormat
from titogym.templates.literal import Guard
from titogym.templates.model import ModelAssets, assemble
from titogym.templates.render import Renderer, RenderError
from titogym.templates.tokenizer import Tokenizer
from titogym.templates.verify import verify

NAME = "generic"
_TOOL_NAME = "probe_tool"
_TOOLS = Prefix(
    tools=(
        {
            "type": "function",
            "function": {
                "name": _TOOL_NAME,
                "description": "Probe.",
                "parameters": {"type": "object", "properties": {"probe_key": {"type": "string"}}},
            },
        },
    )
)
_ASKED = Message("user", "Q7 asked")
_ANSWER = Message("assistant", "A7 answered")
_REASONED = Message("assistant", "A7 answered", "R7 reasoned")
_CALL = ToolCall("call00001", _TOOL_NAME, '{"probe_key": "V7 value"}')
_CALLED = Message("assistant", "A7 answered", tool_calls=(_CALL,))
_RESULT = Message("tool", "T7 result", tool_call_id=_CALL.id, name=_TOOL_NAME)
_NEXT = Message("user", "N7 next")
_REASONING = {family.reasoning for family in BUILT_IN if family.reasoning}
# What may stand between the prompt and an answer: empty reasoning.
_LAYOUT = re.compile(
    "|".join(rf"\s*(?:{re.escape(f.begin)})?\s*(?:{re.escape(f.end)})?\s*" for f in _REASONING)
)


def load(model_dir: Path) -> ModelAssets:
    """Assets with a derived family. Raises `UserError` when the template is not append-only."""
    tokenizer = Tokenizer.load(model_dir)
    template = published.chat_template(model_dir)
    if template is None:
        raise UserError(f"{model_dir} has no chat template to derive a family from; choose another --family.")
    variables = published.template_variables(model_dir)
    probe = _Probe(model_dir, Renderer(_family(), Guard(()), published=template, **variables), tokenizer)
    family = probe.family(variables.get("eos_token"))
    guard = Guard((*tokenizer.special_texts, *family.control_texts))
    renderer = Renderer(family, guard, published=template, **variables)
    assets = assemble(model_dir, family, tokenizer, renderer)
    failed = verify(assets, list(_conversations(family))).counter_example
    if failed is not None:
        raise _refused(model_dir, f"{failed.check} fails: {failed.detail}")
    return assets


def _family(**known: object) -> Family:
    defaults: dict[str, object] = {"name": NAME, "template": NAME, "closer": "", "stop": ()}
    return Family(**(defaults | known))  # type: ignore[arg-type]


def _refused(model_dir: Path, reason: str) -> UserError:
    return UserError(
        f"The chat template of {model_dir} cannot serve as it is, because it is not append-only ({reason}); "
        "choose another --family, or write one for this model."
    )


class _Probe:
    def __init__(self, model_dir: Path, renderer: Renderer, tokenizer: Tokenizer) -> None:
        self._model_dir = model_dir
        self._renderer = renderer
        self._tokenizer = tokenizer

    def family(self, eos: str | None) -> Family:
        """What the template's own renderings tell. Raises `UserError`."""
        prompt = self._render([_ASKED], prompt=True)
        answered = self._render([_ASKED, _ANSWER])
        followed = self._render([_ASKED, _ANSWER, _NEXT])
        if not answered.startswith(prompt):
            raise _refused(self._model_dir, "an answer does not begin as the prompt that asks for it")
        body = answered[len(prompt) :]
        ahead, found, closer = body.partition(_ANSWER.content)
        if not found or not _LAYOUT.fullmatch(ahead):
            raise _refused(self._model_dir, "it writes text of its own ahead of an answer")
        if not followed.startswith(answered):
            raise _refused(self._model_dir, "an answer is written differently once a message follows")
        calls = self._tool_calls()
        closing = self._first_special(closer)
        stop = [text for text in (closing, eos) if text and self._tokenizer.token_to_id(text) is not None]
        openers = [] if closing else [self._first_special(followed[len(answered) :])]
        if calls is not None and not closing:
            called = self._render([_ASKED, _CALLED], _TOOLS)
            openers.append(
                self._first_special(self._render([_ASKED, _CALLED, _RESULT], _TOOLS)[len(called) :])
            )
        if not stop and not any(openers):
            raise UserError(
                f"Nothing in the chat template of {self._model_dir} ends an answer; choose another --family."
            )
        return _family(
            closer=closer,
            stop=tuple(dict.fromkeys(stop)),
            openers=tuple(dict.fromkeys(text for text in openers if text and text not in stop)),
            reasoning=self._reasoning(),
            tool_calls=calls,
            folds=frozenset({"tool"}),
            evidence="best effort: derived by probing the model's own chat template",
        )

    def _render(self, messages: list[Message], prefix: Prefix = Prefix(), *, prompt: bool = False) -> str:
        try:
            return self._renderer.render(messages, prefix, add_generation_prompt=prompt)
        except RenderError as error:
            raise UserError(
                f"The chat template of {self._model_dir} refuses a plain conversation ({error}); choose "
                "another --family."
            ) from error

    def _first_special(self, text: str) -> str:
        """The control token that comes first in `text`; "" where there is none."""
        found = [(at, token) for token in self._tokenizer.special_texts if (at := text.find(token)) >= 0]
        return min(found, key=lambda item: (item[0], -len(item[1])))[1] if found else ""

    def _reasoning(self) -> ReasoningFormat | None:
        """The format of reasoning, where the template writes it. Refuses a template that forgets it."""
        now = self._render([_ASKED, _REASONED])
        if _REASONED.reasoning not in now:
            return None
        if _REASONED.reasoning not in self._render([_ASKED, _REASONED, _NEXT]):
            raise _refused(self._model_dir, "it drops the reasoning of earlier answers")
        for form in _REASONING:
            if re.search(rf"{re.escape(form.begin)}\s*{_REASONED.reasoning}\s*{re.escape(form.end)}", now):
                return form
        return None

    def _tool_calls(self) -> ToolCallFormat | None:
        """The known format in which the template writes calls; None where it writes none that is known."""
        try:
            text = self._renderer.render([_ASKED, _CALLED, _RESULT], _TOOLS, add_generation_prompt=True)
        except RenderError:
            return None
        _, _, text = text.partition(_ASKED.content)
        forms = [family.tool_calls for family in BUILT_IN if family.tool_calls and not family.tool_calls.ids]
        # The longest marks first, so that a format is not taken for one that it contains.
        return next((form for form in sorted(forms, key=_size, reverse=True) if _writes(form, text)), None)


def _size(form: ToolCallFormat) -> int:
    return len(form.begin) + (
        len("".join((form.marks.call, form.marks.named, form.marks.key))) if form.marks else 0
    )


def _writes(form: ToolCallFormat, text: str) -> bool:
    name, begin = re.escape(_TOOL_NAME), re.escape(form.begin)
    if form.kind == "hermes_json":
        pattern = rf'{begin}\s*\{{\s*"name"\s*:\s*"{name}"\s*,\s*"arguments"'
    elif form.kind == "json_list":
        pattern = rf'{begin}\s*\[\s*\{{\s*"name"\s*:\s*"{name}"'
    elif form.kind == "bare_json":
        pattern = rf'\{{\s*"name"\s*:\s*"{name}"\s*,\s*"parameters"'
    elif form.marks is None:
        return False
    else:
        marks = form.marks
        pattern = rf"{begin}\s*{re.escape(marks.call)}\s*{name}\s*{re.escape(marks.named)}"
        if form.kind == "markup":
            typed = f"({re.escape(marks.is_string)}true)?"
            pattern += rf"\s*{re.escape(marks.key)}probe_key{typed}{re.escape(marks.keyed)}"
    return re.search(pattern, text) is not None


def _conversations(family: Family) -> list[tuple[list[Message], Prefix]]:
    """Plain conversations: what a template must append to if it is to serve at all."""
    system = Message("system", "Be brief.")
    answer = _REASONED if family.reasoning else _ANSWER
    talk = [_ASKED, answer, _NEXT, answer, Message("user", "x")]
    made = [(talk, Prefix())]
    if family.tool_calls is not None:
        work = [_ASKED, _CALLED, _RESULT, _CALLED, _RESULT, answer, _NEXT, _CALLED, _RESULT, answer]
        made += [(work, _TOOLS), (talk, _TOOLS)]
    return [*made, *(([system, *messages], prefix) for messages, prefix in made)]
