"""The sessions of one gateway process: those in memory, and those that wait in the journal."""

import secrets
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict

from titogym.gateway.errors import RequestError
from titogym.gateway.sessions.journal import Journal, Record
from titogym.gateway.sessions.session import Diagnostics, Session
from titogym.gateway.sessions.spec import SessionSpec
from titogym.gateway.sessions.tree import Node
from titogym.gateway.telemetry import Telemetry
from titogym.templates.conversation import Message

_RESTORED_PER_SWEEP = 10  # expired sessions that are read once more, lest turns wait for them


class SessionStore:
    """Creates, finds and deletes sessions. Idle ones leave memory and come back when they are used."""

    def __init__(
        self,
        journal: Journal,
        telemetry: Telemetry,
        *,
        max_sessions: int,
        max_turns: int,
        max_bytes: int,
        ttl: float,
        idle: float,
        departing: Callable[[Session], None],
    ) -> None:
        """`ttl` and `idle` are seconds since a session's last use: until it is deleted, or leaves memory.

        `max_turns` bounds each session, `max_bytes` what all sessions in memory take. `departing` is called
        with each session that is deleted while it holds turns that `Diagnostics.compared` leaves out.
        """
        self._journal = journal
        self._telemetry = telemetry
        self._max_sessions = max_sessions
        self._max_turns = max_turns
        self._max_bytes = max_bytes
        self._ttl = ttl
        self._idle = idle
        self._departing = departing
        self._records = {record.id: record for record in journal.sessions()}
        self._live: dict[str, Session] = {}
        self.size = 0  # bytes of the sessions in memory, about

    def __len__(self) -> int:
        return len(self._records)

    @property
    def in_memory(self) -> list[Session]:
        return list(self._live.values())

    def create(self, spec: SessionSpec) -> Session:
        """Raises `RequestError` (429) when there are as many sessions as the gateway may hold."""
        if len(self._records) >= self._max_sessions:
            self.sweep()
        if len(self._records) >= self._max_sessions:
            raise RequestError(
                f"The gateway holds its maximum of {self._max_sessions} sessions: "
                "delete some, or raise max_sessions.",
                status=429,
                code="too_many_sessions",
                retry_after=5,
            )
        session = Session.new("sess_" + secrets.token_urlsafe(18), spec, time.time())
        plain = spec.model_dump(mode="json", exclude_none=True)
        with _kept():
            self._journal.create(session.id, plain, session.created)
        self._records[session.id] = Record(session.id, plain, session.created, session.created, {}, 0)
        self._live[session.id] = session
        self._telemetry.created(session.id, spec.labels)
        return session

    def admit(self, session: Session) -> None:
        """Raises `RequestError` (429) when the session, or the memory, is too full for another turn."""
        if len(session.tree.nodes) >= self._max_turns:
            raise RequestError(
                f"The session holds its maximum of {self._max_turns} turns: start another one.",
                status=429,
                code="session_full",
            )
        if self.size > self._max_bytes:
            self._make_room()
        if self.size > self._max_bytes:
            raise RequestError(
                f"The sessions in use take more than {self._max_bytes >> 20} MiB: "
                "delete some, or raise max_bytes.",
                status=429,
                code="memory_full",
                retry_after=5,
            )

    def failed(self, session: Session, error: RequestError) -> None:
        """Take note of a request of the session that was refused, or failed."""
        session.diagnostics.failed(error)
        self._telemetry.failed(session.id, error)

    def check(self, id: str) -> None:
        """Raises `RequestError` (404) when there is no such session. Reads nothing from the disk."""
        if id not in self._records:
            raise RequestError("There is no such session.", status=404, code="session_not_found")

    def get(self, id: str) -> Session:
        """Raises `RequestError` (404) when there is no such session."""
        session = self._live.get(id)
        if session is None:
            self.check(id)
            session = self._live[id] = self._restore(self._records[id])
            self.size += session.size
        session.touch()
        return session

    def records(self) -> list[Record]:
        """Every session as the journal has it."""
        return list(self._journal.sessions())

    def commit(self, session: Session, node: Node, replayed: list[tuple[Node, Message | None]]) -> None:
        """Put a drafted node into the journal, with how its request replayed earlier answers.

        Raises `RequestError` (503) when the disk does not take it.
        """
        session.touch()
        with _kept():
            self._journal.append(session.id, node, replayed, session.touched)
        self.size += node.size
        self._telemetry.committed(session.id, node)

    def note(self, session: Session) -> None:
        """Keep the session's diagnostics. Raises `RequestError` (503) when the disk does not take them."""
        with _kept():
            self._journal.note(session.id, asdict(session.diagnostics), session.touched)

    def delete(self, id: str, expired: bool = False) -> None:
        """Forget a session and end its turns in flight.

        Raises `RequestError`: 404, or 503 when the disk does not let go of it; then it is still there.
        """
        self.check(id)
        uncounted = id not in self._live and _uncounted(self._records[id])
        departed = self._restore(self._records[id]) if uncounted else None
        with _kept():
            self._journal.delete(id)
        session = self._live.pop(id, None)
        if session is not None:
            session.deleted = True
            self.size -= session.size
            for task in list(session.tasks):
                task.cancel()
        session = session or departed
        if session is not None and session.diagnostics.compared < len(session.tree.nodes):
            self._departing(session)
        del self._records[id]
        self._telemetry.deleted(id, expired)

    def sweep(self) -> None:
        """Delete sessions past their time to live; let idle ones leave memory."""
        self.size = sum(session.size for session in self._live.values())
        now, restored = time.time(), 0
        for id, record in list(self._records.items()):
            session = self._live.get(id)
            if session is not None and not session.idle:
                continue
            unused = now - (session.touched if session else record.touched)
            if unused > record.spec.get("ttl_seconds", self._ttl):
                if session is None and _uncounted(record):
                    restored += 1
                    if restored > _RESTORED_PER_SWEEP:
                        continue  # until the next sweep
                self.delete(id, expired=True)
            elif session is not None and unused > self._idle:
                self._evict(session)

    def checkpoint(self) -> None:
        """Move what was committed into the journal's main file; may be called in any thread."""
        self._journal.checkpoint()

    def _make_room(self) -> None:
        """Let idle sessions leave memory, those first that were used last the longest ago."""
        self.size = sum(session.size for session in self._live.values())
        for session in sorted(self._live.values(), key=lambda session: session.touched):
            if self.size <= self._max_bytes:
                return
            if session.idle:
                self._evict(session)

    def close(self) -> None:
        for session in self.in_memory:
            self.note(session)
        self._journal.close()

    def _evict(self, session: Session) -> None:
        self.note(session)
        old = self._records[session.id]
        self._records[session.id] = Record(
            session.id,
            old.spec,
            session.created,
            session.touched,
            asdict(session.diagnostics),
            len(session.tree.nodes),
        )
        del self._live[session.id]
        self.size -= session.size

    def _restore(self, record: Record) -> Session:
        session = Session.new(
            record.id, SessionSpec.model_validate(record.spec), record.created, record.touched
        )
        session.diagnostics = Diagnostics(**record.diagnostics)
        self._journal.restore(record.id, session.tree)
        for node in session.tree.nodes:
            session.attempts.done(node)
        return session


def _uncounted(record: Record) -> bool:
    """Whether a session out of memory holds turns that `Diagnostics.compared` leaves out."""
    compared: int = record.diagnostics.get("compared", 0)
    return compared < record.turns


@contextmanager
def _kept() -> Iterator[None]:
    """What cannot be kept is refused, in words that say why."""
    try:
        yield
    except sqlite3.Error as error:
        raise RequestError(
            f"The gateway cannot write its journal: {error}.",
            status=503,
            code="journal_unavailable",
            retry_after=5,
        ) from error
