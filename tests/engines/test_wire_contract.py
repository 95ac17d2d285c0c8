"""The scripted engine answers in the shape that SGLang does: both are held to the same assertions."""

from collections.abc import Iterator
from typing import Any

import httpx
import orjson
import pytest

from tests.doubles.scripted_engine import ScriptedEngine

PROMPT = [300, 301, 302, 303]


@pytest.fixture(params=["scripted", pytest.param("sglang", marks=pytest.mark.engine)])
def server(request: pytest.FixtureRequest) -> Iterator[httpx.Client]:
    if request.param == "sglang":
        url = request.getfixturevalue("sglang_server").url
        with httpx.Client(base_url=url, timeout=60) as client:
            yield client
    else:
        with (
            ScriptedEngine(lambda prompt, params: list(range(310, 900))) as engine,
            httpx.Client(base_url=engine.url, timeout=60) as client,
        ):
            yield client


def body(**changes: Any) -> dict[str, Any]:
    params = {"max_new_tokens": 6, "temperature": 1.0, "ignore_eos": True} | changes.pop("params", {})
    return {"input_ids": PROMPT, "sampling_params": params, "return_logprob": True} | changes


def events(response: httpx.Response) -> list[dict[str, Any]]:
    *lines, last, empty = response.text.split("\n\n")
    assert last == "data: [DONE]"
    assert empty == ""
    return [orjson.loads(line.removeprefix("data: ")) for line in lines]


def test_whole_answer(server: httpx.Client) -> None:
    answer = server.post("/generate", json=body(rid="whole", return_prompt_token_ids=True)).json()
    assert answer["prompt_token_ids"] == PROMPT
    assert len(answer["output_ids"]) == 6
    assert isinstance(answer["text"], str)
    meta = answer["meta_info"]
    assert meta["id"] == "whole"
    assert meta["finish_reason"] == {"type": "length", "length": 6}
    assert meta["prompt_tokens"] == 4
    assert meta["completion_tokens"] == 6
    assert 0 <= meta["cached_tokens"] < 4
    assert meta["weight_versions"] == [{"version": meta["weight_version"], "start": 0, "end": 6}]
    assert [token for _, token, text in meta["output_token_logprobs"]] == answer["output_ids"]
    assert all(logprob < 0 and text is None for logprob, _, text in meta["output_token_logprobs"])
    assert meta["num_retractions"] == 0
    assert meta["e2e_latency"] > 0


def test_incremental_stream(server: httpx.Client) -> None:
    response = server.post("/generate", json=body(stream=True))
    assert response.headers["content-type"].startswith("text/event-stream")
    seen = 0
    sent = events(response)
    for event in sent:
        meta = event["meta_info"]
        seen += len(event["output_ids"])
        assert meta["completion_tokens"] == seen
        assert [token for _, token, _ in meta["output_token_logprobs"]] == event["output_ids"]
    assert seen == 6
    assert len(sent) > 1
    assert all(event["meta_info"]["finish_reason"] is None for event in sent[:-1])
    assert "weight_versions" not in sent[0]["meta_info"]
    assert sent[-1]["meta_info"]["finish_reason"] == {"type": "length", "length": 6}
    assert sent[-1]["meta_info"]["weight_versions"][-1]["end"] == 6


def test_stop_token(server: httpx.Client) -> None:
    greedy = server.post("/generate", json=body(params={"temperature": 0.0})).json()["output_ids"]
    stop = greedy[2]
    first = greedy.index(stop)
    params = {"temperature": 0.0, "stop_token_ids": [stop], "ignore_eos": False}
    answer = server.post("/generate", json=body(params=params)).json()
    assert answer["output_ids"] == greedy[: first + 1]
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}


def test_prefix_is_cached(server: httpx.Client) -> None:
    first = server.post("/generate", json=body()).json()
    longer = [*PROMPT, *first["output_ids"], 320]
    again = server.post("/generate", json=body(input_ids=longer)).json()
    assert again["meta_info"]["cached_tokens"] >= len(longer) - 2


@pytest.mark.parametrize("stream", [True, False])
def test_refusals(server: httpx.Client, stream: bool) -> None:
    too_much = server.post("/generate", json=body(stream=stream, params={"max_new_tokens": 5000}))
    negative = server.post("/generate", json=body(stream=stream, params={"temperature": -1.0}))
    for refused, words in ((too_much, "context length"), (negative, "temperature")):
        if stream:
            (event,) = events(refused)
            assert event["error"]["code"] == 400
            assert words in event["error"]["message"]
        else:
            assert refused.status_code == 400
            assert words in refused.json()["error"]["message"]


def test_longest_prompt(server: httpx.Client) -> None:
    longest = server.get("/server_info").json()["max_req_input_len"]
    params = {"max_new_tokens": 4}
    refused = server.post("/generate", json=body(input_ids=[300] * longest, params=params))
    assert refused.status_code == 400
    assert "maximum allowed length" in refused.json()["error"]["message"]
    (event,) = events(
        server.post("/generate", json=body(input_ids=[300] * longest, params=params, stream=True))
    )
    assert event["meta_info"]["finish_reason"]["type"] == "abort"
    assert event["meta_info"]["finish_reason"]["status_code"] == 400
    most = {"max_new_tokens": 7}
    taken = server.post("/generate", json=body(input_ids=[300] * (longest - 1), params=most)).json()
    assert taken["meta_info"]["finish_reason"] == {"type": "length", "length": 5}


def test_model_and_server_info(server: httpx.Client) -> None:
    model = server.get("/model_info").json()
    assert model.keys() >= {"model_path", "weight_version"}
    info = server.get("/server_info").json()
    assert info.keys() >= {"max_req_input_len", "max_total_num_tokens", "tp_size", "version"}
    assert info["incremental_streaming_output"] is True


def test_version_is_set_and_reported(server: httpx.Client) -> None:
    before = server.get("/model_info").json()["weight_version"]
    for version in ("v-test", before):
        wire = {"new_version": version, "abort_all_requests": False}
        assert server.post("/update_weight_version", json=wire).json()["success"]
        assert server.get("/model_info").json()["weight_version"] == version


def test_abort_of_an_unknown_request_is_fine(server: httpx.Client) -> None:
    response = server.post("/abort_request", json={"rid": "nobody"})
    assert response.status_code == 200
    assert response.content == b""


def test_weight_update_needs_its_bracket(server: httpx.Client) -> None:
    wire = {"names": ["x"], "dtypes": ["float32"], "shapes": [[1]], "group_name": "g"}
    assert server.post("/update_weights_from_distributed", json=wire).status_code == 400
    assert server.post("/end_weight_update", json={}).status_code == 400
    assert server.post("/begin_weight_update", json={}).status_code == 200
    again = server.post("/begin_weight_update", json={})
    assert again.status_code == 400
    assert "already open" in again.json()["message"]
    assert server.post("/end_weight_update", json={}).status_code == 200
