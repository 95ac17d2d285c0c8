"""What the gateway asks of an inference engine. Implementations: `sglang.SGLangEngine`."""

from array import array
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, overload

import orjson

FinishReason = Literal["stop", "length", "abort"]


class Prompt(Sequence[int]):
    """Token ids with their JSON (numbers with commas between), where that is known already.

    Writing a long history as JSON takes longer than everything else that is done with it.
    """

    __slots__ = ("ids", "json")

    def __init__(self, ids: "array[int]", json: bytes) -> None:
        self.ids = ids
        self.json = json

    def __len__(self) -> int:
        return len(self.ids)

    def __iter__(self) -> Iterator[int]:
        return iter(self.ids)

    @overload
    def __getitem__(self, at: int) -> int: ...

    @overload
    def __getitem__(self, at: slice) -> "array[int]": ...

    def __getitem__(self, at: int | slice) -> "int | array[int]":
        return self.ids[at]


def ids_json(ids: Sequence[int]) -> bytes:
    """Token ids as JSON numbers with commas between."""
    return ids.json if isinstance(ids, Prompt) else orjson.dumps(list(ids))[1:-1]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling options in the engine's terms. `max_new_tokens` counts tokens, `temperature` 0 is greedy."""

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None  # SGLang heeds it only with --enable-deterministic-inference
    json_schema: str | None = None
    structural_tag: str | None = None  # grammar of an answer, as xgrammar's JSON


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Tokens `[start, end)` of the output (from its first token) were sampled under weights `version`."""

    start: int
    end: int
    version: str


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens that arrived since the chunk before. The last chunk of a generation carries `finish`."""

    output_ids: list[int]
    logprobs: list[float]  # one per output id, at the sampling temperature, before top-p, top-k and min-p
    version: str = ""  # of the weights that sampled the last of them
    finish: "Finish | None" = None


@dataclass(frozen=True, slots=True)
class Finish:
    """How a generation ended, with what the engine knows of the whole of it."""

    reason: FinishReason
    prompt_tokens: int
    cached_tokens: int
    version_spans: tuple[VersionSpan, ...]
    matched_stop: str | int | None = None  # stop string or stop token id that ended it
    # 32-bit little-endian integers, [prompt + output - 1 - routes_from, layers, top_k]
    routes: bytes | None = None
    # So many output tokens have log-probs from another pass through the model than their routes
    unpaired: int = 0
    meta: dict[str, Any] = field(default_factory=dict)  # retractions, engine latency (s), dp_rank


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What an engine says of itself."""

    model_path: str
    context_length: int  # most tokens of prompt + output
    weight_version: str
    tensor_parallel: int = 1  # ranks that share the weights
    seeded: bool = True  # it samples by the seed of a request
    expert_routes: bool = False  # it can return the experts that each token went through


class EngineError(Exception):
    """The engine refused or failed a request. `status` is its HTTP status, None when it did not answer."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class ContextLengthError(EngineError):
    """Prompt, or prompt and output budget together, are longer than the engine takes."""


class NoEngineError(EngineError):
    """No engine is left that could serve. It may pass: try again after `retry_after` seconds."""

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class Engine(Protocol):
    """One inference server. All methods raise `EngineError` when it does not answer or refuses."""

    @property
    def url(self) -> str: ...

    def generate(
        self,
        input_ids: Sequence[int],
        params: SamplingParams,
        *,
        rid: str,
        stream: bool,
        routes_from: int | None = None,
        affinity: str = "",
    ) -> AsyncGenerator[Chunk, None]:
        """Sample a continuation of `input_ids`. Without `stream` one chunk carries everything.

        `routes_from` asks for the expert routes of every token from that position on. Requests with the
        same `affinity` share a prefix: behind one URL they should reach the same replica.
        Closing the iterator early (client gone, cancellation) aborts the request on the engine.
        """
        ...

    async def abort(self, rid: str) -> None: ...

    async def info(self) -> EngineInfo: ...

    async def healthy(self) -> bool: ...

    async def close(self) -> None: ...
