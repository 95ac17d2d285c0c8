"""Operating an SGLang server from outside the request path: pauses, caches, and new weights.

Synchronous, because it is used by the trainer's process. A weight update goes:

    control.pause()                                  # running requests wait, their KV cache is dropped
    with control.weight_update():
        control.update_from_distributed(...)         # while the trainer broadcasts the same tensors
    control.resume()                                 # they go on under the new weights
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import httpx
import orjson

from titogym.gateway.engines.base import EngineError, EngineInfo
from titogym.gateway.engines.wire import engine_info, error_message

PauseMode = Literal["retract", "in_place", "abort"]


class EngineControl:
    """One SGLang server. `timeout` (s) bounds each call. All methods raise `EngineError` on refusal."""

    def __init__(self, url: str, *, timeout: float = 300.0) -> None:
        self.url = url.rstrip("/")
        self._client = httpx.Client(base_url=self.url, timeout=httpx.Timeout(timeout, connect=10.0))

    def __enter__(self) -> "EngineControl":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        self._client.close()

    def info(self) -> EngineInfo:
        return engine_info(self._call("GET", "/model_info"), self._call("GET", "/server_info"))

    def pause(self, mode: PauseMode = "retract") -> None:
        """Stop generating. What becomes of requests in flight:

        - `retract`: they wait; their keys and values are dropped and computed anew after `resume`.
        - `in_place`: they wait and keep keys and values that the old weights computed.
        - `abort`: they end now with what they have.
        """
        self._call("POST", "/pause_generation", {"mode": mode})

    def resume(self) -> None:
        self._call("POST", "/continue_generation", {})

    def flush_cache(self) -> None:
        """Drop every cached prefix. Refused when requests still run after 5 s; fine while retracted."""
        self._call("POST", "/flush_cache?timeout=5")

    @contextmanager
    def weight_update(self) -> Iterator[None]:
        """The bracket that `update_from_distributed` calls must stand in."""
        self.begin_weight_update()
        try:
            yield
        finally:
            self.end_weight_update()

    def begin_weight_update(self) -> None:
        """Open the bracket. One that a trainer left open when it died is closed first."""
        try:
            self._call("POST", "/begin_weight_update", {})
        except EngineError as error:
            if "already open" not in str(error):
                raise
            self.end_weight_update()
            self._call("POST", "/begin_weight_update", {})

    def end_weight_update(self) -> None:
        self._call("POST", "/end_weight_update", {})

    def init_update_group(
        self,
        address: str,
        port: int,
        *,
        rank_offset: int,
        world_size: int,
        group: str,
        backend: Literal["gloo", "nccl"],
    ) -> None:
        """Join the process group at `address:port` with ranks `rank_offset` and up.

        Returns when all `world_size` members are there, so the trainer (rank 0) joins at the same time.
        """
        body = {
            "master_address": address,
            "master_port": port,
            "rank_offset": rank_offset,
            "world_size": world_size,
            "group_name": group,
            "backend": backend,
        }
        self._call("POST", "/init_weights_update_group", body)

    def destroy_update_group(self, group: str) -> None:
        self._call("POST", "/destroy_weights_update_group", {"group_name": group})

    def update_from_distributed(
        self,
        names: Sequence[str],
        dtypes: Sequence[str],
        shapes: Sequence[Sequence[int]],
        *,
        group: str,
        version: str | None = None,
        flush_cache: bool = True,
        flattened: bool = False,
    ) -> None:
        """Receive tensors, which rank 0 of `group` broadcasts meanwhile in this order, under their HF names.

        One broadcast per tensor, or with `flattened` one for all: their bytes, end to end, as uint8.
        `dtypes` are torch's names ("float32", "bfloat16"). `version` becomes the weight version with this
        call, so give it with the last tensors of an update. Call while paused, inside `weight_update`.
        """
        body = {
            "names": list(names),
            "dtypes": list(dtypes),
            "shapes": [list(shape) for shape in shapes],
            "group_name": group,
            "flush_cache": flush_cache,
            "weight_version": version,
            "load_format": "flattened_bucket" if flattened else None,
        }
        self._call("POST", "/update_weights_from_distributed", body)

    def update_from_tensor(
        self, handles: Sequence[str], *, version: str | None = None, flush_cache: bool = True
    ) -> None:
        """Map tensors of a process on the server's machine and load them under their HF names.

        `handles` has one entry per tensor-parallel rank: base64 of a list of (name, tensor) as
        `multiprocessing.reduction.ForkingPickler` writes it. Otherwise as `update_from_distributed`.
        """
        body = {
            "serialized_named_tensors": list(handles),
            "flush_cache": flush_cache,
            "weight_version": version,
        }
        self._call("POST", "/update_weights_from_tensor", body)

    def update_from_disk(self, path: str, version: str, *, flush_cache: bool = True) -> None:
        """Load every weight from a directory in Hugging Face format that the server can read.

        Call while paused: dropping the cache of the old weights fails while requests run.
        """
        body = {"model_path": path, "weight_version": version, "flush_cache": flush_cache}
        self._call("POST", "/update_weights_from_disk", body)

    def set_weight_version(self, version: str) -> None:
        body = {"new_version": version, "abort_all_requests": False}
        self._call("POST", "/update_weight_version", body)

    def randomize_weights(self) -> None:
        """Overwrite every weight with uniform noise, so that one which an update misses shows."""
        self._call("POST", "/weights_checker", {"action": "reset_tensors"})

    def weight_digests(self) -> dict[str, str]:
        """Digest of every weight as the engine holds it, by the engine's own names.

        These are not HF names: the engine fuses some matrices. See `digests.expected_digests`.
        """
        ranks = self._call("POST", "/weights_checker", {"action": "checksum"})["ranks"]
        if len(ranks) != 1:
            raise EngineError(f"weights are spread over {len(ranks)} ranks; digests need an engine with one")
        digests: dict[str, str] = ranks[0]["checksums"]
        return digests

    def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        try:
            response = self._client.request(method, path, json=body)
        except httpx.HTTPError as error:
            raise EngineError(f"{self.url}{path}: {str(error) or type(error).__name__}") from error
        if response.status_code != 200:
            raise EngineError(f"{path}: {error_message(response.content)}", response.status_code)
        is_json = response.headers.get("content-type", "").startswith("application/json")
        return orjson.loads(response.content) if is_json and response.content else None
