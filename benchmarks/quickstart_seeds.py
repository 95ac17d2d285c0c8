"""The quickstart under several seeds: a table of held-out reward before and after, and one plot.

    python benchmarks/quickstart_seeds.py [--seeds 0 1 2] [--out runs/seeds] [--plot FILE.png]

Runs `titogym quickstart` once per seed, one after the other; a seed whose folder is there already is only
read. The table and the plot show every seed, whichever way it turned out.
"""

import argparse
import subprocess
import sys
from pathlib import Path

from titogym.trainer.pages.report import summarise
from titogym.trainer.runs.directory import RunDirectory


def run_of(seed: int, out: Path) -> RunDirectory:
    directory = out / f"seed{seed}"
    if not (directory / "run" / "eval.jsonl").exists():
        command = ["-m", "titogym", "quickstart", "--dir", str(directory), "--seed", str(seed)]
        subprocess.run([sys.executable, *command], check=True)
    return RunDirectory(directory / "run")


def print_table(runs: dict[int, RunDirectory]) -> None:
    print("| Seed | Held-out reward before | after | gain | steps | minutes in steps |")
    print("| --- | --- | --- | --- | --- | --- |")
    for seed, run in runs.items():
        summary = summarise(run)
        before, after = summary.before, summary.after
        if before is None or after is None:
            sys.exit(f"seed {seed} was not finished: delete {run.path.parent} and start again")
        gain, minutes = after - before, summary.seconds / 60
        print(f"| {seed} | {before:.3f} | {after:.3f} | {gain:+.3f} | {summary.steps} | {minutes:.1f} |")


def draw(runs: dict[int, RunDirectory], path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for seed, run in runs.items():
        steps, evaluations = run.metrics(), run.evaluations()
        (line,) = axes.plot(
            [step["step"] for step in steps], [step["reward/mean"] for step in steps], alpha=0.45, linewidth=1
        )
        axes.plot(
            [done["version"] for done in evaluations],
            [done["score"] for done in evaluations],
            "o--",
            color=line.get_color(),
            label=f"seed {seed}, held out",
        )
    axes.set(
        xlabel="step", ylabel="mean reward", ylim=(0, 1), title="Quickstart: training (thin) and held-out"
    )
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=Path("runs/seeds"), help="folder of the runs")
    parser.add_argument("--plot", type=Path, help="where to draw the curves (PNG)")
    arguments = parser.parse_args()
    runs = {seed: run_of(seed, arguments.out) for seed in arguments.seeds}
    print_table(runs)
    if arguments.plot:
        draw(runs, arguments.plot)


if __name__ == "__main__":
    main()
