"""The run directory: everything that a run leaves on disk, and where.

config.json            the configuration as it ran
metrics.jsonl          one line per step (names: `metrics.MEANINGS`)
eval.jsonl             one line per held-out evaluation
events.jsonl           failures, dropped groups and other things worth a line
trajectories/          step-000001.jsonl, eval-000000.jsonl: some trajectories in full, one per line
checkpoints/           step-000010/: the trainer's state and ours
logs/                  one log per process
model/                 the trained model as a Hugging Face directory
reward.png report.html the report
"""

import fcntl
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import orjson

from titogym.errors import UserError
from titogym.trainer.config import RunConfig

Record = dict[str, Any]
_STEP = re.compile(r"step-(\d+)$")


class RunDirectory:
    """One run's files. `create` and `reopen` hold a lock on it for as long as this process lives."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: IO[bytes] | None = None

    @classmethod
    def create(cls, path: Path, config: RunConfig) -> "RunDirectory":
        """Start a run in `path`. Raises `UserError` when a run is already there."""
        run = cls(path)
        run._acquire()
        if run.metrics_path.exists() or run.checkpoints():
            raise UserError(
                f"{path} already holds a run: continue it with --resume, or set run.dir to another directory."
            )
        run._write_config(config)
        return run

    @classmethod
    def reopen(cls, path: Path, config: RunConfig) -> "RunDirectory":
        """Continue the run in `path`: what was written after its last checkpoint is forgotten."""
        run = cls(path)
        run._acquire()
        checkpoints = run.checkpoints()
        run._forget_after(max(checkpoints, default=0))
        run._write_config(config)
        return run

    def release(self) -> None:
        """Give up the lock."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    @property
    def metrics_path(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def eval_path(self) -> Path:
        return self.path / "eval.jsonl"

    @property
    def events_path(self) -> Path:
        return self.path / "events.jsonl"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def model(self) -> Path:
        return self.path / "model"

    def config(self) -> Record:
        """The configuration as it ran. Raises `UserError` when this is not a run directory."""
        try:
            read: Record = orjson.loads((self.path / "config.json").read_bytes())
        except (OSError, orjson.JSONDecodeError):
            raise UserError(f"{self.path} is not a run directory: it has no readable config.json.") from None
        return read

    def metrics(self) -> list[Record]:
        return list(read_lines(self.metrics_path))

    def evaluations(self) -> list[Record]:
        return list(read_lines(self.eval_path))

    def events(self) -> list[Record]:
        return list(read_lines(self.events_path))

    def add_metrics(self, record: Mapping[str, Any]) -> None:
        _append(self.metrics_path, record)

    def add_evaluation(self, record: Mapping[str, Any]) -> None:
        _append(self.eval_path, record)

    def add_event(self, kind: str, step: int, **details: Any) -> None:
        """Something worth a line: `kind` names it, `step` is the step during which it happened."""
        _append(self.events_path, {"kind": kind, "step": step, "time": time.time(), **details})

    # --- trajectories --------------------------------------------------------------------------------

    def keep_trajectories(self, name: str, records: list[Record]) -> None:
        """Write `records` as trajectories/NAME.jsonl, replacing what was there."""
        if records:
            path = self.path / "trajectories" / f"{name}.jsonl"
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(b"".join(orjson.dumps(r) + b"\n" for r in records))

    def trajectories(self) -> Iterator[tuple[str, Record]]:
        """All kept trajectories with their place (`step-000003/0`), those of evaluations first."""
        for path in sorted((self.path / "trajectories").glob("*.jsonl")):
            for number, record in enumerate(read_lines(path)):
                yield f"{path.stem}/{number}", record

    # --- checkpoints ---------------------------------------------------------------------------------

    def checkpoints(self) -> dict[int, Path]:
        """Complete checkpoints by step, in order."""
        found = {}
        for path in sorted((self.path / "checkpoints").glob("step-*")):
            match = _STEP.match(path.name)
            if match and (path / "state.json").is_file():
                found[int(match[1])] = path
        return found

    def save_checkpoint(
        self, step: int, state: Mapping[str, Any], save_trainer: Callable[[Path], None], keep: int
    ) -> Path:
        """Write a checkpoint, and only when it is complete delete all but the last `keep`.

        `save_trainer` writes into the path that it is given. A kill leaves the old checkpoints.
        """
        final = self.path / "checkpoints" / f"step-{step:06d}"
        partial = final.with_name(f".partial-{final.name}")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        save_trainer(partial / "trainer")
        with (partial / "state.json").open("wb") as out:
            out.write(orjson.dumps({"step": step, **state}))
            out.flush()
            os.fsync(out.fileno())
        shutil.rmtree(final, ignore_errors=True)
        partial.rename(final)
        for old in list(self.checkpoints().values())[:-keep]:
            shutil.rmtree(old)
        return final

    def load_state(self, step: int) -> Record:
        """Our part of the checkpoint of `step`. Raises `UserError` where it cannot be read."""
        path = self.checkpoints()[step]
        try:
            state: Record = orjson.loads((path / "state.json").read_bytes())
            if state["step"] != step:
                raise ValueError(step)
        except (OSError, ValueError, LookupError, TypeError):
            raise UserError(
                f"The checkpoint {path} is damaged: delete it, and --resume goes on from the one before."
            ) from None
        return state

    # --- internal ------------------------------------------------------------------------------------

    def _acquire(self) -> None:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = (self.path / ".lock").open("wb")
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise UserError(f"Cannot write to run.dir {str(self.path)!r}: {reason}") from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"{self.path} is in use by another process: stop it, or set run.dir to another directory."
            ) from None

    def _write_config(self, config: RunConfig) -> None:
        (self.path / "config.json").write_text(json.dumps(config.model_dump(mode="json"), indent=2) + "\n")

    def _forget_after(self, step: int) -> None:
        for path, key in (
            (self.metrics_path, "step"),
            (self.eval_path, "version"),
            (self.events_path, "step"),
        ):
            kept = [record for record in read_lines(path) if record[key] <= step]
            if path.exists():
                temporary = path.with_suffix(".partial")
                temporary.write_bytes(b"".join(orjson.dumps(record) + b"\n" for record in kept))
                temporary.replace(path)


def _append(path: Path, record: Mapping[str, Any]) -> None:
    with path.open("ab") as out:
        out.write(orjson.dumps(dict(record)) + b"\n")


def read_lines(path: Path) -> Iterator[Record]:
    """The records of a JSONL file; none when it is not there. A last line cut short by a kill is left out."""
    try:
        lines = path.read_bytes().splitlines()
    except FileNotFoundError:
        return
    for number, line in enumerate(lines):
        try:
            yield orjson.loads(line)
        except orjson.JSONDecodeError:
            if number != len(lines) - 1:
                raise UserError(f"{path}, line {number + 1}: not JSON; the file was damaged.") from None
