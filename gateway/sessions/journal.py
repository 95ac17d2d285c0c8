"""Sessions on disk: each commit is in SQLite before the client sees the end of its answer.

Write-ahead logging with `synchronous=NORMAL`: a commit survives the death of this process at any
point. A power cut may lose the last commits but never corrupts the file.
"""

import fcntl
import sqlite3
import time
from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import IO, Any

import orjson

from titogym.errors import UserError
from titogym.gateway.engines.base import VersionSpan
from titogym.gateway.sessions.tree import Generation, Node, Receipt, Timings, Tree
from titogym.templates.conversation import Message, Prefix, ToolCall

_PATIENCE = 1.0  # seconds
_SCHEMA = """
CREATE TABLE IF NOT EXISTS sessions (
    id TEXT PRIMARY KEY, spec BLOB NOT NULL, created REAL NOT NULL, touched REAL NOT NULL,
    diagnostics BLOB NOT NULL
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS nodes (
    session TEXT NOT NULL, id INTEGER NOT NULL, parent INTEGER, supersedes INTEGER,
    prefix BLOB, messages BLOB NOT NULL, answer BLOB NOT NULL, replayed BLOB,
    trim INTEGER NOT NULL, prompt_ids BLOB NOT NULL, output_ids BLOB NOT NULL, logprobs BLOB NOT NULL,
    routes BLOB, meta BLOB NOT NULL,
    PRIMARY KEY (session, id)
);
"""


@dataclass(frozen=True, slots=True)
class Record:
    """A session as the journal lists it: `spec` and `diagnostics` are JSON."""

    id: str
    spec: dict[str, Any]
    created: float
    touched: float
    diagnostics: dict[str, Any]
    turns: int


def hold(path: Path) -> IO[bytes]:
    """Take the journal at `path` for this process alone, until the file that comes back is closed.

    The lock goes with the process, however it ends; one that has just been killed may take a moment.
    Raises `UserError` while another process has it.
    """
    beside = path.with_name(path.name + ".lock")
    try:
        beside.parent.mkdir(parents=True, exist_ok=True)
        lock = beside.open("ab")
    except OSError as error:
        raise UserError(f"Cannot open the session journal {path}: {error}. Choose another path.") from error
    until = time.monotonic() + _PATIENCE
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return lock
        except OSError as error:
            if time.monotonic() > until:
                lock.close()
                raise UserError(
                    f"Another gateway has the session journal {path}: stop it, or choose another path."
                ) from error
        time.sleep(0.02)


class Journal:
    """The store of one gateway process.

    Calls must not overlap, but for `checkpoint`: the event loop makes them one by one.
    """

    def __init__(self, path: Path | None) -> None:
        """`path` None keeps the journal in a temporary file that goes with the process.

        Raises `UserError` when the file cannot be opened.
        """
        try:
            if path is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
            self._db = sqlite3.connect(
                "" if path is None else path, isolation_level=None, check_same_thread=False
            )
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=NORMAL")
            self._db.execute("PRAGMA busy_timeout=5000")
            self._db.executescript(_SCHEMA)
            # The copy from the log to the main file waits for the disk: never within a turn.
            self._db.execute("PRAGMA wal_autocheckpoint=0")
            self._checkpointing = Lock()
            self._checkpoints = None if path is None else sqlite3.connect(path, check_same_thread=False)
        except (OSError, sqlite3.Error) as error:
            raise UserError(
                f"Cannot open the session journal {path}: {error}. Choose another path."
            ) from error

    def create(self, session: str, spec: dict[str, Any], created: float) -> None:
        row = (session, orjson.dumps(spec), created, created, b"{}")
        self._db.execute("INSERT INTO sessions VALUES (?, ?, ?, ?, ?)", row)

    def append(
        self, session: str, node: Node, replayed: Iterable[tuple[Node, Message | None]], touched: float
    ) -> None:
        """Store a commit, and how its request replayed earlier answers, in one transaction."""
        with self._transaction():
            self._db.execute(f"INSERT INTO nodes VALUES ({', '.join('?' * 14)})", (session, *_dump(node)))
            for earlier, message in replayed:
                row = (_dump_replayed(message), session, earlier.id)
                self._db.execute("UPDATE nodes SET replayed = ? WHERE session = ? AND id = ?", row)
            self._db.execute("UPDATE sessions SET touched = ? WHERE id = ?", (touched, session))

    def note(self, session: str, diagnostics: Any, touched: float) -> None:
        row = (orjson.dumps(diagnostics), touched, session)
        self._db.execute("UPDATE sessions SET diagnostics = ?, touched = ? WHERE id = ?", row)

    def delete(self, session: str) -> None:
        with self._transaction():
            self._db.execute("DELETE FROM nodes WHERE session = ?", (session,))
            self._db.execute("DELETE FROM sessions WHERE id = ?", (session,))

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        """All of what is done inside, or none of it."""
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._db.execute("COMMIT")
        except BaseException:
            if self._db.in_transaction:  # some errors have ended it
                self._db.execute("ROLLBACK")
            raise

    def sessions(self) -> Iterator[Record]:
        query = (
            "SELECT id, spec, created, touched, diagnostics, "
            "(SELECT count(*) FROM nodes WHERE session = sessions.id) FROM sessions"
        )
        for id, spec, created, touched, diagnostics, turns in self._db.execute(query).fetchall():
            yield Record(id, orjson.loads(spec), created, touched, orjson.loads(diagnostics), turns)

    def restore(self, session: str, tree: Tree) -> None:
        """Append the session's commits to an empty tree, in their order."""
        for row in self._db.execute("SELECT * FROM nodes WHERE session = ? ORDER BY id", (session,)):
            _load(row[1:], tree)

    def checkpoint(self) -> None:
        """Copy the log into the main file, beside whatever else goes on: from any thread, one at a time."""
        with self._checkpointing:
            if self._checkpoints is not None:
                self._checkpoints.execute("PRAGMA wal_checkpoint(PASSIVE)")

    def close(self) -> None:
        with self._checkpointing:
            if self._checkpoints is not None:
                self._checkpoints.close()
                self._checkpoints = None
        self._db.close()


def _dump(node: Node) -> tuple[Any, ...]:
    generation = node.generation
    meta = {
        "spans": generation.spans,
        "finish": generation.finish,
        "stop": generation.stop,
        "engine": generation.engine,
        "cached_tokens": generation.cached_tokens,
        "unpaired": generation.unpaired,
        "timings": generation.timings,
        "receipt": node.receipt,
    }
    return (
        node.id,
        None if node.parent is None else node.parent.id,
        node.supersedes,
        orjson.dumps(node.prefix) if node.parent is None else None,
        orjson.dumps(node.messages),
        orjson.dumps(node.answer),
        _dump_replayed(node.replayed),
        generation.trim,
        generation.prompt_ids.tobytes(),
        generation.output_ids.tobytes(),
        generation.logprobs.tobytes(),
        generation.routes,
        orjson.dumps(meta),
    )


def _dump_replayed(message: Message | None) -> bytes | None:
    return None if message is None else orjson.dumps(message)


def _load(row: Sequence[Any], tree: Tree) -> None:
    (
        id,
        parent,
        supersedes,
        prefix,
        messages,
        answer,
        replayed,
        trim,
        prompt,
        output,
        logprobs,
        routes,
        raw,
    ) = row
    meta = orjson.loads(raw)
    # Journals of before there were receipts: no answer can be asked for again, and none has a date.
    receipt = Receipt(**meta.pop("receipt", {"created": 0}))
    above = None if parent is None else tree.nodes[parent]
    node = tree.draft(
        parent=above,
        prefix=above.prefix if above else _prefix(orjson.loads(prefix)),
        messages=tuple(map(_message, orjson.loads(messages))),
        answer=_message(orjson.loads(answer)),
        generation=Generation(
            trim=trim,
            prompt_ids=array("i", prompt),
            output_ids=array("i", output),
            logprobs=array("f", logprobs),
            spans=tuple(VersionSpan(**span) for span in meta.pop("spans")),
            timings=Timings(**meta.pop("timings")),
            routes=routes,
            **meta,
        ),
        supersedes=supersedes,
        receipt=receipt,
    )
    node.replayed = None if replayed is None else _message(orjson.loads(replayed))
    assert node.id == id
    tree.append(node)


def _prefix(plain: dict[str, Any]) -> Prefix:
    return Prefix(tools=tuple(plain["tools"]), kwargs=plain["kwargs"])


def _message(plain: dict[str, Any]) -> Message:
    plain["tool_calls"] = tuple(ToolCall(**call) for call in plain["tool_calls"])
    return Message(**plain)
