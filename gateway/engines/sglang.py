"""Client of SGLang's native `/generate`: token ids in, token ids and their log-probs out.

What the log-probs are (SGLang 0.5.23, `srt/layers/sampler.py`): `log_softmax(logits / temperature)` after
penalties, logit bias and grammar masks, and before the top-p, top-k and min-p filters. So they are those of
the sampling distribution whenever none of these filters is on. With a filter the token was drawn from a
narrower distribution than the number says; a trainer that recomputes log-probs needs the unfiltered number.
Greedy decoding (temperature 0) reports log-probs at temperature 1.
"""

import asyncio
import base64
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from dataclasses import replace
from hashlib import blake2b
from typing import Any

import orjson

from titogym.gateway.engines.base import (
    Chunk,
    ContextLengthError,
    EngineError,
    EngineInfo,
    Finish,
    SamplingParams,
    VersionSpan,
    ids_json,
)
from titogym.gateway.engines.http import HttpClient, HttpError
from titogym.gateway.engines.routers import READY, ROUTING_KEY, WORKERS, worker_urls
from titogym.gateway.engines.wire import engine_info, error_message

_MOST_TOP_K = (1 << 31) - 1  # SGLang makes it an int32: one request with more ends the whole server


class SGLangEngine:
    """One SGLang server, or one of SGLang's routers (see `routers`).

    `timeout` is how long it may stay silent within a request, seconds.
    """

    def __init__(self, url: str, *, timeout: float = 900.0) -> None:
        self.url = url.rstrip("/")
        # Idle connections go well before the server closes them (SGLang: after 5 s).
        self._client = HttpClient(self.url, timeout=timeout, keep_alive=2.0)
        self._server_info: dict[str, Any] | None = None

    async def generate(
        self,
        input_ids: Sequence[int],
        params: SamplingParams,
        *,
        rid: str,
        stream: bool,
        routes_from: int | None = None,
        affinity: str = "",
    ) -> AsyncGenerator[Chunk]:
        """Sample a continuation of `input_ids`; see `base.Engine.generate`.

        Raises `ContextLengthError` when the engine finds prompt or budget too long, and `EngineError` when
        it cannot be reached, refuses, fails, or answers tokens without log-probs. Tokens that were yielded
        before an error were really sampled.
        """
        body = orjson.dumps(
            {
                "input_ids": orjson.Fragment(b"[" + ids_json(input_ids) + b"]"),
                "sampling_params": _sampling_params(params),
                "return_logprob": True,
                "stream": stream,
                "rid": rid,
                **self._options(routes_from, affinity),
            }
        )
        headers = {ROUTING_KEY: affinity} if affinity else {}
        finished = False
        try:
            async with self._client.stream("POST", "/generate", body, headers=headers) as (status, pieces):
                if status != 200:
                    raise _refusal(error_message(await _all(pieces)), status)
                seen, version = 0, None
                async for events in _events(pieces) if stream else _whole(pieces):
                    for chunk in _chunks(events, seen, version):
                        seen, version = seen + len(chunk.output_ids), chunk.version
                        finished = chunk.finish is not None
                        yield chunk
                        if finished:
                            await _drain(pieces)
                            return
                raise EngineError("the engine closed the stream before the generation was complete")
        except (HttpError, orjson.JSONDecodeError) as error:
            raise EngineError(f"{self.url}: {error}") from error
        except EngineError:
            finished = True  # on the engine's side
            raise
        finally:
            if not finished:
                # The caller went away: not only does nobody read on, the engine should stop too. A shield,
                # because we may be here on account of a cancellation that is still going on.
                with contextlib.suppress(EngineError):
                    await asyncio.shield(self.abort(rid))

    def _options(self, routes_from: int | None, affinity: str) -> dict[str, Any]:
        options: dict[str, Any] = {}
        if routes_from is not None:
            options |= {"return_routed_experts": True, "routed_experts_start_len": routes_from}
        replicas = (self._server_info or {}).get("dp_size") or 1
        if affinity and replicas > 1:
            digest = blake2b(affinity.encode(), digest_size=8).digest()
            options["routed_dp_rank"] = int.from_bytes(digest) % replicas
        return options

    async def abort(self, rid: str) -> None:
        """End request `rid`: it finishes with what it has and reason "abort". Unknown ids are ignored."""
        await self._request("POST", "/abort_request", {"rid": rid}, timeout=5.0)

    async def info(self) -> EngineInfo:
        try:
            if self._server_info is None:  # does not change while the server runs
                self._server_info = await self._request("GET", "/server_info")
            return engine_info(await self._request("GET", "/model_info"), self._server_info)
        except EngineError as error:
            if error.status != 404:
                raise
        return await self._workers_info()

    async def _workers_info(self) -> EngineInfo:
        """What the workers of a router say, and the context length that all of them take."""
        workers = [SGLangEngine(url) for url in worker_urls(await self._request("GET", WORKERS))]
        try:
            infos = await asyncio.gather(*(worker.info() for worker in workers))
        finally:
            for worker in workers:
                await worker.close()
        return replace(infos[0], context_length=min(info.context_length for info in infos))

    async def healthy(self) -> bool:
        """Whether the server answers.

        `/model_info` and not `/health`: the latter generates a token, so that it fails while generation is
        paused for new weights, and takes a second. A server whose workers die ends itself.
        """
        try:
            await self._request("GET", "/model_info", timeout=5.0)
        except EngineError as error:
            return error.status == 404 and await self._router_healthy()
        return True

    async def _router_healthy(self) -> bool:
        with contextlib.suppress(HttpError):
            status, _ = await self._client.request("GET", READY, timeout=5.0)
            return status == 200
        return False

    async def close(self) -> None:
        await self._client.close()

    async def _request(
        self, method: str, path: str, body: dict[str, Any] | None = None, timeout: float = 60.0
    ) -> Any:
        try:
            sent = b"" if body is None else orjson.dumps(body)
            status, content = await self._client.request(method, path, sent, timeout=timeout)
        except HttpError as error:
            raise EngineError(f"{self.url}{path}: {error}") from error
        if status != 200:
            raise EngineError(f"{path}: {error_message(content)}", status)
        return orjson.loads(content) if content else None


def _sampling_params(params: SamplingParams) -> dict[str, Any]:
    """Every default that a model's own generation_config could change is said explicitly."""
    wire: dict[str, Any] = {
        "max_new_tokens": params.max_new_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": min(params.top_k, _MOST_TOP_K),
        "min_p": params.min_p,
        "frequency_penalty": params.frequency_penalty,
        "presence_penalty": params.presence_penalty,
        "ignore_eos": params.ignore_eos,
        "no_stop_trim": True,
        "skip_special_tokens": False,
    }
    if params.stop:
        wire["stop"] = list(params.stop)
    if params.stop_token_ids:
        wire["stop_token_ids"] = list(params.stop_token_ids)
    if params.seed is not None:
        wire["sampling_seed"] = params.seed
    if params.json_schema is not None:
        wire["json_schema"] = params.json_schema
    if params.structural_tag is not None:
        wire["structural_tag"] = params.structural_tag
    return wire


async def _events(pieces: AsyncIterator[bytes]) -> AsyncIterator[list[bytes]]:
    """The JSON of a server-sent event stream's events up to `[DONE]`, those together that came together."""
    buffer = bytearray()
    async for piece in pieces:
        searched = max(len(buffer) - 1, 0)
        buffer += piece
        end = buffer.rfind(b"\n\n", searched)
        if end < 0:
            continue
        events = [event.removeprefix(b"data: ") for event in bytes(buffer[:end]).split(b"\n\n")]
        del buffer[: end + 2]
        if b"[DONE]" in events:
            yield events[: events.index(b"[DONE]")]
            return
        yield events


async def _whole(pieces: AsyncIterator[bytes]) -> AsyncIterator[list[bytes]]:
    yield [await _all(pieces)]


async def _all(pieces: AsyncIterator[bytes]) -> bytes:
    return b"".join([piece async for piece in pieces])


async def _drain(pieces: AsyncIterator[bytes]) -> None:
    """Read what stands behind the last tokens, so that the connection can be used again."""
    with contextlib.suppress(HttpError, TimeoutError):
        async with asyncio.timeout(1.0):
            async for _ in pieces:
                pass


def _chunks(events: list[bytes], seen: int, version: str | None) -> Iterator[Chunk]:
    """What events that came together add to the `seen` tokens before them, the last of weights `version`.

    They are joined, since every chunk is parsed and sent on its own; but where the weights change, the first
    chunk of the new ones stays alone: its tokens may be of both.
    """
    joined: Chunk | None = None
    alone = False
    try:
        for event in events:
            chunk = _chunk(orjson.loads(event), seen)
            seen += len(chunk.output_ids)
            if joined is not None and (alone or chunk.version != joined.version):
                yield joined
                joined = None
            if joined is None:
                joined, alone = chunk, version not in (None, chunk.version)
            else:
                joined.output_ids.extend(chunk.output_ids)
                joined.logprobs.extend(chunk.logprobs)
                joined = replace(joined, finish=chunk.finish)
            version = chunk.version
    except (EngineError, orjson.JSONDecodeError):
        if joined is not None:
            yield joined  # it was really sampled
        raise
    if joined is not None:
        yield joined


def _chunk(event: dict[str, Any], seen: int) -> Chunk:
    """What `event` adds to the `seen` tokens before it: servers stream only new tokens, or all so far."""
    if "error" in event:
        error = event["error"]
        raise _refusal(str(error.get("message", error)), error.get("code"))
    meta = event["meta_info"]
    reason = meta["finish_reason"]
    if reason is not None and reason.get("status_code"):
        # A refusal in the shape of a generation; its one token was never sampled.
        raise _refusal(reason["message"], reason["status_code"])
    total = meta["completion_tokens"]
    new = total - seen
    ids = event["output_ids"]
    if len(ids) not in (new, total) or new < 0:
        raise EngineError(f"the engine lost tokens: {seen} before, {len(ids)} sent, {total} in all")
    ids = ids[len(ids) - new :]
    scored = meta.get("output_token_logprobs") or []
    scored = scored[len(scored) - new :] if new <= len(scored) else []
    if [token for _, token, *_ in scored] != ids or any(logprob is None for logprob, *_ in scored):
        raise EngineError("the engine gave tokens without log-probs")
    version = str(meta.get("weight_version") or "")
    return Chunk(ids, [lp for lp, *_ in scored], version, _finish(meta, total) if reason else None)


def _finish(meta: dict[str, Any], total: int) -> Finish:
    reason = meta["finish_reason"]
    spans = meta.get("weight_versions") or [{"start": 0, "end": total, "version": meta["weight_version"]}]
    routes = meta.get("routed_experts")
    return Finish(
        reason=reason["type"],
        prompt_tokens=meta["prompt_tokens"],
        cached_tokens=meta["cached_tokens"],
        version_spans=tuple(VersionSpan(span["start"], span["end"], span["version"]) for span in spans),
        matched_stop=reason.get("matched"),
        routes=None if routes is None else base64.b64decode(routes),
        unpaired=_unpaired(meta.get("num_retractions") or 0, spans, total),
        meta={
            "retractions": meta.get("num_retractions", 0),
            "latency": meta.get("e2e_latency"),
            "dp_rank": meta.get("dp_rank"),
        },
    )


def _unpaired(retractions: int, spans: list[dict[str, Any]], total: int) -> int:
    """How many output tokens were sampled before the last retraction.

    A retracted request goes through the model once more: the routes are those of the second pass, the
    log-probs those of the first. Where each retraction was for new weights, the last span begins where the
    last pass did; where one was for want of memory, nobody says when.
    """
    if not retractions:
        return 0
    return int(spans[-1]["start"]) if len(spans) == retractions + 1 else total


def _refusal(message: str, status: int | None) -> EngineError:
    if status == 400 and ("context length" in message or "maximum allowed length" in message):
        return ContextLengthError(message, status)
    return EngineError(message, status)
