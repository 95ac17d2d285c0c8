"""Drives Pydantic AI: one agent with a bash tool. Limits are the gateway's."""

import os
import subprocess

from pydantic_ai import Agent, UsageLimits
from pydantic_ai.models.openai import OpenAIChatModel

agent = Agent(
    OpenAIChatModel(os.environ["OPENAI_MODEL"]),
    instructions=os.environ["AGENT_SYSTEM"],
    retries=10,
)


@agent.tool_plain
def bash(command: str) -> str:
    """Run a bash command and return its output."""
    done = subprocess.run(
        ["bash", "-c", command], stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace"
    )
    return f"{done.stdout}{done.stderr}[exit code {done.returncode}]"


with open(os.environ["TITOGYM_INSTRUCTION_FILE"], encoding="utf-8") as file:
    print(agent.run_sync(file.read(), usage_limits=UsageLimits(request_limit=None)).output)
