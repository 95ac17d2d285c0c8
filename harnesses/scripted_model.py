"""A model that needs no weights: it puts a harness through its paces by a fixed plan.

It is an engine like any other to the gateway, but runs in this process and answers from what stands in
its prompt alone: some turns that call the harness's own tools with harmless arguments, then an end. The
answers are written the way that shows what a harness does to them: reasoning, odd spacing within
arguments, edge white space, letters beyond ASCII, two calls at once.
"""

import json
import re
from collections.abc import AsyncGenerator, Sequence
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
_SHELLS = re.compile(r"bash|shell|exec|command|terminal|run", re.IGNORECASE)
_LOOKERS = re.compile(r"read|list|ls|glob|grep|search|view", re.IGNORECASE)
_FINISHERS = re.compile(r"finish|submit|complet|done", re.IGNORECASE)
_LAST_COMMAND = re.compile(r"\becho (COMPLETE_TASK\w*)")  # by which mini-swe-agent's models end
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
    """An engine whose answers are `answer(prompt)`. `sampled` are its finished generations, in order."""

    url = "scripted"

    def __init__(self, assets: ModelAssets) -> None:
        self._assets = assets
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
        whole = tokenizer.encode(answer(tokenizer.decode(prompt)))
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


def answer(prompt: str) -> str:
    """What the model writes behind `prompt`, its end-of-turn token included."""
    tools = offered(prompt)
    turn = prompt.count(_ANSWER) - 1
    return (_with_tools(turn, tools, prompt) if tools else _with_words(turn, prompt)) + _END


def offered(prompt: str) -> list[dict[str, Any]]:
    """The tools that the prompt defines: each with its name and its parameters' schema."""
    found = _TOOLS.search(prompt)
    return [json.loads(line)["function"] for line in found[1].splitlines() if line] if found else []


def _with_tools(turn: int, tools: list[dict[str, Any]], prompt: str) -> str:
    tool = min(tools, key=lambda tool: (_rank(tool["name"]), tools.index(tool)))
    first, second = (_call(tool, f"{ECHO} {word}") for word in ("one", "two"))
    match turn:
        case 0:
            return f"{_thought('I look around before I do anything.')}I look around.\n{first}"
        case 1:
            return f"{_thought('Two things at once.')}{first}\n{second}"
        case 2:
            odd = _call(tool, f"{ECHO} 'déjà vu' \"quoted\" a/b")
            return f"{_thought('What was said has spaces at its edges.')}  And now this. \n\n{odd}"
        case 3:
            return f"No reasoning this time.\n{first}"
    return f"{_thought('That is all.')}{_ending(tools, prompt)}"


def _with_words(turn: int, prompt: str) -> str:
    """Commands in blocks of code, of the kind that the instructions name."""
    block, last = _BLOCK.search(prompt), _LAST_COMMAND.search(prompt)
    kind = block[1] if block else "bash"
    if turn < 3:
        return f"{_thought('There are no tools.')}I run a command.\n\n```{kind}\n{ECHO} {turn}\n```\n"
    return f"I am done.\n\n```{kind}\necho {last[1]}\n```\n" if last else "Everything is done. "


def _ending(tools: list[dict[str, Any]], prompt: str) -> str:
    command = _LAST_COMMAND.search(prompt)
    if command:
        tool = min(tools, key=lambda tool: _rank(tool["name"]))
        return f"I am done.\n{_call(tool, f'echo {command[1]}')}"
    finisher = next((tool for tool in tools if _FINISHERS.search(tool["name"])), None)
    return f"I am done.\n{_call(finisher, 'done')}" if finisher else "Everything is done. "


def _thought(text: str) -> str:
    return f"<think>\n{text}\n</think>\n\n"


def _rank(name: str) -> int:
    return 0 if _SHELLS.search(name) else 1 if _LOOKERS.search(name) else 2


def _call(tool: dict[str, Any], text: str) -> str:
    """A call of `tool`; its arguments are spaced as no serialiser would space them."""
    arguments = _filled(tool.get("parameters") or {}, text, 0)
    pairs = (
        f"{json.dumps(key)} :  {json.dumps(value, ensure_ascii=False)}" for key, value in arguments.items()
    )
    written = "{" + " , ".join(pairs) + "}"
    return f'<tool_call>\n{{"name": {json.dumps(tool["name"])}, "arguments": {written}}}\n</tool_call>'


def _filled(schema: dict[str, Any], text: str, depth: int) -> dict[str, Any]:
    """Harmless values for the required properties of an object."""
    properties = schema.get("properties") or {}
    required = schema.get("required") or list(properties)[:1]
    return {name: _value(name, properties.get(name) or {}, text, depth) for name in required}


def _value(name: str, schema: dict[str, Any], text: str, depth: int) -> Any:
    if schema.get("enum"):
        return schema["enum"][0]
    kind = schema.get("type")
    kind = kind[0] if isinstance(kind, list) and kind else kind
    if kind is None and schema.get("anyOf"):
        return _value(name, schema["anyOf"][0], text, depth)
    match kind:
        case "integer" | "number":
            return 1
        case "boolean":
            return False
        case "array":
            if "command" in name.lower():  # words of a command, as Codex has them
                return ["bash", "-lc", text]
            return [] if depth >= _DEPTH else [_value(name, schema.get("items") or {}, text, depth + 1)]
        case "object":
            return {} if depth >= _DEPTH else _filled(schema, text, depth + 1)
    return "." if re.search(r"path|dir|file|folder", name, re.IGNORECASE) else text
