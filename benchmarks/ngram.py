"""Interpolated Witten-Bell n-gram model of bytes, a baseline for trained models.

    p(w | h) = (c(hw) + T(h) p(w | h')) / (c(h) + T(h))

c counts in the training text, T(h) is the number of different bytes after h, and h' is h without its oldest byte. Below
the empty context, every byte has probability 1/256 (Witten and Bell 1991; Chen and Goodman 1998, section 2.5).
"""

from __future__ import annotations

import numpy as np

SYMBOL_BITS = 9
"""Bits of a symbol, which is a byte or START; seven symbols fit in 64 bits."""
START = 256
"""Padding before a document, as long as the context, so that contexts do not cross documents."""
LONGEST_CONTEXT = 64 // SYMBOL_BITS - 1


def witten_bell(train: list[bytes], held_out: list[bytes], context: int) -> float:
    """Return the bits per byte of the held-out bytes, each predicted from the `context` bytes before it."""
    if not 0 <= context <= LONGEST_CONTEXT:
        raise ValueError(f"context = {context}: use 0 to {LONGEST_CONTEXT}")
    probability = np.full(sum(map(len, held_out)), 1 / 256)
    for order in range(context + 1):
        probability = interpolate(grams(train, order), grams(held_out, order), probability)
    return float(-np.log2(probability).mean())


def grams(documents: list[bytes], order: int) -> np.ndarray:
    """Pack each byte and the `order` symbols before it, with the byte in the lowest bits: uint64 [bytes]."""
    start = np.full(order, START, np.uint16)
    symbols = np.concatenate([part for text in documents for part in (start, np.frombuffer(text, np.uint8))])
    packed = np.zeros(len(symbols) - order, np.uint64)
    for shift in range(order + 1):
        packed <<= np.uint64(SYMBOL_BITS)
        packed |= symbols[shift : len(symbols) - order + shift]
    return packed[symbols[order:] != START]


def interpolate(train: np.ndarray, held_out: np.ndarray, shorter: np.ndarray) -> np.ndarray:
    """Return p(w | h) of each held-out gram hw, given its p(w | h'); all [bytes], packed by `grams`."""
    seen, count = np.unique(train, return_counts=True)
    histories, first = np.unique(seen >> SYMBOL_BITS, return_index=True)
    total = np.add.reduceat(count, first)
    distinct = np.diff(first, append=len(seen))
    c_hw = look_up(seen, count, held_out)
    c_h = look_up(histories, total, held_out >> SYMBOL_BITS)
    T_h = look_up(histories, distinct, held_out >> SYMBOL_BITS)
    return np.where(c_h > 0, (c_hw + T_h * shorter) / np.maximum(c_h + T_h, 1), shorter)


def look_up(keys: np.ndarray, values: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Return the value of each wanted key, or 0 if the sorted `keys` do not contain the key."""
    index = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[index] == wanted, values[index], 0)
