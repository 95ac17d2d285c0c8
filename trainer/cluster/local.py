"""Everything on this machine, as children of this process."""

from contextlib import AbstractAsyncContextManager
from pathlib import Path

from titogym.gateway import launch as gateways
from titogym.gateway.engines import launch as engines
from titogym.gateway.engines.launch import EngineOptions
from titogym.gateway.launch import Address
from titogym.harnesses.base import Harness
from titogym.trainer.backends.base import BackendSpec
from titogym.trainer.backends.process import TrainerProcess
from titogym.trainer.backends.torchrun import Torchrun
from titogym.trainer.cluster.base import GatewayOptions, Report, Running, RunningGateway, RunsEpisodes
from titogym.trainer.config.sections import RunConfig
from titogym.trainer.episodes import Gateways, episodes


class Local:
    """A `Cluster` of one machine; with `torchrun`, the trainer's ranks may be on others."""

    def __init__(self, torchrun: Torchrun | None = None) -> None:
        self._torchrun = torchrun

    def engine(
        self, number: int, options: EngineOptions, log: Path, timeout: float, report: Report
    ) -> Running:
        return engines.launch(options, log, timeout=timeout, report=report)

    def gateway(self, options: GatewayOptions, replacing: RunningGateway | None = None) -> RunningGateway:
        address = Address(replacing.url, replacing.admin_key) if replacing is not None else None
        return gateways.launch(
            options.engines,
            options.model_dir,
            directory=options.directory,
            family=options.family,
            options=options.options,
            replacing=address,
        )

    def trainer(self, spec: BackendSpec, log: Path, report: Report) -> TrainerProcess:
        if self._torchrun is None:
            return TrainerProcess(spec, log)
        return TrainerProcess(spec, log, self._torchrun.start(spec, log, report))

    def episodes(
        self, config: RunConfig, harness: Harness, gateways: Gateways
    ) -> AbstractAsyncContextManager[RunsEpisodes]:
        return episodes(config, harness, gateways)

    def close(self) -> None:
        if self._torchrun is not None:
            self._torchrun.close()
