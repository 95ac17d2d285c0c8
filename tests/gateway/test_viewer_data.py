"""The viewer's JSON: paged, guarded, and the same tokens as the trajectories that are trained on."""

from typing import Any

import httpx
import pytest

from tests.gateway.conftest import Serve, Stand
from tests.gateway.viewer_worlds import ANSWERS, KEY, Busy, surprising

HEADERS = {"authorization": f"Bearer {KEY}"}


@pytest.fixture
def stand(serve: Serve) -> Stand:
    return serve(ANSWERS, admin_key=KEY, engine={"logprob": surprising})


@pytest.fixture
def session(stand: Stand) -> str:
    return Busy(stand).id


def ask(stand: Stand, path: str, status: int = 200, **query: Any) -> dict[str, Any]:
    answer = httpx.get(f"{stand.url}/{path}", headers=HEADERS, params=query)
    assert answer.status_code == status, answer.text
    told: dict[str, Any] = answer.json()
    return told


def row(stand: Stand, session: str, leaf: int, page: int) -> dict[str, Any]:
    """All tokens of a row, asked for page by page."""
    told = ask(stand, f"sessions/{session}/rows/{leaf}")
    joined: dict[str, Any] = {"ids": [], "texts": [], "loss": [], "logprobs": [], "versions": [], **told}
    for start in range(0, told["length"], page):
        part = ask(stand, f"sessions/{session}/rows/{leaf}/tokens", start=start, end=start + page)
        for name in ("ids", "texts", "loss", "logprobs", "versions"):
            joined[name] += part[name]
    return joined


def test_an_unchanged_session_is_told_by_its_state_alone(stand):
    talk = Busy(stand)
    path = f"sessions/{talk.id}/tree"
    told = ask(stand, path)
    assert len(told["tree"]) == 5
    assert ask(stand, path, unless=told["state"]) == {"state": told["state"]}
    talk.turn([{"role": "user", "content": "Once more."}])
    fresh = ask(stand, path, unless=told["state"])
    assert len(fresh["tree"]) == 6
    assert fresh["state"] != told["state"]


@pytest.mark.parametrize("page", [64, 1000])
def test_rows_are_the_trajectories(stand, session, page):
    trajectories = ask(stand, f"sessions/{session}/trajectories")["trajectories"]
    assert len(trajectories) == 2
    for trajectory in trajectories:
        seen = row(stand, session, int(trajectory["leaf"]), page)
        assert seen["ids"] == trajectory["tokens"]
        assert seen["loss"] == trajectory["loss_mask"]
        given = [logprob or 0.0 for logprob in seen["logprobs"]]
        assert given == trajectory["logprobs"]
        assert "".join(seen["texts"]) == stand.assets.tokenizer.decode(trajectory["tokens"])
        versions = {place: span[2] for span in seen["versions"] for place in range(*span[:2])}
        told = {place: span[2] for span in trajectory["version_spans"] for place in range(*span[:2])}
        assert versions == told
        assert [part[2] for part in seen["parts"]][1:] == [part[3] for part in seen["parts"]][:-1]
        assert seen["parts"][-1][3] == seen["length"] == len(trajectory["tokens"])


def test_a_superseded_turn_can_be_seen_and_carries_no_loss(stand, session):
    tree = ask(stand, f"sessions/{session}/tree")["tree"]
    (superseded,) = [node["id"] for node in tree if node["superseded"]]
    seen = row(stand, session, superseded, 1000)
    assert sum(seen["loss"]) == 0
    assert sum(logprob is not None for logprob in seen["logprobs"]) > tree[superseded]["output_tokens"]
    assert "👩\u200d💻" in "".join(seen["texts"])


def test_mismatches_come_with_both_sides_and_their_surroundings(stand, session):
    told = ask(stand, f"sessions/{session}/mismatches")
    assert told["total"] == 1
    (found,) = told["mismatches"]
    assert found["cause"] == "harness: it rewrote tool_calls.arguments"
    assert (found["message"], found["role"]) == (2, "assistant")
    assert "".join(found["row_texts"]) == ' "ls -la"'
    assert "".join(found["rendered_texts"]) == '"ls -la", "timeout": 60'
    whole = row(stand, session, found["leaf"], 1000)
    assert whole["ids"][found["at"] : found["at"] + found["row_total"]] == found["row_ids"]
    assert found["before"].endswith('"command": ')
    assert ask(stand, f"sessions/{session}/summary")["mismatches"] == 1


def test_ranges_have_bounds(stand, session):
    path = f"sessions/{session}/rows/0/tokens"
    assert ask(stand, path, start=10**6)["ids"] == []
    for start, end in ((-1, 5), (5, 4), ("x", 5), (0, 10**6)):
        assert ask(stand, path, 400, start=start, end=end)["error"]["param"] in ("start", "end")
    assert ask(stand, f"sessions/{session}/rows/99", 404)["error"]["code"] == "no_such_turn"


@pytest.mark.parametrize("path", ["tree", "summary", "mismatches", "rows/0", "rows/0/tokens"])
def test_data_needs_the_admin_key(stand, session, path):
    """An agent that holds its session's key is no administrator."""
    url = f"{stand.url}/sessions/{session}/{path}"
    for headers in ({}, {"authorization": f"Bearer {session}"}, {"authorization": "Bearer wrong"}):
        assert httpx.get(url, headers=headers).status_code == 401


@pytest.mark.parametrize("path", ["", "/viewer.js", "/tokens.js", "/virtual.js", "/viewer.css"])
def test_the_page_forbids_every_foreign_script(stand, path):
    answer = httpx.get(f"{stand.url}/viewer{path}")
    assert answer.status_code == 200
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'self';")
    assert "unsafe" not in policy
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert "innerHTML" not in answer.text
