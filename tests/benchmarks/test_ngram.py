"""The vectorized n-gram model, compared with the definition counted in dictionaries."""

from __future__ import annotations

import math
from collections import Counter, defaultdict

import pytest

from benchmarks.ngram import witten_bell

TRAIN = [b"to be or not to be", b"that is the question", b"", b"\x00\xff be"]
HELD_OUT = [b"to be that is", b"unseen \xfe", b"t", b""]


def reference_bits_per_byte(train: list[bytes], held_out: list[bytes], context: int) -> float:
    followers: dict[tuple[int, ...], Counter[int]] = defaultdict(Counter)
    for text in train:
        symbols = [256] * context + list(text)
        for position in range(context, len(symbols)):
            for order in range(context + 1):
                followers[tuple(symbols[position - order : position])][symbols[position]] += 1

    def p(w: int, h: tuple[int, ...]) -> float:
        shorter = p(w, h[1:]) if h else 1 / 256
        if h not in followers:
            return shorter
        distinct = len(followers[h])
        return (followers[h][w] + distinct * shorter) / (followers[h].total() + distinct)

    bits, size = 0.0, 0
    for text in held_out:
        symbols = [256] * context + list(text)
        for position in range(context, len(symbols)):
            bits -= math.log2(p(symbols[position], tuple(symbols[position - context : position])))
            size += 1
    return bits / size


@pytest.mark.parametrize("context", range(7))
def test_witten_bell_matches_reference_implementation(context: int) -> None:
    assert witten_bell(TRAIN, HELD_OUT, context) == pytest.approx(
        reference_bits_per_byte(TRAIN, HELD_OUT, context), rel=1e-12
    )


def test_witten_bell_smooths_probability_of_unseen_byte() -> None:
    """With one byte "a" seen, p(b) = (0 + 1/256) / (1 + 1)."""
    assert witten_bell([b"a"], [b"b"], 0) == pytest.approx(9)


def test_witten_bell_rejects_context_longer_than_six() -> None:
    with pytest.raises(ValueError, match="use 0 to 6"):
        witten_bell(TRAIN, HELD_OUT, 7)
