"""Replacing engines and gateways that die, so that a run goes on with nothing lost but time.

A gateway comes back at its address with its sessions as they were committed. An engine comes back with the
weights that the run started from, so it may serve nobody yet: the gateways give it no request until the
driver has published to it (`let_in`). New episodes wait meanwhile, and those that failed because something
had died are run again (`Supervisor.episode`).
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import httpx

from titogym.errors import UserError
from titogym.harnesses.episode import EpisodeResult
from titogym.trainer.cluster.base import Running, RunningGateway

log = logging.getLogger(__name__)
R = TypeVar("R", bound=Running)
T = TypeVar("T")
_ATTEMPTS = 3  # runs of one episode, when something that it needed died each time


@dataclass(slots=True)
class Service(Generic[R]):
    """A server of the run, how to start it again at its address, and how often that may happen."""

    name: str
    running: R
    restart: Callable[[R], R]
    restarts: int


@dataclass(slots=True)
class Supervisor:
    """Watches `engines` and `gateways`; `reconnect` brings the trainer back in touch with all engines.

    All but the constructor belongs to one event loop.
    """

    engines: Sequence[Service[Running]]
    gateways: Sequence[Service[RunningGateway]]
    reconnect: Callable[[], None]
    starter: ThreadPoolExecutor  # one thread, which outlives what it starts
    on_replaced: Callable[[str], None] = lambda name: None
    _losses: int = 0
    _unpublished: list[Service[Running]] = field(
        default_factory=list
    )  # engines with other weights than the run's
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    _whole: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self._whole.set()

    async def mend(self) -> bool:
        """Replace what has died. Whether engines wait for their weights: publish, then `let_in`.

        Raises `UserError` when something does not come up again, or has died too often.
        """
        async with self._lock:
            if lost := [service for service in self.engines if not service.running.alive()]:
                self._lose(lost)
                self._unpublished += [service for service in lost if service not in self._unpublished]
                await asyncio.gather(*(self._drain(service.running.url, True) for service in lost))
                for service in lost:
                    await self._replace(service)
                await self._blocking(self.reconnect)
            # A gateway that starts knows nothing of engines that may not serve yet: they come first.
            if not self._unpublished:
                await self._mend_gateways()
            return bool(self._unpublished)

    async def let_in(self) -> None:
        """The engines hold the weights of the run: they may serve again."""
        async with self._lock:
            waiting, self._unpublished = self._unpublished, []
            await asyncio.gather(*(self._drain(service.running.url, False) for service in waiting))
            await self._mend_gateways()

    async def episode(self, run: Callable[[], Awaitable[EpisodeResult]]) -> EpisodeResult:
        """`run`, once everything is there, and again if something was lost under it."""
        for attempt in range(_ATTEMPTS):
            while self._missing():  # the next look replaces it
                self._whole.clear()
                await self._whole.wait()
            await self._whole.wait()
            losses = self._losses
            result = await run()
            undisturbed = losses == self._losses and not self._missing()
            if result.usable or undisturbed or attempt == _ATTEMPTS - 1:
                break
        return result

    def _missing(self) -> bool:
        everything: list[Running] = [service.running for service in self.engines]
        everything += [service.running for service in self.gateways]
        return not all(one.alive() for one in everything)

    async def _mend_gateways(self) -> None:
        lost = [service for service in self.gateways if not service.running.alive()]
        if lost:
            self._lose(lost)
            for service in lost:
                await self._replace(service)
        self._whole.set()

    def _lose(self, lost: Sequence[Service[R]]) -> None:
        self._whole.clear()
        self._losses += 1
        for service in lost:
            self._spend_restart(service, service.running.ending())

    @staticmethod
    def _spend_restart(service: Service[R], ending: str) -> None:
        log.warning("%s", ending)
        if service.restarts == 0:
            raise UserError(
                f"The {ending}\nIt has been replaced as often as cluster.max_restarts allows; the run can be "
                "continued with --resume."
            )
        service.restarts -= 1

    async def _replace(self, service: Service[R]) -> None:
        old = service.running

        def again() -> None:  # to its end even where this is cancelled: it takes the address
            service.running = service.restart(old)

        await self._blocking(old.stop)
        while service.running is old:
            try:
                await self._blocking(again)
            except UserError as error:  # it has died again while it was starting
                self._spend_restart(service, str(error).removeprefix("The "))
        log.warning("the %s was replaced", service.name)
        self.on_replaced(service.name)

    async def _drain(self, url: str, draining: bool) -> None:
        """Tell every gateway that lives to give an engine no requests, or some again."""
        async with httpx.AsyncClient(trust_env=False, timeout=10.0) as client:
            for service in self.gateways:
                gateway = service.running
                if not gateway.alive():
                    continue
                try:
                    answer = await client.post(
                        f"{gateway.url}/engines",
                        json={"url": url, "draining": draining},
                        headers={"authorization": f"Bearer {gateway.admin_key}"},
                    )
                except httpx.TransportError:
                    continue  # it has just died: its successor knows of no draining
                answer.raise_for_status()

    async def _blocking(self, call: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self.starter, call)
