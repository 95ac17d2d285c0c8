"""The sessions of one gateway process: those in memory, and those that wait in the journal."""

import secrets
import time
from dataclasses import asdict

from titogym.gateway.errors import RequestError
from titogym.gateway.sessions.journal import Journal, Record
from titogym.gateway.sessions.session import Diagnostics, Session
from titogym.gateway.sessions.spec import SessionSpec
from titogym.gateway.sessions.tree import Node
from titogym.templates.conversation import Message


class SessionStore:
    """Creates, finds and deletes sessions. Idle ones leave memory and come back when they are used."""

    def __init__(self, journal: Journal, *, max_sessions: int, ttl: float, idle: float) -> None:
        """`ttl` and `idle` are seconds since a session's last use: until it is deleted, or leaves memory."""
        self._journal = journal
        self._max_sessions = max_sessions
        self._ttl = ttl
        self._idle = idle
        self._records = {record.id: record for record in journal.sessions()}
        self._live: dict[str, Session] = {}
        self.committed = 0  # turns since this process started

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
        self._journal.create(session.id, plain, session.created)
        self._records[session.id] = Record(session.id, plain, session.created, session.created, {}, 0)
        self._live[session.id] = session
        return session

    def get(self, id: str) -> Session:
        """Raises `RequestError` (404) when there is no such session."""
        session = self._live.get(id)
        if session is None:
            if id not in self._records:
                raise RequestError("There is no such session.", status=404, code="session_not_found")
            session = self._live[id] = self._restore(self._records[id])
        session.touch()
        return session

    def records(self) -> list[Record]:
        """Every session as the journal has it."""
        return list(self._journal.sessions())

    def commit(self, session: Session, node: Node, replayed: list[tuple[Node, Message | None]]) -> None:
        """Put a drafted node into the journal, with how its request replayed earlier answers."""
        session.touch()
        self._journal.append(session.id, node, replayed, session.touched)
        self.committed += 1

    def note(self, session: Session) -> None:
        """Keep the session's diagnostics."""
        self._journal.note(session.id, asdict(session.diagnostics), session.touched)

    def delete(self, id: str) -> None:
        """Forget a session and end its turns in flight. Raises `RequestError` (404)."""
        if id not in self._records:
            raise RequestError("There is no such session.", status=404, code="session_not_found")
        session = self._live.pop(id, None)
        if session is not None:
            session.deleted = True
            for task in list(session.tasks):
                task.cancel()
        del self._records[id]
        self._journal.delete(id)

    def sweep(self) -> None:
        """Delete sessions past their time to live; let idle ones leave memory."""
        now = time.time()
        for id, record in list(self._records.items()):
            session = self._live.get(id)
            if session is not None and not session.idle:
                continue
            unused = now - (session.touched if session else record.touched)
            if unused > record.spec.get("ttl_seconds", self._ttl):
                self.delete(id)
            elif session is not None and unused > self._idle:
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

    def _restore(self, record: Record) -> Session:
        session = Session.new(
            record.id, SessionSpec.model_validate(record.spec), record.created, record.touched
        )
        session.diagnostics = Diagnostics(**record.diagnostics)
        self._journal.restore(record.id, session.tree)
        for node in session.tree.nodes:
            session.attempts.done(node)
        return session
