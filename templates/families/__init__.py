"""The families that come with titogym, one module each."""

from titogym.templates.families.quickstart import QUICKSTART
from titogym.templates.families.qwen3 import QWEN3
from titogym.templates.families.smollm2 import SMOLLM2

__all__ = ["BUILT_IN", "QUICKSTART", "QWEN3", "SMOLLM2"]

BUILT_IN = (QUICKSTART, QWEN3, SMOLLM2)
