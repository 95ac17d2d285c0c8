"""Groups on disk: one safetensors file that any tool can open, its header holding what is no array.

Arrays are named `NUMBER.COLUMN`, the samples numbered in the order of the groups: `tokens` int32,
`loss_mask` uint8, `logprobs` float64, and every other column that is an array already. The header's
`groups` is the JSON of the rest.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from titogym.errors import UserError
from titogym.trainer.batch import Group, Sample

_ARRAYS = {"tokens": np.int32, "loss_mask": np.uint8, "logprobs": np.float64}


def write_groups(
    path: Path, groups: Sequence[Group], columns: Mapping[str, Sequence[NDArray[Any]]] | None = None
) -> None:
    """Write `groups`, and further `columns` of one array per sample, to `path`. Raises `OSError`."""
    from safetensors.numpy import save

    arrays: dict[str, NDArray[Any]] = {}
    described = []
    number = 0
    for group in groups:
        samples = []
        for sample in group.samples:
            rest = {}
            for column in fields(sample):
                value = getattr(sample, column.name)
                if column.name in _ARRAYS:
                    value = np.asarray(value, dtype=_ARRAYS[column.name])
                if isinstance(value, np.ndarray):
                    arrays[f"{number}.{column.name}"] = np.ascontiguousarray(value)
                else:
                    rest[column.name] = value
            for name, values in (columns or {}).items():
                arrays[f"{number}.{name}"] = np.ascontiguousarray(values[number])
            samples.append(rest)
            number += 1
        described.append(
            {
                column.name: samples if column.name == "samples" else getattr(group, column.name)
                for column in fields(group)
            }
        )
    content = save(arrays, metadata={"groups": orjson.dumps(described).decode()})
    with path.open("wb") as out:
        out.write(content)
        out.flush()
        os.fsync(out.fileno())


def read_groups(path: Path) -> list[Group]:
    """The groups in `path`. Raises `UserError` when the file is damaged."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as handle:
            described = orjson.loads(handle.metadata()["groups"])
            arrays: dict[int, dict[str, Any]] = {}
            for key in handle.keys():  # noqa: SIM118 (not a mapping)
                number, _, name = key.partition(".")
                array = handle.get_tensor(key)
                arrays.setdefault(int(number), {})[name] = array.tolist() if name in _ARRAYS else array
        known = {column.name for column in fields(Sample)}
        groups, number = [], 0
        for group in described:
            samples = []
            for rest in group.pop("samples"):
                rest["version_spans"] = [tuple(span) for span in rest["version_spans"]]
                own = {name: value for name, value in arrays[number].items() if name in known}
                samples.append(Sample(**rest, **own))
                number += 1
            groups.append(Group(samples=samples, **group))
    except (OSError, SafetensorError, ValueError, LookupError, TypeError) as error:
        raise UserError(f"{path} is damaged: {error}") from None
    return groups
