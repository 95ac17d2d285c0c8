"""A model that needs no weights: it puts a harness through its paces by a fixed plan.

It is an engine like any other to the gateway, but runs in this process and answers from what stands in
its prompt alone: some turns that call the harness's own tools with harmless arguments, then an end. The
answers are written the way that shows what a harness does to them: reasoning, odd spacing within
arguments, edge white space, letters beyond ASCII, two calls at once. Where it may write, it also leaves
`FILE` with `CONTENT` behind, by the harness's own tools for files if it has some, and sends a sub-agent.
"""

import json
import re
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from titogym.gateway.engines.base import Chunk, EngineInfo, Finish, SamplingParams, VersionSpan
from titogym.templates.families import QWEN3
from titogym.templates.model import ModelAssets, load_model_assets

FAMILY = QWEN3  # it reasons, and its calls are JSON that a harness may write anew
MODEL = "scripted-model"  # the name of its folder, by which it is served
CONTEXT_LENGTH = 1 << 22  # tokens; a token is a byte here, and some harnesses send long instructions
_CHUNK = 16  # tokens
_LOGPROB = -0.1
_DEPTH = 4  # of nested arguments

ECHO = "echo titogym doctor"
FILE, CONTENT = "doctor.txt", "edited by titogym"
_DRAFT = "a draft"
_HELPER_TASK = "You are the doctor's helper: run one harmless command."
_SHELLS = re.compile(r"bash|shell|exec|command|terminal|run", re.IGNORECASE)
_LOOKERS = re.compile(r"read|list|ls|glob|grep|search|view", re.IGNORECASE)
_WRITERS = re.compile(r"write|create|file_editor", re.IGNORECASE)
_EDITORS = re.compile(r"edit|replace", re.IGNORECASE)
_HELPERS = re.compile(r"^(task|agent|sub_?agent)$", re.IGNORECASE)
_HELPER_KINDS = ("general-purpose", "general")
_FINISHERS = re.compile(r"finish|submit|complet|done", re.IGNORECASE)
_LAST_COMMAND = re.compile(r"\becho (COMPLETE_TASK\w*)")  # by which mini-swe-agent's models end
_TERMINAL = '"keystrokes"'  # in the instructions of an agent that types into a terminal
_CODE = re.compile(r"opened with '(<code>)', and closed with '(</code>)'")
_BLOCK = re.compile(r"```(\w*(?:bash|sh|shell|command)\w*)\n")
_TOOLS = re.compile(r"^<tools>\n(.*?)^</tools>", re.MULTILINE | re.DOTALL)
_ANSWER = "<|im_start|>assistant\n"
_END = "<|im_end|>"


def write_model(folder: Path) -> ModelAssets:
    """A model folder with a tokenizer whose tokens are bytes and the family's control tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: n for n, letter in enumerate(alphabet)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    controls = dict.fromkeys(("<|im_start|>", *FAMILY.control_texts))
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in controls])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(FAMILY.source(), encoding="utf-8")
    return load_model_assets(folder, FAMILY.name)


@dataclass(frozen=True, slots=True)
class Sampled:
    """One generation: what the model was given, and what it gave."""

    prompt: tuple[int, ...]
    output: tuple[int, ...]


class ScriptedModel:
    """An engine whose answers are `answer(prompt, workdir)`.

    workdir: the directory of a sandbox in which it may write, None where it may not.
    sampled: its finished generations, in order.
    """

    url = "scripted"

    def __init__(self, assets: ModelAssets, workdir: str | None = None) -> None:
        self._assets = assets
        self._workdir = workdir
        self.sampled: list[Sampled] = []

    async def generate(
        self,
        input_ids: Sequence[int],
        params: SamplingParams,
        *,
        rid: str,
        stream: bool,
        routes_from: int | None = None,
        affinity: str = "",
    ) -> AsyncGenerator[Chunk, None]:
        tokenizer = self._assets.tokenizer
        prompt = tuple(input_ids)
        whole = tokenizer.encode(answer(tokenizer.decode(prompt), self._workdir))
        output = whole[: params.max_new_tokens]
        finish = Finish(
            reason="stop" if len(output) == len(whole) else "length",
            prompt_tokens=len(prompt),
            cached_tokens=0,
            version_spans=(VersionSpan(0, len(output), "scripted"),),
            matched_stop=whole[-1] if len(output) == len(whole) else None,
        )
        size = _CHUNK if stream else len(output)
        for start in range(0, len(output), size):
            piece = output[start : start + size]
            last = start + size >= len(output)
            if last:
                self.sampled.append(Sampled(prompt, tuple(output)))
            yield Chunk(piece, [_LOGPROB] * len(piece), "scripted", finish if last else None)

    async def abort(self, rid: str) -> None:
        pass

    async def info(self) -> EngineInfo:
        return EngineInfo("scripted", CONTEXT_LENGTH, "scripted")

    async def healthy(self) -> bool:
        return True

    async def close(self) -> None:
        pass


# --- the plan -------------------------------------------------------------------------------------


def answer(prompt: str, workdir: str | None = None) -> str:
    """What the model writes behind `prompt`, its end-of-turn token included."""
    tools = offered(prompt)
    turn = prompt.count(_ANSWER) - 1
    if tools:
        plan = _helper_plan(tools) if _HELPER_TASK in _asked(prompt) else _plan(tools, workdir)
        text = plan[turn] if turn < len(plan) else f"{_thought('That is all.')}{_ending(tools, prompt)}"
    else:
        text = _with_words(turn, prompt, workdir)
    return text + _END


def _asked(prompt: str) -> str:
    """The first thing that the user says, behind which nothing of the model's own stands."""
    return prompt.partition(_ANSWER)[0].rpartition("<|im_start|>user\n")[2]


def offered(prompt: str) -> list[dict[str, Any]]:
    """The tools that the prompt defines: each with its name and its parameters' schema."""
    found = _TOOLS.search(prompt)
    return [json.loads(line)["function"] for line in found[1].splitlines() if line] if found else []


def _plan(tools: list[dict[str, Any]], workdir: str | None) -> list[str]:
    """The turns of the model before its last."""
    tool = _shell(tools)
    first, second = (_call(tool, f"{ECHO} {word}") for word in ("one", "two"))
    odd = _call(tool, f"{ECHO} 'déjà vu' \"quoted\" a/b")
    plan = [
        f"{_thought('I look around before I do anything.')}I look around.\n{first}",
        f"{_thought('Two things at once.')}{first}\n{second}",
        f"{_thought('What was said has spaces at its edges.')}  And now this. \n\n{odd}",
    ]
    if workdir is None:
        return [*plan, f"No reasoning this time.\n{first}"]
    helper = next((tool for tool in tools if _HELPERS.search(tool["name"])), None)
    if helper is not None:
        plan.append(f"{_thought('Somebody else may look, too.')}{_helper_call(helper)}")
    writer = next((tool for tool in tools if _takes(tool, _WRITERS, r"content|file_text")), None)
    editor = next((tool for tool in tools if _takes(tool, _EDITORS, r"old.*str")), None)
    if writer is None or editor is None:
        return [*plan, f"No reasoning this time.\n{_call(tool, _write_command(workdir))}"]
    path = {r"path|file$": f"{workdir}/{FILE}"}
    written = {r"content|file_text": f"{_DRAFT}\n", "^command$": "create", **path}
    edited = {"old": _DRAFT, "new": CONTENT, "^command$": "str_replace", **path}
    return [
        *plan,
        f"No reasoning this time.\n{_call(writer, 'a file', written)}",
        f"{_thought('The draft is not good enough.')}{_call(editor, 'a change', edited)}",
    ]


def _helper_plan(tools: list[dict[str, Any]]) -> list[str]:
    """What a sub-agent does before its last turn."""
    return [f"{_thought('I am only a helper.')}{_call(_shell(tools), f'{ECHO} helper')}"]


def _helper_call(tool: dict[str, Any]) -> str:
    kind = next((kind for kind in _HELPER_KINDS if kind in json.dumps(tool)), "")
    return _call(tool, "look around", {"prompt": _HELPER_TASK, "subagent_type": kind})


def _shell(tools: list[dict[str, Any]]) -> dict[str, Any]:
    return min(tools, key=lambda tool: (_rank(tool["name"]), tools.index(tool)))


def _takes(tool: dict[str, Any], name: re.Pattern[str], parameter: str) -> bool:
    properties = (tool.get("parameters") or {}).get("properties") or {}
    return bool(name.search(tool["name"])) and any(
        re.search(parameter, known, re.IGNORECASE) for known in properties
    )


def _write_command(workdir: str) -> str:
    return f"echo {CONTENT} > {workdir}/{FILE}"


def _with_words(turn: int, prompt: str, workdir: str | None) -> str:
    """Commands in the form that the instructions name."""
    command = _write_command(workdir) if workdir and turn == 2 else f"{ECHO} {turn}"
    thought = _thought("There are no tools.")
    if _TERMINAL in prompt:
        keys = [{"keystrokes": f"{command}\n", "duration": 0.1}] if turn < 3 else []
        told = {"analysis": "I see.", "plan": "I go on.", "commands": keys, "task_complete": turn >= 3}
        return f"{thought}{json.dumps(told, indent=1)}"
    if code := _CODE.search(prompt):
        line = f"print(bash({command!r}))" if turn < 3 else "final_answer('done')"
        return f"{thought}Thought: I run a command.\n{code[1]}\n{line}\n{code[2]}"
    block, last = _BLOCK.search(prompt), _LAST_COMMAND.search(prompt)
    kind = block[1] if block else "bash"
    if turn < 3:
        return f"{thought}I run a command.\n\n```{kind}\n{command}\n```\n"
    return f"I am done.\n\n```{kind}\necho {last[1]}\n```\n" if last else "Everything is done. "


def _ending(tools: list[dict[str, Any]], prompt: str) -> str:
    command = _LAST_COMMAND.search(prompt)
    if command:
        return f"I am done.\n{_call(_shell(tools), f'echo {command[1]}')}"
    finisher = next((tool for tool in tools if _FINISHERS.search(tool["name"])), None)
    return f"I am done.\n{_call(finisher, 'done')}" if finisher else "Everything is done. "


def _thought(text: str) -> str:
    return f"<think>\n{text}\n</think>\n\n"


def _rank(name: str) -> int:
    return 0 if _SHELLS.search(name) else 1 if _LOOKERS.search(name) else 2


def _call(tool: dict[str, Any], text: str, known: Mapping[str, str] | None = None) -> str:
    """A call of `tool`; its arguments are spaced as no serialiser would space them.

    `known` are values for parameters by patterns of their names; `text` goes into all others.
    """
    arguments = _filled(tool.get("parameters") or {}, text, known or {}, 0)
    pairs = (
        f"{json.dumps(key)} :  {json.dumps(value, ensure_ascii=False)}" for key, value in arguments.items()
    )
    written = "{" + " , ".join(pairs) + "}"
    return f'<tool_call>\n{{"name": {json.dumps(tool["name"])}, "arguments": {written}}}\n</tool_call>'


def _filled(schema: dict[str, Any], text: str, known: Mapping[str, str], depth: int) -> dict[str, Any]:
    """Harmless values for the required properties of an object, and for those that are known."""
    properties = schema.get("properties") or {}
    required = schema.get("required") or list(properties)[:1]
    wanted = [*required, *(name for name in properties if name not in required and _known(name, known))]
    return {name: _value(name, properties.get(name) or {}, text, known, depth) for name in wanted}


def _known(name: str, known: Mapping[str, str]) -> str | None:
    return next((value for key, value in known.items() if re.search(key, name, re.IGNORECASE)), None)


def _value(name: str, schema: dict[str, Any], text: str, known: Mapping[str, str], depth: int) -> Any:
    kind = schema.get("type")
    kind = kind[0] if isinstance(kind, list) and kind else kind
    value = _known(name, known)
    if value is not None and kind in (None, "string") and value in schema.get("enum", [value]):
        return value
    if schema.get("enum"):
        return schema["enum"][0]
    if kind is None and schema.get("anyOf"):
        return _value(name, schema["anyOf"][0], text, known, depth)
    match kind:
        case "integer" | "number":
            return 1
        case "boolean":
            return False
        case "array":
            if "command" in name.lower():  # words of a command, as Codex has them
                return ["bash", "-lc", text]
            item = schema.get("items") or {}
            return [] if depth >= _DEPTH else [_value(name, item, text, known, depth + 1)]
        case "object":
            return {} if depth >= _DEPTH else _filled(schema, text, known, depth + 1)
    return "." if re.search(r"path|dir|file|folder", name, re.IGNORECASE) else text
