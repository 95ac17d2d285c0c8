"""What operators see and do: metrics, logs, draining, and several gateways side by side."""

import asyncio
import logging
import signal
import time
from collections import Counter

import httpx
import openai
import orjson
import pytest

from tests.doubles.scripted_engine import Fault
from tests.gateway.test_restart import start
from tests.gateway.test_turns import CALL, USER, agent, create, sdk
from titogym.gateway.alias import alias
from titogym.gateway.client import GatewayClient, GatewayError, SessionHandle
from titogym.gateway.telemetry import JsonLines
from titogym.processes import free_port


def metrics(url: str) -> dict[str, float]:
    lines = httpx.get(f"{url}/metrics").raise_for_status().text.splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name: float(value) for name, value in pairs}


def ask(session: SessionHandle) -> None:
    sdk(session).chat.completions.create(model="m", messages=[USER])


def test_metrics_count_what_happened(serve):
    stand = serve([f"look\n{CALL}", "done"])
    session = create(stand.url)
    agent(session, 3, stream=True)
    with pytest.raises(openai.ConflictError):
        sdk(session).chat.completions.create(model="m", messages=[{"role": "user", "content": "other"}])
    httpx.get(f"{stand.url}/sessions/{session.id}").raise_for_status()
    seen = metrics(stand.url)
    sent = [len(request["input_ids"]) for request in stand.engine.requests]
    rows = [len(row) for row in stand.engine._served]
    assert seen['titogym_turns_total{finish="stop"}'] == 2
    assert seen["titogym_prompt_tokens_total"] == sum(sent)
    assert seen["titogym_output_tokens_total"] == sum(rows) - sum(sent)
    assert seen["titogym_cached_tokens_total"] == rows[0]
    assert seen['titogym_refusals_total{code="conversation_diverged",status="409"}'] == 1
    for name in ("titogym_turn_seconds", "titogym_first_token_seconds"):
        buckets = [value for key, value in seen.items() if key.startswith(f"{name}_bucket")]
        assert buckets == sorted(buckets)
        assert buckets[-1] == seen[f"{name}_count"] == 2
    assert seen["titogym_first_token_seconds_sum"] <= seen["titogym_turn_seconds_sum"]
    assert seen["titogym_sessions"] == seen["titogym_sessions_created_total"] == 1
    assert seen["titogym_sessions_bytes"] > 2 * 2000
    assert seen["titogym_turns_in_flight"] == 0
    engine = f'{{url="{stand.engine.url}"}}'
    assert seen[f"titogym_engine_up{engine}"] == 1
    httpx.delete(f"{stand.url}/sessions/{session.id}")
    assert metrics(stand.url)['titogym_sessions_deleted_total{why="asked"}'] == 1


def test_mismatches_are_counted_by_type(serve):
    stand = serve(["one", "two"])
    session = create(stand.url, matcher="tests.gateway.test_operations:whatever")
    client = sdk(session)
    client.chat.completions.create(model="m", messages=[USER])
    rewritten = {"role": "assistant", "content": "quite another answer"}
    client.chat.completions.create(model="m", messages=[USER, rewritten, USER])
    httpx.delete(f"{stand.url}/sessions/{session.id}").raise_for_status()
    seen = compared(stand.url, 1)
    assert seen["titogym_leaves_mismatched_total"] == 1
    assert seen['titogym_session_mismatches_total{type="assistant_text"}'] == 1


def compared(url: str, leaves: int) -> dict[str, float]:
    """The metrics once so many leaves are counted, which happens beside the requests."""
    until = time.monotonic() + 10
    while (seen := metrics(url)).get("titogym_leaves_compared_total", 0) < leaves:
        assert time.monotonic() < until, seen
        time.sleep(0.01)
    return seen


def test_each_leaf_is_counted_once(serve):
    stand = serve(["one", "two", "three", "four", "five"])
    session, other = create(stand.url, policy="branching"), create(stand.url)

    def say(*texts: str) -> None:
        roles = ("user", "assistant")
        messages = [{"role": roles[n % 2], "content": text} for n, text in enumerate(texts)]
        sdk(session).chat.completions.create(model="m", messages=messages)

    def collect() -> None:
        httpx.get(f"{stand.url}/sessions/{session.id}/trajectories").raise_for_status()

    say("a")
    say("a", "one", "b")
    collect()
    assert compared(stand.url, 1)["titogym_leaves_compared_total"] == 1
    collect()
    httpx.get(f"{stand.url}/sessions/{session.id}").raise_for_status()
    say("a", "one", "another b")  # a second leaf
    collect()
    assert compared(stand.url, 2)["titogym_leaves_compared_total"] == 2
    httpx.delete(f"{stand.url}/sessions/{session.id}")
    ask(other)
    httpx.delete(f"{stand.url}/sessions/{other.id}")
    seen = compared(stand.url, 3)
    assert seen["titogym_leaves_compared_total"] == 3
    assert "titogym_leaves_mismatched_total" not in seen


class whatever:
    """A matcher to which all messages of one role are the same."""

    @staticmethod
    def key(message):
        return message.role.encode()


def test_logs_are_json_lines_that_never_hold_a_key(serve, caplog):
    caplog.set_level(logging.INFO, "titogym.gateway")
    stand = serve(["hello"])
    session = create(stand.url, labels={"task": "t1"})
    ask(session)
    stand.engine.faults.append(Fault("error", status=500))
    with pytest.raises(openai.APIStatusError):
        sdk(session).chat.completions.create(model="m", messages=[USER], seed=1)
    httpx.delete(f"{stand.url}/sessions/{session.id}")
    written = [JsonLines().format(record) for record in caplog.records if record.name == "titogym.gateway"]
    lines = [orjson.loads(line) for line in written]
    told = [line for line in lines if "session" in line]
    assert [line["event"] for line in told] == ["session_created", "turn", "refused", "session_deleted"]
    assert {line["session"] for line in told} == {alias(session.id)}
    created, turn, refused, _ = told
    assert created["labels"] == {"task": "t1"}
    assert turn["prompt_tokens"] == len(stand.engine.requests[0]["input_ids"])
    assert (refused["status"], refused["level"]) == (503, "warning")
    assert all(line["time"].endswith("Z") for line in lines)
    assert session.id not in "".join(written)


def test_an_engine_is_drained_and_taken_back(serve):
    stand = serve(["hello"])
    session = create(stand.url)
    ask(session)
    url = stand.engine.url
    [status] = httpx.get(f"{stand.url}/engines").json()["engines"]
    assert status == {"url": url, "state": "up", "in_flight": 0}
    drained = httpx.post(f"{stand.url}/engines", json={"url": url, "draining": True}).json()
    assert drained["state"] == "draining"
    ready = httpx.get(f"{stand.url}/ready")
    assert ready.status_code == 503
    assert ready.json()["error"]["message"] == "No engine takes requests."  # it does answer
    with pytest.raises(openai.APIStatusError) as caught:
        sdk(session).chat.completions.create(model="m", messages=[USER], seed=1)
    assert caught.value.status_code == 503
    assert float(caught.value.response.headers["retry-after"]) > 0
    assert httpx.post(f"{stand.url}/engines", json={"url": url, "draining": False}).json()["state"] == "up"
    assert httpx.get(f"{stand.url}/ready").status_code == 200
    ask(session)
    for body, status_code in (
        ({"url": "http://elsewhere", "draining": True}, 404),
        ({"url": url}, 400),
        ({"draining": True}, 400),
        ([], 400),
    ):
        assert httpx.post(f"{stand.url}/engines", json=body).status_code == status_code


async def test_several_gateways_share_sessions_out_and_each_keeps_its_own(serve):
    stands = [serve(["hello"]) for _ in range(2)]
    urls = [stand.url for stand in stands]
    async with GatewayClient(urls) as client, GatewayClient(urls) as other:
        sessions = await asyncio.gather(*(client.create_session() for _ in range(6)))
        assert Counter(session.base_url.partition("/sessions")[0] for session in sessions) == dict.fromkeys(
            urls, 3
        )
        for session in sessions:
            await asyncio.to_thread(ask, session)
            assert (await other.inspect(session.id))["turns"] == 1
            [found] = await client.trajectories(session.id)
            assert found.turns == 1
        assert {listed["id"] for listed in await other.sessions()} == {session.id for session in sessions}
        gone = [session for session in sessions if session.base_url.startswith(urls[0])]
        for session in gone:
            await client.delete(session.id)
        fresh = [await client.create_session() for _ in range(3)]
        assert all(session.base_url.startswith(urls[0]) for session in fresh)
        with pytest.raises(GatewayError, match="no such session"):
            await other.inspect("sess_unknown")


async def test_a_full_or_dead_gateway_gives_way_to_the_next(serve):
    full, spare = serve(["x"], max_sessions=1), serve(["x"])
    async with GatewayClient([full.url, "http://127.0.0.1:9", spare.url]) as client:
        homes = [(await client.create_session()).base_url for _ in range(4)]
        assert sum(home.startswith(full.url) for home in homes) == 1
        assert sum(home.startswith(spare.url) for home in homes) == 3
        with pytest.raises(GatewayError, match=r"sampling\.colour"):
            await client.create_session(sampling={"colour": 1})
        assert not await client.ready()
    async with GatewayClient(["http://127.0.0.1:9"]) as client:
        with pytest.raises(GatewayError, match="does not answer"):
            await client.create_session()
    with pytest.raises(ValueError, match="URL"):
        GatewayClient([])


async def test_two_gateway_processes_before_one_engine(serve, model_dirs, tmp_path):
    """One is killed: the sessions of the other do not notice, and its own come back with it."""
    stand = serve(["hello"])
    ports = [free_port(), free_port()]
    folders = [tmp_path / "a", tmp_path / "b"]

    def run(i: int):
        folders[i].mkdir(exist_ok=True)
        return start(folders[i], model_dirs["qwen3"], stand.engine.url, ports[i])

    processes = [run(0), run(1)]
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    try:
        async with GatewayClient(urls) as client:
            first, second = await client.create_session(), await client.create_session()
            assert [first.base_url[: len(urls[0])], second.base_url[: len(urls[1])]] == urls
            for session in (first, second):
                await asyncio.to_thread(ask, session)
            with pytest.raises(GatewayError, match="no such session"):
                async with GatewayClient(urls[1]) as wrong:
                    await wrong.inspect(first.id)
            processes[0].process.send_signal(signal.SIGKILL)
            await asyncio.to_thread(processes[0].process.wait)
            with pytest.raises(GatewayError, match="does not answer"):
                await client.inspect(first.id)
            assert (await client.inspect(second.id))["turns"] == 1
            assert (await client.create_session()).base_url.startswith(urls[1])
            processes[0] = await asyncio.to_thread(run, 0)
            assert (await client.inspect(first.id))["turns"] == 1
            log = (folders[0] / "gateway.log").read_text()
            assert first.id not in log
            assert f'"session":"{alias(first.id)}"' in log
    finally:
        for process in processes:
            process.stop()
