"""What an evaluation leaves on disk.

DIR/evaluation.json      what was run: source, harness, attempts, ...
DIR/episodes.jsonl       one line per ended episode, in the order of their ends
DIR/episodes/*.json      each episode whole: its conversation, its grade's evidence, the agent's log
DIR/report.html          all of it for a person

A line is written when its episode has ended and its file is on disk, so whatever stops the evaluation
leaves a usable part. Of several lines about one attempt the last counts.
"""

import fcntl
import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Self

from titogym.errors import UserError
from titogym.harnesses.episode import MODEL_OUTCOMES, EpisodeResult

SETTINGS = "evaluation.json"
EPISODES = "episodes.jsonl"
_PARTS = re.compile(r"(\d{1,18})")
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")
_NAME_CHARACTERS = 120
_MAY_CHANGE = {"attempts", "planned", "model"}  # more attempts, or the same model at another address


@dataclass(frozen=True, slots=True)
class EpisodeRecord:
    """One attempt in figures. `seconds` is wall time by phase, `tokens` what the model sampled.

    `file` is the episode's own file, relative to the evaluation's directory.
    """

    task: str
    attempt: int
    outcome: str
    reward: float | None
    error: str | None
    turns: int
    tokens: int
    prompt_tokens: int
    seconds: Mapping[str, float]
    mismatches: Mapping[str, int]
    file: str

    @property
    def name(self) -> str:
        return f"{self.task} #{self.attempt}"

    @property
    def of_model(self) -> bool:
        """Whether the model answers for how it ended: nothing else failed."""
        return self.outcome in MODEL_OUTCOMES and self.reward is not None

    @classmethod
    def read(cls, plain: Mapping[str, Any]) -> Self:
        return cls(**{field.name: plain[field.name] for field in fields(cls)})


class EvaluationDirectory:
    """Reads and writes one directory."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def is_one(cls, path: Path) -> bool:
        return (path / SETTINGS).is_file()

    def check(self, settings: Mapping[str, Any], *, resume: bool) -> None:
        """Raises `UserError` where there is an evaluation already, or with `resume` not the same one."""
        there = self.is_one(self.path)
        if there and not resume:
            raise UserError(
                f"{self.path} holds an evaluation: go on with it by --resume, or choose another --out."
            )
        if resume and not there:
            raise UserError(f"There is no evaluation to resume in {self.path}.")
        before = self.settings() if there else settings
        changed = [key for key in settings if key not in _MAY_CHANGE and before.get(key) != settings[key]]
        if changed:
            key = changed[0]
            raise UserError(
                f"The evaluation in {self.path} was begun with {key} = {before.get(key)!r}, not "
                f"{settings[key]!r}: resume it with the same, or choose another --out."
            )

    def create(self, settings: Mapping[str, Any]) -> None:
        """Make the directory, or keep it with these settings, for this process alone until it ends.

        Raises `UserError` where the disk does not take it, or another evaluation goes on there.
        """
        try:
            (self.path / "episodes").mkdir(parents=True, exist_ok=True)
            self._lock = (self.path / ".lock").open("wb")
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _write(self.path / SETTINGS, json.dumps(settings, indent=2) + "\n")
            _end_torn_line(self.path / EPISODES)
        except BlockingIOError:
            raise UserError(f"An evaluation is going on in {self.path}: choose another --out.") from None
        except OSError as error:
            raise UserError(f"The evaluation cannot be kept in {self.path}: {error.strerror}.") from error

    def settings(self) -> dict[str, Any]:
        found: dict[str, Any] = _read(self.path / SETTINGS)
        return found

    def add(
        self, result: EpisodeResult, attempt: int, turns: Sequence[Mapping[str, Any]], **more: Any
    ) -> EpisodeRecord:
        """Write one ended episode: `turns` is the conversation as the gateway tells it.

        Raises `UserError` where the disk does not take it.
        """
        record = EpisodeRecord(
            task=result.task_id,
            attempt=attempt,
            outcome=result.outcome,
            reward=result.reward,
            error=result.error,
            turns=result.turns,
            tokens=sum(turn["output_tokens"] for turn in turns),
            prompt_tokens=sum(turn["prompt_tokens"] for turn in turns),
            seconds={phase: round(seconds, 3) for phase, seconds in result.seconds.items()},
            mismatches=result.mismatches,
            file=f"episodes/{_file_name(result.task_id)}-{attempt}.json",
        )
        plain = asdict(record)
        whole = {
            **plain,
            "findings": result.findings,
            "evidence": result.evidence,
            "log": result.log,
            "conversation": list(turns),
            **more,
        }
        try:
            _write(self.path / record.file, json.dumps(whole, default=str))
            with open(self.path / EPISODES, "a", encoding="utf-8") as lines:
                lines.write(json.dumps(plain) + "\n")
        except OSError as error:
            raise UserError(f"The episodes cannot be kept in {self.path}: {error.strerror}.") from error
        return record

    def records(self) -> list[EpisodeRecord]:
        """The last of each attempt, in order of tasks' names and attempts. A torn line is left out."""
        found: dict[tuple[str, int], EpisodeRecord] = {}
        path = self.path / EPISODES
        for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
            try:
                record = EpisodeRecord.read(json.loads(line))
            except (ValueError, KeyError, TypeError):
                continue
            found[record.task, record.attempt] = record
        return sorted(found.values(), key=lambda record: (_natural(record.task), record.attempt))

    def episode(self, wanted: str) -> dict[str, Any]:
        """One episode whole, by its number in `records`, its name or its file. Raises `UserError`."""
        records = self.records()
        for number, record in enumerate(records):
            if wanted in (str(number), record.name, record.file, Path(record.file).name):
                return read_episode(self.path / record.file)
        raise UserError(
            f"There is no episode {wanted!r}: choose 0 to {len(records) - 1}, or a name from the list."
        )


def read_episode(path: Path) -> dict[str, Any]:
    """An episode's own file. Raises `UserError` for anything else."""
    found = _read(path)
    if not isinstance(found, dict) or not {"task", "conversation", "outcome"} <= found.keys():
        raise UserError(f"{path} is not an episode of an evaluation.")
    return found


def missing(tasks: Iterable[str], attempts: int, records: Sequence[EpisodeRecord]) -> list[tuple[str, int]]:
    """The attempts that are still to be made: never ended, or failed by no doing of the model."""
    done = {(record.task, record.attempt) for record in records if record.of_model}
    return [(task, attempt) for attempt in range(attempts) for task in tasks if (task, attempt) not in done]


def _natural(name: str) -> list[tuple[bool, int, str]]:
    """For sorting: numbers in names by their value."""
    return [(part.isdecimal(), int(part) if part.isdecimal() else 0, part) for part in _PARTS.split(name)]


def _file_name(task: str) -> str:
    """A name that no other task has; where it is not the task's own, a digest tells them apart."""
    name = _UNSAFE.sub("_", task)[-_NAME_CHARACTERS:]
    if name == task:
        return name
    return f"{name}-{hashlib.sha256(task.encode(errors='surrogatepass')).hexdigest()[:8]}"


def _end_torn_line(path: Path) -> None:
    """What was being written when a machine stopped must not spoil the next line."""
    with path.open("ab+") as file:
        if file.tell() > 0:
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {error}.") from None


def _write(path: Path, text: str) -> None:
    """Whole or not at all."""
    part = path.with_name(f"{path.name}.part")
    part.write_text(text, encoding="utf-8")
    os.replace(part, path)
