"""Let megatron-core run where there is no CUDA device.

Megatron asks torch about "the current CUDA device" and creates small helper tensors on it. Here such a
question gets the CPU's answer; no arithmetic and no collective is replaced. On a machine with CUDA both
functions do nothing. `install` changes torch for the whole process: use it in the trainer's own process.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


def install() -> None:
    """Answer megatron's questions about the current device. Call before importing `megatron.core`."""
    if torch.cuda.is_available():
        return
    cpu = torch.device("cpu")
    cuda: Any = torch.cuda
    cuda.current_device = lambda: cpu  # gradient buffers, RoPE frequencies and norms are created there
    cuda.synchronize = lambda device=None: None  # a CPU operation has finished when its call returns


def on_this_device() -> contextlib.AbstractContextManager[object]:
    """Scope in which code that names "cuda" works on the CPU. Megatron's optimizer is called in it."""
    return contextlib.nullcontext() if torch.cuda.is_available() else _CpuForCuda()


class _CpuForCuda(TorchFunctionMode):
    """Reads `device="cuda"` as the CPU, and names CPU tensor types as the CUDA ones megatron asserts on.

    Megatron's gradient clipping holds one-element buffers on "cuda" and checks that gradients are of type
    'torch.cuda.FloatTensor', by which it means fp32.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = torch.device("cpu")
        if func is torch.Tensor.cuda:
            return args[0]
        result = func(*args, **kwargs)
        if func is torch.Tensor.type and isinstance(result, str):
            return result.replace("torch.", "torch.cuda.", 1)
        return result
