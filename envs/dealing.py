"""Dealing problems out to splits: by seed, the same in every process, and none in both splits."""

import hashlib
import random
from collections.abc import Callable, Iterator
from typing import Literal, TypeVar

from titogym.errors import UserError

T = TypeVar("T")

Split = Literal["train", "test"]

_ONE_IN = 4  # share of all problems that only the test split uses
_MOST_TRIES = 10_000  # until a family is taken to have no (further) problem of a split


def deal(
    family: str,
    split: Split,
    seed: int,
    count: int,
    draw: Callable[[random.Random], T],
    content: Callable[[T], str],
) -> Iterator[T]:
    """The first `count` problems of the endless series that `family`, `split` and `seed` name.

    `draw` makes a problem; `content` is all of it that a model sees, which decides to which split it
    belongs. Problem `n` is the same whatever the count is. Raises `UserError` for another split.
    """
    if split not in ("train", "test"):
        raise UserError(f'The task family "{family}" has no split {split!r}: choose "train" or "test".')
    for index in range(count):
        choose = random.Random(f"{family}/{split}/{seed}/{index}")
        for _ in range(_MOST_TRIES):
            problem = draw(choose)
            if split_of(content(problem)) == split:
                yield problem
                break
        else:
            raise AssertionError(f"{family} has no problem in the split {split}")


def split_of(content: str) -> Split:
    """The one split that a problem belongs to."""
    digest = hashlib.sha256(content.encode()).digest()
    return "test" if int.from_bytes(digest[:8], "big") % _ONE_IN == 0 else "train"
