"""The run directory: everything that a run leaves on disk, and where.

config.json            the configuration as it ran
status.json            what it is doing right now, while it runs
versions.json          what the run was made with: titogym, Python and the packages that matter
metrics.jsonl          one line per step (names: `metrics.MEANINGS`)
eval.jsonl             one line per held-out evaluation
eval/                  step-000010/: weights for an evaluation elsewhere; step-000010.json: its score
events.jsonl           failures, dropped groups and other things worth a line
trajectories/          step-000001.jsonl, eval-000000.jsonl: some trajectories in full, one per line
batches/               step-000001.safetensors: all that a step trained on, where it was asked for
checkpoints/           step-000010/: the trainer's state, ours, and the groups that waited
tensorboard/ wandb/    the same figures for these, where they were asked for
logs/                  one log per process
model/                 the trained model as a Hugging Face directory
reward.png report.html the report
"""

import fcntl
import json
import os
import platform
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import IO, Any

import orjson

from titogym import __version__
from titogym.errors import UserError
from titogym.trainer.batch import Group
from titogym.trainer.config.sections import RunConfig
from titogym.trainer.runs.storage import read_groups, write_groups

Record = dict[str, Any]
_STEP = re.compile(r"step-(\d+)$")
_NUMBERED = re.compile(r"(?:step|eval)-(\d+)")  # files and folders of one step, or of one version
_STATUS_SECONDS = 10.0  # a status that is older is that of a process that was killed


class RunDirectory:
    """One run's files. `create` and `reopen` hold a lock on it for as long as this process lives."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: IO[bytes] | None = None
        self._saving = threading.Lock()  # held while a checkpoint is written

    @classmethod
    def create(cls, path: Path, config: RunConfig) -> "RunDirectory":
        """Start a run in `path`. Raises `UserError` when a run is already there."""
        run = cls(path)
        run._acquire()
        if run.metrics_path.exists() or run.checkpoints():
            raise UserError(
                f"{path} already holds a run: continue it with --resume, or set run.dir to another directory."
            )
        run._forget_after(-1)  # what is left of one that came to no step was not of these weights
        run._write_config(config)
        return run

    @classmethod
    def reopen(cls, path: Path, config: RunConfig) -> "RunDirectory":
        """Continue the run in `path`: what was written after its last checkpoint is forgotten."""
        run = cls(path)
        run._acquire()
        run.rewind()
        run._write_config(config)
        return run

    def rewind(self) -> None:
        """Forget what was written after the last checkpoint; one that is being written counts."""
        with self._saving:
            self._forget_after(self.last_step())

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

    @property
    def evaluation_snapshots(self) -> Path:
        """Where weights lie for evaluation elsewhere."""
        return self.path / "eval"

    def evaluation_snapshots_taken(self) -> list[int]:
        return sorted(
            int(match[1])
            for path in self.evaluation_snapshots.glob("step-*")
            if path.is_dir() and (match := _STEP.match(path.name))
        )

    def evaluations(self) -> list[Record]:
        """All scores by version: our own, and those that others put beside the snapshots they scored.

        Such a file is `eval/step-000010.json` with at least a number `score`. Raises `UserError` for one
        that has none.
        """
        ours = list(read_lines(self.eval_path))
        known = {record["version"] for record in ours}
        theirs = [self._external(path) for path in sorted(self.evaluation_snapshots.glob("step-*.json"))]
        return sorted(
            [*ours, *(record for record in theirs if record["version"] not in known)],
            key=lambda record: record["version"],
        )

    def scored(self) -> set[int]:
        """Versions that have a score, or a file beside their snapshot, which may be half written yet."""
        ours = {record["version"] for record in read_lines(self.eval_path)}
        files = self.evaluation_snapshots.glob("step-*.json")
        return ours | {int(match[1]) for path in files if (match := _STEP.match(path.stem))}

    @staticmethod
    def _external(path: Path) -> Record:
        match = _STEP.match(path.stem)
        try:
            record = orjson.loads(path.read_bytes())
            record["score"] = float(record["score"])
            if match is None:
                raise ValueError(path.stem)
        except (OSError, ValueError, LookupError, TypeError):
            raise UserError(
                f"{path} is no evaluation: name it step-NUMBER.json and give it a number 'score'."
            ) from None
        empty = {"tasks": 0, "graded": 0, "episodes": 0, "by_task": {}, "failures": {}, "versions": []}
        return {**empty, **record, "version": int(match[1])}

    def batch_path(self, step: int) -> Path:
        """Where all that `step` trained on is kept."""
        path = self.path / "batches" / f"step-{step:06d}.safetensors"
        path.parent.mkdir(exist_ok=True)
        return path

    def events(self) -> list[Record]:
        return list(read_lines(self.events_path))

    def add_metrics(self, record: Mapping[str, Any]) -> None:
        _append(self.metrics_path, record)

    def add_evaluation(self, record: Mapping[str, Any]) -> None:
        _append(self.eval_path, record)

    def add_event(self, kind: str, step: int, **details: Any) -> None:
        """Something worth a line: `kind` names it, `step` is the step during which it happened."""
        _append(self.events_path, {"kind": kind, "step": step, "time": time.time(), **details})

    # --- status --------------------------------------------------------------------------------------

    def write_status(self, status: Mapping[str, Any]) -> None:
        """What the run is doing right now, for pages that watch it."""
        temporary = self.path / "status.partial"
        temporary.write_bytes(orjson.dumps({**status, "time": time.time()}))
        temporary.replace(self.path / "status.json")

    def clear_status(self) -> None:
        (self.path / "status.json").unlink(missing_ok=True)

    def status(self) -> Record | None:
        """What the run is doing, None when it is not running."""
        try:
            status: Record = orjson.loads((self.path / "status.json").read_bytes())
        except (OSError, orjson.JSONDecodeError):
            return None
        return status if time.time() - status["time"] < _STATUS_SECONDS else None

    def state(self) -> str:
        """`starting`, `running`, `ending`, `done`, or `stopped at N`, where N is the last step taken."""
        steps = self.metrics()
        last = steps[-1]["step"] if steps else 0
        taken = last >= self.config()["run"]["steps"]
        if self._is_held():
            return "running" if self.status() else "ending" if taken else "starting"
        return "done" if taken and self.model.is_dir() else f"stopped at {last}"

    def _is_held(self) -> bool:
        """Whether a process, this one or another, holds the lock."""
        try:
            with (self.path / ".lock").open("rb") as lock:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

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
            for number, record in self.kept(path.stem):
                yield f"{path.stem}/{number}", record

    def trajectory_files(self) -> list[tuple[str, int]]:
        """Names of the files of trajectories (`step-000003`) and when they last changed, newest first."""
        paths = (self.path / "trajectories").glob("*.jsonl")
        found = [(path.stem, path.stat().st_mtime_ns) for path in paths]
        return sorted(found, key=lambda one: (one[0].rpartition("-")[2], one[0]), reverse=True)

    def kept(self, name: str) -> Iterator[tuple[int, Record]]:
        """The trajectories in the file `name`, numbered."""
        yield from enumerate(read_lines(self.path / "trajectories" / f"{name}.jsonl"))

    def trajectory(self, place: str) -> Record | None:
        """The kept trajectory at `place` (`step-000003/0`), None when there is none."""
        name, _, number = place.partition("/")
        return dict(self.kept(name)).get(int(number))

    # --- checkpoints ---------------------------------------------------------------------------------

    def checkpoints(self) -> dict[int, Path]:
        """Complete checkpoints by step, in order."""
        found = {}
        for path in sorted((self.path / "checkpoints").glob("step-*")):
            match = _STEP.match(path.name)
            if match and (path / "state.json").is_file():
                found[int(match[1])] = path
        return found

    def last_step(self) -> int:
        """The step of the last checkpoint; 0 where there is none."""
        return max(self.checkpoints(), default=0)

    def last_checkpoint(self) -> Path | None:
        return self.checkpoints().get(self.last_step())

    def save_checkpoint(
        self,
        step: int,
        state: Mapping[str, Any],
        save_trainer: Callable[[Path], None],
        keep: int,
        groups: Sequence[Group] = (),
    ) -> Path:
        """Write a checkpoint, and only when it is complete delete all but the last `keep`.

        `save_trainer` writes into the path that it is given; `groups` are those that wait to be trained
        on. A kill leaves the old checkpoints.
        """
        final = self.path / "checkpoints" / f"step-{step:06d}"
        partial = final.with_name(f".partial-{final.name}")
        with self._saving:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            save_trainer(partial / "trainer")
            if groups:
                write_groups(partial / "groups.safetensors", groups)
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

    def load_groups(self, step: int) -> list[Group]:
        """The groups that waited when the checkpoint of `step` was written. `UserError` as `load_state`."""
        path = self.checkpoints()[step] / "groups.safetensors"
        return read_groups(path) if path.exists() else []

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
        (self.path / "versions.json").write_text(json.dumps(_versions(), indent=2) + "\n")

    def _forget_after(self, step: int) -> None:
        for path, key in (
            (self.metrics_path, "step"),
            (self.eval_path, "version"),
            (self.events_path, "step"),
        ):
            kept = []
            for number, record in enumerate(read_lines(path), start=1):
                if not isinstance(record, dict) or not isinstance(record.get(key), int):
                    raise UserError(
                        f"{path}, line {number}: no whole number {key!r}; the file was damaged. Delete that "
                        "line, then --resume."
                    )
                if record[key] <= step:
                    kept.append(record)
            if path.exists():
                temporary = path.with_suffix(".partial")
                temporary.write_bytes(b"".join(orjson.dumps(record) + b"\n" for record in kept))
                temporary.replace(path)
        # Weights of steps that are taken again will be others: neither they, nor their scores, nor what they
        # wrote or were trained on counts.
        for folder in (self.evaluation_snapshots, self.path / "trajectories", self.path / "batches"):
            for path in folder.glob("*-*"):
                if (match := _NUMBERED.fullmatch(path.stem)) and int(match[1]) > step:
                    shutil.rmtree(path) if path.is_dir() else path.unlink()


def _versions() -> Record:
    """What a reader needs to run the same again."""
    found = {}
    for name in ("torch", "megatron-core", "transformers", "numpy", "safetensors"):
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return {"titogym": __version__, "python": platform.python_version(), **found}


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
