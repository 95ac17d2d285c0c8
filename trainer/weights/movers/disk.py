"""Weights through files: only what changed is written, and only reading it pauses the engines.

The engines must see `directory` under the same path: one machine, or a shared file system.
"""

import fcntl
import secrets
import shutil
from collections.abc import Sequence
from pathlib import Path

from titogym.trainer.weights.engines import Engines, WeightUpdateError
from titogym.trainer.weights.prepare import Bucket
from titogym.trainer.weights.settings import WeightSettings
from titogym.trainer.weights.versions import Replica, VersionPublisher


class Disk:
    """A `Mover`. Every connection begins a lineage of its own, so that a resumed run contradicts nothing."""

    def __init__(self, engines: Engines, settings: WeightSettings) -> None:
        assert settings.directory is not None
        self._engines = engines
        self._settings = settings
        self._directory = settings.directory.absolute() / f"lineage-{secrets.token_hex(4)}"
        self._publisher: VersionPublisher | None = None
        self._replica = Replica(self._directory / "replica", settings.model_dir)
        self._staged: Path | None = None

    def connect(self) -> None:
        self._engines.every(lambda engine: engine.info())
        _sweep(self._directory.parent)
        self._publisher = VersionPublisher(
            self._directory / "versions", self._settings.encoding, self._settings.rebase_every
        )

    def stage(self, buckets: Sequence[Bucket], version: str) -> dict[str, float]:
        if self._publisher is None:
            raise WeightUpdateError("The engines are not connected: connect first")
        published = self._publisher.publish(buckets, version)
        self._staged = self._replica.advance(self._directory / "versions", version)
        return {
            "publish/bytes": float(published.written),
            "publish/changed_fraction": published.changed / max(published.total, 1),
        }

    def activate(self, buckets: Sequence[Bucket], version: str, flush_cache: bool) -> None:
        path = str(self._staged)
        self._engines.every(lambda engine: engine.update_from_disk(path, version, flush_cache=flush_cache))

    def close(self) -> None:
        if self._publisher is not None:
            self._publisher.close()
            self._publisher = None
        shutil.rmtree(self._directory, ignore_errors=True)


def _sweep(directory: Path) -> None:
    """Delete the lineages of runs that were killed: nobody holds their locks."""
    for lock in directory.glob("lineage-*/versions/publisher.lock"):
        with lock.open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                continue
            shutil.rmtree(lock.parent.parent, ignore_errors=True)
