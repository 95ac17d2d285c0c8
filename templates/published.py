"""What a model folder in Hugging Face format says of itself."""

import json
from pathlib import Path
from typing import Any

from titogym.errors import UserError


def read_json(path: Path) -> dict[str, Any]:
    """The object in `path`, {} where there is no such file. Raises `UserError` when it is broken."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise UserError(f"Cannot read {path}: {error}") from error
    if not isinstance(value, dict):
        raise UserError(f"{path} should hold a JSON object.")
    return value


def chat_template(model_dir: Path) -> str | None:
    """The model's own chat template: `chat_template.jinja`, else the one in `tokenizer_config.json`."""
    try:
        return (model_dir / "chat_template.jinja").read_text(encoding="utf-8")
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        raise UserError(f"Cannot read {model_dir / 'chat_template.jinja'}: {error}") from error
    stored = read_json(model_dir / "tokenizer_config.json").get("chat_template")
    if isinstance(stored, list):  # several, by name
        stored = {entry["name"]: entry["template"] for entry in stored}.get("default")
    return stored if isinstance(stored, str) else None


def template_variables(model_dir: Path) -> dict[str, str]:
    """The special-token texts that chat templates read by name: `bos_token`, `eos_token`, ..."""
    config = read_json(model_dir / "tokenizer_config.json")
    tokens = {
        name: config[name]
        for name in ("bos_token", "eos_token", "pad_token", "unk_token")
        if config.get(name)
    }
    return {name: token["content"] if isinstance(token, dict) else token for name, token in tokens.items()}


def architectures(model_dir: Path) -> tuple[str, ...]:
    """Architecture names in `config.json`, () where it names none."""
    return tuple(read_json(model_dir / "config.json").get("architectures") or ())


def vocabulary(model_dir: Path) -> int:
    """Tokens that the model can sample, 0 where `config.json` does not say."""
    config = read_json(model_dir / "config.json")
    size = config.get("vocab_size") or (config.get("text_config") or {}).get("vocab_size")
    return int(size or 0)


def context_length(model_dir: Path) -> int | None:
    """Most tokens that the model was made for, None where `config.json` does not say."""
    config = read_json(model_dir / "config.json")
    length = config.get(
        "max_position_embeddings", config.get("text_config", {}).get("max_position_embeddings")
    )
    return int(length) if length else None
