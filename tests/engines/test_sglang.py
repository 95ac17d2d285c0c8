"""The clients against a real SGLang server on the CPU."""

import asyncio
import json
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.engines.fixtures import CONTEXT_LENGTH, END
from tests.engines.processes import eventually, family, running
from titogym.gateway.engines.base import Chunk, ContextLengthError, Finish, SamplingParams, VersionSpan
from titogym.gateway.engines.control import EngineControl, PauseMode
from titogym.gateway.engines.digests import Weight, differing_weights
from titogym.gateway.engines.launch import EngineProcess, answers
from titogym.gateway.engines.sglang import SGLangEngine

pytestmark = pytest.mark.engine

PROMPT = [300, 301, 302, 303, 304]


@pytest.fixture
async def client(sglang_server: EngineProcess) -> AsyncIterator[SGLangEngine]:
    client = SGLangEngine(sglang_server.url, timeout=60)
    yield client
    await client.close()


@pytest.fixture
def control(sglang_server: EngineProcess) -> Iterator[EngineControl]:
    with EngineControl(sglang_server.url, timeout=60) as control:
        yield control


async def sample(
    client: SGLangEngine, prompt: list[int] = PROMPT, *, stream: bool = False, rid: str = "", **params: Any
) -> tuple[list[int], list[float], Finish]:
    options = SamplingParams(**{"max_new_tokens": 24, "ignore_eos": True} | params)
    rid = rid or f"test-{time.monotonic_ns()}"
    chunks = [chunk async for chunk in client.generate(prompt, options, rid=rid, stream=stream)]
    return joined(chunks)


def joined(chunks: list[Chunk]) -> tuple[list[int], list[float], Finish]:
    ids = [token for chunk in chunks for token in chunk.output_ids]
    logprobs = [logprob for chunk in chunks for logprob in chunk.logprobs]
    finish = chunks[-1].finish
    assert finish is not None
    assert len(ids) == len(logprobs)
    return ids, logprobs, finish


@pytest.fixture(scope="module")
def reference(tiny_model: Path) -> Any:
    """transformers' float32 log-probs of `output` after `prompt` at a temperature."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)

    def logprobs(prompt: list[int], output: list[int], temperature: float) -> list[float]:
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1]
        scores = torch.log_softmax(logits / temperature, dim=-1)
        return [float(score) for score in scores[range(len(output)), output]]

    return logprobs


@pytest.mark.parametrize(
    ("params", "temperature"),
    [
        ({"temperature": 1.0}, 1.0),
        ({"temperature": 0.6}, 0.6),
        ({"temperature": 1.7}, 1.7),
        ({"temperature": 0.6, "top_p": 0.5}, 0.6),  # the filters do not show in the log-probs
        ({"temperature": 0.6, "top_k": 3, "min_p": 0.1}, 0.6),
        ({"temperature": 0.6, "top_k": 1 << 40}, 0.6),  # as it is, it would end the server
        ({"temperature": 0.0}, 1.0),
    ],
)
async def test_logprobs_are_at_the_sampling_temperature(
    client: SGLangEngine, reference: Any, params: dict[str, Any], temperature: float
) -> None:
    ids, logprobs, _ = await sample(client, stream=True, **params)
    assert logprobs == pytest.approx(reference(PROMPT, ids, temperature), abs=1e-4)


async def test_stream_and_whole_agree(client: SGLangEngine) -> None:
    whole = await sample(client, temperature=0.0)
    streamed = await sample(client, temperature=0.0, stream=True)
    assert streamed[0] == whole[0]
    assert streamed[1] == pytest.approx(whole[1], abs=1e-5)
    assert whole[2].reason == streamed[2].reason == "length"
    assert whole[2].prompt_tokens == len(PROMPT)
    assert streamed[2].cached_tokens > whole[2].cached_tokens or whole[2].cached_tokens == len(PROMPT) - 1


async def test_many_at_once(client: SGLangEngine, reference: Any) -> None:
    prompts = [[300 + i % 50, 400 + i, 301] for i in range(120)]
    results = await asyncio.gather(
        *(sample(client, prompt, stream=i % 2 == 0, max_new_tokens=6) for i, prompt in enumerate(prompts))
    )
    for prompt, (ids, logprobs, finish) in list(zip(prompts, results, strict=True))[::10]:
        assert len(ids) == 6
        assert finish.prompt_tokens == 3
        assert logprobs == pytest.approx(reference(prompt, ids, 1.0), abs=1e-4)


async def test_stop_token_is_part_of_the_output(client: SGLangEngine) -> None:
    greedy, _, _ = await sample(client, temperature=0.0)
    stop = greedy[3]
    expected = greedy[: greedy.index(stop) + 1]
    ids, _, finish = await sample(
        client, temperature=0.0, stop_token_ids=(stop,), ignore_eos=False, stream=True
    )
    assert ids == expected
    assert (finish.reason, finish.matched_stop) == ("stop", stop)


async def test_end_token_of_the_model_stops(client: SGLangEngine) -> None:
    schema = json.dumps({"type": "boolean"})
    ids, _, finish = await sample(client, json_schema=schema, ignore_eos=False, max_new_tokens=40)
    assert finish.reason == "stop"
    assert finish.matched_stop == ids[-1] == END


async def test_stop_string_keeps_its_tokens(client: SGLangEngine, tiny_model: Path) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(tiny_model / "tokenizer.json"))
    greedy, _, _ = await sample(client, temperature=0.0)
    text = tokenizer.decode(greedy[3:5], skip_special_tokens=False)
    ids, logprobs, finish = await sample(client, temperature=0.0, stop=(text,), stream=True)
    assert (finish.reason, finish.matched_stop) == ("stop", text)
    assert ids == greedy[: len(ids)]
    assert text in tokenizer.decode(ids, skip_special_tokens=False)
    assert len(logprobs) == len(ids)


async def test_json_schema(client: SGLangEngine, tiny_model: Path) -> None:
    from tokenizers import Tokenizer

    schema = {
        "type": "object",
        "properties": {"done": {"type": "boolean"}, "level": {"enum": ["low", "high"]}},
        "required": ["done", "level"],
        "additionalProperties": False,
    }
    # JSON may hold any white space, and a random model would go on with it for ever unless penalised.
    ids, logprobs, finish = await sample(
        client, json_schema=json.dumps(schema), ignore_eos=False, max_new_tokens=900, frequency_penalty=2.0
    )
    assert finish.reason == "stop"
    text = Tokenizer.from_file(str(tiny_model / "tokenizer.json")).decode(ids[:-1], skip_special_tokens=False)
    found = json.loads(text)
    assert isinstance(found["done"], bool)
    assert found["level"] in ("low", "high")
    assert max(logprobs) == 0.0  # where the grammar left one choice


@pytest.mark.parametrize("stream", [True, False])
async def test_too_long(client: SGLangEngine, stream: bool) -> None:
    limit = (await client.info()).context_length
    assert CONTEXT_LENGTH - 8 < limit <= CONTEXT_LENGTH
    for length, budget in ((limit - 4, 1), (limit + 50, 1), (5, CONTEXT_LENGTH)):
        with pytest.raises(ContextLengthError):
            await sample(client, [300] * length, max_new_tokens=budget, stream=stream)
    ids, _, finish = await sample(client, [300] * (limit - 5), max_new_tokens=5, stream=stream)
    assert len(ids) == 5
    assert finish.reason == "length"


async def test_turns_share_their_prefix(client: SGLangEngine) -> None:
    row = [500, 501, 502, 503]
    cached = -1
    for _ in range(4):
        ids, _, finish = await sample(client, row, max_new_tokens=8)
        assert finish.cached_tokens > cached
        assert finish.cached_tokens >= len(row) - 8 or cached == -1
        cached = finish.cached_tokens
        row = [*row, *ids, 504, 505]


async def test_closing_early_frees_the_engine(client: SGLangEngine, control: EngineControl) -> None:
    params = SamplingParams(max_new_tokens=4000, ignore_eos=True)
    async with aclosing(client.generate(PROMPT, params, rid="early", stream=True)) as chunks:
        async for _ in chunks:
            break
    # Refused when a request still runs after 5 s; left alone, this one would run for more than 10.
    await asyncio.to_thread(control.flush_cache)


async def test_abort_keeps_what_was_sampled(client: SGLangEngine, reference: Any) -> None:
    async def stop_soon() -> None:
        await asyncio.sleep(0.3)
        await client.abort("aborted")

    (ids, logprobs, finish), _ = await asyncio.gather(
        sample(client, rid="aborted", max_new_tokens=4000), stop_soon()
    )
    assert finish.reason == "abort"
    assert 0 < len(ids) < 4000
    assert logprobs == pytest.approx(reference(PROMPT, ids, 1.0), abs=1e-4)


@pytest.mark.parametrize(("mode", "retractions"), [("retract", 1), ("in_place", 0)])
async def test_generation_goes_on_after_a_pause(
    client: SGLangEngine, control: EngineControl, reference: Any, mode: PauseMode, retractions: int
) -> None:
    before = control.info().weight_version
    chunks: list[Chunk] = []
    paused = False
    params = SamplingParams(max_new_tokens=800, ignore_eos=True)
    async for chunk in client.generate(PROMPT, params, rid=f"pause-{mode}", stream=True):
        chunks.append(chunk)
        if not paused:
            await asyncio.to_thread(control.pause, mode)
            paused = True
            assert await client.healthy()
            await asyncio.to_thread(control.set_weight_version, "next")
            await asyncio.to_thread(control.resume)
    await asyncio.to_thread(control.set_weight_version, before)
    ids, logprobs, finish = joined(chunks)
    assert len(ids) == 800
    assert finish.meta["retractions"] == retractions
    assert logprobs == pytest.approx(reference(PROMPT, ids, 1.0), abs=1e-4)
    spans = finish.version_spans
    assert (spans[0].start, spans[-1].end) == (0, 800)
    assert all(a.end == b.start for a, b in pairwise(spans))


async def test_pause_in_abort_mode_ends_requests(client: SGLangEngine, control: EngineControl) -> None:
    def pause() -> None:
        time.sleep(0.3)
        control.pause("abort")
        control.resume()

    (ids, _, finish), _ = await asyncio.gather(sample(client, max_new_tokens=4000), asyncio.to_thread(pause))
    assert finish.reason == "abort"
    assert 0 < len(ids) < 4000


def test_every_weight_is_compared(control: EngineControl, tiny_model: Path) -> None:
    """Noise in every tensor shows, and after an update each equals the trainer's copy."""
    from safetensors.numpy import load_file

    def trainers_copy() -> list[Weight]:
        return [
            Weight(name, tensor.shape, tensor.tobytes())
            for name, tensor in load_file(tiny_model / "model.safetensors").items()
        ]

    version = control.info().weight_version
    held = control.weight_digests()
    assert differing_weights(held, trainers_copy()) == []
    control.pause()
    try:
        control.randomize_weights()
        assert differing_weights(control.weight_digests(), trainers_copy()) == sorted(held)
    finally:
        control.update_from_disk(str(tiny_model), version)
        control.resume()
    assert differing_weights(control.weight_digests(), trainers_copy()) == []


async def test_version_spans_after_an_update(
    client: SGLangEngine, control: EngineControl, tiny_model: Path
) -> None:
    before = control.info().weight_version

    def update() -> None:
        time.sleep(0.3)
        control.pause()
        control.update_from_disk(str(tiny_model), "updated")
        control.resume()

    (ids, _, finish), _ = await asyncio.gather(sample(client, max_new_tokens=800), asyncio.to_thread(update))
    await asyncio.to_thread(control.set_weight_version, before)
    old, new = finish.version_spans
    assert old == VersionSpan(0, new.start, before)
    assert new == VersionSpan(old.end, len(ids), "updated")
    assert 0 < old.end < 800


async def test_a_stream_costs_the_same_per_token(client: SGLangEngine) -> None:
    received = {}
    for length in (50, 400):
        body = {
            "input_ids": PROMPT,
            "stream": True,
            "return_logprob": True,
            "sampling_params": {"max_new_tokens": length, "ignore_eos": True, "skip_special_tokens": False},
        }
        async with (
            httpx.AsyncClient(timeout=60) as raw,
            raw.stream("POST", client.url + "/generate", json=body) as response,
        ):
            received[length] = sum([len(piece) async for piece in response.aiter_raw()])
    assert received[400] < 10 * received[50]


@pytest.fixture
def cli(tiny_model: Path, tmp_path: Path) -> Iterator["subprocess.Popen[str]"]:
    command = [sys.executable, "-m", "titogym", "engine", str(tiny_model), "--port", "0", "--device", "cpu"]
    process = subprocess.Popen(
        [*command, "--log", str(tmp_path / "log")], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    yield process
    process.kill()
    process.communicate()


@pytest.mark.parametrize("victim", ["launcher", "engine"])
def test_nothing_survives_a_kill(cli: "subprocess.Popen[str]", victim: str) -> None:
    """SIGKILL in mid-generation: no process stays, and the port is free."""
    assert cli.stdout is not None
    url = cli.stdout.readline().strip()
    processes = family(cli.pid)
    launcher, engine, *workers = processes
    assert len(workers) >= 2
    body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 4000, "ignore_eos": True}}
    failed: list[str] = []

    def request() -> None:
        try:
            httpx.post(url + "/generate", json=body, timeout=60)
        except httpx.HTTPError as error:
            failed.append(type(error).__name__)

    pending = threading.Thread(target=request)
    pending.start()
    time.sleep(0.5)
    {"launcher": launcher, "engine": engine}[victim].kill()
    assert eventually(lambda: not running(processes), timeout=20)
    pending.join(10)
    assert failed
    assert not answers(url)
    assert not any(
        connection.laddr.port == int(url.rsplit(":", 1)[1]) and connection.status == psutil.CONN_LISTEN
        for connection in psutil.net_connections("tcp")
    )
