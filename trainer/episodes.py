"""Running the episodes of a run: its harness, sandboxes and sessions at the gateways, put together."""

from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

from titogym.envs.sandboxes.base import SandboxBackend
from titogym.envs.sandboxes.registry import backend as sandbox_backend
from titogym.envs.task import Task
from titogym.gateway.client import GatewayClient
from titogym.harnesses.base import Harness
from titogym.harnesses.episode import EpisodeResult, run_episode
from titogym.harnesses.warm import WarmStarts
from titogym.trainer.config.sections import RunConfig


@dataclass(frozen=True, slots=True)
class Gateways:
    """URL and admin key of the gateway of training and of that of evaluation (which may be the same)."""

    train: tuple[str, str]
    evaluation: tuple[str, str]


@dataclass(frozen=True, slots=True)
class Episodes:
    """Runs episodes as training does (`train`) and as evaluation does (`evaluate`)."""

    config: RunConfig
    harness: Harness
    backend: SandboxBackend
    gateway: GatewayClient
    eval_gateway: GatewayClient
    warm: WarmStarts

    async def train(self, task: Task, labels: Mapping[str, str]) -> EpisodeResult:
        temperature = self.config.rollout.temperature
        return await self._run(task, labels, self.gateway, temperature, self.warm)

    def announce(self, task: Task, labels: Mapping[str, str]) -> None:
        """`train` will be called with these: its sandbox may be made ready."""
        self.warm.announce(task, labels)

    async def evaluate(self, task: Task, labels: Mapping[str, str]) -> EpisodeResult:
        temperature = self.config.eval.temperature if self.config.eval else 0.0
        return await self._run(task, labels, self.eval_gateway, temperature, None)

    async def _run(
        self,
        task: Task,
        labels: Mapping[str, str],
        gateway: GatewayClient,
        temperature: float,
        warm: WarmStarts | None,
    ) -> EpisodeResult:
        return await run_episode(
            task,
            harness=self.harness,
            backend=self.backend,
            gateway=gateway,
            session_options=session_options(self.config, temperature),
            labels=labels,
            warm=warm,
        )


@asynccontextmanager
async def episodes(config: RunConfig, harness: Harness, gateways: Gateways) -> AsyncIterator[Episodes]:
    """`harness` is prepared here, and closed at the end as all else is."""
    sandboxes = config.sandbox
    own = {} if sandboxes.root is None else {"root": sandboxes.root}
    async with AsyncExitStack() as stack:
        labels = {"run": config.run.dir.name}
        backend = sandbox_backend(sandboxes.backend, **{"labels": labels, **own, **sandboxes.options})
        stack.push_async_callback(backend.close)
        stack.push_async_callback(harness.close)
        client = await stack.enter_async_context(GatewayClient(*gateways.train))
        eval_client = await stack.enter_async_context(GatewayClient(*gateways.evaluation))
        await harness.prepare()
        warm = WarmStarts(sandboxes.warm, harness=harness, backend=backend, gateway=client)
        stack.push_async_callback(warm.close)
        yield Episodes(config, harness, backend, client, eval_client, warm)


def session_options(config: RunConfig, temperature: float) -> dict[str, Any]:
    """What the gateway forces on every turn, whatever the agent asks.

    The whole distribution is sampled from (no cut-offs, no penalties): the trainer scores under no other.
    """
    options: dict[str, Any] = {
        "sampling": {
            "temperature": temperature,
            "top_p": 1.0,
            "top_k": -1,
            "min_p": 0.0,
            "frequency_penalty": 0.0,
            "presence_penalty": 0.0,
            "max_tokens": config.rollout.max_tokens_per_turn,
        },
    }
    if config.trainer.r3:
        options["routes"] = True
    if config.gateway.policy is not None:
        options["policy"] = config.gateway.policy
    if config.gateway.matcher is not None:
        options["matcher"] = config.gateway.matcher
    return options
