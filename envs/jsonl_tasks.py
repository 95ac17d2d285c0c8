"""Tasks from a JSONL file of questions, one JSON object a line:

    {"question": "What is 7 * 6?", "answer": 42}
    {"prompt": [{"role": "user", "content": "Which city is the capital of France?"}], "answer": "Paris"}
    {"question": "Write f(n), which doubles n.", "tests": "from solution import f\\nassert f(4) == 8"}

`question` is a text; `prompt` a text or chat messages. `answer` and `info` (anything) are for the grader,
which the source names: `questions.jsonl?grader=numeric&tolerance=0.5`, or a function of your own,
`?grader=my_package.grading:grade`. A record with `tests` is graded by them, in a sandbox. `id` and `split`
("train" or "test") may be given; where no record has a split, all belong to whichever is asked for.
"""

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titogym.envs.dealing import Split
from titogym.envs.environment import system, user
from titogym.envs.single_turn import GRADERS, make_grader
from titogym.envs.task import Limits, Task
from titogym.errors import UserError

FIELDS = ("question", "prompt", "answer", "info", "tests", "id", "split")
_ROLES = ("system", "user", "assistant")

# The code is not believed when it merely ends well: only one who went through the tests prints the word.
_TEST_SH = """#!/bin/sh
word=$(od -An -N16 -tx1 /dev/urandom | tr -d ' \\n')
said=$(echo "$word" | python3 -P /tests/run.py | tail -n 1)
[ "$said" = "passed $word" ] && echo 1 > /logs/verifier/reward.txt || echo 0 > /logs/verifier/reward.txt
"""
_RUN = """import sys
word = sys.stdin.readline().strip()
sys.path.insert(0, ".")
exec(compile(open("/tests/test.py").read(), "test.py", "exec"), {"__name__": "__main__"})
print("passed", word)
"""


@dataclass(frozen=True, slots=True)
class _Record:
    place: str  # file:line
    fields: dict[str, Any]


def tasks(
    path: Path,
    split: Split = "train",
    seed: int = 0,
    count: int | None = None,
    grader: str = "exact",
    system: str = "",
    **options: Any,
) -> list[Task]:
    """The tasks of a file in its order, or shuffled by a `seed` other than 0.

    `system` is a system message put first; `options` are the grader's. Raises `UserError` that names file
    and line.
    """
    records = list(_records(path))
    if any("split" in record.fields for record in records):
        records = [record for record in records if record.fields.get("split") == split]
    if not records:
        raise UserError(f"{path} has no question of the split {split!r}.")
    if seed:
        random.Random(f"{path.name}/{seed}").shuffle(records)
    made = [_task(record, path, split, grader, system, options) for record in records[:count]]
    ids: dict[str, str] = {}
    for task, record in zip(made, records, strict=False):
        if task.id in ids:
            raise UserError(f"{record.place} has the id {task.id!r} of {ids[task.id]}.")
        ids[task.id] = record.place
    return made


def _records(path: Path) -> Iterator[_Record]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read: {error}.") from None
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        place = f"{path}:{number}"
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{place} is not JSON: {error}.") from None
        if not isinstance(record, dict):
            raise UserError(f"{place} is not a JSON object.")
        if unknown := record.keys() - set(FIELDS):
            raise UserError(f"{place} has the field {min(unknown)!r}; it may have {', '.join(FIELDS)}.")
        if ("question" in record) == ("prompt" in record):
            raise UserError(f"{place} needs a question or a prompt, and not both.")
        if "split" in record and record["split"] not in ("train", "test"):
            raise UserError(f'{place}: split is {record["split"]!r}; it is "train" or "test".')
        yield _Record(place, record)


def _task(
    record: _Record, path: Path, split: Split, grader: str, before: str, options: dict[str, Any]
) -> Task:
    fields, place = record.fields, record.place
    prompt = _prompt(fields.get("question", fields.get("prompt")), place)
    if before:
        prompt = [dict(system(before)), *prompt]
    instruction = str(prompt[-1]["content"])
    tests = _tests(fields["tests"], place) if "tests" in fields else None
    if tests is None:
        facts = {"answer": fields.get("answer"), "info": fields.get("info"), "question": instruction}
        if grader in GRADERS and grader != "judge" and "answer" not in fields:
            raise UserError(f"{place} has no answer, which the grader {grader!r} needs.")
        try:
            make_grader(grader, options, facts)
        except UserError as error:
            raise UserError(f"{place}: {error}") from None
    number = place.rpartition(":")[2]
    return Task(
        id=str(fields["id"]) if "id" in fields else f"{path.stem}-{number}",
        instruction=instruction,
        environment="question" if tests is None else "code_question",
        tests=tests,
        limits=Limits(turns=1, agent_seconds=300.0, memory_mb=512, storage_mb=64, processes=32),
        split=split,
        metadata={
            "prompt": prompt,
            "answer": fields.get("answer"),
            "info": fields.get("info"),
            **({"grader": grader, "grader_options": options} if tests is None else {}),
            "place": place,
        },
    )


def _prompt(value: Any, place: str) -> list[dict[str, Any]]:
    if isinstance(value, str) and value.strip():
        return [dict(user(value))]
    if isinstance(value, list) and value:
        for message in value:
            if (
                not isinstance(message, dict)
                or message.get("role") not in _ROLES
                or not isinstance(message.get("content"), str)
            ):
                raise UserError(
                    f"{place}: a message of the prompt is {str(message)[:80]!r}; it has a role (system, "
                    f"user, "
                    "assistant) and a content that is a text."
                )
        if value[-1]["role"] != "user":
            raise UserError(f"{place}: the last message of the prompt must be the user's.")
        return value
    raise UserError(f"{place}: the prompt must be a text that is not empty, or a list of chat messages.")


def _tests(value: Any, place: str) -> dict[str, str]:
    """A test script as files for the verifier: Python that raises where the solution is wrong."""
    if isinstance(value, str):
        return {"test.sh": _TEST_SH, "run.py": _RUN, "test.py": value}
    if isinstance(value, dict) and "test.sh" in value and all(isinstance(v, str) for v in value.values()):
        return value
    raise UserError(f"{place}: tests is Python as a text, or files (name -> text) with a test.sh.")
