"""Let megatron-core run where there is no CUDA device.

Megatron asks torch about "the current CUDA device" and creates small helper tensors on it. Here such a
question gets the CPU's answer; no arithmetic and no collective is replaced. On a machine with CUDA nothing
of it is done. `install` changes torch for the whole process: use it in the trainer's own process.
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
    # The one stream of a CPU is always in order and always done.
    stream = _Stream()
    cuda.Stream = cuda.Event = lambda *args, **kwargs: stream
    cuda.current_stream = lambda device=None: stream
    cuda.stream = lambda stream: contextlib.nullcontext()
    # "The CUDA generator" is the CPU's. Not torch.manual_seed, which itself seeds CUDA.
    cuda.get_rng_state = lambda device=None: torch.get_rng_state()
    cuda.set_rng_state = lambda state, device=None: torch.set_rng_state(state)
    cuda.manual_seed = lambda seed: torch.default_generator.manual_seed(seed) and None


def mend() -> None:
    """Mend megatron-core 0.16.1 where it takes a GPU or Transformer Engine for granted."""
    import megatron.core.tensor_parallel.random as random
    from megatron.core.pipeline_parallel import p2p_communication, schedules
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    moe: Any = moe_utils
    if not hasattr(moe, "te_general_gemm"):
        moe.te_general_gemm = None  # only bound where Transformer Engine is installed, but always read
    _restore_torch_adamw()
    if torch.cuda.is_available():
        return
    random._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    move = moe.maybe_move_tensor_to_cpu

    def as_on_the_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        """Sizes of an all-to-all become numpy arrays also where they were on the CPU already."""
        if torch.is_tensor(tensor) and as_numpy:
            return tensor.numpy()
        return move(tensor, as_numpy, record_stream)

    moe.maybe_move_tensor_to_cpu = token_dispatcher.maybe_move_tensor_to_cpu = as_on_the_host
    for module in (schedules, p2p_communication):
        module.torch = _TorchOnTheCpu()


def _restore_torch_adamw() -> None:
    """Let a checkpoint restore torch's AdamW, which counts `step` per parameter; it is set elsewhere."""
    from megatron.core.optimizer import distrib_optimizer

    if distrib_optimizer.HAVE_APEX_OR_TE:
        return

    @torch.no_grad()
    def restore(self: Any, model_parameter: Any, tensors: Mapping[str, torch.Tensor]) -> None:
        group, place = self.model_param_group_index_map[model_parameter]
        main = self.optimizer.param_groups[group]["params"][place]
        for name, held in {"param": main, **self.optimizer.state[main]}.items():
            if name != "step":
                held.copy_(tensors[name])

    distrib_optimizer.DistributedOptimizer._set_main_param_and_optimizer_states = restore


def on_this_device() -> contextlib.AbstractContextManager[object]:
    """Scope in which code that names "cuda" works on the CPU. Megatron's optimizer is called in it."""
    return contextlib.nullcontext() if torch.cuda.is_available() else _CpuForCuda()


class _Stream:
    """A stream and an event in one."""

    def wait_stream(self, other: object) -> None: ...

    def wait_event(self, event: object) -> None: ...

    def synchronize(self) -> None: ...

    def record_event(self, event: object = None) -> _Stream:
        return self


class _TorchOnTheCpu:
    """torch as the pipeline's modules see it: they count tokens on "cuda"."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def zeros(self, *size: Any, device: Any = None, **settings: Any) -> torch.Tensor:
        made: torch.Tensor = torch.zeros(*size, device="cpu" if device == "cuda" else device, **settings)
        return made


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
