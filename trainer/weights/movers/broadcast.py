"""Weights over a torch.distributed group (NCCL or gloo) of which the trainer is rank 0.

Every engine receives the broadcast straight into the weights that it serves. It is asked over HTTP, and
answers only when the broadcast that it waits for has happened.
"""

import secrets
import time
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import (
    Backend,
    GroupName,
    PrefixStore,
    ProcessGroup,
    Work,
    _new_process_group_helper,
    _world,
)
from torch.distributed.rendezvous import rendezvous

from titogym.gateway.engines.control import EngineControl
from titogym.processes import free_port
from titogym.trainer.weights.engines import Engines, WeightUpdateError, address_towards
from titogym.trainer.weights.prepare import Bucket


class Broadcast:
    """A `Mover`. After a failed update the group is not used again: it may be out of step."""

    def __init__(self, engines: Engines) -> None:
        self._engines = engines
        self._name = f"titogym-{secrets.token_hex(4)}"
        self._group: ProcessGroup | None = None

    def connect(self) -> None:
        """Form the group: this process as rank 0, then every engine's tensor-parallel ranks in order."""
        sizes = self._engines.every(lambda engine: engine.info().tensor_parallel)
        controls = self._engines.controls
        world = 1 + sum(sizes)
        address = address_towards(controls[0].url)
        port = free_port(address)
        backend: Literal["gloo", "nccl"] = "nccl" if torch.cuda.is_available() else "gloo"

        def ask(engine: EngineControl) -> None:
            engine.init_update_group(
                address,
                port,
                rank_offset=1 + sum(sizes[: controls.index(engine)]),
                world_size=world,
                group=self._name,
                backend=backend,
            )

        calls: list[Future[Any]] = [*self._engines.start(ask)]
        joining = self._engines.beside(
            lambda: _join(address, port, world, self._name, backend, self._engines.timeout)
        )
        self._engines.finish([*calls, joining])
        self._group = joining.result()

    def stage(self, buckets: Sequence[Bucket], version: str) -> dict[str, float]:
        if self._group is None:
            raise WeightUpdateError("The engines are not connected, or an update failed: connect again")
        return {"publish/bytes": float(sum(bucket.flat.nbytes for bucket in buckets))}

    def activate(self, buckets: Sequence[Bucket], version: str, flush_cache: bool) -> None:
        group, self._group = self._group, None  # back only when all has gone well
        assert group is not None
        self._engines.every(lambda engine: engine.begin_weight_update())
        for bucket in buckets[:-1]:
            self._send(group, bucket)
        self._send(group, buckets[-1], version, flush_cache)
        self._engines.every(lambda engine: engine.end_weight_update())
        self._group = group

    def close(self) -> None:
        if self._group is not None:
            with suppress(WeightUpdateError):
                self._engines.every(lambda engine: engine.destroy_update_group(self._name))
            dist.destroy_process_group(self._group)
            self._group = None

    def _send(
        self, group: ProcessGroup, bucket: Bucket, version: str | None = None, flush_cache: bool = False
    ) -> None:
        def ask(engine: EngineControl) -> None:
            engine.update_from_distributed(
                bucket.names,
                bucket.dtypes,
                bucket.shapes,
                group=self._name,
                version=version,
                flush_cache=flush_cache,
                flattened=True,
            )

        asked = self._engines.start(ask)
        work = dist.broadcast(bucket.flat, src=0, group=group, async_op=True)
        assert work is not None
        self._await(work, asked)
        self._engines.finish(asked)

    def _await(self, work: Work, asked: Sequence["Future[None]"]) -> None:
        """Wait for a broadcast, but not for an engine that has refused it or died."""
        deadline = time.monotonic() + self._engines.timeout
        while not work.is_completed():
            refused = [call for call in asked if call.done() and call.exception()]
            if refused:
                self._engines.finish(refused)
            if time.monotonic() > deadline:
                raise WeightUpdateError(
                    f"The engines did not take a broadcast within {self._engines.timeout:.0f} s"
                )
            time.sleep(0.0005)
        try:
            work.wait()
        except RuntimeError as error:
            raise WeightUpdateError(f"The broadcast to the engines broke: {error}") from None


def _join(address: str, port: int, world_size: int, name: str, backend: str, timeout: float) -> ProcessGroup:
    """Become rank 0 of a group beside the default one, as SGLang's other ranks expect to find it.

    Both sides build it with torch's own helper from the same store prefix and group name, so that the
    keys under which the ranks exchange addresses are the same.
    """
    patience = timedelta(seconds=timeout)
    store, _, _ = next(rendezvous(f"tcp://{address}:{port}", 0, world_size, timeout=patience))
    store.set_timeout(patience)
    group: ProcessGroup
    group, _ = _new_process_group_helper(
        world_size,
        0,
        [],
        Backend(backend),
        PrefixStore(name, store),
        group_name=GroupName(name),
        timeout=patience,
    )
    _world.pg_group_ranks[group] = {rank: rank for rank in range(world_size)}
    return group
