from pathlib import Path
from types import SimpleNamespace

import fastokens
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.templates import models, real_models
from titogym.errors import UserError
from titogym.templates.tokenizer import Tokenizer, encode_segments

# What tokenizers treat in ways of their own: space, contractions, digits, marks to combine, control tokens.
SPECIAL_CARE = (
    *" \n\t\r'’0123456789",
    "\u00a0",
    "\u3000",
    "\r\n",
    "'s",
    "'LL",
    "e\u0301",
    "\u1100\u1161",
    "\u017f",
)
BACKEND = models.byte_level(models.CHATML, (*models.TAGS, "é tag", "｜wide▁｜"))
TOKENIZER = Tokenizer(BACKEND)
ids = st.lists(st.integers(0, TOKENIZER.vocab_size + 5), max_size=40)


@given(st.text())
def test_text_survives(text):
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text


@given(ids, st.data())
def test_any_way_of_cutting_a_stream_gives_the_same_text(row, data):
    stream, text, at = TOKENIZER.stream(), "", 0
    while at < len(row):
        step = data.draw(st.integers(1, 5))
        text += stream.push(row[at : at + step])
        at += step
    assert text + stream.flush() == TOKENIZER.decode(row)


@given(st.lists(st.integers(0, 255 + 8), max_size=40))
def test_decoding_agrees_with_the_library(row):
    assert TOKENIZER.decode(row) == BACKEND.decode(row, skip_special_tokens=False)


@settings(max_examples=50)
@given(st.text())
def test_a_character_is_held_back_until_it_is_whole(text):
    stream = TOKENIZER.stream()
    # One token per byte, so every character of more than one byte is split.
    for character in text:
        letters = (BACKEND.token_to_id(models.LETTERS[byte]) for byte in character.encode())
        shown = [stream.push([token]) for token in letters if token is not None]
        assert shown == [""] * (len(character.encode()) - 1) + [character]
    assert stream.flush() == ""


def test_a_stream_looks_at_each_token_once():
    stream = TOKENIZER.stream()
    looked_up: list[int] = []

    def token_bytes(token_id: int) -> bytes:
        looked_up.append(token_id)
        return TOKENIZER.token_bytes(token_id)

    stream._token_bytes = token_bytes
    row = TOKENIZER.encode("the 🎉 the 你好 <|im_end|>" * 50)
    for token in row:
        stream.push([token])
    assert looked_up == row


def test_control_text_becomes_its_id_unless_it_is_plain():
    end = TOKENIZER.token_to_id("<|im_end|>")
    assert TOKENIZER.encode("a<|im_end|>")[-1] == end
    plain = TOKENIZER.encode_plain("a<|im_end|><|im_end|><|im_start|>")
    assert TOKENIZER.special_ids.isdisjoint(plain)
    assert TOKENIZER.decode(plain) == "a<|im_end|><|im_end|><|im_start|>"
    # `<think>` is one token but no control token: typed or not, it is the same words.
    assert TOKENIZER.encode_plain("<think>") == TOKENIZER.encode("<think>")


@given(st.text(st.sampled_from("the.\n <|>é🎉")))
def test_plain_text_without_control_text_is_encoded_as_ever(text):
    assert TOKENIZER.encode_plain(text) == TOKENIZER.encode(text)


def test_pieces_after_the_first_get_no_prefix_space():
    backend = models.byte_level(models.CHATML)
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(replacement="Ġ", prepend_scheme="first")
    tokenizer = Tokenizer(backend)
    assert tokenizer.decode(tokenizer.encode("th")) == " th"
    assert tokenizer.decode(tokenizer.encode_inside("th")) == "th"
    assert tokenizer.decode(encode_segments(tokenizer, ["th", "th"])) == " thth"


def test_a_prompt_is_never_cut_or_padded(tmp_path):
    backend = models.byte_level(models.CHATML)
    backend.enable_truncation(3)
    backend.enable_padding(length=8)
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.decode(tokenizer.encode("abcdefg")) == "abcdefg"


def test_files_that_cannot_serve_are_refused_in_a_sentence(tmp_path):
    with pytest.raises(UserError, match="nope is no folder"):
        Tokenizer.load(tmp_path / "nope")
    with pytest.raises(UserError, match=r"has no tokenizer\.json"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match="not a readable tokenizer"):
        Tokenizer.load(tmp_path)
    tokenizers.Tokenizer(tokenizers.models.BPE()).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(UserError, match="not byte-level"):
        Tokenizer.load(tmp_path)


def test_the_real_qwen3_tokenizer_encodes_as_published(qwen3):
    # Ids that Qwen's own tokenizer gives.
    assert qwen3.tokenizer.encode("Hello world, 12") == [9707, 1879, 11, 220, 16, 17]
    assert qwen3.tokenizer.encode("<|im_start|>user\n") == [151644, 872, 198]
    assert qwen3.tokenizer.encode("</think>\n\n") == [151668, 271]
    assert qwen3.tokenizer.token_to_id("<|im_end|>") == 151645


@pytest.mark.parametrize(
    "model_dir",
    [
        real_models.qwen3,
        real_models.qwen3_5,
        real_models.smollm2,
        real_models.deepseek_v3,
        real_models.gpt_oss,
        real_models.llama_3,
        real_models.mistral,
    ],
    ids=lambda model_dir: model_dir.__name__,
)
def test_real_tokenizers_give_the_same_ids_when_accelerated(model_dir):
    fast, slow = Tokenizer.load(model_dir()), Tokenizer.load(model_dir())
    assert fast.accelerate()
    pieces = st.one_of(st.text(max_size=12), st.sampled_from((*SPECIAL_CARE, *slow.special_texts[:20])))

    @settings(max_examples=300, deadline=None)
    @given(st.lists(pieces, max_size=40))
    def agree(parts):
        text = "".join(parts)
        assert fast.encode(text) == slow.encode(text)
        assert fast.encode_plain(text) == slow.encode_plain(text)

    agree()
    code = Path(__file__).read_text()
    assert fast.encode(code) == slow.encode(code)


def test_an_accelerated_tokenizer_that_gives_other_ids_is_not_used(monkeypatch):
    class Wrong:
        @staticmethod
        def from_json_str(text):
            return Wrong()

        def encode(self, text):
            right = BACKEND.encode(text, add_special_tokens=False).ids
            return SimpleNamespace(ids=[0] if "\u0e01" in text else right)

    monkeypatch.setattr(fastokens, "Tokenizer", Wrong)
    tokenizer = Tokenizer(BACKEND)
    assert not tokenizer.accelerate()
    assert tokenizer.encode("\u0e01") == TOKENIZER.encode("\u0e01") != [0]


def test_what_the_fast_encoder_cannot_encode_is_encoded_all_the_same(monkeypatch):
    class Limited:
        def __init__(self, text):
            self._backend = tokenizers.Tokenizer.from_str(text)

        from_json_str = classmethod(lambda cls, text: cls(text))

        def encode(self, text):
            if text == "too much":
                raise ValueError("match limit exceeded")
            return self._backend.encode(text, add_special_tokens=False)

    monkeypatch.setattr(fastokens, "Tokenizer", Limited)
    tokenizer = Tokenizer(BACKEND)
    assert tokenizer.accelerate()
    assert tokenizer.encode("too much") == TOKENIZER.encode("too much")
