"""Routing replay (R3) on and off: a mixture-of-experts model trained against a real SGLang.

    python benchmarks/r3.py [--steps 200] [--dir runs/r3] [--dtype bfloat16]

Makes a small Qwen3-MoE from nothing as the quickstart does and trains it on the quickstart's tasks with
`trainer.r3` on. Then the batches of every fourth step are scored twice under the weights that trained on
them, with the engine's routes and with the trainer's own: same tokens, same weights, only the replay differs.
Prints how far the trainer's log-probs are from the engine's in both. Exits with 1 unless every route of the
run agreed and mean |m - 1| is lower with R3. What is there already is read or continued. Takes some twenty
minutes on two cores with nothing beside it.
"""

import argparse
import statistics
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import orjson
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import track

from titogym.quickstart.model import Recipe, prepare_tokenizer
from titogym.quickstart.run import CONFIG
from titogym.trainer.backends.base import BackendSpec
from titogym.trainer.backends.process import TrainerProcess
from titogym.trainer.config.file import load_config
from titogym.trainer.config.sections import AlgorithmSection, OptimizerConfig
from titogym.trainer.learning.collate import train_batch
from titogym.trainer.runs.directory import RunDirectory
from titogym.trainer.runs.storage import read_groups
from titogym.trainer.training import run_training

EXPERTS = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 128,
    "intermediate_size": 256,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "tie_word_embeddings": False,  # SGLang leaves a tied output matrix of this model uninitialised
}
SCORED_EVERY = 4  # steps; each needs a checkpoint


def make_model(directory: Path, demonstrations: int) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    recipe = Recipe(demonstrations=demonstrations)
    examples = prepare_tokenizer(directory, 0, recipe)
    config = orjson.loads((directory / "config.json").read_bytes()) | EXPERTS
    (directory / "config.json").write_bytes(orjson.dumps(config))
    optimizer = OptimizerConfig(beta2=0.95, weight_decay=0.01)
    trainer = TrainerProcess(BackendSpec(optimizer=optimizer), directory / "sft.log")
    try:
        trainer.init_random(config, 0, directory)
        last = trainer.sft(examples, replace(recipe.sft, lr=2e-3))
        print(f"Start model: negative log-likelihood {last['loss/nll']:.3f}", flush=True)
        trainer.save_hf(directory)
    finally:
        trainer.close()


def train(arguments: argparse.Namespace) -> RunDirectory:
    directory = arguments.dir / "run"
    overrides = {
        "run.dir": directory,
        "run.steps": arguments.steps,
        "run.keep_batches": "true",
        "model.dir": arguments.dir / "model",
        "engine.dtype": arguments.dtype,
        "trainer.dtype": arguments.dtype,
        "trainer.r3": "true",
        "rollout.samples_per_prompt": 4,
        "rollout.groups_per_step": 2,
        "rollout.episodes_in_flight": 16,
        "buffer.capacity": 4,
        "checkpoint.every": SCORED_EVERY,
        "checkpoint.keep": arguments.steps,
        "eval.count": 8,
    }
    config = load_config(CONFIG, [f"{key}={value}" for key, value in overrides.items()])
    if directory.exists() and len(RunDirectory(directory).metrics()) == arguments.steps:
        return RunDirectory(directory)
    return run_training(config, Console(), resume=directory.exists())


def ratios(run: RunDirectory, arguments: argparse.Namespace, replay: bool) -> NDArray[np.float64]:
    """m = exp(trainer's log-prob - engine's) of every sampled token of the scored batches."""
    spec = BackendSpec(dtype=arguments.dtype, replay_routes=replay)
    trainer = TrainerProcess(spec, arguments.dir / "score.log")
    found = []
    try:
        trainer.load_hf(arguments.dir / "model")
        steps = [step for step in run.checkpoints() if step < arguments.steps]
        for step in track(steps, f"Scoring with R3 {'on' if replay else 'off'}"):
            trainer.load(run.checkpoints()[step] / "trainer")
            batch = train_batch(read_groups(run.batch_path(step + 1)), AlgorithmSection(), 1.0)
            for scored, sampled, mask in zip(
                trainer.logprobs(batch), batch.rollout_logprobs, batch.loss_mask, strict=True
            ):
                found.append((scored.astype(np.float64) - sampled)[mask > 0])
    finally:
        trainer.close()
    ratio: NDArray[np.float64] = np.exp(np.concatenate(found))
    return ratio


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--dir", type=Path, default=Path("runs/r3"))
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--demonstrations", type=int, default=6000)
    arguments = parser.parse_args()
    if not (arguments.dir / "model" / "model.safetensors").exists():
        make_model(arguments.dir / "model", arguments.demonstrations)
    run = train(arguments)
    on, off = ratios(run, arguments, True), ratios(run, arguments, False)
    steps = run.metrics()
    agreement = min(step["r3/agreement"] for step in steps)
    own = statistics.fmean(step["r3/own_agreement"] for step in steps)
    print(
        f"\n{len(steps)} steps with R3, {arguments.dtype}: reward {steps[0]['reward/mean']:.3f} at first, ",
        end="",
    )
    print(f"{steps[-1]['reward/mean']:.3f} at last; routes agree {agreement:.6f} at least, ", end="")
    print(f"the trainer's own would have {own:.6f} of them\n")
    print(f"| {len(on)} tokens | R3 on | R3 off |\n| --- | --- | --- |")
    rows: dict[str, Callable[[NDArray[np.float64]], float]] = {
        "mean of abs(m - 1)": lambda m: float(np.abs(m - 1).mean()),
        "its 99.9th percentile": lambda m: float(np.quantile(np.abs(m - 1), 0.999)),
        "its maximum": lambda m: float(np.abs(m - 1).max()),
        "mean of m - 1 - log m (k3)": lambda m: float((m - 1 - np.log(m)).mean()),
    }
    for name, of in rows.items():
        print(f"| {name} | {of(on):.6f} | {of(off):.6f} |")
    if agreement < 1 or np.abs(on - 1).mean() >= np.abs(off - 1).mean():
        sys.exit("The bar is missed")


if __name__ == "__main__":
    main()
