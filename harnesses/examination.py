"""Letting a harness really work, with every request of its kept.

The gateway runs in this process, behind it a model that answers by a plan. Nothing of it needs a GPU, a
network or weights.
"""

import asyncio
import contextlib
import json
import logging
import os
import re
import secrets
import signal
import socket
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from titogym.envs.sandboxes.local import LocalBackend
from titogym.envs.task import Limits, Task
from titogym.errors import UserError
from titogym.gateway.app import application
from titogym.gateway.client import GatewayClient
from titogym.gateway.sessions.journal import Journal
from titogym.gateway.sessions.matchers import matcher
from titogym.gateway.sessions.tree import Tree
from titogym.gateway.settings import GatewaySettings
from titogym.gateway.trajectories import Trajectory
from titogym.harnesses.base import Connection, Harness, HarnessResult, Outcome
from titogym.harnesses.command import fill
from titogym.harnesses.episode import EpisodeResult, run_episode
from titogym.harnesses.program import environment
from titogym.harnesses.scripted_model import CONTENT, FILE, MODEL, ScriptedModel, write_model
from titogym.processes import die_with_parent

INSTRUCTION = "Look around with your tools: run a few harmless commands, then say that you are done."
TURNS = 20  # of one examination; the plan needs five to twelve
MATCHER = "call_id"  # of a session whose harness names none: it bears the most
_KEPT_BYTES = 1 << 20  # of a response
_LOG_CHARACTERS = 16_384


@dataclass(slots=True)
class Exchange:
    """One request to a model endpoint, and how it was answered."""

    method: str
    path: str  # without the part that names the session
    headers: dict[str, str]
    body: bytes = b""
    status: int = 0
    answer: bytes = b""

    def json(self) -> Any:
        try:
            return json.loads(self.body)
        except ValueError:
            return None

    def error(self) -> Mapping[str, Any]:
        try:
            told = json.loads(self.answer).get("error") or {}
        except (ValueError, AttributeError):
            return {}
        return told if isinstance(told, dict) else {}


_SESSION = re.compile(r"^/sessions/[^/]+(?=/v1)")


class _Recorder:
    """ASGI middleware that keeps every exchange of the model endpoints."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self.exchanges: list[Exchange] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = _SESSION.sub("", scope.get("path", ""))
        if scope["type"] != "http" or path.startswith("/sessions"):
            await self._app(scope, receive, send)
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        kept = Exchange(scope["method"], path, headers)
        self.exchanges.append(kept)

        async def received() -> Message:
            message = await receive()
            kept.body += message.get("body", b"")
            return message

        async def sent(message: Message) -> None:
            kept.status = message.get("status", kept.status)
            if len(kept.answer) < _KEPT_BYTES:
                kept.answer += message.get("body", b"")
            await send(message)

        await self._app(scope, received, sent)


@dataclass(frozen=True, slots=True)
class Run:
    """Everything that one examination gave. `tree` is the session as the gateway held it."""

    harness: str
    declared: str | None  # the matcher that the harness says it needs
    result: HarnessResult
    seconds: float
    exchanges: list[Exchange]
    tree: Tree
    model: ScriptedModel
    mismatches: dict[str, int]  # cause -> count
    reward: float | None  # 1 when a harness in its sandbox has done what the model asked for
    trajectories: list[Trajectory]


@dataclass
class HostCommand:
    """Any program as an agent on this machine itself, in an empty directory, with this environment.

    Its words take the same placeholders as those of the `command` harness.
    """

    words: Sequence[str]

    async def run(self, connection: Connection, seconds: float) -> HarnessResult:
        with tempfile.TemporaryDirectory(prefix="titogym-doctor-") as directory:
            instruction, work = _lay_out(Path(directory))
            values = {
                "{instruction}": INSTRUCTION,
                "{instruction_file}": str(instruction),
                "{base_url}": connection.base_url,
                "{api_key}": connection.api_key,
                "{model}": connection.model,
            }
            told = {**environment(connection), "TITOGYM_INSTRUCTION_FILE": str(instruction)}
            return await _run([fill(word, values) for word in self.words], work, told, seconds)


def _lay_out(directory: Path) -> tuple[Path, Path]:
    """The file with the instruction, and an empty directory to work in."""
    instruction, work = directory / "instruction.md", directory / "work"
    instruction.write_text(INSTRUCTION, encoding="utf-8")
    work.mkdir()
    return instruction, work


async def _run(words: Sequence[str], work: Path, env: Mapping[str, str], seconds: float) -> HarnessResult:
    parent = os.getpid()
    try:
        process = await asyncio.create_subprocess_exec(
            *words,
            cwd=work,
            env={**os.environ, **env},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=lambda: die_with_parent(parent),
        )
    except OSError as error:
        raise UserError(f"The command {words[0]!r} does not start: {error.strerror}.") from error
    output = b""
    try:
        async with asyncio.timeout(seconds):
            output, _ = await process.communicate()
    except TimeoutError:
        return HarnessResult("timeout", f"It was stopped after {seconds:g} s.")
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # what it left behind goes too
        await process.wait()
    log = output.decode(errors="replace")[-_LOG_CHARACTERS:]
    if process.returncode == 0:
        return HarnessResult("finished", "", log, 0)
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    last = f"; its last words: {lines[-1][:300]}" if lines else ""
    return HarnessResult(
        "crashed", f"It ended with status {process.returncode}{last}", log, process.returncode
    )


async def examine(agent: Harness | HostCommand, *, seconds: float = 180.0) -> Run:
    """Let the harness work with the scripted model for at most `seconds`.

    Raises `UserError` when it cannot be run at all.
    """
    with tempfile.TemporaryDirectory(prefix="titogym-doctor-") as directory:
        assets = write_model(Path(directory, MODEL))
        # A harness in its sandbox may write files, a command of this machine may not.
        task = None if isinstance(agent, HostCommand) else _task(seconds)
        model = ScriptedModel(assets, task.workdir if task else None)
        key = secrets.token_urlsafe(24)
        settings = GatewaySettings(
            model_dir=assets.model_dir,
            engines=("http://scripted",),
            admin_key=key,
            journal=Path(directory, "journal.sqlite"),
        )
        recorder = _Recorder(application(settings, assets, [model]))
        if not isinstance(agent, HostCommand):
            await agent.prepare()  # installing is not its work, and takes minutes
        async with _served(recorder) as url, GatewayClient(url, key) as client:
            started = time.monotonic()
            if isinstance(agent, HostCommand):
                result, session = await _command(agent, client, seconds)
                reward, trajectories = None, list[Trajectory]()
            else:
                assert task is not None
                episode = await _attempt(agent, task, client)
                # A failed grading is told by the missing reward.
                ended = "finished" if episode.outcome == "grading_error" else episode.outcome
                result = HarnessResult(cast(Outcome, ended), episode.error or "", episode.log)
                session, reward, trajectories = episode.session_id, episode.reward, episode.trajectories
            passed = time.monotonic() - started
            told = await client.inspect(session) if session else {}
            tree = Tree(matcher(_session_matcher(agent)))
            if session:
                journal = Journal(settings.journal)
                journal.restore(session, tree)
                journal.close()
        return Run(
            harness=" ".join(agent.words) if isinstance(agent, HostCommand) else agent.name,
            declared=None if isinstance(agent, HostCommand) else agent.matcher,
            result=result,
            seconds=passed,
            exchanges=recorder.exchanges,
            tree=tree,
            model=model,
            mismatches=told.get("diagnostics", {}).get("mismatch_causes", {}),
            reward=reward,
            trajectories=trajectories,
        )


def _session_matcher(agent: Harness | HostCommand) -> str:
    return MATCHER if isinstance(agent, HostCommand) else agent.matcher


def _session_options(agent: Harness | HostCommand) -> dict[str, Any]:
    return {"matcher": _session_matcher(agent), "policy": "branching", "limits": {"turns": TURNS}}


def _task(seconds: float) -> Task:
    """Its reward is 1 when the agent has carried out what the model asked for, in the right place."""
    return Task(
        id="doctor",
        instruction=INSTRUCTION,
        tests={
            "test.sh": f"#!/bin/sh\nif grep -qsx '{CONTENT}' {FILE}; then echo 1; else echo 0; fi "
            "> /logs/verifier/reward.txt\n"
        },
        limits=Limits(turns=TURNS, agent_seconds=seconds),
    )


async def _command(
    agent: HostCommand, client: GatewayClient, seconds: float
) -> tuple[HarnessResult, str | None]:
    session = await client.create_session(**_session_options(agent))
    connection = Connection(session.base_url, session.api_key, MODEL)
    return await agent.run(connection, seconds), session.id


async def _attempt(agent: Harness, task: Task, client: GatewayClient) -> EpisodeResult:
    try:
        episode = await run_episode(
            task,
            harness=agent,
            backend=LocalBackend(),
            gateway=client,
            session_options=_session_options(agent),
            keep_session=True,
        )
    finally:
        await agent.close()
    if episode.outcome == "setup_error" or episode.outcome == "gateway_error":
        raise UserError(episode.error or "The harness could not be run.")
    return episode


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Ctrl-C is the command's, not the server's."""
        yield


@contextlib.asynccontextmanager
async def _served(app: ASGIApp) -> AsyncIterator[str]:
    """URL of `app` on a loopback port, while the context lasts."""
    log = logging.getLogger("titogym.gateway")
    level = log.level
    log.setLevel(logging.ERROR)  # what happens stands in the report
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    config = uvicorn.Config(app, log_level="error", lifespan="on", timeout_graceful_shutdown=1)
    server = _Server(config)
    serving = asyncio.create_task(server.serve([listener]))
    try:
        while not server.started and not serving.done():  # noqa: ASYNC110 (it has no event)
            await asyncio.sleep(0.01)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        await serving
        log.setLevel(level)
