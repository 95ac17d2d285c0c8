"""Drives Inspect AI: its ReAct agent with a bash tool, evaluated on one sample. Limits are the gateway's."""

import asyncio
import os
import subprocess
import sys

from inspect_ai import Task, eval
from inspect_ai.agent import react
from inspect_ai.dataset import Sample
from inspect_ai.model import get_model
from inspect_ai.tool import tool


def run(command: str) -> str:
    done = subprocess.run(
        ["bash", "-c", command], stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace"
    )
    return f"{done.stdout}{done.stderr}[exit code {done.returncode}]"


@tool
def bash():
    async def execute(command: str) -> str:
        """Run a bash command and return its output.

        Args:
            command: What to run.
        """
        return await asyncio.to_thread(run, command)

    return execute


with open(os.environ["TITOGYM_INSTRUCTION_FILE"], encoding="utf-8") as file:
    sample = Sample(input=file.read())
model = get_model(
    f"openai-api/titogym/{os.environ['OPENAI_MODEL']}",
    base_url=os.environ["OPENAI_BASE_URL"],
    api_key=os.environ["OPENAI_API_KEY"],
)
task = Task(dataset=[sample], solver=react(tools=[bash()], prompt=os.environ["AGENT_SYSTEM"]))
(log,) = eval(task, model=model, display="plain", log_dir="/tmp/inspect", score=False)
if log.status != "success":
    sys.exit(str(log.error.message if log.error else log.status))
