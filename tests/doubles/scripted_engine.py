"""An HTTP server that speaks SGLang's native wire format with scripted outputs instead of a model.

It runs in a thread of its own, so asynchronous and synchronous tests use it alike:

    with ScriptedEngine(lambda prompt, params: [7, 8, 9]) as engine:
        httpx.post(engine.url + "/generate", json=...)

    async with ScriptedEngine(lambda prompt, params: "hi<|im_end|>", tokenizer=tokenizer) as engine:
        ...

What it answers has the shape that SGLang 0.5.23 answers; `tests/engines/test_wire_contract.py` holds
both to the same assertions.
"""

import asyncio
import base64
import socket
import struct
import threading
import time
import uuid
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import orjson
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

Script = Callable[[list[int], dict[str, Any]], "Sequence[int] | str"]


class TextTokenizer(Protocol):
    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...


@dataclass(frozen=True)
class Fault:
    """What goes wrong with one `/generate` call, after `after_tokens` tokens.

    - `error`: before the first token an HTTP `status`; later an error event in the stream.
    - `drop`: the connection closes without an end.
    - `hang`: nothing more is sent.
    - `null_logprobs`: the tokens arrive, their log-probs are null.
    - `abort`: the engine ends the request itself (`finish_reason.type` "abort") with `status`.
    """

    kind: Literal["error", "drop", "hang", "null_logprobs", "abort"]
    after_tokens: int = 0
    status: int = 500
    message: str = "scripted failure"


class _Dropped(Exception):
    """Makes uvicorn close the connection in mid-response."""


@dataclass
class Generation:
    """One request in flight."""

    rid: str
    prompt: list[int]
    cached: int
    output: list[int] = field(default_factory=list)
    versions: list[str] = field(default_factory=list)
    aborted: bool = False
    retractions: int = 0


class ScriptedEngine:
    """The server. Attributes may be changed while it runs; they apply to the next request or token.

    `script(input_ids, sampling_params)` gives the continuation as token ids, or as text when a `tokenizer`
    is given. Generation ends at a stop token (`stop_token_ids`, or `eos_ids` without `ignore_eos`), at a
    stop string, at `max_new_tokens`, or where the script's ids run out: that counts as a length stop.
    """

    def __init__(
        self,
        script: Script,
        *,
        tokenizer: TextTokenizer | None = None,
        incremental: bool = True,
        token_latency: float = 0.0,
        tokens_per_chunk: int = 1,
        context_length: int = 4096,
        eos_ids: Sequence[int] = (),
        logprob: Callable[[int, int], float] = lambda position, token: -0.25 - (token % 7) / 16,
        model_path: str = "scripted",
        experts: tuple[int, int, int] | None = None,
        port: int = 0,
    ) -> None:
        self.script = script
        self.tokenizer = tokenizer
        self.incremental = incremental
        self.token_latency = token_latency  # seconds per token
        self.tokens_per_chunk = tokens_per_chunk
        self.context_length = context_length
        self.eos_ids = frozenset(eos_ids)
        self.logprob = logprob
        self.model_path = model_path
        self.seeded = True
        self.experts = experts  # layers, top-k and number of experts, where it returns routes
        self.data_parallel = 1  # replicas that it says it has
        self.weight_version = "default"
        self.faults: list[Fault] = []  # consumed by `/generate` calls in order
        self.requests: list[dict[str, Any]] = []  # bodies of `/generate`, in order of arrival
        self.calls: list[tuple[str, dict[str, Any]]] = []  # (path, body) of every other POST
        self.aborted: list[str] = []  # rids ended by /abort_request, a pause, or a client that went away
        self.most_in_flight = 0
        self._in_flight: dict[str, Generation] = {}
        self._served: deque[list[int]] = deque(maxlen=256)  # rows in the prefix cache, which is finite
        self._paused = False
        self._updating = False
        self._port = port
        self._thread: threading.Thread | None = None
        self._server: uvicorn.Server | None = None
        self.url = ""

    # --- life -------------------------------------------------------------------------------------

    def start(self) -> None:
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", self._port))
        listener.listen(1024)
        self._port = listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self._port}"
        config = uvicorn.Config(
            self._app(), log_level="critical", lifespan="off", timeout_graceful_shutdown=0
        )
        server = self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=lambda: asyncio.run(server.serve([listener])), daemon=True)
        self._thread.start()
        while not server.started:
            time.sleep(0.005)

    def stop(self) -> None:
        """Close the port and every connection. `start` brings it back on the same port."""
        if self._server is not None and self._thread is not None:
            self._server.should_exit = self._server.force_exit = True
            self._thread.join(10)
            self._server = self._thread = None

    def __enter__(self) -> "ScriptedEngine":
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    async def __aenter__(self) -> "ScriptedEngine":
        self.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await asyncio.to_thread(self.stop)

    @property
    def in_flight(self) -> int:
        return len(self._in_flight)

    # --- generation -------------------------------------------------------------------------------

    async def _generate(self, request: Request) -> Response:
        body = orjson.loads(await request.body())
        self.requests.append(body)
        prompt: list[int] = body["input_ids"]
        params: dict[str, Any] = body.get("sampling_params") or {}
        stream = bool(body.get("stream"))
        fault = self.faults.pop(0) if self.faults else None
        if fault and fault.kind == "error" and fault.after_tokens == 0:
            return JSONResponse({"error": {"message": fault.message}}, fault.status)
        refusal = self._refusal(prompt, params)
        if refusal and not stream:
            return JSONResponse({"error": {"message": refusal}}, 400)
        if refusal is None and len(prompt) >= self.longest_prompt:
            fault = Fault("abort", status=400, message=self._too_long(prompt))
        events = self._refused(refusal) if refusal else self._events(body, prompt, params, fault)
        if stream:
            return StreamingResponse(self._sse(events), media_type="text/event-stream")
        if fault and fault.kind == "drop":
            return StreamingResponse(self._drop(events), headers={"content-length": "1000000"})
        answer = asyncio.ensure_future(_last(events))
        while not (await asyncio.wait({answer}, timeout=0.02))[0]:
            if await request.is_disconnected():
                answer.cancel()
        try:
            last = answer.result()
        except asyncio.CancelledError:
            return Response(status_code=499)
        if "error" in last:
            return JSONResponse({"error": {"message": last["error"]["message"]}}, last["error"]["code"])
        finish = last["meta_info"]["finish_reason"]
        if finish.get("status_code"):
            return JSONResponse({"error": {"message": finish["message"]}}, finish["status_code"])
        return Response(orjson.dumps(last), media_type="application/json")

    def _refusal(self, prompt: list[int], params: dict[str, Any]) -> str | None:
        if not prompt:
            return "input_ids cannot be empty."
        wanted = params.get("max_new_tokens", 128)
        if len(prompt) + wanted > self.context_length:
            return (
                f"Requested token count exceeds the model's maximum context length of {self.context_length} "
                f"tokens. You requested a total of {len(prompt) + wanted} tokens: {len(prompt)} tokens from "
                f"the input messages and {wanted} tokens for the completion."
            )
        if params.get("temperature", 1.0) < 0:
            return f"temperature must be a non-negative finite number, got {params['temperature']}."
        return None

    @property
    def longest_prompt(self) -> int:
        return self.context_length - 6

    def _too_long(self, prompt: list[int]) -> str:
        return (
            f"Input length ({len(prompt)} tokens) exceeds the maximum allowed length "
            f"({self.longest_prompt} tokens). Use a shorter input or enable --allow-auto-truncate."
        )

    async def _refused(self, message: str) -> AsyncIterator[dict[str, Any]]:
        error = {"message": message, "type": "invalid_request_error", "code": 400, "retryable": False}
        yield {"error": error}

    async def _sse(self, events: AsyncIterator[dict[str, Any]]) -> AsyncIterator[bytes]:
        async for event in events:
            yield b"data: " + orjson.dumps(event) + b"\n\n"
        yield b"data: [DONE]\n\n"

    async def _drop(self, events: AsyncIterator[dict[str, Any]]) -> AsyncIterator[bytes]:
        async for _ in events:
            pass
        raise _Dropped
        yield b""

    async def _events(
        self, body: dict[str, Any], prompt: list[int], params: dict[str, Any], fault: Fault | None
    ) -> AsyncIterator[dict[str, Any]]:
        """The responses of one generation; without streaming only the last counts."""
        generation = Generation(body.get("rid") or uuid.uuid4().hex, prompt, self._cached(prompt))
        self._in_flight[generation.rid] = generation
        self.most_in_flight = max(self.most_in_flight, len(self._in_flight))
        started = time.monotonic()
        stream = bool(body.get("stream"))
        sent = 0
        finish: dict[str, Any] | None = None
        try:
            script = self.script(list(prompt), dict(params))
            if isinstance(script, str):
                assert self.tokenizer is not None, "a script that returns text needs a tokenizer"
                script = self.tokenizer.encode(script)
            await self._unpaused(generation)
            limit = min(params.get("max_new_tokens", 128), self.context_length - len(prompt) - 2)
            if fault and fault.kind == "abort" and fault.after_tokens == 0:
                limit = 0  # refused at admission: SGLang then answers with one token that it never sampled
                generation.output, generation.versions = [0], [self.weight_version]
                finish = _abort(fault.message, fault.status)
            for token in script[:limit]:
                count = len(generation.output)
                if fault and count >= fault.after_tokens and fault.kind in ("error", "drop", "hang", "abort"):
                    if fault.kind == "error":
                        yield {"error": {"message": fault.message, "code": fault.status, "type": "internal"}}
                        return
                    if fault.kind == "drop":
                        raise _Dropped
                    if fault.kind == "hang":
                        await asyncio.sleep(3600)
                    finish = _abort(fault.message, fault.status)
                    break
                if self.token_latency:
                    await asyncio.sleep(self.token_latency)
                await self._unpaused(generation)
                if generation.aborted:
                    finish = _abort("Aborted", None)
                    break
                generation.output.append(token)
                generation.versions.append(self.weight_version)
                finish = self._stopped(generation.output, params)
                if finish:
                    break
                if (
                    stream
                    and len(generation.output) - sent >= self.tokens_per_chunk
                    and len(generation.output) < min(limit, len(script))
                ):
                    yield self._answer(body, generation, None, sent, fault, started)
                    sent = len(generation.output)
            finish = finish or {"type": "length", "length": len(generation.output)}
            self._served.append([*prompt, *generation.output])
            yield self._answer(body, generation, finish, sent, fault, started)
        finally:
            if finish is None and (fault is None or fault.kind == "hang"):
                self.aborted.append(generation.rid)
            self._in_flight.pop(generation.rid, None)

    def _answer(
        self,
        body: dict[str, Any],
        generation: Generation,
        finish: dict[str, Any] | None,
        sent: int,
        fault: Fault | None,
        started: float,
    ) -> dict[str, Any]:
        output = generation.output
        first = sent if body.get("stream") and self.incremental else 0
        meta: dict[str, Any] = {
            "id": generation.rid,
            "finish_reason": finish,
            "prompt_tokens": len(generation.prompt),
            "weight_version": generation.versions[-1] if generation.versions else self.weight_version,
            "num_retractions": generation.retractions,
        }
        if body.get("return_logprob"):
            hidden = fault is not None and fault.kind == "null_logprobs"
            meta["input_token_logprobs"] = []
            meta["output_token_logprobs"] = [
                [
                    None if hidden and i >= fault.after_tokens else self.logprob(i, output[i]),  # type: ignore[union-attr]
                    output[i],
                    None,
                ]
                for i in range(first, len(output))
            ]
            meta["output_token_logprobs_length"] = len(output)
        meta["completion_tokens"] = len(output)
        meta["cached_tokens"] = generation.cached
        if finish:
            meta["weight_versions"] = _spans(generation.versions, self.weight_version)
            meta["e2e_latency"] = time.monotonic() - started
            if self.experts and body.get("return_routed_experts"):
                meta["routed_experts"] = self._routed(generation, body.get("routed_experts_start_len", 0))
        meta["dp_rank"] = None
        text = self.tokenizer.decode(output[first:]) if self.tokenizer else ""
        answer = {"text": text, "output_ids": output[first:], "meta_info": meta}
        if body.get("return_prompt_token_ids"):
            answer["prompt_token_ids"] = generation.prompt
        return answer

    def _routed(self, generation: Generation, start: int) -> str:
        """Base64 of int32 `[prompt + output - 1 - start, layers, top_k]`."""
        row = [*generation.prompt, *generation.output]
        numbers = [
            number
            for position in range(start, len(row) - 1)
            for number in self.routes(position, row[position], generation.retractions)
        ]
        return base64.b64encode(struct.pack(f"<{len(numbers)}i", *numbers)).decode()

    def routes(self, position: int, token: int, passes: int = 0) -> list[int]:
        """A token's experts, layer by layer; other ones in every pass through the model."""
        assert self.experts
        layers, top_k, experts = self.experts
        return [(31 * position + token + 7 * n + 101 * passes) % experts for n in range(layers * top_k)]

    def _stopped(self, output: list[int], params: dict[str, Any]) -> dict[str, Any] | None:
        stops = set(params.get("stop_token_ids") or ())
        if not params.get("ignore_eos"):
            stops |= self.eos_ids
            if output[-1] in stops:
                return {"type": "stop", "matched": output[-1]}
        strings = params.get("stop") or ()
        if strings and self.tokenizer is not None:
            text = self.tokenizer.decode(output)
            for stop in [strings] if isinstance(strings, str) else strings:
                if stop in text:
                    return {"type": "stop", "matched": stop}
        return None

    async def _unpaused(self, generation: Generation) -> None:
        while self._paused and not generation.aborted:  # noqa: ASYNC110 - other threads flip it
            await asyncio.sleep(0.005)

    def _cached(self, prompt: list[int]) -> int:
        """Tokens of `prompt` that an earlier row shares; the last one is always computed afresh."""
        longest = max((_shared(row, prompt) for row in self._served), default=0)
        return min(longest, len(prompt) - 1)

    # --- control ----------------------------------------------------------------------------------

    def _app(self) -> Starlette:
        async def model_info(request: Request) -> Response:
            return JSONResponse(
                {"model_path": self.model_path, "is_generation": True, "weight_version": self.weight_version}
            )

        async def server_info(request: Request) -> Response:
            return JSONResponse(
                {
                    "model_path": self.model_path,
                    "context_length": self.context_length,
                    "max_total_num_tokens": 16 * self.context_length,
                    "max_req_input_len": self.longest_prompt,
                    "tp_size": 1,
                    "dp_size": self.data_parallel,
                    "enable_deterministic_inference": self.seeded,
                    "enable_return_routed_experts": self.experts is not None,
                    "incremental_streaming_output": self.incremental,
                    "version": "0.5.23",
                }
            )

        async def health(request: Request) -> Response:
            return Response()

        def post(path: str, handle: Callable[[dict[str, Any]], Awaitable[Response]]) -> Route:
            async def endpoint(request: Request) -> Response:
                raw = await request.body()
                body = orjson.loads(raw) if raw else {}
                self.calls.append((path, body))
                return await handle(body)

            return Route(path, endpoint, methods=["POST"])

        async def abort(body: dict[str, Any]) -> Response:
            for generation in list(self._in_flight.values()):
                if body.get("abort_all") or generation.rid == body.get("rid"):
                    self._abort(generation)
            return Response()

        async def pause(body: dict[str, Any]) -> Response:
            self._paused = True
            for generation in list(self._in_flight.values()):
                if body.get("mode", "abort") == "abort":
                    self._abort(generation)
                elif body["mode"] == "retract":
                    generation.retractions += 1
            return JSONResponse({"message": "Generation paused successfully.", "status": "ok"})

        async def resume(body: dict[str, Any]) -> Response:
            self._paused = False
            return JSONResponse({"message": "Generation continued successfully.", "status": "ok"})

        async def flush(body: dict[str, Any]) -> Response:
            if self._in_flight and not self._paused:
                return Response("Cache flush failed.", 400)
            self._served.clear()
            return Response("Cache flushed.")

        async def set_version(body: dict[str, Any]) -> Response:
            self.weight_version = body["new_version"]
            return JSONResponse({"success": True, "message": "", "new_version": self.weight_version})

        async def begin(body: dict[str, Any]) -> Response:
            if self._updating:
                return _result(
                    False, "a weight-update session is already open; call end_weight_update() first"
                )
            self._updating = True
            return _result(True, "Success")

        async def end(body: dict[str, Any]) -> Response:
            if not self._updating:
                return _result(False, "no weight-update session is open; call begin_weight_update() first")
            self._updating = False
            return _result(True, "Success")

        async def receive(body: dict[str, Any]) -> Response:
            if not self._updating:
                return _result(
                    False,
                    "update_weights_from_distributed must run between begin_weight_update() and "
                    "end_weight_update()",
                )
            return await weights(body)

        async def weights(body: dict[str, Any]) -> Response:
            if body.get("weight_version"):
                self.weight_version = body["weight_version"]
            if body.get("flush_cache"):
                self._served.clear()
            return _result(True, "Success")

        return Starlette(
            routes=[
                Route("/generate", self._generate, methods=["POST"]),
                Route("/model_info", model_info),
                Route("/server_info", server_info),
                Route("/get_server_info", server_info),
                Route("/health", health),
                post("/abort_request", abort),
                post("/pause_generation", pause),
                post("/continue_generation", resume),
                post("/flush_cache", flush),
                post("/update_weight_version", set_version),
                post("/update_weights_from_disk", weights),
                post("/init_weights_update_group", weights),
                post("/destroy_weights_update_group", weights),
                post("/begin_weight_update", begin),
                post("/end_weight_update", end),
                post("/update_weights_from_distributed", receive),
            ]
        )

    def _abort(self, generation: Generation) -> None:
        generation.aborted = True
        self.aborted.append(generation.rid)


def _result(success: bool, message: str) -> Response:
    return JSONResponse({"success": success, "message": message}, 200 if success else 400)


def _shared(row: list[int], prompt: list[int]) -> int:
    return next(
        (i for i, (a, b) in enumerate(zip(row, prompt, strict=False)) if a != b), min(len(row), len(prompt))
    )


async def _last(events: AsyncIterator[dict[str, Any]]) -> dict[str, Any]:
    return [event async for event in events][-1]


def _abort(message: str, status: int | None) -> dict[str, Any]:
    return {"type": "abort", "message": message, "status_code": status, "err_type": None}


def _spans(versions: list[str], current: str) -> list[dict[str, Any]]:
    spans: list[dict[str, Any]] = []
    for i, version in enumerate(versions):
        if spans and spans[-1]["version"] == version:
            spans[-1]["end"] = i + 1
        else:
            spans.append({"version": version, "start": i, "end": i + 1})
    return spans or [{"version": current, "start": 0, "end": 0}]
