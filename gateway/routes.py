"""Expert routes: which experts of a mixture-of-experts model saw each token, for routing replay (R3).

The trainer replays the routes under which a token's log-prob was computed ("Stabilizing MoE Reinforcement
Learning by Aligning Training and Inference Routers", 2025). Of a row of `n` tokens there are `n - 1` rows of
routes: the last token was sampled but never went through the model.
"""

import sys
from array import array
from dataclasses import dataclass
from pathlib import Path

from titogym.templates.published import read_json

_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts")
_TOP_K = ("num_experts_per_tok", "num_experts_per_token", "moe_topk")


@dataclass(frozen=True, slots=True)
class Routes:
    """Unsigned integers of `itemsize` bytes (little endian), shape `[rows, layers, top_k]`, row-major."""

    data: bytes
    layers: int
    top_k: int
    itemsize: int


@dataclass(frozen=True, slots=True)
class RouteShape:
    """What one token's routes are in a model with `experts` experts in each of its `layers` layers."""

    layers: int
    top_k: int
    experts: int

    @property
    def itemsize(self) -> int:
        """Bytes of the smallest integer that holds an expert's number."""
        return 1 if self.experts <= 1 << 8 else 2

    @property
    def row(self) -> int:
        """Bytes that one token's routes are kept in."""
        return self.layers * self.top_k * self.itemsize

    def pack(self, wire: bytes, rows: int) -> bytes:
        """Routes as engines give them (32-bit little endian) in as few bytes as hold them.

        Raises `ValueError` when there are not `rows` rows, or a number is that of no expert.
        """
        items = rows * self.layers * self.top_k
        if len(wire) != 4 * items:
            raise ValueError(
                f"{len(wire) / 4 / self.layers / self.top_k:g} rows of expert routes came in place of {rows} "
                f"([rows, {self.layers}, {self.top_k}])"
            )
        low, second = wire[::4], wire[1::4]
        if any(wire[2::4]) or any(wire[3::4]) or (self.itemsize == 1 and any(second)):
            raise ValueError("the expert routes name experts that the model does not have")
        if self.itemsize == 1:
            if items and max(low) >= self.experts:
                raise ValueError(f"the expert routes name expert {max(low)} of {self.experts}")
            return low
        packed = bytearray(2 * items)
        packed[::2], packed[1::2] = low, second
        numbers = array("H", bytes(packed))
        if sys.byteorder == "big":
            numbers.byteswap()
        if items and max(numbers) >= self.experts:
            raise ValueError(f"the expert routes name expert {max(numbers)} of {self.experts}")
        return bytes(packed)

    def routes(self, data: bytes) -> Routes:
        return Routes(data, self.layers, self.top_k, self.itemsize)


def route_shape(model_dir: Path) -> RouteShape | None:
    """From the model's `config.json`; None for a model without experts."""
    config = read_json(model_dir / "config.json")
    config = config.get("text_config") or config
    experts = next((config[name] for name in _EXPERTS if config.get(name)), None)
    top_k = next((config[name] for name in _TOP_K if config.get(name)), None)
    layers = config.get("num_hidden_layers")
    return RouteShape(layers, top_k, experts) if experts and top_k and layers else None


def first_missing(parent_length: int, trim: int) -> int:
    """Behind a parent's row of `parent_length` tokens that loses `trim`: the first token without routes.

    The parent holds those of all its tokens but the last.
    """
    return max(parent_length - max(trim, 1), 0)
