"""Routing replay (R3) on and off: a mixture-of-experts model trained twice against a real SGLang.

    python benchmarks/r3.py [--steps 200] [--dir runs/r3] [--dtype bfloat16]

Makes a small Qwen3-MoE from nothing as the quickstart does, then runs the quickstart's tasks with
`trainer.r3` on and off, which differ in nothing else. Prints how far the trainer's log-probs are from the
engine's in both, and how often its routers would have taken the engine's experts. Exits with 1 unless with
R3 every route agrees and mean |m - 1| is lower. What is there already is read or continued. Takes some
twenty minutes on two cores with nothing beside it.
"""

import argparse
import statistics
import sys
from dataclasses import replace
from pathlib import Path

import orjson
from rich.console import Console

from titogym.quickstart.model import Recipe, prepare_tokenizer
from titogym.quickstart.run import CONFIG
from titogym.trainer.backends.base import BackendSpec
from titogym.trainer.backends.process import TrainerProcess
from titogym.trainer.config import OptimizerConfig
from titogym.trainer.config_file import load_config
from titogym.trainer.runs import RunDirectory
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
SHOWN = ("tis/deviation", "tis/k3", "logprobs/gap_mean", "logprobs/gap_max", "tis/clipped_fraction")


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


def run(arguments: argparse.Namespace, r3: bool) -> RunDirectory:
    directory = arguments.dir / f"r3-{'on' if r3 else 'off'}"
    overrides = {
        "run.dir": directory,
        "run.steps": arguments.steps,
        "model.dir": arguments.dir / "model",
        "engine.dtype": arguments.dtype,
        "trainer.dtype": arguments.dtype,
        "trainer.r3": str(r3).lower(),
        "rollout.samples_per_prompt": 4,
        "rollout.groups_per_step": 2,
        "rollout.episodes_in_flight": 16,
        "buffer.capacity": 4,
        "checkpoint.every": arguments.steps,
        "eval.count": 8,
    }
    config = load_config(CONFIG, [f"{key}={value}" for key, value in overrides.items()])
    if directory.exists() and len(RunDirectory(directory).metrics()) == arguments.steps:
        return RunDirectory(directory)
    return run_training(config, Console(), resume=directory.exists())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--dir", type=Path, default=Path("runs/r3"))
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--demonstrations", type=int, default=6000)
    arguments = parser.parse_args()
    if not (arguments.dir / "model" / "model.safetensors").exists():
        make_model(arguments.dir / "model", arguments.demonstrations)
    runs = {r3: run(arguments, r3).metrics() for r3 in (True, False)}

    def mean(r3: bool, name: str) -> float:
        return statistics.fmean(step[name] for step in runs[r3])

    print(f"\n{arguments.steps} steps, {arguments.dtype}; means over the steps\n")
    print("| | R3 on | R3 off |\n| --- | --- | --- |")
    for name in SHOWN:
        print(f"| {name} | {mean(True, name):.6f} | {mean(False, name):.6f} |")
    agreement = min(step["r3/agreement"] for step in runs[True])
    print(f"| r3/agreement, lowest | {agreement:.6f} | |")
    print(f"| r3/own_agreement | {mean(True, 'r3/own_agreement'):.6f} | |")
    print(f"| reward/mean | {mean(True, 'reward/mean'):.3f} | {mean(False, 'reward/mean'):.3f} |")
    if agreement < 1 or mean(True, "tis/deviation") >= mean(False, "tis/deviation"):
        sys.exit("The bar is missed")


if __name__ == "__main__":
    main()
