"""Text to token ids and back, over a model's `tokenizer.json`. Needs neither torch nor transformers."""

import codecs
import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import tokenizers
from tokenizers import decoders

from titogym.errors import UserError
from titogym.templates.literal import Guard, segments


class Tokenizer:
    """A byte-level BPE tokenizer (the kind of every family here).

    Ids and text correspond exactly: `decode` is the concatenation of each token's bytes read as UTF-8,
    so a stream of tokens decodes to the same text whichever way it is cut.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        """Raises `UserError` when the tokenizer is not byte-level."""
        if not isinstance(backend.decoder, decoders.ByteLevel):
            raise UserError("This tokenizer is not byte-level BPE; only byte-level tokenizers are supported.")
        # Some published files cut or pad every text; a prompt must arrive whole.
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._fast: Callable[[str], list[int]] | None = None
        self._added = {
            token_id: token.content for token_id, token in backend.get_added_tokens_decoder().items()
        }
        specials = {
            token_id: token for token_id, token in backend.get_added_tokens_decoder().items() if token.special
        }
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        self.highest_id: int = max(backend.get_vocab_size(with_added_tokens=False) - 1, *self._added, 0)
        self.special_ids = frozenset(specials)
        self.special_texts = tuple(token.content for token in specials.values())
        self._guard = Guard(self.special_texts)
        # A token that takes nothing from the text after it: what follows it stands in mid-sequence.
        self._anchor = next((token.content for token in specials.values() if not token.rstrip), "")
        self._bytes: dict[int, bytes] = {}

    @classmethod
    def load(cls, model_dir: Path) -> "Tokenizer":
        """Read `tokenizer.json`. Raises `UserError` where it is missing, broken or not byte-level."""
        path = Path(model_dir) / "tokenizer.json"
        if not path.parent.is_dir():
            raise UserError(f"{model_dir} is no folder: give a model folder in Hugging Face format.")
        if not path.is_file():
            raise UserError(f"{model_dir} has no tokenizer.json; give a model folder in Hugging Face format.")
        try:
            return cls(tokenizers.Tokenizer.from_file(str(path)))
        except UserError as error:
            raise UserError(f"{path}: {error}") from None
        except Exception as error:  # the library raises bare Exception
            raise UserError(f"{path} is not a readable tokenizer: {error}") from error

    def accelerate(self) -> bool:
        """Encode with `fastokens` from now on, many times as fast, if it gives the same ids; whether it does.

        Takes seconds for a large vocabulary. May run in a thread while others encode.
        """
        import fastokens

        try:
            library = fastokens.Tokenizer.from_json_str(self._backend.to_str())

            def fast(text: str) -> list[int]:
                ids: list[int] = library.encode(text).ids
                return ids

            if all(fast(text) == self._encode(text) for text in self._trials()):
                self._fast = fast
        except Exception:  # it does not know every kind of tokenizer, and raises what it likes
            return False
        return self._fast is not None

    def _trials(self) -> Iterator[str]:
        """Texts with the characters of all common scripts, every added token, and all kinds of space."""
        yield from ("", " ", "a", "\n", *self._added.values())
        yield "".join(f"{token} {token}x{token}\n" for token in self._added.values())
        for codes in (range(0x3000), range(0x3000, 0x110000, 97)):
            characters = [chr(code) for code in codes if not 0xD800 <= code < 0xE000]
            for between in ("", " ", "a1"):
                yield between.join(characters)
        for space in (" ", "\n", "\t", "\r\n", " \n", "\u3000"):
            yield "".join(f"{space * n}x{space * n}!{space * n}7" for n in range(1, 20))
        yield " ".join(str(7**n) for n in range(200))
        yield "I'll say SHE'D, they'Ve l'eau e\u0301 \u1100\u1161\u11a8 __init__(self, *a):\n\t\treturn x" * 9

    def encode(self, text: str) -> list[int]:
        """Ids of `text` at the start of a sequence. Adds no BOS or EOS; special-token text becomes its id."""
        if self._fast is not None:
            with contextlib.suppress(Exception):  # the other library may know better
                return self._fast(text)
        return self._encode(text)

    def _encode(self, text: str) -> list[int]:
        # The batch call leaves out the offsets of tokens, a quarter of the work.
        ids: list[int] = self._backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return ids

    def encode_inside(self, text: str) -> list[int]:
        """Ids of `text` where other tokens stand before it: no prefix space or other start-of-text marks."""
        return self.encode(self._anchor + text)[1:] if self._anchor else self.encode(text)

    def encode_plain(self, text: str) -> list[int]:
        """Ids of `text` as somebody's words: special-token text in it gives no special id."""
        return encode_segments(self, segments(self._guard.text(text)))

    def decode(self, ids: Iterable[int]) -> str:
        """Text of `ids`, special tokens included. Bytes that are not UTF-8 become U+FFFD."""
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for; empty for an id past the vocabulary (padded embeddings)."""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._look_up(token_id)
        return known

    def _look_up(self, token_id: int) -> bytes:
        if token_id in self._added:
            return self._added[token_id].encode()
        token = self._backend.id_to_token(token_id)
        return b"" if token is None else bytes(_BYTE_OF[character] for character in token)

    def token_to_id(self, token: str) -> int | None:
        return self._backend.token_to_id(token)

    def stream(self) -> "IncrementalDecoder":
        return IncrementalDecoder(self)


class IncrementalDecoder:
    """Decodes tokens as they arrive, in time proportional to the new tokens.

    A character split across tokens is held back until it is whole. What `push` and `flush` returned,
    joined, equals `decode` of all ids.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Iterable[int]) -> str:
        return self._utf8.decode(b"".join(map(self._token_bytes, ids)))

    def flush(self) -> str:
        """The rest: U+FFFD for a character that never became whole."""
        return self._utf8.decode(b"", final=True)


def encode_segments(tokenizer: Tokenizer, pieces: Sequence[str]) -> list[int]:
    """Ids of a rendered conversation, given as the pieces that no token may join (see `literal`)."""
    ids = tokenizer.encode(pieces[0])
    for piece in pieces[1:]:
        ids += tokenizer.encode_inside(piece)
    return ids


def _byte_of() -> dict[str, int]:
    """Byte-level BPE's alphabet: printable Latin-1 stands for itself, the other bytes for U+0100 onwards."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    shifted = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(shifted)}


_BYTE_OF = _byte_of()
