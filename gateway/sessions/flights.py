"""Turns in flight, and which request is a retry of which.

A turn runs by itself and several clients may read it: a retry of a request that is still in flight joins
it, and one that comes after it has finished gets its answer again. A turn that nobody reads any more ends.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field

from titogym.gateway.errors import RequestError
from titogym.gateway.sessions.tree import Node, Receipt
from titogym.gateway.sessions.turn import Item, again


class Flight:
    """One turn on its way. Its items are kept until it is over, for readers that come late."""

    def __init__(self, receipt: Receipt, items: AsyncGenerator[Item]) -> None:
        self.receipt = receipt
        self._items: list[Item] = []
        self._failure: Exception | None = None
        self._readers = 0
        self._news = asyncio.Event()
        self.task = asyncio.create_task(self._run(items))
        self.task.add_done_callback(lambda _: self._wake())

    @property
    def joinable(self) -> bool:
        return self._readers > 0 and not self.task.done()

    def board(self) -> "Passenger":
        """A reader of all items from the first."""
        self._readers += 1
        return Passenger(self)

    async def item(self, at: int) -> Item:
        """Item number `at`, waiting for it. Raises what ended the turn, or `StopAsyncIteration`."""
        while at >= len(self._items):
            if self.task.cancelled():  # whoever still reads did not ask for that
                raise RequestError("The session was deleted.", status=404, code="session_not_found")
            if self.task.done():
                raise self._failure or StopAsyncIteration
            await self._news.wait()
        return self._items[at]

    def leave(self) -> None:
        self._readers -= 1
        if not self._readers:
            self.task.cancel()

    async def _run(self, items: AsyncGenerator[Item]) -> None:
        try:
            async with aclosing(items):
                async for item in items:
                    self._items.append(item)
                    self._wake()
        except Exception as error:
            self._failure = error

    def _wake(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()


class Passenger:
    """Reads a flight's items; to be closed."""

    def __init__(self, flight: Flight) -> None:
        self._flight: Flight | None = flight
        self._at = 0

    def __aiter__(self) -> "Passenger":
        return self

    async def __anext__(self) -> Item:
        if self._flight is None:
            raise StopAsyncIteration
        item = await self._flight.item(self._at)
        self._at += 1
        return item

    async def aclose(self) -> None:
        flight, self._flight = self._flight, None
        if flight is not None:
            flight.leave()


@dataclass(slots=True)
class Attempts:
    """The latest attempt at each request of a session, and the one that each idempotency key stands for."""

    _flights: dict[str, Flight] = field(default_factory=dict)  # by digest
    _done: dict[str, Node] = field(default_factory=dict)
    _keys: dict[str, Flight | Node] = field(default_factory=dict)  # by idempotency key

    def done(self, node: Node) -> None:
        """A turn was committed, or came back from the journal."""
        receipt = node.receipt
        if receipt.request:
            self._done[receipt.request] = node
        if receipt.key:
            self._keys[receipt.key] = node

    def earlier(self, receipt: Receipt, retried: bool) -> Flight | Node | None:
        """The attempt that this request is a retry of; `retried` says that the client calls it one.

        Raises `RequestError` when an idempotency key comes back with another request.
        """
        first = self._keys.get(receipt.key) if receipt.key else None
        if first is not None:
            if first.receipt.request != receipt.request:
                raise RequestError(
                    "This idempotency key was used for another request: use a new key for each.",
                    status=409,
                    code="idempotency_key_reused",
                )
            return first if isinstance(first, Node) or first.joinable else None
        if not retried:
            return None
        flight = self._flights.get(receipt.request)
        if flight is not None and flight.joinable:
            return flight
        return self._done.get(receipt.request)

    def start(self, receipt: Receipt, items: Callable[[], AsyncGenerator[Item]]) -> Flight:
        """Another attempt at a request: from here on a retry means this one."""
        self._done.pop(receipt.request, None)
        flight = self._flights[receipt.request] = Flight(receipt, items())
        if receipt.key:
            self._keys[receipt.key] = flight
        flight.task.add_done_callback(lambda _: self._landed(flight))
        return flight

    def _landed(self, flight: Flight) -> None:
        request, key = flight.receipt.request, flight.receipt.key
        if self._flights.get(request) is flight:  # and no later attempt
            del self._flights[request]
        if self._keys.get(key) is flight:  # and no answer: it failed
            del self._keys[key]


async def replay(node: Node) -> AsyncGenerator[Item]:
    """The items of a turn that has finished."""
    for item in again(node):
        yield item
