"""What the quickstart model learns from: demonstrations by somebody who often gets it wrong.

Every demonstration works on a training problem of the family `shell`. The right command is only one habit
among others (forgetting the redirection, copying instead of moving, stopping after the first look), so the
model starts with all of them, and reinforcement has something to find out.
"""

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import orjson

from titogym.envs.shell_tasks import Job, Problem, problem
from titogym.templates.conversation import Message, Prefix, ToolCall
from titogym.templates.families import QUICKSTART
from titogym.templates.literal import Guard
from titogym.templates.model import ModelAssets
from titogym.templates.render import Renderer
from titogym.trainer.learning.sft import Example

# As the openai_loop harness offers its tool; the template renders the names alone.
TOOL = {
    "type": "function",
    "function": {
        "name": "bash",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}},
    },
}
PREFIX = Prefix(tools=(TOOL,))
ANSWER = "Done."
NO_OUTPUT = "(no output)"

# The usual mistake is commoner than the right command: greedy decoding of the start model makes it.
_MISTAKE_WEIGHTS = (3, 1)
_SEED_OFFSET = 1_000_003  # demonstrations are on other training problems than reinforcement


@dataclass(frozen=True, slots=True)
class Habits:
    """How often the demonstrator does the right thing: looks first where it must; then acts rightly."""

    look: float = 0.75
    act: float = 0.35


@dataclass(frozen=True, slots=True)
class Action:
    """A shell line, and what the tool answers to it."""

    command: str
    output: str = NO_OUTPUT


def demonstrations(count: int, seed: int, habits: Habits) -> Iterator[list[Message]]:
    """`count` conversations, from instruction to final answer. The same for the same arguments."""
    for index in range(count):
        made = problem("train", seed + _SEED_OFFSET, index)
        yield conversation(made, actions(made, habits, random.Random(f"demonstration/{seed}/{index}")))


def actions(made: Problem, habits: Habits, choose: random.Random) -> list[Action]:
    """What the demonstrator does about `made`."""
    if not made.look:
        return _act(made, habits.act, choose)
    note = made.look.removeprefix("cat ")
    if choose.random() >= habits.look:
        return [Action(f"rm {note}")]
    return [Action(made.look, made.files[note].rstrip("\n")), *_act(made, habits.act, choose)]


def conversation(made: Problem, done: Sequence[Action]) -> list[Message]:
    messages = [Message("user", made.instruction)]
    for action in done:
        arguments = orjson.dumps({"command": action.command}).decode().replace('":"', '": "', 1)
        messages.append(Message("assistant", tool_calls=(ToolCall("call", "bash", arguments),)))
        messages.append(Message("tool", action.output, tool_call_id="call"))
    return [*messages, Message("assistant", ANSWER)]


def texts(conversations: Sequence[Sequence[Message]], special_texts: Sequence[str]) -> Iterator[str]:
    """The conversations as the family's template writes them: what a tokenizer is trained on."""
    renderer = Renderer(QUICKSTART, Guard(special_texts))
    for messages in conversations:
        yield renderer.render(messages, PREFIX, add_generation_prompt=False)


def examples(assets: ModelAssets, conversations: Iterable[Sequence[Message]]) -> list[Example]:
    """`(tokens, loss mask)` of each: exactly the row that the gateway would hold had the model sampled it.

    The mask is 1 on what the assistant wrote, its `<|im_end|>` included. The row ends there.
    """
    opener = assets.tokenizer.encode_inside(assets.renderer.opener(PREFIX))
    return [
        _masked(assets.encode(messages, PREFIX, add_generation_prompt=False), opener, assets.closer_ids[0])
        for messages in conversations
    ]


def _masked(tokens: list[int], opener: list[int], stop: int) -> tuple[list[int], list[int]]:
    mask: list[int] = []
    while len(mask) < len(tokens):  # no text that anybody wrote holds the opener's or the stop's token
        if tokens[len(mask) : len(mask) + len(opener)] == opener:
            start = len(mask) + len(opener)
            end = tokens.index(stop, start) + 1
            mask += [0] * len(opener) + [1] * (end - start)
        else:
            mask.append(0)
    length = len(mask) - mask[::-1].index(1)
    return tokens[:length], mask[:length]


def _act(made: Problem, rightly: float, choose: random.Random) -> list[Action]:
    if choose.random() < rightly:
        return [Action(made.job.command)]
    return choose.choices(mistakes(made.job, made.files), weights=_MISTAKE_WEIGHTS)[0]


def mistakes(job: Job, files: Mapping[str, str]) -> list[list[Action]]:
    """The two wrong habits for this kind of job, the usual one first, with what the tool answers."""
    source, target, value = job.source, job.target, job.value
    content = files.get(source, "").rstrip("\n")
    lines = content.splitlines()
    return {
        "write": [[Action(f"echo {value}", value)], [Action(f"touch {target}")]],
        "append": [[Action(f"echo {value} > {target}")], [Action(f"echo {value}", value)]],
        "delete": [[Action(f"cat {source}", content)], []],
        "rename": [[Action(f"cp {source} {target}")], []],
        "copy": [[Action(f"mv {source} {target}")], [_missing("cp", target, source)]],
        "sort": [[Action(f"sort {source}", "\n".join(sorted(lines)))], [Action(f"cp {source} {target}")]],
        "count": [[Action(f"wc -l < {source}", str(len(lines)))], [Action(f"cp {source} {target}")]],
    }[job.kind]


def _missing(program: str, absent: str, other: str) -> Action:
    """Copying or moving the wrong way round, with the error that this gives."""
    error = f"{program}: cannot stat '{absent}': No such file or directory\n[exit code 1]"
    return Action(f"{program} {absent} {other}", error)
