"""Training with torch's fully_shard (FSDP2) and transformers' own models."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as read_sharded
from torch.distributed.checkpoint.state_dict_saver import save as write_sharded
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from titogym.errors import UserError, install_extra
from titogym.gateway.engines.cpu_shim import exact_forward
from titogym.trainer import on_policy
from titogym.trainer.backends import hf_directory
from titogym.trainer.backends.base import BackendSpec
from titogym.trainer.backends.packing import Members, Microbatch, Share
from titogym.trainer.backends.steps import SteppingBackend
from titogym.trainer.backends.world import join_world


class FsdpBackend(SteppingBackend):
    """See `Backend` and `SteppingBackend`. Ranks are data parallel; each holds a part of every weight.

    Weights and optimizer are fp32; with dtype "bfloat16" the forward and backward passes are in bf16.
    """

    EXACT = True

    def __init__(self, spec: BackendSpec) -> None:
        super().__init__(spec)
        if spec.true_on_policy:
            exact_forward.install()

    def export(self) -> Iterator[tuple[str, Tensor]]:
        """Tied copies appear once. Tensors that the model fuses are cut up again all together."""
        transformers = _transformers()
        dtype = getattr(torch, self.spec.dtype)
        whole = {name: _whole(parameter).detach().to(dtype) for name, parameter in self._named()}
        yield from transformers.core_model_loading.revert_weight_conversion(self.model, whole).items()

    def save_hf(self, model_dir: Path) -> None:
        tensors = {name: tensor.cpu().contiguous() for name, tensor in self.export()}
        if dist.get_rank() != 0:
            return
        config = {**self._config, "dtype": self.spec.dtype}
        hf_directory.write_companions(model_dir, config, self._source)
        partial = model_dir / "model.safetensors.partial"
        save_file(tensors, partial, metadata={"format": "pt"})
        os.replace(partial, model_dir / "model.safetensors")
        (model_dir / "model.safetensors.index.json").unlink(missing_ok=True)

    def _build(self, config: Mapping[str, Any]) -> torch.device:
        _check(self.spec)
        if self.spec.true_on_policy:
            on_gpu = torch.cuda.is_available()
            on_policy.check(config, backend="fsdp", dtype=self.spec.dtype, device="cuda" if on_gpu else "cpu")
        device = join_world(self.spec)
        _model_config(config)  # a model that is not known is refused before its weights are read
        return device

    def _read_weights(self, model_dir: Path) -> None:
        try:
            model = _transformers().AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
        except (OSError, ValueError) as error:
            raise UserError(f"transformers cannot load {model_dir}: {error}") from None
        self._shard(model)

    def _draw_weights(self, seed: int) -> None:
        torch.manual_seed(seed)
        self._shard(_transformers().AutoModelForCausalLM.from_config(_model_config(self._config)).float())

    def _shard(self, model: Any) -> None:
        """Every rank holds the same whole `model`; leave it a part of each weight."""
        self.model: Any = model.to(self._device).train()
        self._some_logits = "logits_to_keep" in inspect.signature(model.forward).parameters
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout) and module.p:
                raise UserError("The model has dropout, with which log-probs are random: set it to 0")
        if self.spec.recompute:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        mesh = init_device_mesh(self._device.type, (dist.get_world_size(),))
        half = torch.bfloat16 if self.spec.dtype == "bfloat16" else None
        policy = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32)
        for block in _blocks(model):
            fully_shard(block, mesh=mesh, mp_policy=policy)
        # Also the outermost part, so that between calls every weight is the part that the optimizer knows.
        fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=True)

    def _make_optimizer(self) -> None:
        settings = self.spec.optimizer
        matrices = [parameter for parameter in self._parameters() if parameter.dim() > 1]
        others = [parameter for parameter in self._parameters() if parameter.dim() <= 1]
        groups: list[dict[str, Any]] = [
            {"params": matrices},
            {"params": others, "weight_decay": 0.0},
        ]  # norms are not decayed
        self._optimizer = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=settings.lr,
            betas=(settings.beta1, settings.beta2),
            eps=settings.eps,
            weight_decay=settings.weight_decay,
        )

    def _named(self) -> list[tuple[str, Tensor]]:
        return list(self.model.named_parameters())

    def _parameters(self) -> list[Tensor]:
        return list(self.model.parameters())

    def _share(self) -> Share:
        return Share(data_rank=dist.get_rank(), data_size=dist.get_world_size())

    @torch.no_grad()
    def _forward(
        self, micros: Sequence[Microbatch], temperature: float
    ) -> list[tuple[Members, NDArray[np.float32]]]:
        scored = [
            (micro.members, self._scores(micro, temperature, False).float().cpu().numpy()) for micro in micros
        ]
        return _of_all(scored)

    def _accumulate(
        self,
        micros: Sequence[Microbatch],
        temperature: float,
        loss: Callable[[Microbatch, Tensor], tuple[Tensor, dict[str, float]]],
    ) -> list[dict[str, float]]:
        self._optimizer.zero_grad()
        parts = []
        for micro in micros:
            share, part = loss(micro, self._scores(micro, temperature, self.spec.loss.needs_entropy))
            torch.autograd.backward(share * dist.get_world_size())  # fully_shard takes the mean over ranks
            parts.append(part)
        return _of_all(parts)

    def _scores(self, micro: Microbatch, temperature: float, with_entropy: bool) -> Tensor:
        """`[m, columns]` in fp32. Sequences of the pack are told apart by their positions alone."""
        wanted = {"logits_to_keep": micro.where} if self._some_logits and micro.scored else {}
        output = self.model(input_ids=micro.tokens, position_ids=micro.positions, use_cache=False, **wanted)
        logits = output.logits[0].float()
        if not wanted:
            logits = logits[micro.where]
        if temperature != 1.0:
            logits = logits / temperature
        logp = torch.log_softmax(logits, dim=-1)
        if self.spec.true_on_policy:  # SGLang's way to log-probs; the gradient is the same
            logp = torch.softmax(logits, dim=-1).log().detach() + (logp - logp.detach())
        columns = [logp.gather(-1, micro.targets[:, None])[:, 0]]
        if with_entropy:
            columns.append(-(logp.exp() * logp).sum(-1))
        return torch.stack(columns, dim=1)

    def _update(self, lr: float) -> float:
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        norm = torch.nn.utils.clip_grad_norm_(self._parameters(), self.spec.optimizer.clip_grad)
        self._optimizer.step()
        return float(_whole(norm))

    def _write(self, version: Path) -> None:
        weights, moments = get_state_dict(self.model, self._optimizer)
        write_sharded({"model": weights, "optimizer": moments}, checkpoint_id=str(version))

    def _read(self, version: Path, step: int) -> None:
        weights, moments = get_state_dict(self.model, self._optimizer)
        read_sharded({"model": weights, "optimizer": moments}, checkpoint_id=str(version))
        set_state_dict(self.model, self._optimizer, model_state_dict=weights, optim_state_dict=moments)


def _check(spec: BackendSpec) -> None:
    layout = spec.layout
    if layout.world != layout.data:
        raise UserError(f"The FSDP backend has data parallelism only, not {layout}: set the other sizes to 1")
    if spec.replay_routes:
        raise UserError('trainer.r3 needs trainer.backend = "megatron"')
    if spec.value_head:
        raise UserError('algorithm.advantage = "gae" needs a value head, and so trainer.backend = "megatron"')


def _transformers() -> Any:
    try:
        import transformers
        import transformers.core_model_loading
    except ImportError:
        raise UserError(f'trainer.backend = "fsdp" needs transformers: {install_extra("fsdp")}') from None
    return transformers


def _model_config(config: Mapping[str, Any]) -> Any:
    """The transformers configuration that the contents of a config.json describe."""
    known = _transformers().AutoConfig
    plain = {key: value for key, value in config.items() if key not in ("model_type", "transformers_version")}
    model_type = config.get("model_type") or _model_type(config)
    try:
        return known.for_model(model_type, **plain)
    except ValueError as error:
        raise UserError(f"transformers does not know the model type {model_type!r}: {error}") from None


def _model_type(config: Mapping[str, Any]) -> str:
    """Of a config.json that names only its architecture."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    architecture = (config.get("architectures") or ["none"])[0]
    for model_type, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        if name == architecture:
            return str(model_type)
    raise UserError(f"transformers does not know the architecture {architecture}")


def _blocks(model: Any) -> list[torch.nn.Module]:
    """The decoder layers: the modules that transformers itself never splits over devices."""
    names = set(getattr(model, "_no_split_modules", None) or [])
    return [module for module in model.modules() if type(module).__name__ in names]


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _of_all(mine: list[Any]) -> list[Any]:
    """The lists of all ranks, one after another."""
    lists: list[list[Any]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(lists, mine)
    return [item for part in lists for item in part]
