"""Drives Harbor's Terminus-2 in the terminal of this very machine. Limits are the gateway's."""

import asyncio
import logging
import os
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

from harbor.agents.terminus_2 import Terminus2
from harbor.environments.base import BaseEnvironment, ExecResult
from harbor.models.agent.context import AgentContext

LOGS = Path("/logs/agent/terminus-2")


class ThisMachine(BaseEnvironment):
    """The environment is where this program runs."""

    def __init__(self) -> None:
        self.session_id = "here"
        self.default_user = None
        self.logger = logging.getLogger("terminus-2")
        self.trial_paths = SimpleNamespace(agent_dir=LOGS)

    @staticmethod
    def type() -> str:
        return "this-machine"

    def _validate_definition(self) -> None:
        pass

    async def start(self, force_build: bool) -> None:
        pass

    async def stop(self, delete: bool) -> None:
        pass

    async def exec(self, command, cwd=None, env=None, timeout_sec=None, user=None, **options) -> ExecResult:
        def run() -> ExecResult:
            done = subprocess.run(
                ["bash", "-c", command],
                cwd=cwd,
                env={**os.environ, **(env or {})},
                timeout=timeout_sec,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
            )
            return ExecResult(stdout=done.stdout, stderr=done.stderr, return_code=done.returncode)

        return await asyncio.to_thread(run)

    async def upload_file(self, source_path, target_path) -> None:
        shutil.copy(source_path, target_path)

    async def upload_dir(self, source_dir, target_dir) -> None:
        shutil.copytree(source_dir, target_dir, dirs_exist_ok=True)

    async def download_file(self, source_path, target_path) -> None:
        shutil.copy(source_path, target_path)

    async def download_dir(self, source_dir, target_dir) -> None:
        shutil.copytree(source_dir, target_dir, dirs_exist_ok=True)


async def main(instruction: str) -> None:
    context_tokens = int(os.environ["AGENT_CONTEXT_TOKENS"])
    agent = Terminus2(
        logs_dir=LOGS,
        model_name=f"openai/{os.environ['OPENAI_MODEL']}",
        api_base=os.environ["OPENAI_BASE_URL"],
        model_info={
            "max_input_tokens": context_tokens,
            "max_output_tokens": context_tokens,
            "input_cost_per_token": 0.0,
            "output_cost_per_token": 0.0,
        },
        parser_name=os.environ["AGENT_PARSER"],
        enable_summarize=os.environ["AGENT_SUMMARIZE"] == "true",
        interleaved_thinking=os.environ["AGENT_INTERLEAVED_THINKING"] == "true",
        record_terminal_session=False,
    )
    machine = ThisMachine()
    await agent.setup(machine)
    await agent.run(instruction, machine, AgentContext())


LOGS.mkdir(parents=True, exist_ok=True)
asyncio.run(main(Path(os.environ["TITOGYM_INSTRUCTION_FILE"]).read_text(encoding="utf-8")))
