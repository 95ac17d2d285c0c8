"""R3: the experts that the engine took replace the trainer's own choice, forward and backward.

("Stabilizing MoE Reinforcement Learning by Aligning Training and Inference Routers", Ma et al. 2025,
section 3.) The gate's scores are gathered at the recorded experts, so that the router still learns; which
experts they are is not differentiated. Where activations are recomputed in the backward pass, the routes of
that microbatch are replayed once more.
"""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router_replay import RouterReplay
from torch import Tensor

from titogym.trainer.backends.megatron.model import PolicyModel
from titogym.trainer.backends.packing import Microbatch


class LayerReplay(RouterReplay):  # type: ignore[misc]
    """What Megatron's router of one layer asks which experts to take."""

    def __init__(self, recomputed: bool) -> None:
        # Not the parent's constructor, which enters every instance in a list of the process.
        self._recomputed = recomputed
        self._routes: Tensor | None = None  # [tokens, top_k] of the forward pass in progress
        self._real: Tensor | None = None
        self._awaited: deque[Tensor] = deque()  # of microbatches whose backward pass is to come
        self.own: Tensor | None = None  # [tokens, top_k], the router's own choice in the last forward pass
        # Of real tokens: recorded routes; those that the router would have taken; those that it took.
        self.counts = torch.zeros(3, dtype=torch.int64)

    def expect(self, routes: Tensor, real: Tensor) -> None:
        """The next forward pass takes `routes`; only `real` tokens `[tokens]` are counted."""
        self._routes, self._real = routes, real
        if self._recomputed and torch.is_grad_enabled():
            self._awaited.append(routes)

    def forward_is_over(self) -> None:
        """A router that asks from here on does so for a recomputation."""
        self._routes = None

    def clear(self) -> None:
        self._routes = None
        self._awaited.clear()
        self.counts.zero_()

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., tuple[Tensor, Tensor]] | None = None,
    ) -> tuple[Tensor, Tensor]:
        assert default_compute_topk is not None
        if self._routes is not None and self._real is not None:
            routes = self._routes
            with torch.no_grad():
                _, self.own = default_compute_topk(scores, topk, num_groups, group_topk)
                agreeing = (routes[:, :, None] == self.own[:, None, :]).any(-1)[self._real]
                self.counts[:2] += torch.tensor([agreeing.numel(), int(agreeing.sum())])
        elif self._awaited:
            routes = self._awaited.popleft()
        else:  # nothing is replayed
            taken, self.own = default_compute_topk(scores, topk, num_groups, group_topk)
            return taken, self.own
        if len(routes) != len(scores):
            raise ValueError(f"{len(routes)} rows of expert routes for {len(scores)} tokens")
        return scores.gather(1, routes), routes

    def see(self, router: Any, arguments: Any, result: tuple[Tensor, Tensor]) -> None:
        """Forward hook of the router: what it really took, `[tokens, experts]` bool."""
        if self._routes is not None and self._real is not None:
            self.counts[2] += int(result[1].gather(1, self._routes)[self._real].sum())


class Replay:
    """Replays recorded routes in every mixture-of-experts layer of this rank."""

    def __init__(self, model: PolicyModel) -> None:
        self._layers: list[tuple[int, Any]] = []  # number of the layer in the whole model, its router
        for layer in model.decoder.layers:
            if isinstance(layer.mlp, MoELayer):
                router = layer.mlp.router
                replay = LayerReplay(model.config.recompute_granularity == "full")
                router.router_replay = replay
                router.register_forward_hook(replay.see)
                self._layers.append((layer.layer_number - 1, router))

    def __bool__(self) -> bool:
        return bool(self._layers)

    @contextmanager
    def forward(self, micro: Microbatch) -> Iterator[None]:
        """The forward pass in the block takes the routes of `micro`, if it has any."""
        if micro.routes is None:
            yield
            return
        routes, real = self._part(micro.routes), self._part(micro.real)
        for number, router in self._layers:
            router.router_replay.expect(routes[:, number], real)
        yield
        for _, router in self._layers:
            router.router_replay.forward_is_over()

    def own_routes(self) -> list[Tensor]:
        """The routers' own choices in the last forward pass, `[tokens, top_k]` per layer of this rank."""
        return [router.router_replay.own for _, router in self._layers]

    def take_counts(self) -> Tensor:
        """`LayerReplay.counts` since the last call, over this rank's layers; clears what is left over."""
        counts = torch.zeros(3, dtype=torch.int64)
        for _, router in self._layers:
            counts += router.router_replay.counts
            router.router_replay.clear()
        return counts

    @staticmethod
    def _part(rows: Tensor) -> Tensor:
        """The tokens that this rank's routers see: sequence parallelism cuts them over tensor ranks."""
        ranks = parallel_state.get_tensor_model_parallel_world_size()
        part: Tensor = rows.chunk(ranks)[parallel_state.get_tensor_model_parallel_rank()]
        return part
