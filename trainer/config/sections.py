"""The configuration of a run: one TOML file, one pydantic model, no key without effect.

Everything that can be known to be wrong before the first process starts is refused here, by the key's
dotted name and with what to change. `docs/configuration.md` is generated from these models.
"""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from titogym.trainer.backends.layout import Layout
from titogym.trainer.config.checks import impossible

Text = Annotated[str, Field(min_length=1)]
PathValue = Annotated[Path, Field(strict=False)]
Count = Annotated[int, Field(ge=1)]
Whole = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Section(BaseModel):
    """A table of the file. Unknown keys and values of another type are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class RunSection(Section):
    """Where the run lives and how long it lasts."""

    dir: PathValue = Field(
        description="Run directory: configuration, metrics, trajectories, checkpoints, report."
    )
    steps: Count = Field(
        description="Optimizer steps of the whole run; a resumed run goes on to this number."
    )
    driver: Literal["async", "sync"] = Field(
        default="async",
        description="`async`: rollout and training overlap. `sync`: they take turns, and a step trains on "
        "what the newest weights have sampled.",
    )
    seed: int = Field(default=0, description="Seeds the order of tasks and the trainer.")
    keep_trajectories: Whole = Field(
        default=4, description="Episodes per step whose full trajectories are kept for reading."
    )
    keep_batches: bool = Field(
        default=False,
        description="Also keep all that each step trained on, as safetensors, in run.dir/batches.",
    )


class ModelSection(Section):
    """The model to train."""

    dir: PathValue = Field(
        description="Hugging Face model directory (config.json, safetensors, tokenizer.json) to start from."
    )
    family: Text | None = Field(
        default=None, description="Model family (chat template, tool-call format). Recognised when left out."
    )


class EngineSection(Section):
    """The inference engine that samples."""

    urls: list[Text] = Field(
        default_factory=list,
        description="SGLang servers to use, all with the same model. Empty: the run starts its own.",
    )
    count: Count = Field(default=1, description="Engines that the run starts when no `urls` are given.")
    placement: Literal["disaggregated", "colocated"] = Field(
        default="disaggregated",
        description="Whether engine and trainer have devices of their own, or take turns on the same ones "
        '(`colocated`, for run.driver = "sync" alone).',
    )
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        default="auto", description="Precision of the engine that the run starts; `auto` is the model's own."
    )
    context_length: Count | None = Field(
        default=None, description="Most tokens of prompt and output together; the model's own when left out."
    )
    max_total_tokens: Count | None = Field(
        default=None,
        description="Tokens that the KV cache can hold. Left out: 65536 on a CPU, what fits on a GPU.",
    )
    memory_fraction: Annotated[float, Field(gt=0, lt=1)] | None = Field(
        default=None,
        description="Share of the GPU's memory for weights and KV cache; SGLang's choice when left out.",
    )
    tensor_parallel: Count = Field(default=1, description="GPUs that share the model.")
    threads: Count = Field(default=1, description="Threads of an engine on a CPU.")
    extra: list[Text] = Field(default_factory=list, description="Further arguments for SGLang, as they are.")
    start_timeout: Positive = Field(default=300.0, description="Seconds that the engine may take to start.")


class GatewaySection(Section):
    """The gateway between agents and engine; the run starts its own."""

    policy: Literal["linear", "branching"] | None = Field(
        default=None,
        description="`linear`: an agent may extend its conversation or retry its last turn. "
        "`branching`: any earlier turn may be continued; an episode may give several trajectories. The "
        "harness's own when left out.",
    )
    matcher: Text | None = Field(
        default=None,
        description="How replayed messages are recognised; the harness's own matcher when left out.",
    )


class EnvironmentSection(Section):
    """The tasks that training sees."""

    source: Text = Field(
        description="Where tasks come from: a directory, a .jsonl file, or a generator that `titogym env "
        "list` shows, with its options: `arithmetic?level=2`."
    )
    split: Text = Field(default="train", description="Split of a generator to train on.")
    seed: int = Field(default=0, description="Seed of a generator's tasks.")
    count: Count | None = Field(
        default=None,
        description="How many tasks: of a generator 100 when left out, of a directory the first ones or all.",
    )


class HarnessSection(Section):
    """The agent."""

    name: Text = Field(
        default="openai_loop",
        description="A harness by name (docs/harnesses.md lists them), dotted path or TOML file.",
    )
    options: dict[str, Any] = Field(
        default_factory=dict,
        description="Options of that harness: its fields, such as `system` of `openai_loop`.",
    )


class SandboxSection(Section):
    """Where the agent's commands run (docs/sandboxes.md)."""

    backend: Text = Field(default="local", description="`local`, `docker`, `daytona`, or a dotted path.")
    options: dict[str, Any] = Field(
        default_factory=dict, description="Options of that backend, such as `host` and `image` of `docker`."
    )
    root: PathValue | None = Field(
        default=None,
        description="Directory that holds the files of local sandboxes; by default the usual one.",
    )
    warm: Whole = Field(
        default=0,
        description="Sandboxes of the next episodes that are made ready while earlier ones run; 0: each is "
        "made when its episode starts. For backends that are slow to start, on one machine.",
    )


class RolloutSection(Section):
    """How episodes are collected."""

    samples_per_prompt: Count = Field(
        default=8, description="Episodes of one task that form a group and are compared with one another."
    )
    groups_per_step: Count = Field(default=4, description="Groups that one optimizer step trains on.")
    episodes_in_flight: Count = Field(
        default=32,
        description="Episodes that run at the same time; a new group starts when its places are free.",
    )
    refill: Literal["sample", "group"] = Field(
        default="sample",
        description="When an episode's place is free again: when it ends (`sample`), or when its whole "
        "`group` has ended.",
    )
    min_episodes: Count = Field(
        default=2, description="A group with fewer usable episodes is not trained on; the others failed."
    )
    over_sampling: Whole = Field(
        default=0,
        description="Further episodes started per group; once samples_per_prompt usable ones have ended, the "
        "rest are aborted.",
    )
    over_sampling_groups: Whole = Field(
        default=0,
        description='With run.driver = "sync": further groups started per step; what still runs when it '
        "has its groups is aborted and collected again later.",
    )
    temperature: Positive = Field(
        default=1.0, description="Sampling temperature; the trainer scores under the same one."
    )
    max_tokens_per_turn: Count = Field(
        default=512, description="Most tokens that the model may sample in one turn."
    )
    max_turns: Count | None = Field(
        default=None, description="Most turns of an episode, where the task allows more."
    )
    max_tokens: Count | None = Field(
        default=None, description="Most tokens sampled over a whole episode; no limit when left out."
    )
    max_seconds: Positive | None = Field(
        default=None, description="Most seconds that the agent may work, where the task allows more."
    )
    max_failures_in_a_row: Count = Field(
        default=64, description="The run stops when this many episodes in a row have failed."
    )


class BufferSection(Section):
    """Where finished groups wait for the trainer."""

    capacity: Count = Field(
        default=8, description="Groups that may wait; when it is full no new episodes are started."
    )
    max_staleness: Whole = Field(
        default=4,
        description="Oldest weights a group may have been sampled with, in versions behind the trainer's; "
        "a group that is older by more when the trainer takes it is rejected.",
    )
    on_stale: Literal["drop", "retry", "wait"] = Field(
        default="drop",
        description="What happens to a group that is too old: `drop` forgets it, `retry` runs it again. "
        "`wait`: the trainer waits for groups before they are, so that long tasks are trained on too.",
    )
    on_failure: Literal["drop", "retry"] = Field(
        default="drop", description="The same for a group with fewer than rollout.min_episodes usable ones."
    )
    max_retries: Count = Field(
        default=2, description="How often one group is run again, with `retry`, before it is dropped."
    )
    on_timeout: Literal["keep", "drop"] = Field(
        default="keep",
        description="Whether an attempt that ran out of time is trained on with its grade, or has failed.",
    )
    filter: Text = Field(
        default="none",
        description="Which groups the trainer sees: `none` filters nothing, `mixed_rewards` keeps those "
        "whose episodes differ in reward, or a dotted path to a function `(Group) -> True, or why not`.",
    )
    max_filtered_in_a_row: Count = Field(
        default=1000, description="The run stops when the filter has refused this many groups in a row."
    )
    implementation: Text = Field(
        default="titogym.trainer.rollout.buffer:GroupBuffer",
        description="Dotted path to the buffer's class; `Buffer` beside the default says what it does.",
    )


class LossConfig(Section):
    """What the loss needs to know."""

    loss: Text = Field(
        default="clipped",
        description="Policy objective per token: `clipped` (PPO), or a dotted path to a function "
        "`(LossInputs, LossConfig) -> tensor` of what to maximise.",
    )
    ratio: Literal["token", "sequence"] = Field(
        default="token",
        description="Policy ratio: of each `token` (PPO, GRPO), or the geometric mean over the `sequence` "
        "(GSPO, whose clip bounds are far narrower: 3e-4 and 4e-4).",
    )
    clip_low: Annotated[float, Field(gt=0, le=1)] = Field(
        default=0.2, description="The policy ratio is clipped below 1 - clip_low."
    )
    clip_high: Positive = Field(default=0.28, description="The policy ratio is clipped above 1 + clip_high.")
    dual_clip: Annotated[float, Field(gt=1, allow_inf_nan=False)] | None = Field(
        default=None,
        description="Where the advantage A is negative, the objective is at least dual_clip x A. Left out: "
        "not bounded.",
    )
    correction: Literal["truncate", "clip_or_pop", "none"] = Field(
        default="truncate",
        description="Weight of a token from m = exp(trainer - rollout log-prob): `truncate` to the bounds "
        "(TIS), `clip_or_pop` (m inside the bounds, 0 outside), or `none`.",
    )
    tis_low: NonNegative = Field(default=0.0, description="Lower bound of m.")
    tis_high: Positive = Field(default=2.0, description="Upper bound of m.")
    sequence_mask: Literal["none", "product", "geometric"] = Field(
        default="none",
        description="Leave out whole sequences by the `product` of m over their tokens, or its `geometric` "
        "mean.",
    )
    sequence_mask_low: NonNegative = Field(default=0.5, description="Least such value that is kept.")
    sequence_mask_high: Positive = Field(default=2.0, description="Largest such value that is kept.")
    kl: Literal["none", "loss", "reward"] = Field(
        default="none",
        description="Where KL(policy || start model) is charged: in the `loss`, or per token in the "
        "`reward`. The start model's log-probs then cost a forward pass per step.",
    )
    kl_estimator: Literal["k1", "k2", "k3"] = Field(
        default="k3",
        description="k1 = -r, k2 = r^2 / 2, k3 = exp(r) - 1 - r, with r = reference - policy log-prob.",
    )
    kl_coefficient: NonNegative = Field(default=0.001, description="Weight of that KL.")
    entropy_coefficient: NonNegative = Field(
        default=0.0, description="Weight of the entropy bonus; above 0 it costs memory for all logits."
    )
    value_coefficient: Positive = Field(
        default=0.5, description='With advantage = "gae": weight of the value head\'s squared error.'
    )

    @property
    def needs_reference(self) -> bool:
        """Whether the start model's log-probs are needed."""
        return self.kl != "none"

    @property
    def needs_entropy(self) -> bool:
        """Whether the entropy of each token's distribution is needed."""
        return self.entropy_coefficient > 0


class AlgorithmSection(LossConfig):
    """Advantages and loss."""

    advantage: Text = Field(
        default="grpo",
        description="`grpo`: reward minus group mean, over group std. `grpo_no_std`: not divided. `rloo`: "
        "reward minus mean of the others. `reinforce_plus_plus`: returns, normalised over the batch. "
        "`gae`: PPO with a value head. Or a dotted path to a function "
        "`(Experience, AlgorithmSection) -> arrays`.",
    )
    gamma: Annotated[float, Field(gt=0, le=1)] = Field(
        default=1.0, description="Discount per token, of `gae` and `reinforce_plus_plus`."
    )
    gae_lambda: Annotated[float, Field(ge=0, le=1)] = Field(
        default=1.0, description="With `gae`: 1 trusts the rewards alone, 0 the value head's next step."
    )
    normalization: Literal["token_mean", "sequence_mean", "prompt_mean"] = Field(
        default="token_mean",
        description="What weighs the same in the loss: every sampled token of the batch, every trajectory "
        "(`sequence_mean`) or every group (`prompt_mean`).",
    )
    minibatches: Count = Field(
        default=1,
        description="Optimizer updates per step, each on its share of the groups. "
        "The policy ratio is taken to the weights before the first, so that clipping bounds the later ones.",
    )

    @property
    def needs_value(self) -> bool:
        """Whether the model has a value head."""
        return self.advantage == "gae"


class TrainerSection(Section):
    """The processes that hold the weights in training."""

    backend: Literal["megatron", "fsdp"] = Field(
        default="megatron",
        description="`megatron`: Qwen3, Qwen3-MoE and Llama in any layout. `fsdp`: every model of "
        "transformers, data parallel.",
    )
    dtype: Literal["float32", "bfloat16"] = Field(
        default="float32", description="Precision of weights and compute."
    )
    microbatch_tokens: Count = Field(
        default=16384, description="Most tokens in one forward and backward pass."
    )
    threads: Count = Field(
        default=1,
        description="CPU threads of one operation. One suits a trainer that shares the cores with an engine.",
    )
    tensor_parallel: Count = Field(default=1, description="Ranks that share each matrix.")
    pipeline_parallel: Count = Field(default=1, description="Ranks that hold consecutive layers.")
    context_parallel: Count = Field(default=1, description="Ranks that share the tokens of each sequence.")
    data_parallel: Count = Field(
        default=1, description="Copies of the model, each with its part of the batch."
    )
    expert_parallel: Count = Field(
        default=1, description="Ranks, of those of one pipeline stage, that hold different experts."
    )
    expert_tensor_parallel: Count | None = Field(
        default=None, description="Ranks that share each matrix of an expert; tensor_parallel when left out."
    )
    recompute: bool = Field(
        default=False, description="Compute activations again in the backward pass, to save memory."
    )
    deterministic: bool = Field(
        default=False, description="Use only algorithms that give the same bits for the same input."
    )
    r3: bool = Field(
        default=False,
        description="Routing replay for mixture-of-experts models: the trainer takes the experts that the "
        "engine took.",
    )
    true_on_policy: bool = Field(
        default=False,
        description="Engine and trainer share one arithmetic, and a step is refused unless their log-probs "
        "are equal to the last bit. For models with a profile (docs/backends.md), some ten times slower.",
    )
    timeout: Positive = Field(
        default=600.0, description="Seconds that one rank waits for another before the trainer gives up."
    )
    launcher: Literal["spawn", "torchrun"] = Field(
        default="spawn",
        description="What starts the ranks: `spawn`, the driver as child processes; `torchrun`, started by "
        "the driver on one node and by you on several (docs/cluster.md).",
    )
    nodes: Count = Field(
        default=1, description="Machines that share the ranks equally; several need `torchrun`."
    )
    driver_address: Text | None = Field(
        default=None,
        description="With `torchrun`: HOST:PORT of the driver's machine, where it listens for the ranks. "
        "Left out: a free port of 127.0.0.1.",
    )
    start_timeout: Positive = Field(
        default=600.0, description="With `torchrun`: seconds until all ranks have met the driver."
    )

    def layout(self) -> Layout:
        return Layout(
            tensor=self.tensor_parallel,
            pipeline=self.pipeline_parallel,
            context=self.context_parallel,
            data=self.data_parallel,
            expert=self.expert_parallel,
            expert_tensor=self.expert_tensor_parallel,
        )


class OptimizerConfig(Section):
    """AdamW. The learning rate rises linearly over the warm-up and then follows the schedule."""

    lr: Positive = Field(default=1e-6, description="Learning rate.")
    beta1: Annotated[float, Field(ge=0, lt=1)] = Field(default=0.9, description="Decay of the first moment.")
    beta2: Annotated[float, Field(ge=0, lt=1)] = Field(
        default=0.95, description="Decay of the second moment."
    )
    eps: Positive = Field(default=1e-8, description="Added to the root of the second moment.")
    weight_decay: NonNegative = Field(default=0.0, description="Decoupled weight decay.")
    clip_grad: Positive = Field(default=1.0, description="Largest norm of the gradient.")
    warmup_steps: Whole = Field(default=0, description="Updates over which the learning rate rises.")
    schedule: Literal["constant", "cosine", "linear"] = Field(
        default="constant", description="Course of the learning rate after the warm-up."
    )
    decay_steps: Count | None = Field(
        default=None,
        description="Updates after the warm-up until a `cosine` or `linear` schedule reaches min_lr.",
    )
    min_lr: NonNegative = Field(default=0.0, description="Where such a schedule ends.")


class WeightsSection(Section):
    """How new weights reach the engines (docs/weights.md says which way to choose)."""

    mover: Literal["broadcast", "handoff", "disk", "p2p"] = Field(
        default="broadcast",
        description="`broadcast` over a process group, `handoff` of memory on one machine, `disk` writes "
        "what changed, `p2p` writes into memory beside each engine.",
    )
    mode: Literal["retract", "in_place", "abort"] = Field(
        default="retract",
        description="What becomes of requests in flight: computed anew under the new weights, kept with the "
        "old weights' keys and values, or ended.",
    )
    bucket_mb: Count = Field(default=512, description="MiB of weights that travel at once.")
    timeout: Positive = Field(default=120.0, description="Seconds that any one step of an update may take.")
    check: bool = Field(
        default=True,
        description="Before the first step, fill the engines with noise, send the weights and compare every "
        "tensor.",
    )
    encoding: Literal["xor", "overwrite"] = Field(
        default="xor", description="Mover disk: how a changed tensor is written."
    )
    rebase_every: Count = Field(
        default=20, description="Mover disk: versions after which the weights are written whole again."
    )


class ClusterSection(Section):
    """Where the processes of the run live (docs/cluster.md)."""

    kind: Literal["local", "ray"] = Field(
        default="local", description="This machine alone, or a Ray cluster (extra `ray`)."
    )
    address: Text | None = Field(
        default=None,
        description='Ray cluster to join ("auto", "HOST:PORT"); when left out, a new one on this machine.',
    )
    rollout_workers: Count = Field(default=2, description="Ray: actors that run the episodes between them.")
    max_restarts: Whole = Field(
        default=3,
        description="Times that each engine, gateway, rollout worker and trainer is replaced when it dies.",
    )


class CheckpointSection(Section):
    """What survives a crash."""

    every: Count = Field(
        default=10, description="Steps between checkpoints; the last step always writes one."
    )
    keep: Count = Field(default=2, description="Checkpoints kept; older ones are deleted.")


class EvalSection(Section):
    """Held-out evaluation, before the first step and after the last. Without this table there is none."""

    source: Text | None = Field(default=None, description="Task source; that of [environment] when left out.")
    split: Text = Field(default="test", description="Split of a generator to evaluate on.")
    seed: int = Field(default=0, description="Seed of a generator's tasks.")
    count: Count = Field(default=64, description="Tasks to evaluate on.")
    place: Literal["shared", "dedicated", "external"] = Field(
        default="shared",
        description="`shared`: on the rollout's engines, training waits. `dedicated`: on the engines of "
        "eval.urls, training goes on. `external`: a snapshot is left in run.dir/eval for others to score.",
    )
    urls: list[Text] = Field(
        default_factory=list,
        description='With place = "dedicated": SGLang servers with the same model, which can read run.dir.',
    )
    every: Whole = Field(default=0, description="Also evaluate every so many steps; 0: never in between.")
    samples_per_task: Count = Field(
        default=1, description="Episodes per task; their mean is the task's score."
    )
    temperature: NonNegative = Field(default=0.0, description="Sampling temperature; 0 is greedy decoding.")


class TrackingSection(Section):
    """Where figures go beside metrics.jsonl, all under the same names (docs/metrics.md)."""

    tensorboard: bool = Field(
        default=False,
        description="Write TensorBoard events to run.dir/tensorboard; extra `tracking`.",
    )
    wandb: bool = Field(
        default=False,
        description="Write an offline W&B run to run.dir/wandb, for `wandb sync`; extra `tracking`.",
    )
    wandb_project: Text = Field(default="titogym", description="W&B project of that run.")
    port: Annotated[int, Field(ge=0, le=65535)] | None = Field(
        default=None,
        description="Serve the live page, and Prometheus metrics at /metrics, on this port of 127.0.0.1; 0 "
        "takes a free one. Left out: neither (`titogym runs watch` shows the page as well).",
    )


class RunConfig(Section):
    """A whole run."""

    run: RunSection
    model: ModelSection
    engine: EngineSection = EngineSection()
    gateway: GatewaySection = GatewaySection()
    environment: EnvironmentSection
    harness: HarnessSection = HarnessSection()
    sandbox: SandboxSection = SandboxSection()
    rollout: RolloutSection = RolloutSection()
    buffer: BufferSection = BufferSection()
    algorithm: AlgorithmSection = AlgorithmSection()
    trainer: TrainerSection = TrainerSection()
    optimizer: OptimizerConfig = OptimizerConfig()
    weights: WeightsSection = WeightsSection()
    cluster: ClusterSection = ClusterSection()
    checkpoint: CheckpointSection = CheckpointSection()
    eval: EvalSection | None = None
    tracking: TrackingSection = TrackingSection()

    @model_validator(mode="after")
    def _possible(self) -> "RunConfig":
        problems = list(impossible(self))
        if problems:
            raise ValueError("\n".join(problems))
        return self
