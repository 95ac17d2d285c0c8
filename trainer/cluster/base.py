"""Where the processes of a run live. One machine (`local`) needs nothing else; `ray` spreads them out."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from titogym.envs.task import Task
from titogym.gateway.engines.launch import EngineOptions
from titogym.harnesses.base import Harness
from titogym.harnesses.episode import EpisodeResult
from titogym.trainer.backends.base import BackendSpec
from titogym.trainer.backends.process import TrainerProcess
from titogym.trainer.config.sections import RunConfig
from titogym.trainer.episodes import Gateways

Report = Callable[[str], None]


class Running(Protocol):
    """A server that was started, wherever that is."""

    @property
    def url(self) -> str: ...

    def alive(self) -> bool:
        """Whether it still runs. Quick: asked every second."""
        ...

    def ending(self) -> str:
        """How it ended, for a person."""
        ...

    def stop(self) -> None:
        """End it. Safe to call twice."""
        ...


class RunningGateway(Running, Protocol):
    @property
    def admin_key(self) -> str: ...


class RunsEpisodes(Protocol):
    """Runs one episode under labels that name it, as training does or as evaluation does."""

    async def train(self, task: Task, labels: Mapping[str, str]) -> EpisodeResult: ...

    async def evaluate(self, task: Task, labels: Mapping[str, str]) -> EpisodeResult: ...

    def announce(self, task: Task, labels: Mapping[str, str]) -> None:
        """`train` will be called with these: its sandbox may be made ready."""
        ...


@dataclass(frozen=True, slots=True)
class GatewayOptions:
    """What `titogym serve` is told. `directory` gets its journal and log."""

    engines: Sequence[str]
    model_dir: Path
    directory: Path
    family: str | None = None
    options: tuple[str, ...] = ()


class Cluster(Protocol):
    """Starts the processes of a run. Every method raises `UserError` when one does not come up."""

    def engine(
        self, number: int, options: EngineOptions, log: Path, timeout: float, report: Report
    ) -> Running:
        """Start engine `number`, or start it again: at the same address if `options` name its port."""
        ...

    def gateway(self, options: GatewayOptions, replacing: RunningGateway | None = None) -> RunningGateway:
        """Start a gateway. One that replaces another gets its address, its key and its sessions."""
        ...

    def trainer(self, spec: BackendSpec, log: Path, report: Report) -> TrainerProcess:
        """Start the trainer with all its ranks. Call from the main thread."""
        ...

    def episodes(
        self, config: RunConfig, harness: Harness, gateways: Gateways
    ) -> AbstractAsyncContextManager[RunsEpisodes]:
        """What runs the episodes, wherever that is; all have ended when the context is left."""
        ...

    def close(self) -> None:
        """Let go of machines. What was started has been stopped before."""
        ...
