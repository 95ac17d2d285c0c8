"""A model family as data: how its conversations are written, and where a turn ends."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from titogym.errors import UserError
from titogym.templates.conversation import Role

JINJA = Path(__file__).with_name("jinja")
SIGNATURE = "titogym family: "  # ahead of a family's name in its template


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """Reasoning stands between `begin` and `end`, ahead of the content; newlines at its edges are layout."""

    begin: str
    end: str

    def open_after(self, opener: str) -> bool:
        """Whether the assistant opener (`Renderer.opener`) leaves reasoning open for the model to go on."""
        return opener.rfind(self.begin) > opener.rfind(self.end)


@dataclass(frozen=True, slots=True)
class CallMarks:
    """What sets the parts of one call apart. White space around marks is layout, and "" is no mark."""

    call: str  # opens a call, ahead of its name
    named: str  # ends the name
    end: str  # ends the call
    id: str = ""  # stands between the name and the model's own id of the call
    key: str = ""  # opens an argument, ahead of its name
    keyed: str = ""  # ends the argument's name
    value: str = ""  # opens the value, where `keyed` does not
    valued: str = ""  # ends the value
    pad: str = ""  # layout at both edges of a value
    is_string: str = ""  # stands between an argument's name and `true` or `false`: whether it is a string


@dataclass(frozen=True, slots=True)
class ToolCallFormat:
    """Calls stand between `begin` and `end`, after the content; white space inside the marks is layout.

    Kinds: `hermes_json` is one JSON object `{"name": ..., "arguments": {...}}` per pair of marks, calls
    separated by a newline; `json_list` is one list of such objects for all calls; `marked_json` is a name
    and JSON arguments per call, set apart by `marks`; `markup` is a name and one marked value per argument;
    `bare_json` is such an object (`parameters` for its arguments), with `begin` or where an answer starts;
    `harmony` is a message on the commentary channel.
    """

    kind: str
    begin: str
    end: str
    marks: CallMarks | None = None
    lead: str = "\n"  # layout between the content and the first call
    # How the family writes the id of a call, from `name` and `number`, which counts the calls of the
    # conversation from 0. "" where its template prints no ids.
    ids: str = ""


@dataclass(frozen=True, slots=True)
class Signs:
    """How a model folder shows that it belongs to a family: all of `template` must occur in its own
    chat template and none of `absent`, and its architecture (where `config.json` names one) must be among
    `architectures`."""

    template: tuple[str, ...]
    architectures: tuple[str, ...]
    absent: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Family:
    """One family of models.

    The template is append-only: an assistant message is the generation prompt, what the model wrote, and
    `closer`; nothing written earlier changes when messages follow. `titogym verify-template` proves it.
    """

    name: str
    template: str | Path  # file in templates/jinja, or an absolute path
    closer: str  # what the template writes after an assistant message; "" where the next message closes it
    stop: tuple[str, ...]  # tokens that end a turn and open nothing
    openers: tuple[str, ...] = ()  # tokens that end a turn and open the next message, as `<|user|>` of GLM
    call_closer: str = ""  # in place of `closer` after a message that calls tools; "" where it is the same
    tokens: tuple[str, ...] = ()  # further tokens of the template that no other text may become
    settings: Mapping[str, Any] = field(default_factory=dict)  # names that the template reads, as JSON values
    reasoning: ReasoningFormat | None = None
    tool_calls: ToolCallFormat | None = None
    # Roles whose messages are written differently for what stands before them (folded into it, or headed
    # by the name of its call). A suffix that starts with one is differenced behind its real neighbour.
    folds: frozenset[Role] = frozenset()
    # Template arguments and the values that each takes, the default first.
    kwargs: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    signs: Signs | None = None  # None: only by name
    models: str = ""  # which models belong to it
    evidence: str = ""  # what was checked, on which tokenizer and engine

    @property
    def default_kwargs(self) -> dict[str, Any]:
        return {name: values[0] for name, values in self.kwargs.items()}

    @property
    def control_texts(self) -> tuple[str, ...]:
        """Texts that only the template may write, whether or not the tokenizer calls them special."""
        return (*self.stop, *self.openers, *self.tokens)

    def source(self) -> str:
        """The text of the template, its name and settings ahead, so that it serves elsewhere as it is.

        Raises `UserError` when the file cannot be read.
        """
        try:
            text = (JINJA / self.template).read_text(encoding="utf-8")
        except OSError as error:
            raise UserError(f"Family {self.name}: cannot read its template: {error}") from error
        named = f"{{#- {SIGNATURE}{self.name} -#}}\n"
        settings = (f"{{%- set {name} = {json.dumps(value)} -%}}\n" for name, value in self.settings.items())
        return "".join((named, *settings, text))
