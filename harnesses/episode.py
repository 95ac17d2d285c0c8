"""One attempt at one task: session, sandbox, environment, agent, grade, trajectories; nothing left behind.

Whatever goes wrong inside becomes a failed result with one clear sentence. Clean-up runs on every way
out, cancellation included. When this process is killed, the sandbox dies with it (its processes are
bound to ours) and the session ends by its time to live.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar, cast
from urllib.parse import urlsplit

from titogym.cancellation import to_its_end
from titogym.envs.environment import AgentEnvironment, Environment, InteractiveEnvironment, Observation
from titogym.envs.registry import environment as find_environment
from titogym.envs.rewards import verified
from titogym.envs.sandboxes.base import Sandbox, SandboxBackend, SandboxError
from titogym.envs.task import GradingError, Task
from titogym.errors import UserError
from titogym.gateway.client import GatewayClient, GatewayError, SessionHandle
from titogym.gateway.trajectories import Trajectory
from titogym.harnesses.base import Connection, Harness, HarnessResult, Outcome, Player
from titogym.harnesses.findings import Finding, findings
from titogym.harnesses.warm import INSIDE_PORT, WarmStarts, address_of, enclosed, spec_of

log = logging.getLogger(__name__)

T = TypeVar("T")

RESET_SECONDS = 600.0  # that an environment may take to be ready
EpisodeOutcome = Outcome | Literal["setup_error", "gateway_error", "grading_error"]

# The agent's own ending, good or bad: the model answers for it, so a graded one may be trained on.
MODEL_OUTCOMES = frozenset({"finished", "turn_limit", "token_limit", "context_limit", "timeout"})

HARNESS_GRACE = 10.0  # seconds past the agent's limit until a harness that does not keep it is cancelled
BUDGET_CHECK = 5.0  # seconds between two looks at whether a program's session has a budget left
VERIFIER_GRACE = 10.0  # the same for a grader
CLEANUP_SECONDS = 30.0  # longest wait for a sandbox or a session to go
MODEL = "titogym"  # the name by which agents ask for their model; a gateway serves one

# What a session says of its last refused request -> how the attempt ended.
_SESSION_CAUSES: dict[str, EpisodeOutcome] = {
    "turns": "turn_limit",
    "tokens": "token_limit",
    "context_length_exceeded": "context_limit",
    "engine_unavailable": "engine_error",
}


@dataclass(slots=True)
class EpisodeResult:
    """What one episode gave. `error` is one sentence about anything but a finished, graded attempt.

    `reward` is None when the episode could not be graded; each trajectory carries it too. `seconds` is
    wall time by phase: setup, agent, grade, collect. `mismatches` counts all that `tito_session_mismatch`
    found in the session, by type; `findings` are some of it. `log` is the tail of the agent's own output.
    """

    task_id: str
    outcome: EpisodeOutcome
    reward: float | None = None
    error: str | None = None
    trajectories: list[Trajectory] = field(default_factory=list)
    turns: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    mismatches: dict[str, int] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    evidence: dict[str, Any] = field(default_factory=dict)
    log: str = ""
    session_id: str | None = None

    @property
    def failed(self) -> bool:
        """Whether it came to anything but a finished and graded attempt. Its reward may still stand."""
        return self.outcome != "finished"

    @property
    def usable(self) -> bool:
        """Whether it may be trained on: graded, sampled, and ended by the model's own doing."""
        return self.reward is not None and bool(self.trajectories) and self.outcome in MODEL_OUTCOMES


async def run_episode(
    task: Task,
    *,
    harness: Harness,
    backend: SandboxBackend,
    gateway: GatewayClient,
    session_options: Mapping[str, Any] | None = None,
    labels: Mapping[str, str] | None = None,
    keep_session: bool = False,
    warm: WarmStarts | None = None,
) -> EpisodeResult:
    """Let `harness` attempt `task` once.

    `session_options` are fields of the gateway's session (matcher, policy, sampling, ...); the harness's
    matcher and the task's limits of turns and tokens stand where they are silent. `labels` name the
    sandbox and the session. With `keep_session` the session of an episode that was not cancelled is
    the caller's to delete. `warm` may hold a world that was made ready for this very episode. Raises
    nothing but `asyncio.CancelledError`, and that only after everything is cleaned up.
    """
    episode = _Episode(task, harness, backend, gateway, session_options or {}, labels or {}, warm)
    ended = False
    try:
        await episode.run()
        ended = True
    finally:
        await to_its_end(episode.clean_up(keep_session=keep_session and ended))
    return episode.result


class _Failed(Exception):
    """Ends the episode with this outcome and sentence."""

    def __init__(self, outcome: EpisodeOutcome, error: str) -> None:
        self.outcome: EpisodeOutcome = outcome
        self.error = error


@dataclass(frozen=True, slots=True)
class _World:
    """What the set-up made."""

    environment: Environment
    first: Observation
    sandbox: Sandbox | None
    connection: Connection


class _Episode:
    """The state of one `run_episode`: what has been made so far, and the result that is filled in."""

    def __init__(
        self,
        task: Task,
        harness: Harness,
        backend: SandboxBackend,
        gateway: GatewayClient,
        session_options: Mapping[str, Any],
        labels: Mapping[str, str],
        warm: WarmStarts | None,
    ) -> None:
        self._task = task
        self._harness = harness
        self._backend = backend
        self._gateway = gateway
        self._session_options = session_options
        self._given = labels
        self._labels = {"task": task.id, **labels}
        self._warm = warm
        # Creation runs in tasks of its own: a cancellation in its midst must still know what to destroy.
        self._session: asyncio.Task[SessionHandle] | None = None
        self._sandbox: asyncio.Future[Sandbox] | None = None
        self._environment: Environment | None = None
        self.result = EpisodeResult(task.id, "setup_error")

    async def run(self) -> None:
        result = self.result
        try:
            with self._phase("setup"):
                world = await self._set_up()
            with self._phase("agent"):
                ended = await self._let_work(world)
            result.outcome, result.error, result.log = ended.outcome, ended.detail or None, ended.log
            with self._phase("grade"):
                await self._grade(world)
        except _Failed as failure:
            result.outcome, result.error = failure.outcome, failure.error
        with self._phase("collect"):
            await self._collect()

    async def clean_up(self, *, keep_session: bool) -> None:
        """Destroy what was made, whatever state it is in. Failures are logged: there is no one to tell."""
        session = None if keep_session else self._session
        if self._environment is not None:
            await _quietly("environment", self._environment.close())
        await asyncio.gather(
            _destroy("sandbox", self._sandbox, lambda sandbox: sandbox.destroy()),
            _destroy("session", session, lambda session: self._gateway.delete(session.id)),
        )

    async def _set_up(self) -> _World:
        try:
            environment = find_environment(self._task.environment)
            self._refuse_what_cannot_work(environment)
            self._environment = environment
            await self._harness.prepare()
            session = await self._create_session()
            ready = await self._warm.take(self._task, self._given) if self._warm else None
            if ready is not None:
                self._environment = environment = ready.environment
                self._sandbox = asyncio.get_running_loop().create_future()
                self._sandbox.set_result(ready.sandbox)
                sandbox: Sandbox | None = ready.sandbox
                first = ready.first
            else:
                sandbox = await self._create_sandbox(session) if environment.needs_sandbox else None
                first = await self._reset(environment, sandbox)
            if not isinstance(first, Observation):
                raise UserError(
                    f"The environment {environment.name!r} returned {str(first)[:80]!r} from reset: "
                    "return an Observation."
                )
        except GatewayError as error:
            raise _Failed("gateway_error", f"The gateway gave no session: {error}") from error
        except SandboxError as error:
            raise _Failed("setup_error", f"The sandbox could not be made ready: {error}") from error
        except UserError as error:
            raise _Failed("setup_error", str(error)) from error
        except (Exception, SystemExit) as error:  # an environment's own code may exit
            raise _Failed("setup_error", _unexpected("the set-up", error)) from error
        return _World(environment, first, sandbox, self._connection(session))

    async def _reset(self, environment: Environment, sandbox: Sandbox | None) -> Observation:
        try:
            async with asyncio.timeout(RESET_SECONDS) as limit:
                return await environment.reset(self._task, sandbox)
        except TimeoutError:
            if not limit.expired():
                raise
            raise UserError(
                f"The environment {environment.name!r} did not end its reset within {RESET_SECONDS:.0f} s."
            ) from None

    def _refuse_what_cannot_work(self, environment: Environment) -> None:
        harness = self._harness
        if environment.interactive:
            if not isinstance(harness, Player):
                raise UserError(
                    f"The environment {environment.name!r} answers the model turn by turn, which the harness "
                    f"{harness.name!r} cannot do: use the harness openai_loop."
                )
        elif not environment.needs_sandbox:
            raise UserError(
                f"The environment {environment.name!r} is agent-driven but says that it needs no sandbox: "
                "agents work in one."
            )
        if harness.inside and not self._gateway.guarded:
            raise UserError(
                f"With the harness {harness.name!r} the model's commands can reach the gateway: "
                "start it with --admin-key, and give that key to the run."
            )

    async def _create_session(self) -> SessionHandle:
        limits = self._task.limits
        budget = {"turns": limits.turns, "tokens": limits.tokens}
        options = {
            "matcher": self._harness.matcher,
            "policy": getattr(self._harness, "policy", "linear"),
            "limits": {name: value for name, value in budget.items() if value is not None},
            "labels": self._labels,
            **self._session_options,
        }
        self._session = asyncio.ensure_future(self._gateway.create_session(**options))
        session = await asyncio.shield(self._session)
        self.result.session_id = session.id
        return session

    async def _create_sandbox(self, session: SessionHandle) -> Sandbox:
        url = session.base_url
        address = address_of(url) if enclosed(self._harness, self._task, self._backend, url) else None
        spec = spec_of(self._task, self._harness, self._given, address)
        self._sandbox = asyncio.ensure_future(self._backend.create(spec))
        return await asyncio.shield(self._sandbox)

    def _connection(self, session: SessionHandle) -> Connection:
        url = session.base_url
        if enclosed(self._harness, self._task, self._backend, url):
            url = urlsplit(url)._replace(scheme="http", netloc=f"127.0.0.1:{INSIDE_PORT}").geturl()
        return Connection(url, session.api_key, MODEL, self._task.env)

    async def _let_work(self, world: _World) -> HarnessResult:
        limit = self._task.limits.agent_seconds
        try:
            async with asyncio.timeout(limit + HARNESS_GRACE):
                return await self._attempt(world)
        except TimeoutError:  # the harness did not keep the limit itself
            return HarnessResult("timeout", f"The agent was stopped at its limit of {limit:g} s.")
        except (Exception, SystemExit) as error:  # an environment's own code may exit
            return HarnessResult("crashed", _unexpected(f"harness {self._harness.name!r}", error))

    async def _attempt(self, world: _World) -> HarnessResult:
        harness, environment, sandbox = self._harness, world.environment, world.sandbox
        if environment.interactive:
            assert isinstance(harness, Player)
            player = cast(InteractiveEnvironment, environment)
            return await harness.play(self._task, player, world.first, world.connection)
        assert sandbox is not None
        return await cast(AgentEnvironment, environment).run(
            self._task, lambda task: self._watched(harness.run(task, sandbox, world.connection))
        )

    async def _watched(self, work: Coroutine[Any, Any, HarnessResult]) -> HarnessResult:
        """The end of a program, or ours of one that goes on asking when its session's budget is used up."""
        running = asyncio.ensure_future(work)
        spent = 0
        try:
            while spent < 2 and not (await asyncio.wait([running], timeout=BUDGET_CHECK))[0]:
                spent = spent + 1 if await self._budget_is_spent() else 0
            if running.done():
                return running.result()
            return HarnessResult("crashed", "The agent was stopped: its session's budget was used up.")
        finally:
            running.cancel()
            await asyncio.wait([running])

    async def _budget_is_spent(self) -> bool:
        if not self._harness.inside or self.result.session_id is None:
            return False
        try:
            seen = await self._gateway.inspect(self.result.session_id, brief=True)
        except GatewayError:
            return False
        return seen["exhausted"] is not None

    async def _grade(self, world: _World) -> None:
        limit = self._task.limits.verifier_seconds
        try:
            async with asyncio.timeout(limit + VERIFIER_GRACE):
                if world.sandbox is not None:
                    await world.sandbox.kill_processes()
                environment = world.environment
                grade = verified(await environment.grade(self._task, world.sandbox), environment.name)
        except TimeoutError:
            self._not_graded(f"the tests were stopped at their limit of {limit:g} s")
        except (GradingError, SandboxError, UserError) as error:
            self._not_graded(str(error))
        except (Exception, SystemExit) as error:  # an environment's own code may exit
            self._not_graded(_unexpected("the grader", error))
        else:
            self.result.reward, self.result.evidence = grade.reward, grade.evidence

    def _not_graded(self, why: str) -> None:
        sentence = f"The attempt could not be graded: {why.rstrip('.')}."
        if self.result.outcome in MODEL_OUTCOMES:
            self.result.outcome = "grading_error"
        self.result.error = f"{self.result.error} {sentence}" if self.result.error else sentence

    async def _collect(self) -> None:
        """Fetch what the session holds; a failed episode's samples too."""
        if self.result.session_id is None:
            return
        try:
            seen = await self._gateway.inspect(self.result.session_id)
            trajectories = await self._gateway.trajectories(self.result.session_id)
        except GatewayError as error:
            self.result.outcome = "gateway_error"
            self.result.error = f"The gateway did not hand over the session's trajectories: {error}"
            return
        for trajectory in trajectories:
            trajectory.reward = self.result.reward
        self.result.trajectories = trajectories
        self.result.turns = seen["turns"]
        self.result.mismatches = seen["tito_session_mismatch"]
        self.result.findings = findings(seen)
        if self._harness.inside:
            self._explain(seen)

    def _explain(self, seen: Mapping[str, Any]) -> None:
        """Why an agent program really ended: it has only an exit status, the session knows the cause."""
        result, error, most = self.result, seen["last_error"], self._task.limits.tokens
        if result.outcome not in ("finished", "crashed"):
            return
        if error is not None:
            outcome = _SESSION_CAUSES.get(seen["exhausted"] or error["code"])
            # A program that finished has got over its engine's failure.
            if outcome is not None and (result.outcome, outcome) != ("finished", "engine_error"):
                result.outcome, result.error = outcome, error["message"]
        elif most is not None and seen["sampled_tokens"] >= most and seen["tree"][-1]["finish"] == "length":
            result.outcome, result.error = "token_limit", f"The agent sampled its limit of {most} tokens."

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        started = time.monotonic()
        try:
            yield
        finally:
            self.result.seconds[name] = time.monotonic() - started


def _unexpected(where: str, error: BaseException) -> str:
    log.error("unexpected error in %s", where, exc_info=error)
    return f"Unexpected error in {where}: {type(error).__name__}: {error}"


async def _destroy(
    what: str, made: "asyncio.Future[T] | None", destroy: Callable[[T], Awaitable[None]]
) -> None:
    if made is None:
        return
    try:
        async with asyncio.timeout(CLEANUP_SECONDS):
            try:
                thing = await made
            except Exception:
                return  # it was never made, and setup has said why
            await destroy(thing)
    except Exception as error:
        log.warning("the %s of an episode was not destroyed: %s: %s", what, type(error).__name__, error)


async def _quietly(what: str, closing: Awaitable[None]) -> None:
    try:
        async with asyncio.timeout(CLEANUP_SECONDS):
            await closing
    except Exception as error:
        log.warning("the %s of an episode was not closed: %s: %s", what, type(error).__name__, error)
