"""Hugging Face model directories: what is in them beside weights."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from titogym.errors import UserError
from titogym.trainer.backends.versions import write_json

# What makes a saved model directory usable by transformers and SGLang beside weights and config.json.
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "generation_config.json",
)


def read_config(model_dir: Path) -> dict[str, Any]:
    """The config.json of `model_dir`. Raises `UserError` when it is missing or not JSON."""
    path = model_dir / "config.json"
    try:
        config: dict[str, Any] = json.loads(path.read_text())
    except OSError:
        raise UserError(f"{model_dir} has no config.json: give a Hugging Face model directory") from None
    except json.JSONDecodeError as error:
        raise UserError(f"{path} is not valid JSON: {error}") from None
    return config


def companions(model_dir: Path) -> list[Path]:
    """What an engine may read of `model_dir` beside weights: configuration, tokenizer, template."""
    kinds = (".json", ".jinja", ".txt", ".model")
    return [
        path for path in model_dir.iterdir() if path.suffix in kinds and not path.name.endswith(".index.json")
    ]


def without_dtype(config: Mapping[str, Any]) -> dict[str, Any]:
    """What `config` says of the model itself, and not of the precision it was saved in."""
    return {key: value for key, value in config.items() if key not in ("dtype", "torch_dtype")}


def write_companions(model_dir: Path, config: Mapping[str, Any], source: Path | None) -> None:
    """Write config.json, and copy the tokenizer's files from the directory `source`."""
    model_dir.mkdir(parents=True, exist_ok=True)
    write_json(model_dir / "config.json", config)
    if source is not None and source.resolve() != model_dir.resolve():
        for name in _TOKENIZER_FILES:
            if (source / name).exists():
                shutil.copyfile(source / name, model_dir / name)
