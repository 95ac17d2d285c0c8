"""One arithmetic for engine and trainer on a CPU: the same bits for a token, whatever is computed beside it.

An engine computes a sequence token by token, in batches that change from step to step; a trainer computes
it whole. Matrix products and attention round differently with the shape of their operands, so that the two
disagree about log-probs in the last digits. The functions here do not: every output depends on its own row
alone, in an order of operations that no shape changes. They stand in for torch's own in both processes, and
are some ten times slower.

Everything else that a dense Qwen3 needs (RMSNorm, rotary embedding, SiLU, softmax) works row by row
already, as long as its width is a multiple of `WIDTH`. Needs nothing but torch, on one thread.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

WIDTH = 32  # a vector loop treats what is left over behind it with scalar functions, which round otherwise
_BLOCK = 1 << 24  # most elements of one intermediate tensor


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weight)
        # One product of a row and the matrix for each row: what stands beside it cannot matter.
        return torch.bmm(rows[:, None], weight.t().expand(len(rows), -1, -1))[:, 0]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        rows, weight = ctx.saved_tensors
        return gradient @ weight, gradient.t() @ rows


def linear(inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`torch.nn.functional.linear`, row by row."""
    rows = inputs.reshape(-1, inputs.shape[-1])
    result: Tensor = _Linear.apply(rows, weight)  # type: ignore[no-untyped-call]
    result = result.view(*inputs.shape[:-1], -1)
    return result if bias is None else result + bias


def matmul(left: Tensor, right: Tensor) -> Tensor:
    """`torch.matmul` with a matrix on the right, row by row."""
    return linear(left, right.t()) if right.dim() == 2 else torch.matmul(left, right)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`torch.nn.functional.scaled_dot_product_attention` of `[1, heads, tokens, dim]`, without mask.

    Sums over keys are prefix sums, taken one after another: keys that come later, or are not there yet,
    change nothing.
    """
    if attn_mask is not None or dropout_p or query.shape[0] != 1:
        raise NotImplementedError("the exact attention takes one sequence, without mask and dropout")
    q, k, v = query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1)
    repeats = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    rows = max(1, _BLOCK // (k.numel() or 1))
    attended = [
        _attend(q[start : start + rows], k, v, scale, start if is_causal else None)
        for start in range(0, len(q), rows)
    ]
    return torch.cat(attended).transpose(0, 1)[None]


def _attend(q: Tensor, k: Tensor, v: Tensor, scale: float, first: int | None) -> Tensor:
    """`q` `[n, h, d]`, `k` and `v` `[t, h, d]`; `first` is the place of the first query, None for no mask."""
    scores = (q[:, None] * k[None]).sum(-1) * scale  # [n, t, h]
    if first is not None:
        seen = torch.arange(len(k))[None] <= torch.arange(first, first + len(q))[:, None]
        scores = scores.masked_fill(~seen[:, :, None], float("-inf"))
    weights = (scores - scores.max(dim=1, keepdim=True).values).exp()
    weights = weights / weights.cumsum(1)[:, -1:]
    return (weights[..., None] * v[None]).cumsum(1)[:, -1]


class _TorchWith:
    """torch, as one module sees it, with some functions replaced."""

    def __init__(self, **replaced: Callable[..., Any]) -> None:
        self.__dict__.update(replaced)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def install() -> None:
    """Replace torch's matrix products with weights, and its attention, in this process."""
    torch.set_num_threads(1)
    functional: Any = torch.nn.functional
    functional.linear = linear
    functional.scaled_dot_product_attention = attention


def _patch_linear(module: Any) -> None:
    install()


def _patch_logits(module: Any) -> None:
    module.torch = _TorchWith(matmul=matmul)  # the product with the output matrix


def _patch_attention(module: Any) -> None:
    module.scaled_dot_product_attention = attention  # it holds torch's by name


# module of SGLang -> what to change in it right after it was loaded
PATCHES: dict[str, Callable[[Any], None]] = {
    "sglang.srt.layers.quantization.unquant": _patch_linear,
    "sglang.srt.layers.logits_processor": _patch_logits,
    "sglang.srt.layers.attention.torch_native_backend": _patch_attention,
}
