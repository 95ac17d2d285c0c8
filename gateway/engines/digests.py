"""Comparing an engine's weights with the trainer's, tensor by tensor, without moving them.

SGLang reports a digest of every weight it holds (`EngineControl.weight_digests`): on the CPU the first 8
bytes of the SHA-256 of the tensor's bytes. It fuses matrices that are multiplied together, so the digest of
the trainer's copy is taken over the parts in the engine's order.
"""

import hashlib
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

# Hugging Face name -> engine's name; the group that was replaced says which part of the fused tensor it is.
_FUSED = (
    (re.compile(r"\.(q|k|v)_proj\."), ".qkv_proj.", ("q", "k", "v")),
    (re.compile(r"\.(gate|up)_proj\."), ".gate_up_proj.", ("gate", "up")),
)
_EXPERT = re.compile(r"\.experts\.(\d+)\.(gate|up|down)_proj\.weight$")
_VOCABULARY = ("model.embed_tokens.weight", "lm_head.weight")
_VOCABULARY_BLOCK = 64  # the engine fills the vocabulary up with rows of zeros to a multiple of this


@dataclass(frozen=True, slots=True)
class Weight:
    """One tensor under its Hugging Face name; `data` are its row-major bytes in the engine's dtype."""

    name: str
    shape: Sequence[int]
    data: bytes | memoryview


def expected_digests(weights: Iterable[Weight]) -> dict[str, str]:
    """The digests an engine with tensor parallelism 1 reports when it holds exactly `weights`.

    Covers models of the Llama and Qwen3 architectures, dense and MoE. A tied output matrix may be left out
    or given: see `differing_weights`.
    """
    parts: dict[str, dict[tuple[int, int], bytes]] = defaultdict(dict)
    for weight in weights:
        name, part = _place(weight.name)
        parts[name][part] = _padded(weight)
    return {name: _digest(part for _, part in sorted(found.items())) for name, found in parts.items()}


def differing_weights(engine: dict[str, str], weights: Iterable[Weight]) -> list[str]:
    """Names of the weights in which an engine and the trainer differ, or that only one of them has."""
    expected = expected_digests(weights)
    tied = "lm_head.weight" not in engine
    if tied and expected.get("lm_head.weight") == expected.get("model.embed_tokens.weight"):
        expected.pop("lm_head.weight", None)
    return sorted(name for name in engine.keys() | expected.keys() if engine.get(name) != expected.get(name))


def _place(name: str) -> tuple[str, tuple[int, int]]:
    """The engine's tensor that holds `name`, and at which place: (expert, part)."""
    if expert := _EXPERT.search(name):
        number, kind = int(expert[1]), expert[2]
        fused = ".experts.w2_weight" if kind == "down" else ".experts.w13_weight"
        return name[: expert.start()] + fused, (number, 1 if kind == "up" else 0)
    for pattern, fused, kinds in _FUSED:
        if found := pattern.search(name):
            return pattern.sub(fused, name), (0, kinds.index(found[1]))
    return name, (0, 0)


def _padded(weight: Weight) -> bytes:
    data = bytes(weight.data)
    if weight.name not in _VOCABULARY:
        return data
    rows = weight.shape[0]
    return data + bytes(-rows % _VOCABULARY_BLOCK * (len(data) // rows))


def _digest(parts: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.digest()[:8].hex()
