"""`run_training` with every real part but the engine: gateway, harness, sandboxes, graders, trainer process.

The scripted engine has no weights, so publishing tells it the new version and moves no tensor. Run as a
program (`python -m tests.trainer.drive CONFIG [--resume]`) it is a driver that a test may kill.
"""

import sys
from pathlib import Path

import httpx

from titogym.cli import train as cli
from titogym.trainer.backends.process import TrainerProcess
from titogym.trainer.cluster import local


class VersionOnlyTrainer(TrainerProcess):
    """The real trainer process in front of engines that hold no weights."""

    def connect_engines(self, urls, settings=None):
        self.urls = urls

    def check_weight_update(self):
        return {"publish/tensors_checked": 0.0}

    def publish_weights(self, version):
        for url in self.urls:
            httpx.post(f"{url}/update_weight_version", json={"new_version": str(version)}).raise_for_status()
        return {}


def tasks(split: str, seed: int, count: int):
    """Tasks that ask for a word in a file; half of them grade by it."""
    from titogym.envs.task import Limits, Task

    return [
        Task(
            id=f"write-{split}-{seed}-{number}",
            instruction=f"Write the word {word(number)} to answer.txt.",
            tests={
                "test.sh": f'#!/bin/bash\n[ "$(cat /workspace/answer.txt)" = {word(number)} ]\n'
                "echo $((1 - $?)) > /logs/verifier/reward.txt\n"
            },
            limits=Limits(turns=4, agent_seconds=30, verifier_seconds=20),
        )
        for number in range(count)
    ]


def word(number: int) -> str:
    return f"w{number}"


def main() -> None:
    setattr(local, "TrainerProcess", VersionOnlyTrainer)  # noqa: B010 (typed code may not do this)
    cli.command(config=Path(sys.argv[1]), resume="--resume" in sys.argv)


if __name__ == "__main__":
    from titogym.errors import UserError

    try:
        import typer

        main()
    except typer.Exit as ended:
        sys.exit(ended.exit_code)
    except UserError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
