"""New weights to SGLang servers over a torch.distributed group, the trainer being rank 0.

An update is: pause, open an update on the engines, broadcast buckets while every engine receives and
loads them, with the last one take the new version and flush the prefix cache, close the update, resume.
What an engine is asked goes by HTTP in a thread per engine, since its answer comes only when the broadcast
that it waits for has happened.
"""

import secrets
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, TypeVar
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch import Tensor
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
from titogym.trainer.weights.settings import BroadcastSettings

T = TypeVar("T")


class WeightUpdateError(Exception):
    """An engine could not be given the new weights. What its weights are now is not known."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """Tensors that travel in one broadcast, their bytes one after another in `flat`."""

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    flat: Tensor  # uint8


def buckets(tensors: Iterable[tuple[str, Tensor]], limit: int) -> Iterator[Bucket]:
    """Cut named tensors into buckets of at most `limit` bytes, in order; never cuts a tensor."""
    held: list[tuple[str, Tensor]] = []
    size = 0
    for name, tensor in tensors:
        if held and size + tensor.nbytes > limit:
            yield _bucket(held)
            held, size = [], 0
        held.append((name, tensor))
        size += tensor.nbytes
    if held:
        yield _bucket(held)


def _bucket(tensors: Sequence[tuple[str, Tensor]]) -> Bucket:
    return Bucket(
        names=[name for name, _ in tensors],
        dtypes=[str(tensor.dtype).removeprefix("torch.") for _, tensor in tensors],
        shapes=[list(tensor.shape) for _, tensor in tensors],
        flat=torch.cat([tensor.contiguous().flatten().view(torch.uint8) for _, tensor in tensors]),
    )


class WeightBroadcast:
    """The update group of the SGLang servers at `urls`. Raises `WeightUpdateError` and never hangs."""

    def __init__(self, urls: Sequence[str], settings: BroadcastSettings) -> None:
        self._settings = settings
        # The client waits a little longer than we do, so that it is we who say what was not done in time.
        self._engines = [EngineControl(url, timeout=settings.timeout + 5) for url in urls]
        self._threads = ThreadPoolExecutor(max_workers=len(urls) + 1, thread_name_prefix="weights")
        self._name = f"titogym-{secrets.token_hex(4)}"
        self._group: ProcessGroup | None = None

    def connect(self) -> None:
        """Form the group: this process as rank 0, then every engine's tensor-parallel ranks in order."""
        sizes = self._every(lambda engine: engine.info().tensor_parallel)
        world = 1 + sum(sizes)
        address = _address_towards(self._engines[0].url)
        port = free_port(address)
        backend: Literal["gloo", "nccl"] = "nccl" if torch.cuda.is_available() else "gloo"

        def ask(engine: EngineControl) -> None:
            engine.init_update_group(
                address,
                port,
                rank_offset=1 + sum(sizes[: self._engines.index(engine)]),
                world_size=world,
                group=self._name,
                backend=backend,
            )

        calls: list[Future[Any]] = [*self._start(ask)]
        joining = self._threads.submit(
            _join, address, port, world, self._name, backend, self._settings.timeout
        )
        self._finish([*calls, joining])
        self._group = joining.result()

    def publish(self, tensors: Iterable[tuple[str, Tensor]], version: str) -> dict[str, float]:
        """Install `tensors` (Hugging Face names) in every engine as weight version `version`.

        Returns `publish/<phase>_seconds` for each phase, the total, and `publish/bytes`.
        """
        if self._group is None:
            raise WeightUpdateError("The engines are not connected, or an update failed: connect again")
        group, self._group = self._group, None  # back only when all has gone well
        figures: dict[str, float] = {}
        started = time.perf_counter()
        with _timed(figures, "prepare"):
            prepared = list(buckets(tensors, self._settings.bucket_bytes))
        with _timed(figures, "pause"):
            self._every(lambda engine: engine.pause(self._settings.mode))
        with _timed(figures, "transfer"):
            self._every(lambda engine: engine.begin_weight_update())
            for bucket in prepared[:-1]:
                self._send(group, bucket)
            # No key or value of the old weights may serve the new ones, unless that was asked for.
            self._send(group, prepared[-1], version, flush_cache=self._settings.mode != "in_place")
            self._every(lambda engine: engine.end_weight_update())
        with _timed(figures, "resume"):
            for engine, info in zip(self._engines, self._every(lambda e: e.info()), strict=True):
                if (found := info.weight_version) != version:
                    raise WeightUpdateError(f"{engine.url} reports version {found!r}, was sent {version!r}")
            self._every(lambda engine: engine.resume())
        figures["publish/seconds"] = time.perf_counter() - started
        figures["publish/bytes"] = float(sum(bucket.flat.nbytes for bucket in prepared))
        self._group = group
        return figures

    def close(self) -> None:
        """Leave the group, as far as the engines still answer."""
        if self._group is not None:
            with suppress(WeightUpdateError):
                self._every(lambda engine: engine.destroy_update_group(self._name))
            dist.destroy_process_group(self._group)
            self._group = None
        self._threads.shutdown(wait=False, cancel_futures=True)
        for engine in self._engines:
            engine.close()

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

        asked = self._start(ask)
        work = dist.broadcast(bucket.flat, src=0, group=group, async_op=True)
        assert work is not None
        self._await(work, asked)
        self._finish(asked)

    def _await(self, work: Work, asked: Sequence["Future[None]"]) -> None:
        """Wait for a broadcast, but not for an engine that has refused it or died."""
        deadline = time.monotonic() + self._settings.timeout
        while not work.is_completed():
            refused = [call for call in asked if call.done() and call.exception()]
            if refused:
                self._finish(refused)
            if time.monotonic() > deadline:
                raise WeightUpdateError(
                    f"The engines did not take a broadcast within {self._settings.timeout:.0f} s"
                )
            time.sleep(0.0005)
        try:
            work.wait()
        except RuntimeError as error:
            raise WeightUpdateError(f"The broadcast to the engines broke: {error}") from None

    def _every(self, ask: Callable[[EngineControl], T]) -> list[T]:
        """Ask all engines at once; their answers in order."""
        return self._finish(self._start(ask))

    def _start(self, ask: Callable[[EngineControl], T]) -> "list[Future[T]]":
        return [self._threads.submit(ask, engine) for engine in self._engines]

    def _finish(self, calls: "Sequence[Future[T]]") -> list[T]:
        """The results of `calls`; the first failure is raised as soon as it is known."""
        done, _ = wait(calls, timeout=self._settings.timeout, return_when=FIRST_EXCEPTION)
        for call in done:
            if error := call.exception():
                raise WeightUpdateError(f"The engines could not be given new weights: {error}") from error
        if len(done) < len(calls):
            raise WeightUpdateError(f"An engine did not answer within {self._settings.timeout:.0f} s")
        return [call.result() for call in calls]


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


def _address_towards(url: str) -> str:
    """This machine's address on the interface from which `url` is reached."""
    target = urlsplit(url)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((target.hostname, target.port or 80))  # sends nothing
        return str(probe.getsockname()[0])


@contextmanager
def _timed(figures: dict[str, float], phase: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    figures[f"publish/{phase}_seconds"] = time.perf_counter() - start
