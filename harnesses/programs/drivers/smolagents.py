"""Drives smolagents: its CodeAgent with a bash tool. Limits are the gateway's."""

import os
import subprocess

from smolagents import CodeAgent, OpenAIModel, tool
from smolagents.models import REMOVE_PARAMETER


@tool
def bash(command: str) -> str:
    """Run a bash command and return its output.

    Args:
        command: What to run.
    """
    done = subprocess.run(
        ["bash", "-c", command], stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace"
    )
    return f"{done.stdout}{done.stderr}[exit code {done.returncode}]"


model = OpenAIModel(
    os.environ["OPENAI_MODEL"],
    api_base=os.environ["OPENAI_BASE_URL"],
    api_key=os.environ["OPENAI_API_KEY"],
    # A stop at </code>, which it would then write itself, makes every turn another one than was sampled.
    stop=REMOVE_PARAMETER,
)
agent = CodeAgent(tools=[bash], model=model, instructions=os.environ["AGENT_SYSTEM"], max_steps=1_000_000)
with open(os.environ["TITOGYM_INSTRUCTION_FILE"], encoding="utf-8") as file:
    print(agent.run(file.read()))
