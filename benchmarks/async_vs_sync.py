"""Asynchronous against synchronous training where episode lengths are skewed 10:1.

    python benchmarks/async_vs_sync.py [--steps 18] [--out runs/async-vs-sync] [--short]

Trains the quickstart's model twice on the quickstart's task family, from the same weights and in the same
order of tasks, with `run.driver` "sync" and then "async". The tests of one task in eight take ten times as
long as those of the others, as a long test suite or a slow web page would; waiting costs no CPU.

Prints one table and whether the bars hold:

- async reaches the reward of sync within noise (two standard errors of the held-out scores)
- in at most 0.7 of its wall time
- a step of async takes at most 1.1 of the slower of its two sides: rollout (the seconds that a step's groups
  take to be collected while the buffer has room) and trainer (scoring, optimizer and weight update)

Needs a quiet machine: on two cores about 15 minutes, with `--short` 4, which is too few steps for rewards.
A run that is in `--out` already is only read.
"""

import argparse
import asyncio
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from titogym.envs.sandboxes.base import Sandbox
from titogym.envs.shell_tasks import tasks as shell_tasks
from titogym.envs.task import Grade, Task
from titogym.envs.terminal import TerminalEnvironment
from titogym.quickstart.run import CONFIG
from titogym.trainer.pages.report import summarise
from titogym.trainer.runs.directory import RunDirectory

SECONDS = 1.5  # that the tests of most tasks take
SKEW = 10  # times as long for the others
ONE_IN = 8  # share of these
BAR_TIME, BAR_STEP = 0.7, 1.1
DRIVERS = ("sync", "async")


def tasks(split: str, seed: int, count: int) -> list[Task]:
    """The quickstart's tasks; every eighth has slow tests."""
    return [
        replace(
            task,
            environment="benchmarks.async_vs_sync:SlowTests",
            limits=replace(task.limits, verifier_seconds=120.0),
            metadata={**task.metadata, "wait": SECONDS * (SKEW if number % ONE_IN == 0 else 1)},
        )
        for number, task in enumerate(shell_tasks(split, seed, count))
    ]


class SlowTests(TerminalEnvironment):
    """The terminal, whose tests take as long as the task says."""

    async def grade(self, task: Task, sandbox: Sandbox | None) -> Grade:
        await asyncio.sleep(task.metadata["wait"])
        return await super().grade(task, sandbox)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one driver came to; times in seconds, per step where not said otherwise."""

    driver: str
    steps: int
    wall: float  # of all steps
    step: float
    rollout: float  # to collect a step's groups while the buffer has room
    trainer: float
    before: float
    after: float
    noise: float  # standard error of `after`
    stale: int  # groups rejected as too old
    bias: float  # see `consumption/duration_bias`

    @property
    def overhead(self) -> float:
        """A step's time over that of the slower side."""
        return self.step / max(self.rollout, self.trainer)


def run_of(driver: str, out: Path, steps: int) -> RunDirectory:
    directory = out / driver
    if not (directory / "report.html").exists():
        settings = {
            "run.dir": directory,
            "run.driver": driver,
            "run.steps": steps,
            "run.keep_trajectories": 1,
            "model.dir": out / "model",
            "environment.source": "benchmarks.async_vs_sync:tasks",
            "buffer.capacity": 12,
            "checkpoint.every": steps,
        }
        sets = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
        subprocess.run([sys.executable, "-m", "titogym", "train", str(CONFIG), *sets], check=True)
    return RunDirectory(directory)


def outcome(driver: str, run: RunDirectory) -> Outcome:
    summary, records, config = summarise(run), run.metrics(), run.config()
    steps, evaluation = records[1:], run.evaluations()[-1]  # the first step waits for an empty pipeline
    elapsed = sum(step["time/step"] for step in steps)
    blocked = sum(step["time/rollout_blocked"] for step in steps)
    episodes = sum(step["rollout/episodes"] for step in steps)
    per_step = config["rollout"]["samples_per_prompt"] * config["rollout"]["groups_per_step"]
    own = ("time/logprobs", "time/train", "time/publish")
    trainer = sum(step[name] for step in steps for name in own) / len(steps)
    score = evaluation["score"]
    return Outcome(
        driver=driver,
        steps=summary.steps,
        wall=summary.seconds,
        step=elapsed / len(steps),
        # In sync the trainer's time is the rollout's rest: what it waits for is what collecting takes.
        rollout=(
            sum(step["time/wait"] for step in steps) / len(steps)
            if driver == "sync"
            else (elapsed - blocked) / max(episodes, 1) * per_step
        ),
        trainer=trainer,
        before=summary.before or 0.0,
        after=score,
        noise=(score * (1 - score) / evaluation["graded"]) ** 0.5,
        stale=int(sum(step["buffer/stale"] for step in records)),
        bias=records[-1].get("consumption/duration_bias", 1.0),
    )


def print_table(outcomes: Sequence[Outcome]) -> None:
    print(
        "\n| Driver | steps | wall s | s per step | rollout s | trainer s | step / slower side "
        "| held-out before | after | stale | duration bias |\n" + "| --- " * 11 + "|"
    )
    for o in outcomes:
        print(
            f"| {o.driver} | {o.steps} | {o.wall:.0f} | {o.step:.1f} | {o.rollout:.1f} | {o.trainer:.1f} "
            f"| {o.overhead:.2f} | {o.before:.3f} | {o.after:.3f} ± {o.noise:.3f} | {o.stale} "
            f"| {o.bias:.2f} |"
        )


def verdicts(sync: Outcome, asynchronous: Outcome) -> dict[str, bool]:
    noise = 2 * (sync.noise**2 + asynchronous.noise**2) ** 0.5
    ratio = asynchronous.wall / sync.wall
    return {
        f"reward {asynchronous.after:.3f} against {sync.after:.3f}, within {noise:.3f}": asynchronous.after
        >= sync.after - noise,
        f"wall time {ratio:.2f} of sync, at most {BAR_TIME}": ratio <= BAR_TIME,
        f"step {asynchronous.overhead:.2f} of the slower side, at most {BAR_STEP}": asynchronous.overhead
        <= BAR_STEP,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=18)
    parser.add_argument("--out", type=Path, default=Path("runs/async-vs-sync"))
    parser.add_argument("--short", action="store_true", help="4 steps each: times, no rewards to speak of")
    arguments = parser.parse_args()
    out, steps = arguments.out, 4 if arguments.short else arguments.steps
    if not (out / "model" / "model.safetensors").exists():
        from titogym.quickstart.model import prepare_model

        (out / "model").mkdir(parents=True, exist_ok=True)
        prepare_model(out / "model", 0, print)
    outcomes = [outcome(driver, run_of(driver, out, steps)) for driver in DRIVERS]
    print_table(outcomes)
    held = verdicts(*outcomes)
    for bar, holds in held.items():
        print(f"{'holds' if holds else 'FAILS'}: {bar}")
    (out / "result.json").write_text(json.dumps([asdict(o) for o in outcomes], indent=2) + "\n")
    sys.exit(not all(held.values()))


if __name__ == "__main__":
    main()
