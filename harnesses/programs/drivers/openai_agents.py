"""Drives the OpenAI Agents SDK: one agent with a bash tool. Limits are the gateway's."""

import os
import subprocess

from agents import Agent, ModelSettings, Runner, function_tool, set_default_openai_api, set_tracing_disabled


@function_tool
def bash(command: str) -> str:
    """Run a bash command and return its output."""
    done = subprocess.run(
        ["bash", "-c", command], stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace"
    )
    return f"{done.stdout}{done.stderr}[exit code {done.returncode}]"


set_tracing_disabled(True)
set_default_openai_api(os.environ["AGENT_API"])
agent = Agent(
    name="agent",
    instructions=os.environ["AGENT_SYSTEM"],
    model=os.environ["OPENAI_MODEL"],
    tools=[bash],
    model_settings=ModelSettings(tool_choice=os.environ["AGENT_TOOL_CHOICE"]),
    reset_tool_choice=False,
)
with open(os.environ["TITOGYM_INSTRUCTION_FILE"], encoding="utf-8") as file:
    print(Runner.run_sync(agent, file.read(), max_turns=1_000_000).final_output)
