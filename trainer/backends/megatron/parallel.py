"""The ranks of a Megatron trainer: process groups, what each rank computes, and bringing it together."""

from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from torch import Tensor

from titogym.trainer.backends.layout import Layout
from titogym.trainer.backends.packing import Microbatch, Share


def arrange(layout: Layout, timeout: float) -> None:
    """Make Megatron's groups for `layout`, in place of those of another one; `timeout` is in seconds."""
    if parallel_state.is_initialized():
        parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        context_parallel_size=layout.context,
        expert_model_parallel_size=layout.expert,
        expert_tensor_parallel_size=layout.expert_tensor,
        distributed_timeout_minutes=timeout / 60,
    )
    model_parallel_cuda_manual_seed(0)  # the forks of its generator exist even where nothing is drawn


def my_share() -> Share:
    """What this rank computes of a batch."""
    return Share(
        data_rank=parallel_state.get_data_parallel_rank(),
        data_size=parallel_state.get_data_parallel_world_size(),
        context_rank=parallel_state.get_context_parallel_rank(),
        context_size=parallel_state.get_context_parallel_world_size(),
        multiple=parallel_state.get_tensor_model_parallel_world_size(),  # sequence parallelism cuts evenly
    )


def speaks() -> bool:
    """Whether this rank's results count: one of those that hold the same ones."""
    return bool(
        parallel_state.is_pipeline_last_stage()
        and parallel_state.get_tensor_model_parallel_rank() == 0
        and parallel_state.get_context_parallel_rank() == 0
    )


def collect(mine: list[Any]) -> list[Any]:
    """The lists of all ranks that speak, one after another, on every rank."""
    if dist.get_world_size() == 1:
        return mine
    lists: list[list[Any]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(lists, mine if speaks() else [])
    return [item for part in lists for item in part]


def added_up(counts: Tensor) -> Tensor:
    """Sum over all ranks."""
    dist.all_reduce(counts)
    return counts


def whole(scores: Tensor, micro: Microbatch) -> Tensor:
    """The scores `[m, columns]` of all context ranks, from this rank's own."""
    if parallel_state.get_context_parallel_world_size() == 1:
        return scores
    result: Tensor = _Whole.apply(scores, micro.mine, micro.scored)  # type: ignore[no-untyped-call]
    return result


class _Whole(torch.autograd.Function):
    """Every context rank computes the same loss of all scores; each takes back the gradient of its own."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, mine: Tensor, count: int) -> Tensor:
        ctx.save_for_backward(mine)
        everyones = scores.new_zeros(count, scores.shape[1])
        everyones[mine] = scores
        dist.all_reduce(everyones, group=parallel_state.get_context_parallel_group())
        return everyones

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (mine,) = ctx.saved_tensors
        return gradient[mine], None, None
