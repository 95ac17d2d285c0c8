"""Weights to engines on the same machine: only handles travel, the engines map the trainer's memory.

On GPUs the handles are CUDA IPC's, on the CPU files in shared memory. Needs no process group.
"""

import base64
import io
from collections.abc import Sequence
from multiprocessing.reduction import ForkingPickler

import torch

from titogym.gateway.engines.control import EngineControl
from titogym.trainer.weights.engines import Engines, WeightUpdateError, is_local
from titogym.trainer.weights.prepare import Bucket


class Handoff:
    """A `Mover` for colocated engines."""

    def __init__(self, engines: Engines) -> None:
        self._engines = engines
        self._ranks: list[int] = []  # tensor-parallel ranks of each engine, each of which maps the memory

    def connect(self) -> None:
        for engine in self._engines.controls:
            if not is_local(engine.url):
                raise WeightUpdateError(
                    f"{engine.url} is on another machine, so it cannot map the trainer's memory: "
                    "choose the mover broadcast, disk or p2p"
                )
        self._ranks = self._engines.every(lambda engine: engine.info().tensor_parallel)
        # Descriptors would need a socket that the engine cannot log on to; files have names.
        torch.multiprocessing.set_sharing_strategy("file_system")  # type: ignore[no-untyped-call]

    def stage(self, buckets: Sequence[Bucket], version: str) -> dict[str, float]:
        return {"publish/bytes": 0.0}

    def activate(self, buckets: Sequence[Bucket], version: str, flush_cache: bool) -> None:
        self._engines.every(lambda engine: engine.begin_weight_update())
        for bucket in buckets:
            handles = _handles(bucket)
            last = bucket is buckets[-1]

            def ask(engine: EngineControl, handles: str = handles, last: bool = last) -> None:
                ranks = self._ranks[self._engines.controls.index(engine)]
                engine.update_from_tensor(
                    [handles] * ranks, version=version if last else None, flush_cache=last and flush_cache
                )

            self._engines.every(ask)
        self._engines.every(lambda engine: engine.end_weight_update())

    def close(self) -> None:
        pass


def _handles(bucket: Bucket) -> str:
    """Name and handle of each tensor, as SGLang's deserialiser takes them."""
    buffer = io.BytesIO()
    ForkingPickler(buffer).dump(bucket.tensors())
    return base64.b64encode(buffer.getvalue()).decode()
