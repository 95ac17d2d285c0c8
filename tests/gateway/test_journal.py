"""Sessions on disk."""

import sqlite3
from typing import Any

import pytest
from starlette.testclient import TestClient

from tests.gateway.forest import answer, turn, user
from titogym.errors import UserError
from titogym.gateway.app import create_app
from titogym.gateway.errors import RequestError
from titogym.gateway.sessions.journal import Journal
from titogym.gateway.sessions.session import Session
from titogym.gateway.sessions.spec import Sampling, SessionSpec, parse_spec
from titogym.gateway.sessions.store import SessionStore
from titogym.gateway.sessions.tree import Node, Receipt, conversation, row
from titogym.gateway.settings import GatewaySettings
from titogym.gateway.telemetry import Telemetry
from titogym.gateway.trajectories import cut
from titogym.templates.conversation import Message, Prefix, ToolCall


def open_store(
    path,
    max_sessions=10,
    max_turns=100,
    max_bytes=1 << 30,
    ttl=1000.0,
    idle=1000.0,
    departing=lambda session: None,
) -> SessionStore:
    return SessionStore(
        Journal(path),
        Telemetry(),
        max_sessions=max_sessions,
        max_turns=max_turns,
        max_bytes=max_bytes,
        ttl=ttl,
        idle=idle,
        departing=departing,
    )


def commit(store: SessionStore, session: Session, messages, reply, replays=(), **tokens) -> Node:
    """As the service does: the journal first."""
    placement = session.policy(session.tree, session.tree.find(PREFIX, messages))
    parent, old = placement.parent, placement.supersedes
    new = tuple(messages[parent.depth if parent else 0 :])
    made = turn(type(session.tree)(session.tree.matcher), [user("made")], answer(""), **tokens).generation
    node = session.tree.draft(parent, PREFIX, new, reply, made, old.id if old else None)
    store.commit(session, node, list(replays))
    session.tree.append(node)
    for earlier, message in replays:
        earlier.replayed = message
    return node


PREFIX = Prefix(
    tools=({"type": "function", "function": {"name": "bash"}},), kwargs={"enable_thinking": False}
)
CALLS = Message("assistant", "é🎉", "hm", (ToolCall("call_1", "bash", "{broken"),))


def described(session) -> list[Any]:
    return [
        (
            (
                node.id,
                node.parent and node.parent.id,
                node.prefix,
                node.messages,
                node.answer,
                node.generation,
            ),
            (node.supersedes, node.replayed, node.end_hash, node.request_hash, node.depth, node.length),
            (node.children, row(node).tolist(), conversation(node)),
        )
        for node in session.tree.nodes
    ]


def test_a_restart_finds_every_session_as_committed(tmp_path):
    path = tmp_path / "deep" / "journal.sqlite"
    store = open_store(path)
    spec = SessionSpec(
        matcher="call_id", policy="branching", labels={"run": "r1"}, sampling=Sampling(temperature=0.5)
    )
    session = store.create(spec)
    other = store.create(SessionSpec())
    ask, result = user("1"), Message("tool", "out", tool_call_id="call_1", name="bash")
    first = commit(store, session, [ask], CALLS, prompt=(1, 2), output=(3, 4), routes=b"\x00\xff")
    sent = Message("assistant", "é🎉", "", CALLS.tool_calls)
    commit(store, session, [ask, CALLS, result], answer("b"), [(first, sent)], trim=1, finish="length")
    commit(store, session, [ask, CALLS, result], answer("c"))
    session.diagnostics.ignored["store"] = "why not"
    store.note(session)
    # no close: as after kill -9
    again = open_store(path)
    assert len(again) == 2
    restored = again.get(session.id)
    assert restored is not session
    assert restored.spec == spec
    assert restored.diagnostics == session.diagnostics
    assert described(restored) == described(session)
    assert restored.tree.superseded == session.tree.superseded == {1}
    assert cut("s", restored.tree) == cut("s", session.tree)
    assert again.get(other.id).tree.nodes == []
    assert [record.turns for record in sorted(again.records(), key=lambda r: -r.turns)] == [3, 0]


def test_idle_sessions_leave_memory_and_come_back(tmp_path):
    store = open_store(None, idle=0.0)
    session = store.create(SessionSpec())
    commit(store, session, [user("1")], answer("a"))
    session.diagnostics.aborted = 3
    session.touched -= 1
    store.sweep()
    assert store.in_memory == []
    back = store.get(session.id)
    assert back is not session
    assert described(back) == described(session)
    assert back.diagnostics.aborted == 3


def test_sessions_in_use_stay(tmp_path):
    store = open_store(tmp_path / "j", ttl=0.001, idle=0.0)
    session = store.create(SessionSpec())
    session.tasks.add(None)  # type: ignore[arg-type]
    session.touched -= 100
    store.sweep()
    assert store.in_memory == [session]


def test_unused_sessions_are_deleted_after_their_time_to_live(tmp_path):
    store = open_store(tmp_path / "j", ttl=50.0)
    brief, long = store.create(SessionSpec(ttl_seconds=5.0)), store.create(SessionSpec())
    for session in (brief, long):
        session.touched -= 10
    store.sweep()
    with pytest.raises(RequestError, match="no such session"):
        store.get(brief.id)
    assert store.get(long.id) is long
    assert [record.id for record in open_store(tmp_path / "j").records()] == [long.id]


def test_what_expires_uncounted_is_handed_over_once_more(tmp_path):
    """Whether it is in memory or not; what was counted is not read from the journal again."""
    left: list[Session] = []
    store = open_store(tmp_path / "j", ttl=50.0, idle=5.0, departing=left.append)
    live, out, counted, empty = (store.create(SessionSpec()) for _ in range(4))
    for session in (live, out, counted):
        commit(store, session, [user("1")], answer("a"))
    counted.diagnostics.compared = 1
    for session in (out, counted):
        session.touched -= 10
    store.sweep()
    assert set(store.in_memory) == {live, empty}
    store.delete(live.id)
    store.delete(empty.id)
    for id in (out.id, counted.id):
        store.delete(id, expired=True)
    assert left[0] is live
    assert [session.id for session in left] == [live.id, out.id]
    assert described(left[1]) == described(out)


def test_many_that_expire_unread_go_over_several_sweeps(tmp_path):
    store = open_store(tmp_path / "j", max_sessions=25)
    for _ in range(25):
        commit(store, store.create(SessionSpec()), [user("1")], answer("a"))
    left: list[Session] = []
    again = open_store(tmp_path / "j", ttl=-1.0, departing=left.append)
    remaining = []
    for _ in range(3):
        again.sweep()
        remaining.append(len(again))
    assert remaining == [15, 5, 0]
    assert len(left) == 25


def test_full_gateway_refuses_another_session_until_one_goes():
    store = open_store(None, max_sessions=1)
    first = store.create(SessionSpec())
    with pytest.raises(RequestError, match="maximum of 1 sessions") as refused:
        store.create(SessionSpec())
    assert (refused.value.status, refused.value.retry_after) == (429, 5)
    store.delete(first.id)
    store.create(SessionSpec())


def test_a_full_session_refuses_another_turn():
    store = open_store(None, max_turns=2)
    session = store.create(SessionSpec())
    messages: list[Message] = []
    for text in "ab":
        store.admit(session)
        messages += [user(text)]
        messages += [commit(store, session, messages, answer(text)).answer]
    with pytest.raises(RequestError, match="maximum of 2 turns") as refused:
        store.admit(session)
    assert (refused.value.status, refused.value.code, refused.value.retry_after) == (
        429,
        "session_full",
        None,
    )
    store.admit(store.create(SessionSpec()))


def test_full_memory_lets_go_of_idle_sessions_before_it_refuses(tmp_path):
    store = open_store(tmp_path / "j.sqlite", max_bytes=100_000)
    sessions = [store.create(SessionSpec()) for _ in range(3)]
    for session in sessions:
        commit(store, session, [user("x" * 40_000)], answer("y"))
    sessions[0].tasks.add(object())  # type: ignore[arg-type]
    before = described(sessions[1])
    store.admit(sessions[2])
    assert set(store.in_memory) == {sessions[0], sessions[2]}  # the oldest is in use, the next one went
    assert store.size == sum(session.size for session in store.in_memory)
    again = store.get(sessions[1].id)
    assert described(again) == before
    for session in (sessions[2], again):
        session.tasks.add(object())  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="MiB") as refused:
        store.admit(sessions[0])
    assert (refused.value.status, refused.value.code, refused.value.retry_after) == (429, "memory_full", 5)
    again.tasks.clear()
    store.delete(again.id)
    store.admit(sessions[0])


def test_the_log_is_moved_into_the_main_file_between_turns(tmp_path):
    path = tmp_path / "j.sqlite"
    store = open_store(path)
    session = store.create(SessionSpec())
    commit(store, session, [user("x" * 100_000)], answer("y"))
    small = path.stat().st_size
    store.checkpoint()
    assert path.stat().st_size > max(small, 100_000)
    [found] = open_store(path).records()
    assert found.turns == 1


def test_deleted_sessions_leave_nothing_on_disk(tmp_path):
    store = open_store(tmp_path / "j")
    session = store.create(SessionSpec())
    commit(store, session, [user("1")], answer("a"))
    store.delete(session.id)
    counts = sqlite3.connect(tmp_path / "j").execute(
        "SELECT (SELECT count(*) FROM nodes), (SELECT count(*) FROM sessions)"
    )
    assert counts.fetchone() == (0, 0)
    with pytest.raises(RequestError, match="no such session"):
        store.delete(session.id)


def test_a_journal_of_before_there_were_receipts_is_read(tmp_path):
    store = open_store(tmp_path / "j")
    session = store.create(SessionSpec())
    commit(store, session, [user("1")], answer("a"))
    commit(store, session, [user("1"), answer("a"), user("2")], answer("b"))
    old = sqlite3.connect(tmp_path / "j")
    with old:
        old.execute("UPDATE nodes SET meta = CAST(json_remove(CAST(meta AS TEXT), '$.receipt') AS BLOB)")
    [(meta,)] = old.execute("SELECT meta FROM nodes WHERE id = 0")
    assert b"receipt" not in meta
    restored = open_store(tmp_path / "j").get(session.id)
    assert described(restored) == described(session)
    assert [node.receipt for node in restored.tree.nodes] == [Receipt(created=0)] * 2
    assert restored.tree.answers == {}
    assert restored.attempts.earlier(Receipt(), retried=True) is None


def test_a_session_that_the_disk_does_not_let_go_of_is_still_there(tmp_path):
    store = open_store(tmp_path / "j")
    kept, other = store.create(SessionSpec()), store.create(SessionSpec())
    commit(store, kept, [user("1")], answer("a"))
    meddler = sqlite3.connect(tmp_path / "j")
    with meddler:
        meddler.execute(
            "CREATE TRIGGER stuck BEFORE DELETE ON sessions BEGIN SELECT RAISE(ABORT, 'disk I/O error'); END"
        )
    with pytest.raises(RequestError) as refused:
        store.delete(kept.id)
    assert (refused.value.status, refused.value.code) == (503, "journal_unavailable")
    assert store.get(kept.id) is kept
    commit(store, other, [user("1")], answer("b"))  # no transaction is left open
    with meddler:
        meddler.execute("DROP TRIGGER stuck")
    assert [node.answer for node in open_store(tmp_path / "j").get(kept.id).tree.nodes] == [answer("a")]
    store.delete(kept.id)
    assert len(store) == 1


def test_a_journal_belongs_to_one_gateway_at_a_time(tmp_path, model_dirs):
    settings = GatewaySettings(
        engines=("http://x",), model_dir=model_dirs["qwen3"], journal=tmp_path / "deep" / "j"
    )
    alone = pytest.raises(UserError, match="Another gateway has the session journal")
    with TestClient(create_app(settings)), alone:
        create_app(settings)
    with TestClient(create_app(settings)) as again:
        assert again.get("/health").status_code == 200


def test_journal_that_cannot_be_opened_is_the_users_to_mend(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match="Choose another path"):
        Journal(tmp_path / "file" / "j.sqlite")
    (tmp_path / "text").write_text("no database, only text " * 100)
    with pytest.raises(UserError, match="Choose another path"):
        Journal(tmp_path / "text")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"matcher": "exact"}, "matcher"),
        ({"policy": "tree"}, "policy"),
        ({"sampling": {"temprature": 1}}, "sampling.temprature"),
        ({"sampling": {"temperature": -1}}, "sampling.temperature"),
        ({"limits": {"turns": 0}}, "limits.turns"),
        ({"color": "red"}, "color"),
        ([], None),
    ],
)
def test_wrong_session_options_are_refused_by_name(body, param):
    with pytest.raises(RequestError) as refused:
        parse_spec(body)
    assert refused.value.param == param
    assert refused.value.status == 400
