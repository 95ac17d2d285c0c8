"""The generation client against scripted answers and failures."""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.doubles.scripted_engine import Fault, ScriptedEngine
from titogym.errors import UserError
from titogym.gateway.engines.base import (
    Chunk,
    ContextLengthError,
    EngineError,
    SamplingParams,
    VersionSpan,
)
from titogym.gateway.engines.sglang import SGLangEngine

OUTPUT = [40, 41, 42, 43, 44, 2]


def script(prompt: list[int], params: dict[str, Any]) -> list[int]:
    return OUTPUT


@pytest.fixture
async def scripted() -> AsyncIterator[ScriptedEngine]:
    async with ScriptedEngine(script, eos_ids=[2]) as engine:
        yield engine


@pytest.fixture
async def client(scripted: ScriptedEngine) -> AsyncIterator[SGLangEngine]:
    client = SGLangEngine(scripted.url, timeout=5)
    yield client
    await client.close()


async def collect(client: SGLangEngine, *, stream: bool = True, rid: str = "r", **params: Any) -> list[Chunk]:
    options = SamplingParams(**{"max_new_tokens": 16} | params)
    return [chunk async for chunk in client.generate([5, 6, 7], options, rid=rid, stream=stream)]


@asynccontextmanager
async def answering(pieces: Sequence[bytes], *, chunked: bool = True) -> AsyncIterator[str]:
    """The URL of a server that answers every request with these pieces, each in a packet of its own."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        await reader.readexactly(int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0]))
        size = sum(map(len, pieces))
        how = "transfer-encoding: chunked" if chunked else f"content-length: {size}"
        writer.write(f"HTTP/1.1 200 OK\r\n{how}\r\nconnection: close\r\n\r\n".encode())
        for piece in filter(None, pieces):
            writer.write(b"%x;x=y\r\n%b\r\n" % (len(piece), piece) if chunked else piece)
            await writer.drain()
            await asyncio.sleep(0)
        if chunked:
            writer.write(b"0\r\nchecksum: 0\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def eventually(condition: Any, timeout: float = 3.0) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("incremental", [True, False])
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("tokens_per_chunk", [1, 4])
async def test_every_token_once(
    scripted: ScriptedEngine, client: SGLangEngine, incremental: bool, stream: bool, tokens_per_chunk: int
) -> None:
    scripted.incremental = incremental
    scripted.tokens_per_chunk = tokens_per_chunk
    chunks = await collect(client, stream=stream)
    assert [token for chunk in chunks for token in chunk.output_ids] == OUTPUT
    logprobs = [logprob for chunk in chunks for logprob in chunk.logprobs]
    assert logprobs == [scripted.logprob(i, token) for i, token in enumerate(OUTPUT)]
    assert all(chunk.finish is None for chunk in chunks[:-1])
    assert len(chunks) <= ((2 if tokens_per_chunk == 4 else 6) if stream else 1)
    finish = chunks[-1].finish
    assert finish is not None
    assert finish.reason == "stop"
    assert finish.matched_stop == 2
    assert finish.prompt_tokens == 3
    assert finish.version_spans == (VersionSpan(0, 6, "default"),)


async def test_what_is_asked_for(scripted: ScriptedEngine, client: SGLangEngine) -> None:
    await collect(
        client, rid="mine", temperature=0.5, stop=("x",), stop_token_ids=(9,), seed=3, json_schema="{}"
    )
    (body,) = scripted.requests
    assert body["input_ids"] == [5, 6, 7]
    assert body["rid"] == "mine"
    assert body["return_logprob"] is True
    assert body["sampling_params"] == {
        "max_new_tokens": 16,
        "temperature": 0.5,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "ignore_eos": False,
        "no_stop_trim": True,
        "skip_special_tokens": False,
        "stop": ["x"],
        "stop_token_ids": [9],
        "sampling_seed": 3,
        "json_schema": "{}",
    }


async def test_no_top_k_is_more_than_the_engine_survives(
    scripted: ScriptedEngine, client: SGLangEngine
) -> None:
    await collect(client, top_k=1 << 40)
    assert scripted.requests[0]["sampling_params"]["top_k"] == (1 << 31) - 1


@pytest.mark.parametrize("url", ["nowhere", "ftp://127.0.0.1", "http://[::1", "http://127.0.0.1:port"])
def test_what_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(UserError, match="is no URL"):
        SGLangEngine(url)


async def test_spans_follow_a_version_change(scripted: ScriptedEngine, client: SGLangEngine) -> None:
    scripted.token_latency = 0.02
    seen = 0
    async for chunk in client.generate([5], SamplingParams(max_new_tokens=16), rid="r", stream=True):
        seen += len(chunk.output_ids)
        if seen == 2:
            scripted.weight_version = "v1"
    assert chunk.finish is not None
    old, new = chunk.finish.version_spans
    assert (old.version, old.start, new.version, new.end) == ("default", 0, "v1", 6)
    assert 2 <= old.end == new.start < 6


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("fault", "status", "words"),
    [
        (Fault("error", status=500, message="out of memory"), 500, "out of memory"),
        (Fault("error", status=503, message="busy"), 503, "busy"),
        (Fault("error", after_tokens=2, status=500, message="late"), 500, "late"),
        (Fault("abort", after_tokens=2, status=500, message="gone"), 500, "gone"),
        (Fault("drop", after_tokens=0), None, "closed the connection"),
        (Fault("drop", after_tokens=3), None, "closed the connection"),
        (Fault("null_logprobs", after_tokens=1), None, "without log-probs"),
    ],
)
async def test_failures(
    scripted: ScriptedEngine, client: SGLangEngine, stream: bool, fault: Fault, status: int | None, words: str
) -> None:
    scripted.faults.append(fault)
    received: list[int] = []

    async def receive() -> None:
        async for chunk in client.generate([5], SamplingParams(max_new_tokens=16), rid="r", stream=stream):
            received.extend(chunk.output_ids)

    with pytest.raises(EngineError, match=words) as caught:
        await receive()
    assert caught.value.status == status
    assert received == (OUTPUT[: fault.after_tokens] if stream else [])
    assert await collect(client)  # and the next request is served


@pytest.mark.parametrize("stream", [True, False])
async def test_silence_is_an_error(scripted: ScriptedEngine, stream: bool) -> None:
    scripted.faults.append(Fault("hang", after_tokens=1))
    client = SGLangEngine(scripted.url, timeout=0.2)
    with pytest.raises(EngineError, match="no answer in time"):
        await collect(client, stream=stream)
    await eventually(lambda: "r" in scripted.aborted)
    await client.close()


@pytest.mark.parametrize("stream", [True, False])
async def test_context_length(scripted: ScriptedEngine, client: SGLangEngine, stream: bool) -> None:
    limit = (await client.info()).context_length
    most = SamplingParams(max_new_tokens=100_000)
    with pytest.raises(ContextLengthError, match="context length"):
        [chunk async for chunk in client.generate([5], most, rid="r", stream=stream)]
    few = SamplingParams(max_new_tokens=2)
    with pytest.raises(ContextLengthError, match="maximum allowed length") as caught:
        [chunk async for chunk in client.generate([5] * (limit - 2), few, rid="r", stream=stream)]
    assert caught.value.status == 400


async def test_unreachable() -> None:
    client = SGLangEngine("http://127.0.0.1:1")
    with pytest.raises(EngineError) as caught:
        await collect(client)
    assert caught.value.status is None
    assert not await client.healthy()
    await client.close()


async def test_not_sglang() -> None:
    async with answering([b'{"hello": 1}']) as url:
        client = SGLangEngine(url)
        with pytest.raises(EngineError, match="no SGLang"):
            await client.info()
        await client.close()


async def test_closing_early_aborts(scripted: ScriptedEngine, client: SGLangEngine) -> None:
    scripted.token_latency = 0.05
    async with aclosing(
        client.generate([5], SamplingParams(max_new_tokens=16), rid="early", stream=True)
    ) as chunks:
        async for _ in chunks:
            break
    assert ("/abort_request", {"rid": "early"}) in scripted.calls
    await eventually(lambda: scripted.in_flight == 0)


@pytest.mark.parametrize("stream", [True, False])
async def test_cancellation_aborts(scripted: ScriptedEngine, client: SGLangEngine, stream: bool) -> None:
    scripted.token_latency = 0.5
    task = asyncio.create_task(collect(client, stream=stream, rid="cancelled"))
    await eventually(lambda: scripted.in_flight == 1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ("/abort_request", {"rid": "cancelled"}) in scripted.calls
    await eventually(lambda: scripted.in_flight == 0)


async def test_abort_ends_with_what_there_is(scripted: ScriptedEngine, client: SGLangEngine) -> None:
    scripted.token_latency = 0.03
    received: list[int] = []
    async for chunk in client.generate([5], SamplingParams(max_new_tokens=16), rid="a", stream=True):
        received += chunk.output_ids
        if len(received) == 2:
            await client.abort("a")
    assert chunk.finish is not None
    assert chunk.finish.reason == "abort"
    assert received == OUTPUT[: len(received)]
    assert 2 <= len(received) < len(OUTPUT)


async def test_finished_requests_are_not_aborted(scripted: ScriptedEngine, client: SGLangEngine) -> None:
    await collect(client, stream=True)
    await collect(client, stream=False)
    scripted.faults.append(Fault("error"))
    with pytest.raises(EngineError):
        await collect(client)
    assert scripted.calls == []


async def test_no_cap_on_connections(scripted: ScriptedEngine, client: SGLangEngine) -> None:
    scripted.token_latency = 0.1
    await asyncio.gather(*(collect(client, stream=i % 2 == 0, rid=str(i)) for i in range(150)))
    assert scripted.most_in_flight == 150


@settings(max_examples=30)
@given(data=st.data())
async def test_stream_may_arrive_in_any_pieces(data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=5))
    incremental = data.draw(st.booleans())
    ids = list(range(10, 10 + sum(lengths)))
    wire, seen = b"", 0
    for i, length in enumerate(lengths):
        seen += length
        shown = ids[seen - length : seen] if incremental else ids[:seen]
        meta = {
            "finish_reason": {"type": "length", "length": seen} if i == len(lengths) - 1 else None,
            "completion_tokens": seen,
            "output_token_logprobs": [[-0.5 * token, token, None] for token in shown],
            "prompt_tokens": 1,
            "cached_tokens": 0,
            "weight_version": "v",
        }
        text = "data: [DONE]\n\n"  # what a model says must not end the stream
        wire += b"data: " + orjson.dumps({"text": text, "output_ids": shown, "meta_info": meta}) + b"\n\n"
    wire += b"data: [DONE]\n\n"
    cuts = sorted(data.draw(st.lists(st.integers(0, len(wire)), max_size=8)))
    pieces = [wire[a:b] for a, b in zip([0, *cuts], [*cuts, len(wire)], strict=True)]
    params = SamplingParams(max_new_tokens=9)
    async with answering(pieces, chunked=data.draw(st.booleans())) as url:
        client = SGLangEngine(url)
        chunks = [chunk async for chunk in client.generate([1], params, rid="r", stream=True)]
        await client.close()
    assert [token for chunk in chunks for token in chunk.output_ids] == ids
    ends = set(itertools.accumulate(lengths))
    assert set(itertools.accumulate(len(chunk.output_ids) for chunk in chunks)) <= ends
    assert [chunk.finish is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert [lp for chunk in chunks for lp in chunk.logprobs] == [-0.5 * token for token in ids]


@pytest.mark.parametrize("second", [[11], [10, 11, 12, 13]], ids=["one lost", "one too many"])
async def test_lost_tokens_are_an_error(second: list[int]) -> None:
    def event(ids: list[int], total: int) -> bytes:
        meta = {
            "finish_reason": None,
            "completion_tokens": total,
            "output_token_logprobs": [[-1.0, token, None] for token in ids],
        }
        return b"data: " + orjson.dumps({"output_ids": ids, "meta_info": meta}) + b"\n\n"

    wire = event([10], 1) + event(second, 3)
    async with answering([wire]) as url:
        client = SGLangEngine(url)
        with pytest.raises(EngineError, match="lost tokens"):
            await collect(client)
        await client.close()
