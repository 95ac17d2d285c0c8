"""The Python environment that SGLang runs in.

SGLang pins versions (torch, openai) that clash with ours, so it lives in an environment of its own, which
is built on first use. On a GPU machine an SGLang that is already installed beside titogym is taken as it is.
"""

import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from titogym import venvs

Device = Literal["cpu", "cuda"]

SGLANG = "sglang==0.5.23"
_REQUIREMENTS = Path(__file__).with_name("requirements-cpu.txt")
_NVIDIA_GPUS = Path("/proc/driver/nvidia/gpus")


def default_device() -> Device:
    """ "cuda" when this machine has an NVIDIA GPU that `CUDA_VISIBLE_DEVICES` does not hide, else "cpu"."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return "cpu"
    return "cuda" if _NVIDIA_GPUS.is_dir() and any(_NVIDIA_GPUS.iterdir()) else "cpu"


def engine_python(device: Device | None = None, report: Callable[[str], None] = lambda line: None) -> Path:
    """The interpreter that can import SGLang, building its environment first if need be (minutes, once).

    `report` gets one line per step of the building. Raises `UserError` when a package cannot be installed.
    """
    if (device or default_device()) == "cuda":
        if importlib.util.find_spec("sglang"):
            return Path(sys.executable)
        return venvs.ensure("engine-cuda", [[SGLANG]], report=report)
    installs = [["-r", str(_REQUIREMENTS)], ["--no-deps", SGLANG, "xgrammar==0.2.7"]]
    return venvs.ensure("engine", installs, report=report)
