"""What a weight update costs by each mover, on one model, one engine and one machine, side by side.

    python benchmarks/weights.py [--hidden N] [--layers N] [--updates N]

A real SGLang server and a trainer with a Qwen3 of random weights (36 M parameters unless told otherwise).
Each update follows an optimizer step with a learning rate of 1e-6 in bfloat16, as in fine-tuning, so that
few bytes change. Printed are medians over the updates, the first of each mover left out: seconds in which
the engine could generate (prepare, stage), seconds in which it could not (pause, activate, resume), bytes
that travelled, and the share of bytes that had changed where the mover knows it.
"""

import argparse
import json
import tempfile
from pathlib import Path
from statistics import median

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import track
from rich.table import Table

from titogym.gateway.engines.launch import EngineOptions, running
from titogym.quickstart import model
from titogym.trainer.backends.base import BackendSpec
from titogym.trainer.backends.process import TrainerProcess
from titogym.trainer.batch import TrainBatch
from titogym.trainer.config.sections import OptimizerConfig
from titogym.trainer.weights.settings import MoverName, WeightSettings

MOVERS: tuple[tuple[str, MoverName, str], ...] = (
    ("broadcast", "broadcast", "xor"),
    ("handoff", "handoff", "xor"),
    ("disk, xor", "disk", "xor"),
    ("disk, overwrite", "disk", "overwrite"),
    ("p2p", "p2p", "xor"),
)


def batch(rng: np.random.Generator, vocabulary: int) -> TrainBatch:
    tokens: list[NDArray[np.int32]] = [rng.integers(0, vocabulary, 64).astype(np.int32) for _ in range(4)]
    ones: list[NDArray[np.float32]] = [np.ones(64, np.float32) for _ in tokens]
    for mask in ones:
        mask[0] = 0
    rollout: list[NDArray[np.float32]] = [np.full(64, -6.0, np.float32) for _ in tokens]
    return TrainBatch(tokens, ones, rollout, [mask.copy() for mask in ones])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hidden", type=int, default=768, help="width of the model (default: 768)")
    parser.add_argument("--layers", type=int, default=6, help="its layers (default: 6)")
    parser.add_argument("--updates", type=int, default=4, help="updates by each mover (default: 4)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        model.prepare_tokenizer(root / "tokenizer", 0)
        config = json.loads((root / "tokenizer" / "config.json").read_text())
        config |= {
            "hidden_size": args.hidden,
            "num_hidden_layers": args.layers,
            "intermediate_size": 2 * args.hidden,
            "num_attention_heads": args.hidden // 64,
            "num_key_value_heads": args.hidden // 64,
            "initializer_range": 0.02,
        }
        spec = BackendSpec(optimizer=OptimizerConfig(lr=1e-6), dtype="bfloat16")
        trainer = TrainerProcess(spec, root / "trainer.log")
        trainer.init_random(config, 0, root / "tokenizer")
        trainer.save_hf(root / "model")
        options = EngineOptions(str(root / "model"), dtype="bfloat16", max_total_tokens=4096)
        with running(options, root / "engine.log") as engine:
            rows = [
                measure(trainer, engine.url, root, label, mover, encoding, config["vocab_size"], args.updates)
                for label, mover, encoding in track(MOVERS, "Updating")
            ]
        trainer.close()
    table = Table("mover", "generating (s)", "paused (s)", "bytes", "changed")
    for row in rows:
        table.add_row(*row)
    Console().print(table)


def measure(
    trainer: TrainerProcess,
    url: str,
    root: Path,
    label: str,
    mover: MoverName,
    encoding: str,
    vocabulary: int,
    updates: int,
) -> tuple[str, str, str, str, str]:
    settings = WeightSettings(
        mover=mover,
        directory=root / "weights",
        model_dir=root / "model",
        encoding="xor" if encoding == "xor" else "overwrite",
    )
    trainer.connect_engines([url], settings)
    rng = np.random.default_rng(0)
    found = []
    for version in range(updates + 1):
        trainer.train_step(batch(rng, vocabulary))
        found.append(trainer.publish_weights(version))
    later = found[1:]

    def typical(*names: str) -> float:
        return median(sum(figures[name] for name in names) for figures in later)

    changed = "publish/changed_fraction"
    return (
        label,
        f"{typical('publish/prepare_seconds', 'publish/stage_seconds'):.3f}",
        f"{typical('publish/pause_seconds', 'publish/activate_seconds', 'publish/resume_seconds'):.3f}",
        f"{typical('publish/bytes'):,.0f}",
        f"{typical(changed):.2%}" if changed in later[0] else "",
    )


if __name__ == "__main__":
    main()
