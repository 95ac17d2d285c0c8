"""The quickstart model's tokenizer: a small byte-level BPE, trained on the texts that the model will read."""

import re
from collections.abc import Iterable
from pathlib import Path

import orjson
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from titogym.templates.families import QUICKSTART

END_OF_TURN = "<|im_end|>"
PADDING = "<|endoftext|>"
SPECIAL_TOKENS = (PADDING, "<|im_start|>", END_OF_TURN, "<tool_call>", "</tool_call>")

# A word with the mark that ties it to the one before (`-otter`, `.txt`), a digit, or whatever else stands
# together. A word is the same token at the start of a line and behind a space, which makes copying easy.
_WORDS = r"[-._]?\p{L}+|\p{N}|[^\p{L}\p{N}]+"
_SPECIAL = re.compile("|".join(map(re.escape, SPECIAL_TOKENS)))


def train(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Learn at most `vocab_size` tokens, fewer when the texts hold no further pairs to merge."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    pieces = (piece for text in texts for piece in _SPECIAL.split(text) if piece)
    tokenizer.train_from_iterator(pieces, trainer)
    return tokenizer


def write(tokenizer: Tokenizer, model_dir: Path) -> None:
    """Write the files by which transformers, SGLang and the gateway know this tokenizer and its template."""
    model_dir.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(model_dir / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END_OF_TURN,
        "pad_token": PADDING,
        "clean_up_tokenization_spaces": False,
    }
    (model_dir / "tokenizer_config.json").write_bytes(orjson.dumps(settings))
    (model_dir / "chat_template.jinja").write_text(QUICKSTART.source(), encoding="utf-8")
    stops = [tokenizer.token_to_id(text) for text in QUICKSTART.stop]
    generation = {"eos_token_id": stops, "pad_token_id": tokenizer.token_to_id(PADDING)}
    (model_dir / "generation_config.json").write_bytes(orjson.dumps(generation))
