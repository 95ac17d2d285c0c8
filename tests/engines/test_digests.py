"""Digests of weights under the engine's own, fused names."""

import hashlib

from titogym.gateway.engines.digests import Weight, differing_weights, expected_digests


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def weight(name: str, fill: int, shape: tuple[int, ...] = (2, 3)) -> Weight:
    size = 4
    for length in shape:
        size *= length
    return Weight(name, shape, bytes([fill]) * size)


def test_fused_parts_are_in_the_engines_order_whatever_order_they_come_in() -> None:
    layer = "model.layers.3."
    names = [f"self_attn.{part}_proj.{kind}" for part in "vkq" for kind in ("weight", "bias")]
    weights = [weight(layer + name, ord(name[10])) for name in names]
    weights += [weight(layer + "mlp.up_proj.weight", 1), weight(layer + "mlp.gate_proj.weight", 2)]
    weights += [weight(layer + "mlp.down_proj.weight", 3), weight("model.norm.weight", 4, (3,))]
    qkv = b"q" * 24 + b"k" * 24 + b"v" * 24
    assert expected_digests(weights) == {
        layer + "self_attn.qkv_proj.weight": digest(qkv),
        layer + "self_attn.qkv_proj.bias": digest(qkv),
        layer + "mlp.gate_up_proj.weight": digest(b"\2" * 24 + b"\1" * 24),
        layer + "mlp.down_proj.weight": digest(b"\3" * 24),
        "model.norm.weight": digest(b"\4" * 12),
    }


def test_experts_are_stacked() -> None:
    mlp = "model.layers.0.mlp.experts."
    weights = [
        weight(f"{mlp}{number}.{part}_proj.weight", 10 * number + i)
        for number in (10, 9)
        for i, part in enumerate(("down", "up", "gate"))
    ]
    assert expected_digests(weights) == {
        mlp + "w13_weight": digest(
            bytes([92]) * 24 + bytes([91]) * 24 + bytes([102]) * 24 + bytes([101]) * 24
        ),
        mlp + "w2_weight": digest(bytes([90]) * 24 + bytes([100]) * 24),
    }


def test_vocabulary_is_padded_with_zeros() -> None:
    embedding = weight("model.embed_tokens.weight", 5, (70, 2))
    assert expected_digests([embedding]) == {embedding.name: digest(b"\5" * 560 + bytes((128 - 70) * 8))}
    full = weight("lm_head.weight", 5, (64, 2))
    assert expected_digests([full]) == {full.name: digest(b"\5" * 512)}


def test_differences_are_named() -> None:
    embedding, norm = weight("model.embed_tokens.weight", 5, (64, 2)), weight("model.norm.weight", 4, (3,))
    tied = weight("lm_head.weight", 5, (64, 2))
    engine = expected_digests([embedding, norm])
    assert differing_weights(engine, [embedding, norm]) == []
    assert differing_weights(engine, [embedding, norm, tied]) == []
    assert differing_weights(engine, [embedding]) == ["model.norm.weight"]
    assert differing_weights(engine, [embedding, weight("model.norm.weight", 3, (3,))]) == [
        "model.norm.weight"
    ]
    untied = weight("lm_head.weight", 6, (64, 2))
    assert differing_weights(engine, [embedding, norm, untied]) == ["lm_head.weight"]
    assert differing_weights(expected_digests([embedding, norm, untied]), [embedding, norm]) == [
        "lm_head.weight"
    ]
