"""Counting `tito_session_mismatch` over all sessions, whether or not a person looks at them."""

import asyncio
import logging

from titogym.gateway.alias import alias
from titogym.gateway.sessions.session import Session
from titogym.gateway.sessions.tree import Node
from titogym.gateway.telemetry import Telemetry
from titogym.gateway.tokens.mismatch import compare
from titogym.templates.model import ModelAssets

_LOG = logging.getLogger("titogym.gateway")


class LeafCounter:
    """Compares each leaf of a session once with a fresh rendering, and counts what it finds.

    Sessions come when their trajectories are collected, and when they are deleted. They are compared one
    by one in another thread, so that turns need not wait.
    """

    def __init__(self, assets: ModelAssets, telemetry: Telemetry) -> None:
        self._assets = assets
        self._telemetry = telemetry
        self._waiting: asyncio.Queue[tuple[Session, list[Node]]] = asyncio.Queue()

    def add(self, session: Session) -> None:
        """Take the leaves that were not counted before. Nodes older than those counted get no new leaf."""
        tree, known = session.tree, session.diagnostics.compared
        session.diagnostics.compared = len(tree.nodes)
        leaves = [node for node in tree.nodes[known:] if not node.children and tree.counts(node)]
        if leaves:
            self._waiting.put_nowait((session, leaves))

    async def run(self) -> None:
        """Compare what waits, until cancelled."""
        while True:
            session, leaves = await self._waiting.get()
            for leaf in leaves:
                try:
                    found = await asyncio.to_thread(compare, self._assets, leaf)
                except Exception:  # of one session's making: the others are counted all the same
                    fields = {"session": alias(session.id), "node": leaf.id}
                    _LOG.exception("comparison_failed", extra={"fields": fields})
                else:
                    self._telemetry.compared(mismatch.type for mismatch in found)
