"""The Megatron-core backend. Importing this package makes megatron usable on a machine without CUDA."""

from titogym.trainer.backends.megatron import compat

compat.install()
compat.mend()
