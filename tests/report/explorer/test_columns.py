"""Packed columns: choices are exact, and numbers exact to the bits that are kept."""

from __future__ import annotations

import numpy as np
import pytest

from phalanx.report.explorer.columns import DROPPED_BITS, pack_columns, pack_json, round_floats
from tests.helpers.explorations import unpack_columns, unpack_json


def test_pack_columns_keeps_choices_and_rounded_numbers():
    generator = np.random.default_rng(0)
    choices = {"name": ["ddp", "zero1", "ddp"], "degree": [8, 1, 1], "place": [None, None, "/scratch"]}
    numbers = {"seconds": generator.random(3) * 100, "bytes": generator.random(3) * 1e11}
    found_choices, found_numbers = unpack_columns(pack_columns(choices, numbers))
    assert found_choices == choices
    assert found_numbers == {name: round_floats(values).tolist() for name, values in numbers.items()}


def test_round_floats_is_within_its_bits():
    values = np.concatenate([np.geomspace(1e-30, 1e30, 10_001), [0.0, 1.0]])
    rounded = round_floats(values)
    assert np.abs(rounded / np.where(values > 0, values, 1) - (values > 0)).max() <= 2.0 ** (DROPPED_BITS - 24)
    assert rounded[-2:].tolist() == [0.0, 1.0]
    assert not (rounded.view(np.uint32) % 2**DROPPED_BITS).any()


def test_pack_columns_rejects_columns_of_different_lengths():
    with pytest.raises(ValueError, match="different lengths"):
        pack_columns({"name": ["a"]}, {"seconds": np.ones(2)})


def test_pack_columns_rejects_too_many_choices():
    with pytest.raises(ValueError, match="name has more than 65,536 distinct values"):
        pack_columns({"name": range(65_537)}, {})


def test_pack_json_is_a_zlib_stream():
    assert unpack_json(pack_json('{"µ": 1}')) == {"µ": 1}
