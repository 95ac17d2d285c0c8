"""SIGKILL of every type of process of a run, each at many random moments.

    python -m tests.e2e.kill_matrix [--kills 20] [--only engine driver] [--seed 0]

Three runs with a real engine, gateway, trainer and sandboxes: one that starts its own engine, one whose
trainer has two ranks, and one on Ray actors. Their processes are killed in random order, between training
steps, in the middle of updates and publications, and some before the run has recovered from the last kill.
A killed driver is started again with --resume; everything else the run has to replace by itself.

At the end each run is asked for two steps more. It has to end by itself, with every step once, no group of
tasks lost or trained on twice (`tests.trainer.accounts`), and no process or sandbox left. All of it takes
about an hour on two cores; needs the extra `ray`.
"""

import argparse
import random
import shutil
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from rich.progress import MofNCompleteColumn, Progress

from tests.e2e.killed_run import GROUPS_PER_STEP, Run, assert_gone, command_line, listening, write_config
from tests.engines.fixtures import build_tiny_model
from tests.trainer.accounts import assert_groups_accounted_for
from titogym.gateway.engines.launch import EngineOptions, running

RECOVERY = 240.0  # seconds within which a run has to take a step again
UNRECOVERED = 0.2  # share of kills that do not wait until the run has recovered from the last one
AT_MOST = 5.0  # seconds from a step to the next kill


@dataclass(frozen=True, slots=True)
class Victim:
    """A type of process: a word of its command line, and of its parent's where that tells it from others."""

    name: str
    word: str
    parent: str = ""

    def find(self, run: Run) -> psutil.Process | None:
        """One to kill; None where there is none at the moment."""
        assert run.driver is not None
        if self == DRIVER:
            return psutil.Process(run.driver.pid)
        # An actor is a child of Ray's daemon.
        everything = psutil.process_iter() if self.word.startswith("ray::") else run.descendants()
        return next((one for one in everything if self._is(one)), None)

    def _is(self, process: psutil.Process) -> bool:
        if not any(word.partition(".run")[0] == self.word for word in command_line(process)):
            return False
        parent = process.parent()
        return not self.parent or (parent is not None and self.parent in command_line(parent))


WORKER = "titogym.trainer.backends.worker"
DRIVER = Victim("driver", "")


@dataclass(frozen=True, slots=True)
class Layout:
    """One run: how it is configured, and what is killed in it."""

    name: str
    victims: tuple[Victim, ...]
    settings: tuple[str, ...]
    own_engine: bool = False


LAYOUTS = (
    Layout("own engine", (Victim("engine", "sglang.launch_server"),), (), own_engine=True),
    Layout(
        "two ranks",
        (
            DRIVER,
            Victim("gateway", "serve"),
            Victim("trainer", WORKER, parent="titogym"),
            Victim("trainer rank", WORKER, parent=WORKER),
        ),
        ("trainer.data_parallel=2",),
    ),
    Layout(
        "Ray",
        (
            Victim("rollout worker", "ray::EpisodesActor"),
            Victim("gateway actor", "ray::ServerActor"),
            Victim("trainer actor", "ray::TrainerActor"),
        ),
        ("cluster.kind=ray",),
    ),
)


@contextmanager
def directory() -> Iterator[Path]:
    """Which sandbox users may enter."""
    path = Path(tempfile.mkdtemp(prefix="titogym-kills-"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


@dataclass(slots=True)
class Outcome:
    """What a layout came to: kills by type of process and by what the run was doing, and steps taken."""

    killed: Counter[str] = field(default_factory=Counter)
    phases: Counter[str] = field(default_factory=Counter)
    steps: int = 0


def kill_all(
    layout: Layout, plan: Sequence[Victim], dice: random.Random, tick: Callable[[], None]
) -> Outcome:
    outcome = Outcome()
    with ExitStack() as stack:
        folder = stack.enter_context(directory())
        (folder / "model").mkdir()
        build_tiny_model(folder / "model")
        write_config(folder, folder / "model")
        settings = [
            *layout.settings,
            "cluster.max_restarts=1000",
            "run.keep_batches=true",
            "checkpoint.every=2",
        ]
        if layout.own_engine:
            settings.append("engine.dtype=float32")
        else:
            options = EngineOptions(str(folder / "model"), dtype="float32", seed=1)
            url = stack.enter_context(running(options, folder / "engine.log")).url
            settings.append(f'engine.urls=["{url}"]')
        arguments = [word for setting in settings for word in ("--set", setting)]
        run = Run(folder)
        stack.callback(run.stop)
        run.start(*arguments)
        wait_for_a_step(run)
        for victim in plan:
            time.sleep(dice.random() * AT_MOST)
            outcome.phases[(run.records.status() or {"phase": "starting"})["phase"]] += 1
            kill(victim, run, arguments)
            outcome.killed[victim.name] += 1
            tick()
            # What dies before a driver has started ends that driver, which says so.
            if victim == DRIVER or dice.random() > UNRECOVERED:
                wait_for_a_step(run)
        wait_for_a_step(run)
        outcome.steps = finish(run, arguments)
    return outcome


def wait_for_a_step(run: Run) -> None:
    """Until the run has taken a step that it had not taken before this call."""
    assert run.driver is not None
    before, deadline = taken(run), time.monotonic() + RECOVERY
    while taken(run) <= before:
        assert run.driver.poll() is None, run.output
        assert time.monotonic() < deadline, f"no step in {RECOVERY:.0f} s\n{run.output}"
        time.sleep(0.1)


def taken(run: Run) -> set[tuple[int, float]]:
    """The steps of the record, told apart from those at the same place that were forgotten."""
    return {(record["step"], record["time/step"]) for record in run.records.metrics()}


def kill(victim: Victim, run: Run, arguments: Sequence[str]) -> None:
    assert run.driver is not None
    deadline = time.monotonic() + RECOVERY
    while (process := victim.find(run)) is None:  # it is just being replaced
        assert run.driver.poll() is None, run.output
        assert time.monotonic() < deadline, f"no {victim.name} in {RECOVERY:.0f} s\n{run.output}"
        time.sleep(0.05)
    if victim is not DRIVER:
        process.kill()
        return
    children = run.descendants()
    ports = listening(children)
    process.send_signal(signal.SIGKILL)
    run.driver.wait()
    assert_gone(children, ports)
    run.start("--resume", *arguments)


def finish(run: Run, arguments: Sequence[str]) -> int:
    """Stop it, ask it for two more steps, and look at what it has done. Returns all of its steps."""
    assert run.driver is not None
    run.driver.send_signal(signal.SIGTERM)
    run.driver.wait(120)
    steps = max(run.records.checkpoints()) + 2
    driver = run.start("--resume", *arguments, "--set", f"run.steps={steps}")
    assert driver.wait(RECOVERY) == 0, run.output
    assert len(run.records.metrics()) == steps
    assert_groups_accounted_for(run.records, GROUPS_PER_STEP)
    assert run.sandboxes() == []
    unnamed = [record["step"] for record in run.records.metrics() if record["staleness/coverage"] < 1]
    assert not unnamed, f"tokens without a weight version in steps {unnamed}"
    return steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    names = [victim.name for layout in LAYOUTS for victim in layout.victims]
    parser.add_argument("--kills", type=int, default=20, help="of each type (default 20)")
    parser.add_argument(
        "--only", nargs="+", choices=names, default=names, metavar="TYPE", help=", ".join(names)
    )
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    plans = {
        layout: [victim for victim in layout.victims if victim.name in arguments.only] * arguments.kills
        for layout in LAYOUTS
    }
    outcomes = {}
    with Progress(*Progress.get_default_columns(), MofNCompleteColumn()) as progress:
        kills = progress.add_task("kills", total=sum(map(len, plans.values())))
        for layout, plan in plans.items():
            if plan:
                dice = random.Random(f"{arguments.seed}/{layout.name}")
                dice.shuffle(plan)
                progress.update(kills, description=layout.name)
                outcomes[layout.name] = kill_all(layout, plan, dice, lambda: progress.advance(kills))
                print(f"{layout.name}: {outcomes[layout.name]}", flush=True)
    print("\n| Killed | times | run | its steps, each once |\n| --- | --- | --- | --- |")
    for name, outcome in outcomes.items():
        for victim, times in outcome.killed.items():
            print(f"| {victim} | {times} | {name} | {outcome.steps} |")
    print("\nNo group lost or trained on twice, nothing left behind.")


if __name__ == "__main__":
    main()
