"""The generated task family `shell`: small jobs with files, one or two commands each.

Every name in a task (files and values) is an adjective and an animal, such as `amber-otter`. The pairs
are dealt out to the splits, so that no name of a test task ever stands in a training task. The job is
done when the work directory is exactly what it should be, bystanders included; that is the whole test.
"""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, cast

from titogym.envs.task import Limits, Task
from titogym.errors import UserError

Split = Literal["train", "test"]

ADJECTIVES = [
    "amber",
    "azure",
    "black",
    "blue",
    "brown",
    "coral",
    "gold",
    "green",
    "ivory",
    "jade",
    "lemon",
    "lilac",
    "olive",
    "pearl",
    "pink",
    "plum",
    "red",
    "ruby",
    "silver",
    "teal",
    "white",
    "yellow",
]
ANIMALS = [
    "badger",
    "bear",
    "crab",
    "crow",
    "deer",
    "eagle",
    "falcon",
    "finch",
    "fox",
    "hare",
    "heron",
    "lynx",
    "mole",
    "moth",
    "otter",
    "owl",
    "panda",
    "raven",
    "seal",
    "swan",
    "tiger",
    "wolf",
]
_ONE_IN = 4  # share of the pairs that only the test split uses

LIMITS = Limits(
    turns=4, agent_seconds=60.0, verifier_seconds=30.0, memory_mb=256, storage_mb=16, processes=16
)

_TEST = """#!/bin/sh
# The work directory must equal what is expected, file by file.
if diff -r /tests/expected . > /dev/null; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
"""


def names(split: str) -> list[str]:
    """The names that tasks of `split` are made of. Raises `UserError` for another split."""
    if split not in ("train", "test"):
        raise UserError(f'The task family "shell" has no split {split!r}: choose "train" or "test".')
    return [
        f"{adjective}-{animal}"
        for i, adjective in enumerate(ADJECTIVES)
        for j, animal in enumerate(ANIMALS)
        if ((7 * i + 3 * j) % _ONE_IN == 0) == (split == "test")
    ]


@dataclass(frozen=True, slots=True)
class Job:
    """One thing to do: `value`, `source` and `target` as far as its kind has them."""

    kind: str
    instruction: str
    source: str = ""
    target: str = ""
    value: str = ""

    @property
    def command(self) -> str:
        """The shell line that does it."""
        return _COMMANDS[self.kind].format(source=self.source, target=self.target, value=self.value)


@dataclass(frozen=True, slots=True)
class Problem:
    """A task before it is packed: `look` is the command that must come first to know what `job` is."""

    kind: str
    instruction: str
    files: Mapping[str, str]
    expected: Mapping[str, str]
    job: Job
    look: str = ""

    @property
    def commands(self) -> tuple[str, ...]:
        return (self.look, self.job.command) if self.look else (self.job.command,)


_COMMANDS = {
    "write": "echo {value} > {target}",
    "append": "echo {value} >> {target}",
    "delete": "rm {source}",
    "rename": "mv {source} {target}",
    "copy": "cp {source} {target}",
    "sort": "sort {source} > {target}",
    "count": "wc -l < {source} > {target}",
}
_INSTRUCTIONS = {
    "write": "Write {value} to {target}.",
    "append": "Append {value} to {target}.",
    "delete": "Delete {source}.",
    "rename": "Rename {source} to {target}.",
    "copy": "Copy {source} to {target}.",
    "sort": "Sort {source} into {target}.",
    "count": "Count the lines of {source} into {target}.",
}
FOLLOWED = ("write", "append", "delete", "rename", "copy")  # kinds that a note may ask for
KINDS = (*_COMMANDS, "follow", "delete_named")


def problem(split: str, seed: int, index: int) -> Problem:
    """Problem `index` of the endless series that `split` and `seed` name. The kinds take turns."""
    pool = names(split)
    choose = random.Random(f"{split}/{seed}/{index}")
    fresh = choose.sample(pool, 12)
    kind = KINDS[index % len(KINDS)]
    make: Callable[[str, list[str], random.Random], Problem] = _NOTES.get(kind, _plain)
    return make(kind, fresh, choose)


def tasks(split: str = "train", seed: int = 0, count: int = 100) -> list[Task]:
    """The first `count` tasks of `split` and `seed`. Raises `UserError` for a split that does not exist."""
    names(split)
    return [_pack(problem(split, seed, index), cast(Split, split), seed, index) for index in range(count)]


def _plain(kind: str, fresh: list[str], choose: random.Random) -> Problem:
    job, files = _job(kind, fresh, choose)
    files[_file(fresh)] = fresh.pop() + "\n"
    return Problem(kind, job.instruction, files, _done(job, files), job)


def _follow(kind: str, fresh: list[str], choose: random.Random) -> Problem:
    """The job stands in a note."""
    job, files = _job(choose.choice(FOLLOWED), fresh, choose)
    note = _file(fresh)
    files[note] = job.instruction + "\n"
    return Problem(kind, f"Do what {note} says.", files, _done(job, files), job, f"cat {note}")


def _delete_named(kind: str, fresh: list[str], choose: random.Random) -> Problem:
    """The file to delete is named in a note."""
    job, files = _job("delete", fresh, choose)
    note = _file(fresh)
    files[note] = job.source + "\n"
    files[_file(fresh)] = fresh.pop() + "\n"
    return Problem(kind, f"Delete the file that {note} names.", files, _done(job, files), job, f"cat {note}")


_NOTES = {"follow": _follow, "delete_named": _delete_named}


def _job(kind: str, fresh: list[str], choose: random.Random) -> tuple[Job, dict[str, str]]:
    """A job of `kind` with names taken from `fresh`, and the files that it starts from."""
    source, target, value = _file(fresh), _file(fresh), fresh.pop()
    template = _INSTRUCTIONS[kind]
    fields = {"source": source, "target": target, "value": value}
    used = {name: text for name, text in fields.items() if f"{{{name}}}" in template}
    job = Job(kind, template.format(**used), **used)
    if kind == "write":
        return job, {}
    if kind == "append":
        return job, {target: fresh.pop() + "\n"}
    lines = {"sort": 3, "count": choose.randint(2, 5)}.get(kind, 1)
    content = [fresh.pop() for _ in range(lines)]
    if kind == "sort" and content == sorted(content):
        content.reverse()
    return job, {source: "".join(line + "\n" for line in content)}


def _done(job: Job, files: Mapping[str, str]) -> dict[str, str]:
    """The work directory after the job."""
    after = dict(files)
    if job.kind == "write":
        after[job.target] = job.value + "\n"
    elif job.kind == "append":
        after[job.target] += job.value + "\n"
    elif job.kind == "delete":
        del after[job.source]
    elif job.kind == "rename":
        after[job.target] = after.pop(job.source)
    elif job.kind == "copy":
        after[job.target] = after[job.source]
    elif job.kind == "sort":
        after[job.target] = "".join(sorted(after[job.source].splitlines(keepends=True)))
    else:
        after[job.target] = f"{after[job.source].count(chr(10))}\n"
    return after


def _file(fresh: list[str]) -> str:
    return fresh.pop() + ".txt"


def _pack(made: Problem, split: Split, seed: int, index: int) -> Task:
    return Task(
        id=f"shell-{split}-{seed}-{index}-{made.kind}",
        instruction=made.instruction,
        files=dict(made.files),
        tests={"test.sh": _TEST, **{f"expected/{name}": text for name, text in made.expected.items()}},
        solution={"solve.sh": "#!/bin/sh\nset -e\n" + "".join(line + "\n" for line in made.commands)},
        limits=LIMITS,
        split=split,
        metadata={"kind": made.kind},
    )
