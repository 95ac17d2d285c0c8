"""The process group of a trainer's ranks."""

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from titogym.errors import UserError
from titogym.trainer.backends.base import BackendSpec


def join_world(spec: BackendSpec) -> torch.device:
    """Become a rank of the trainer's process group, once per process. Returns the device of this rank.

    Under torchrun, or a parent that sets the same variables (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT),
    one of many; else alone. Raises `UserError` when there are not as many ranks as the layout has.
    """
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
        patience = timedelta(seconds=spec.timeout)
        if "RANK" in os.environ:
            dist.init_process_group(backend, timeout=patience)
        else:
            dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1, timeout=patience)
    if dist.get_world_size() != spec.layout.world:
        raise UserError(
            f"The layout {spec.layout} needs {spec.layout.world} ranks, and there are {dist.get_world_size()}"
        )
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
