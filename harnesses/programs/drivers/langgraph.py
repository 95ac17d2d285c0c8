"""Drives LangGraph's prebuilt agent with a bash tool. Limits are the gateway's."""

import os
import subprocess

from langchain.agents import create_agent
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI


@tool
def bash(command: str) -> str:
    """Run a bash command and return its output."""
    done = subprocess.run(
        ["bash", "-c", command], stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace"
    )
    return f"{done.stdout}{done.stderr}[exit code {done.returncode}]"


agent = create_agent(
    ChatOpenAI(model=os.environ["OPENAI_MODEL"]), [bash], system_prompt=os.environ["AGENT_SYSTEM"]
)
with open(os.environ["TITOGYM_INSTRUCTION_FILE"], encoding="utf-8") as file:
    asked = {"messages": [{"role": "user", "content": file.read()}]}
print(agent.invoke(asked, {"recursion_limit": 1_000_000})["messages"][-1].content)
