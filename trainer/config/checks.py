"""Configurations that cannot keep their promise, each told in a sentence that says what to change."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from titogym.trainer.backends.meeting import parse_address

if TYPE_CHECKING:
    from titogym.trainer.config.sections import AlgorithmSection, OptimizerConfig, RunConfig, TrainerSection


def impossible(config: RunConfig) -> Iterator[str]:
    """Combinations that cannot keep their promise, each as a sentence that says what to change."""
    rollout, buffer, algorithm, evaluation = config.rollout, config.buffer, config.algorithm, config.eval
    together = rollout.samples_per_prompt + rollout.over_sampling
    if rollout.episodes_in_flight < together:
        yield (
            f"rollout.episodes_in_flight = {rollout.episodes_in_flight} can never hold one group of "
            f"rollout.samples_per_prompt + over_sampling = {together}: raise it to at least that"
        )
    if buffer.capacity < rollout.groups_per_step:
        yield (
            f"buffer.capacity = {buffer.capacity} can never hold the rollout.groups_per_step = "
            f"{rollout.groups_per_step} groups of one step: raise it to at least that"
        )
    if algorithm.minibatches > rollout.groups_per_step:
        yield (
            f"algorithm.minibatches = {algorithm.minibatches} is more than the rollout.groups_per_step = "
            f"{rollout.groups_per_step} groups of one step: lower it"
        )
    if "retry" not in (buffer.on_stale, buffer.on_failure) and "max_retries" in buffer.model_fields_set:
        yield (
            'buffer.max_retries has no effect with buffer.on_stale = "drop": remove it, '
            'or set buffer.on_stale = "retry"'
        )
    if buffer.on_stale == "wait" and (buffer.max_staleness == 0 or config.run.driver == "sync"):
        yield (
            'buffer.on_stale = "wait" needs training beside the rollout: set buffer.max_staleness to 1 or '
            'more, and run.driver = "async"'
        )
    if "max_filtered_in_a_row" in buffer.model_fields_set and buffer.filter == "none":
        yield "buffer.max_filtered_in_a_row has no effect without a buffer.filter: remove it"
    if rollout.min_episodes > rollout.samples_per_prompt:
        yield (
            f"rollout.min_episodes = {rollout.min_episodes} is more than the rollout.samples_per_prompt = "
            f"{rollout.samples_per_prompt} episodes of a group: lower it"
        )
    if rollout.min_episodes < 2 and algorithm.advantage in _GROUP_RELATIVE:
        yield (
            f'algorithm.advantage = "{algorithm.advantage}" compares episodes of one task, of which '
            f"rollout.min_episodes = {rollout.min_episodes} leaves too few: raise it to at least 2"
        )
    if config.run.driver == "async" and rollout.over_sampling_groups:
        yield (
            'rollout.over_sampling_groups has no effect with run.driver = "async", which never waits for a '
            'slow group: remove it, or set run.driver = "sync"'
        )
    if config.run.driver == "async" and config.engine.placement == "colocated":
        yield (
            'run.driver = "async" samples while it trains, which engine.placement = "colocated" cannot: the '
            'same devices do both. Set run.driver = "sync", or engine.placement = "disaggregated"'
        )
    if algorithm.tis_low >= algorithm.tis_high:
        yield (
            f"algorithm.tis_low = {algorithm.tis_low} must be below algorithm.tis_high = {algorithm.tis_high}"
        )
    if algorithm.sequence_mask_low >= algorithm.sequence_mask_high:
        yield (
            f"algorithm.sequence_mask_low = {algorithm.sequence_mask_low} must be below "
            f"algorithm.sequence_mask_high = {algorithm.sequence_mask_high}"
        )
    yield from _without_effect(algorithm)
    if rollout.max_tokens is not None and rollout.max_tokens < rollout.max_tokens_per_turn:
        yield (
            f"rollout.max_tokens = {rollout.max_tokens} for an episode is below "
            f"rollout.max_tokens_per_turn = {rollout.max_tokens_per_turn}: lower the latter"
        )
    context = config.engine.context_length
    if context is not None and rollout.max_tokens_per_turn >= context:
        yield (
            f"rollout.max_tokens_per_turn = {rollout.max_tokens_per_turn} leaves no room for a prompt in "
            f"engine.context_length = {context}: lower the former"
        )
    yield from _impossible_training(config.trainer, config.optimizer)
    yield from _impossible_launch(config.trainer)
    if config.trainer.launcher == "torchrun" and config.cluster.kind == "ray":
        yield (
            'trainer.launcher = "torchrun" goes with cluster.kind = "local": Ray starts the trainer itself. '
            "Change either"
        )
    if config.trainer.backend == "fsdp" and algorithm.needs_value:
        yield (
            'algorithm.advantage = "gae" needs a value head, which trainer.backend = "fsdp" does not have: '
            "change either"
        )
    if config.trainer.true_on_policy:
        yield from _not_on_policy(config)
    pool = config.engine.max_total_tokens
    if context is not None and pool is not None and context > pool:
        yield (
            f"engine.max_total_tokens = {pool} cannot hold one sequence of "
            f"engine.context_length = {context}: raise it"
        )
    own = config.engine.model_fields_set - {"urls", "placement"}
    if config.engine.urls and own:
        yield (
            f"engine.{min(own)} has no effect on the running engines of engine.urls: remove it, or remove "
            "engine.urls to let the run start its own"
        )
    if evaluation is not None:
        if (evaluation.place == "dedicated") != bool(evaluation.urls):
            yield (
                'eval.place = "dedicated" and eval.urls, the engines to evaluate on, go together: set both '
                "or neither"
            )
        if both := set(evaluation.urls) & set(config.engine.urls):
            yield (
                f"{min(both)} is in eval.urls and in engine.urls: dedicated engines serve evaluation alone, "
                'so remove it from one, or set eval.place = "shared"'
            )
        training = config.environment
        source = evaluation.source or training.source
        if (source, evaluation.split, evaluation.seed) == (training.source, training.split, training.seed):
            yield (
                f'eval.split = "{evaluation.split}" is the split that training sees: choose another '
                "eval.split, eval.source or eval.seed"
            )


def _not_on_policy(config: RunConfig) -> Iterator[str]:
    because = "so that trainer.true_on_policy can hold"
    if config.run.driver != "sync":
        yield f'run.driver = "async" trains on what older weights have sampled: set it to "sync", {because}'
    if config.engine.urls:
        yield f"engine.urls names engines with an arithmetic of their own: leave it out, {because}"
    if config.engine.dtype != "float32":
        yield f'engine.dtype has to be "float32", {because}'


def _impossible_training(trainer: TrainerSection, optimizer: OptimizerConfig) -> Iterator[str]:
    if problem := trainer.layout().problem():
        yield f"trainer: {problem}: change them"
    if trainer.backend == "fsdp":
        if trainer.layout().world != trainer.data_parallel:
            yield 'trainer.backend = "fsdp" has data parallelism alone: leave out the other sizes'
        if trainer.r3:
            yield 'trainer.r3 needs trainer.backend = "megatron": set that, or trainer.r3 to false'
    if optimizer.schedule == "constant":
        for key in sorted({"decay_steps", "min_lr"} & optimizer.model_fields_set):
            yield f'optimizer.{key} has no effect here: remove it, or set optimizer.schedule = "cosine"'
    elif optimizer.decay_steps is None:
        yield (
            f"optimizer.schedule = {optimizer.schedule!r} needs optimizer.decay_steps: over how many updates "
            "the learning rate falls"
        )


def _impossible_launch(trainer: TrainerSection) -> Iterator[str]:
    if trainer.launcher == "spawn":
        for key in sorted({"nodes", "driver_address", "start_timeout"} & trainer.model_fields_set):
            yield f'trainer.{key} has no effect here: remove it, or set trainer.launcher = "torchrun"'
        return
    world = trainer.layout().world
    if world % trainer.nodes:
        yield (
            f"trainer.nodes = {trainer.nodes} cannot share {world} ranks equally (the product of tensor, "
            "pipeline, context and data parallel): change either"
        )
    if trainer.driver_address is not None:
        try:
            host, _ = parse_address(trainer.driver_address)
        except ValueError as error:
            yield f"trainer.driver_address: {error}, such as 10.0.0.5:29400: correct it"
        else:
            if host in ("0.0.0.0", "::"):
                yield "trainer.driver_address is told to the ranks: name an address that they can reach"
    elif trainer.nodes > 1:
        yield (
            f"trainer.nodes = {trainer.nodes} needs trainer.driver_address, HOST:PORT of this machine, where "
            "ranks on other machines find the driver: set it"
        )


_GROUP_RELATIVE = ("grpo", "grpo_no_std", "rloo")
_TOKEN_LEVEL = ("reinforce_plus_plus", "gae")

# key -> what gives it an effect, and whether that is so
_EFFECTS: tuple[tuple[str, str, Callable[[AlgorithmSection], bool]], ...] = (
    ("kl_estimator", 'algorithm.kl = "loss"', lambda a: a.kl != "none"),
    ("kl_coefficient", 'algorithm.kl = "loss"', lambda a: a.kl != "none"),
    ("value_coefficient", 'algorithm.advantage = "gae"', lambda a: a.needs_value),
    ("gae_lambda", 'algorithm.advantage = "gae"', lambda a: a.needs_value),
    ("gamma", 'algorithm.advantage = "gae"', lambda a: a.advantage not in _GROUP_RELATIVE),
    ("sequence_mask_low", 'algorithm.sequence_mask = "geometric"', lambda a: a.sequence_mask != "none"),
    ("sequence_mask_high", 'algorithm.sequence_mask = "geometric"', lambda a: a.sequence_mask != "none"),
)


def _without_effect(algorithm: AlgorithmSection) -> Iterator[str]:
    for key, remedy, has_effect in _EFFECTS:
        if key in algorithm.model_fields_set and not has_effect(algorithm):
            yield f"algorithm.{key} has no effect here: remove it, or set {remedy}"
    if algorithm.ratio == "sequence" and algorithm.needs_value:
        yield (
            'algorithm.ratio = "sequence" needs one advantage per sequence, and algorithm.advantage = "gae" '
            "gives one per token: change either"
        )
    for key, known in (("loss", ("clipped",)), ("advantage", (*_GROUP_RELATIVE, *_TOKEN_LEVEL))):
        value = getattr(algorithm, key)
        if value not in known and "." not in value and ":" not in value:
            yield (
                f'algorithm.{key} = "{value}" is neither {" nor ".join(known)} nor a dotted path such as '
                '"package.module:function"'
            )
