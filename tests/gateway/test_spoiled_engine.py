"""Engines that answer nonsense: told as their failure, nothing committed, and the session goes on."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tests.gateway.conftest import Served
from tests.gateway.test_fuzz import junk, places, replaced
from tests.gateway.test_turns import USER, create, inspect
from titogym.gateway.app import create_app
from titogym.gateway.settings import GatewaySettings

EVENTS: list[Any] = [  # as SGLang answers: two tokens, and then the last one
    {
        "text": "",
        "output_ids": [40, 41],
        "meta_info": {
            "id": "x",
            "finish_reason": None,
            "prompt_tokens": 9,
            "weight_version": "1",
            "output_token_logprobs": [[-0.5, 40, None], [-0.25, 41, None]],
            "completion_tokens": 2,
            "cached_tokens": 0,
        },
    },
    {
        "text": "",
        "output_ids": [42],
        "meta_info": {
            "id": "x",
            "finish_reason": {"type": "length", "length": 3},
            "prompt_tokens": 9,
            "weight_version": "1",
            "weight_versions": [{"start": 0, "end": 3, "version": "1"}],
            "output_token_logprobs": [[-0.5, 42, None]],
            "completion_tokens": 3,
            "cached_tokens": 0,
            "num_retractions": 0,
            "e2e_latency": 0.1,
        },
    },
]
WHOLE = copy.deepcopy(EVENTS[1])
WHOLE["output_ids"] = [40, 41, 42]
WHOLE["meta_info"]["output_token_logprobs"] = [[-0.5, 40, None], [-0.25, 41, None], [-0.5, 42, None]]


class Liar:
    """An engine that says of itself what is true, and answers whatever it is told to."""

    def __init__(self) -> None:
        self.answer = b""
        self.status = 200
        self.app = Starlette(
            routes=[
                Route("/model_info", self._model),
                Route("/server_info", self._server),
                Route("/abort_request", self._model, methods=["POST"]),
                Route("/generate", self._generate, methods=["POST"]),
            ]
        )

    async def _model(self, request: Request) -> Response:
        return JSONResponse({"model_path": "liar", "weight_version": "1"})

    async def _server(self, request: Request) -> Response:
        return JSONResponse({"max_req_input_len": 4000, "tp_size": 1})

    async def _generate(self, request: Request) -> Response:
        await request.body()
        return Response(self.answer, self.status, media_type="text/event-stream")


@pytest.fixture(scope="module")
def stand(model_dirs: dict[str, Path]) -> Iterator[tuple[Liar, str]]:
    liar = Liar()
    engine = Served(liar.app)
    settings = GatewaySettings(
        engines=(f"http://127.0.0.1:{engine.port}",), model_dir=model_dirs["quickstart"]
    )
    gateway = Served(create_app(settings))
    yield liar, f"http://127.0.0.1:{gateway.port}"
    gateway.stop()
    engine.stop()


def stream_of(events: Any) -> bytes:
    told = events if isinstance(events, list) else [events]
    return b"".join(b"data: " + orjson.dumps(event) + b"\n\n" for event in told) + b"data: [DONE]\n\n"


@st.composite
def spoiled(draw: st.DrawFn) -> tuple[bool, bytes, int]:
    """Whether it is streamed, what the engine answers, and with which status."""
    stream = draw(st.booleans())
    good = EVENTS if stream else WHOLE
    bad = replaced(good, draw(st.sampled_from(places(good))), draw(junk))
    told = stream_of(bad) if stream else orjson.dumps(bad)
    if draw(st.booleans()):
        at = draw(st.integers(0, len(told)))
        told = told[:at] + draw(st.binary(max_size=6)) + told[at + draw(st.integers(0, 8)) :]
    return stream, told, draw(st.sampled_from([200, 200, 200, 200, 204, 400, 500]))


@settings(max_examples=60, suppress_health_check=list(HealthCheck))
@given(case=spoiled())
def test_nonsense_is_answered_and_what_is_committed_was_told(
    stand: tuple[Liar, str], case: tuple[bool, bytes, int]
) -> None:
    liar, url = stand
    stream, liar.answer, liar.status = case
    session = create(url)
    with httpx.Client(timeout=15) as http:
        body = {"messages": [USER], "stream": stream}
        answer = http.post(f"{session.base_url}/chat/completions", json=body)
        assert answer.status_code in (200, 400, 502, 503), answer.text
        ended = answer.status_code == 200 and (not stream or answer.content.endswith(b"data: [DONE]\n\n"))
        if answer.status_code == 200 and not ended:
            assert b'"error"' in answer.content
        report = inspect(url, session)
        assert report["turns"] == ended, (case, answer.content)
        assert report["errors"].get("internal_error") is None, answer.text
        liar.answer, liar.status = (stream_of(EVENTS) if stream else orjson.dumps(WHOLE)), 200
        again = http.post(f"{session.base_url}/chat/completions", json=body)
        assert again.status_code == 200, again.text
