"""Lets SGLang run on a machine without a GPU. Loaded by Python at start from the engine's PYTHONPATH.

Only `gateway/engines/launch.py` puts this folder on a path, only for the engine's own process, and only
when it runs on the CPU. SGLang has a CPU mode (`SGLANG_USE_CPU_ENGINE=1`, `--device cpu`), but it still
imports packages that exist for GPUs alone. Nothing here computes anything:

- `STUBS` are packages that SGLang imports and never calls on this path. A package that is really installed
  is never replaced. Calling into a stub gives a decorator that changes nothing: arithmetic with it fails.
- `_no_pinned_memory`: returning expert routes pins its host buffer with the CUDA driver, even on the CPU.
- `_fork_workers`: SGLang starts its workers with `spawn`, because a CUDA context does not survive a fork.
  Each worker then imports torch and SGLang anew: 10 s of CPU time and half a gigabyte apiece. There is no
  CUDA context here, and the parent has started no thread pool when it forks.
"""

import importlib.abc
import importlib.machinery
import multiprocessing.context
import os
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

STUBS = {
    "triton": "compiler for GPU kernels: SGLang decorates its kernels with it when modules load",
    "sgl_kernel": "SGLang's compiled kernels, built for GPUs and for servers with AMX",
    "torchvision": "image transforms of the multi-modal models",
}


class _Stub(types.ModuleType):
    """A package in which every name exists: subclassed, used as a decorator, or called, it does nothing."""

    __version__ = "0.0.0"

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        # By convention a capital letter names a class, which may be subclassed or have enum-like members.
        value = _StubClass(name, (), {}) if name[0].isupper() else _Stub(f"{self.__name__}.{name}")
        setattr(self, name, value)
        return value

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        is_decorator = len(args) == 1 and not kwargs and isinstance(args[0], (types.FunctionType, type))
        return args[0] if is_decorator else _unchanged


def _unchanged(decorated: Any) -> Any:
    return decorated


class _StubClass(type):
    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return f"{cls.__name__}.{name}"

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return super().__call__()


class _StubFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Comes last on `sys.meta_path`, so that it is asked only for what no one else has found."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name.split(".")[0] in STUBS:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Stub(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def _no_pinned_memory(module: Any) -> None:
    module._cuda_host_register = lambda *args, **kwargs: None


class _ForkContext(multiprocessing.context.ForkContext):
    def set_start_method(self, method: str | None, force: bool = False) -> None:
        """SGLang asks for `spawn`; here it stays with `fork`."""


def _fork_workers(module: Any) -> None:
    module.mp = _ForkContext()


# module of SGLang -> what to change in it right after it was loaded
PATCHES: dict[str, Callable[[Any], None]] = {
    "sglang.srt.mem_cache.pool_host.common": _no_pinned_memory,
    "sglang.srt.entrypoints.engine": _fork_workers,
}


def _exact(module: Any) -> None:
    import exact_forward  # it imports torch, which not every process of the engine needs

    exact_forward.PATCHES[module.__name__](module)


if os.environ.get("TITOGYM_EXACT_FORWARD"):
    PATCHES |= dict.fromkeys(
        (
            "sglang.srt.layers.quantization.unquant",
            "sglang.srt.layers.logits_processor",
            "sglang.srt.layers.attention.torch_native_backend",
        ),
        _exact,
    )


class _PatchFinder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        patch = PATCHES.get(name)
        spec = importlib.machinery.PathFinder.find_spec(name, path) if patch else None
        if patch is None or spec is None or spec.loader is None:
            return None
        load = spec.loader.exec_module

        def exec_module(module: types.ModuleType) -> None:
            load(module)
            patch(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, _PatchFinder())
sys.meta_path.append(_StubFinder())
