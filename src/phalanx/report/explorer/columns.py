"""Columns of numbers as one compressed text, small enough for a page and read by a browser in milliseconds.

Numbers of many layouts compress well where bytes of equal weight are neighbors: a column of 32-bit floats is four
planes, first the lowest byte of every number. Values that repeat, such as degrees and names, are indices into a list.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

DROPPED_BITS = 8
"""Dropped bits of a float's 23-bit fraction: the rest is exact to one part in 65,536, and a page shows three digits."""
MAX_VALUES = 65_536
"""Distinct values of a column of choices, at most: indices are 16-bit numbers."""


def pack_columns(
    choices: Mapping[str, Sequence[Hashable]], numbers: Mapping[str, NDArray[np.floating[Any]]]
) -> dict[str, Any]:
    """Pack columns of equal length: choices with few distinct values, and numbers, which are rounded (`round_floats`).

    Returns:
        `rows`, their number; `choices`, the distinct values of each column; `numbers`, the names of the columns;
        `data`, base64 of a zlib stream with the columns in this order.
    """
    lengths = {*map(len, choices.values()), *map(len, numbers.values())}
    if len(lengths) != 1:
        raise ValueError(f"columns have different lengths: {sorted(lengths)}")
    values = {}
    planes = []
    for name, column in choices.items():
        index_of = {value: index for index, value in enumerate(dict.fromkeys(column))}
        if len(index_of) > MAX_VALUES:
            raise ValueError(f"{name} has more than {MAX_VALUES:,} distinct values")
        values[name] = list(index_of)
        planes.append(_split_byte_planes(np.array([index_of[value] for value in column], "<u2")))
    planes += [_split_byte_planes(round_floats(column)) for column in numbers.values()]
    return {
        "rows": lengths.pop(),
        "choices": values,
        "numbers": list(numbers),
        "data": base64.b64encode(zlib.compress(b"".join(planes), 9)).decode(),
    }


def round_floats(column: NDArray[np.floating[Any]]) -> NDArray[np.float32]:
    """Round numbers to 32-bit floats whose lowest `DROPPED_BITS` bits are zero."""
    bits = np.ascontiguousarray(column, "<f4").view("<u4")
    half = np.uint32(1 << (DROPPED_BITS - 1))
    mask = np.uint32(0xFFFFFFFF << DROPPED_BITS & 0xFFFFFFFF)
    rounded: NDArray[np.float32] = ((bits + half) & mask).view("<f4")
    return rounded


def pack_json(text: str) -> str:
    """Compress a JSON text: base64 of a zlib stream."""
    return base64.b64encode(zlib.compress(text.encode(), 9)).decode()


def _split_byte_planes(column: NDArray[Any]) -> bytes:
    """Return the lowest byte of every number, then the next, and so on."""
    return column.view(np.uint8).reshape(len(column), -1).T.tobytes()
