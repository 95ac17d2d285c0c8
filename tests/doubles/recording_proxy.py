"""Stands between the gateway and a real engine, and writes down what passes: an independent witness."""

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import httpx
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route


@dataclass
class Exchange:
    """One `/generate` as the engine saw it."""

    input_ids: list[int]
    output_ids: list[int] = field(default_factory=list)
    logprobs: list[list[Any]] = field(default_factory=list)  # [log-prob, token id, text]
    prompt_tokens: int = -1
    completion_tokens: int = -1
    cached_tokens: int = -1

    def hear(self, answer: dict[str, Any]) -> None:
        meta = answer["meta_info"]
        self.output_ids += answer["output_ids"]
        self.logprobs += meta["output_token_logprobs"]
        self.prompt_tokens = meta["prompt_tokens"]
        self.completion_tokens = meta["completion_tokens"]
        self.cached_tokens = meta["cached_tokens"]


class RecordingProxy:
    """An ASGI application that forwards everything to `target`. `exchanges` are in order of arrival.

    The engine must stream incrementally (each event carries new tokens only).
    """

    def __init__(self, target: str) -> None:
        self.exchanges: list[Exchange] = []
        # No kept connection: the engine may close one at the moment that we use it again.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        self._client = httpx.AsyncClient(base_url=target, timeout=120, limits=limits)
        self.app = Starlette(
            routes=[
                Route("/generate", self._generate, methods=["POST"]),
                Route("/{path:path}", self._forward, methods=["GET", "POST"]),
            ]
        )

    async def _forward(self, request: Request) -> Response:
        answer = await self._client.request(request.method, request.url.path, content=await request.body())
        return Response(answer.content, answer.status_code, media_type=answer.headers.get("content-type"))

    async def _generate(self, request: Request) -> Response:
        body = await request.json()
        exchange = Exchange(body["input_ids"])
        self.exchanges.append(exchange)
        if not body.get("stream"):
            answer = await self._client.post("/generate", json=body)
            exchange.hear(answer.json())
            return Response(answer.content, answer.status_code, media_type="application/json")

        async def relay() -> AsyncIterator[bytes]:
            async with self._client.stream("POST", "/generate", json=body) as answer:
                async for line in answer.aiter_lines():
                    if line.startswith("data: {"):
                        exchange.hear(json.loads(line.removeprefix("data: ")))
                    yield line.encode() + b"\n"

        return StreamingResponse(relay(), media_type="text/event-stream")
