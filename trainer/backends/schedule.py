"""The learning rate of each optimizer step."""

import math

from titogym.trainer.config.sections import OptimizerConfig


def learning_rate(step: int, settings: OptimizerConfig) -> float:
    """Rate of the step after `step` earlier ones.

    Linear from 0 over `warmup_steps`. Then `constant`; or down to `min_lr`, reached `decay_steps` steps after
    the warm-up and kept from there: `linear`, or `cosine` (Loshchilov and Hutter 2017, eq. 5, one cycle).
    """
    done = step + 1
    if done <= settings.warmup_steps:
        return settings.lr * done / settings.warmup_steps
    if settings.schedule == "constant" or settings.decay_steps is None:
        return settings.lr
    part = min((done - settings.warmup_steps) / settings.decay_steps, 1.0)
    left = (1 + math.cos(math.pi * part)) / 2 if settings.schedule == "cosine" else 1 - part
    return settings.min_lr + (settings.lr - settings.min_lr) * left
