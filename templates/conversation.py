"""The canonical conversation: what every wire protocol maps to and every template renders."""

from dataclasses import dataclass, field
from typing import Any, Literal

Role = Literal["system", "user", "assistant", "tool"]


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One function call of an assistant message. `arguments` is JSON text, exactly as it was written.

    `id` is what clients know the call by; `native_id` is the model's own, where its family writes ids.
    """

    id: str
    name: str
    arguments: str
    native_id: str = ""


@dataclass(frozen=True, slots=True)
class Message:
    """One chat message. Absent text is "": null, missing and [] on the wire all mean the same."""

    role: Role
    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""  # on role "tool": the call that this answers
    name: str = ""  # on role "tool": the function's name, where the client gives it


@dataclass(frozen=True, slots=True)
class Prefix:
    """What a template renders ahead of the messages; part of a root's identity.

    `tools` are OpenAI tool definitions (`{"type": "function", "function": {...}}`);
    `kwargs` are template arguments such as `enable_thinking`.
    """

    tools: tuple[dict[str, Any], ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
