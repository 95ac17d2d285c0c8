"""Where the processes of a run live, and how those that die are replaced."""

from titogym.trainer.backends.torchrun import Torchrun
from titogym.trainer.cluster.base import Cluster
from titogym.trainer.cluster.local import Local
from titogym.trainer.config.sections import RunConfig


def cluster(config: RunConfig) -> Cluster:
    """The cluster that `config.cluster` asks for. Raises `UserError` when it cannot be reached."""
    if config.cluster.kind == "local":
        return Local(_torchrun(config) if config.trainer.launcher == "torchrun" else None)
    from titogym.trainer.cluster.ray import OnRay

    return OnRay(config)


def _torchrun(config: RunConfig) -> Torchrun:
    return Torchrun(config.trainer, config.run.dir / "trainer.key", config.cluster.max_restarts)
