"""Model folders for tests: byte-level tokenizers that need no download, and the files around them."""

import json
from collections.abc import Sequence
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from titogym.templates.family import Family


def _letters() -> list[str]:
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


LETTERS = _letters()  # how byte-level BPE spells each byte


def byte_level(specials: Sequence[str], added: Sequence[str] = ()) -> tokenizers.Tokenizer:
    """A tokenizer of 256 bytes, a few merges, control tokens `specials` and plain single tokens `added`."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [
        ("t", "h"),
        ("th", "e"),
        ("i", "n"),
        ("Ġ", "the"),
        ("Ċ", "Ċ"),
        (".", "Ċ"),
        ("<", "|"),
        ("|", ">"),
    ]
    vocabulary = [*alphabet, *(left + right for left, right in merges)]
    tokenizer = tokenizers.Tokenizer(
        models.BPE(vocab={token: n for n, token in enumerate(vocabulary)}, merges=merges)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in specials])
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in added])
    return tokenizer


CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TAGS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")


def tokenizer_for(family: Family) -> tokenizers.Tokenizer:
    """A tokenizer of our own with the control tokens of ChatML and of a family."""
    return byte_level(tuple(dict.fromkeys((*CHATML, *family.control_texts))), TAGS)


def write_model_dir(folder: Path, family: Family, *, context_length: int = 4096) -> Path:
    """A model folder without weights that `load_model_assets` reads."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer_for(family).save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(family.source())
    config: dict[str, object] = {"max_position_embeddings": context_length}
    if family.signs is not None:
        config["architectures"] = [family.signs.architectures[0]]
    (folder / "config.json").write_text(json.dumps(config))
    return folder
