"""Typed decoding of records."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.runs.decode import Amount, Count, Index, Number, decode_object, decoder, read_bytes, read_json

DEEP = 100_000
decode_sample = decoder(dict[Index, tuple[Count, Amount, Number]])


@pytest.mark.parametrize("text", ['{"0": [1, 2, -3.5]}', '{"12": [0, 0.0, 1e18]}', "{}"])
def test_decoder_returns_values_of_its_type_unchanged(text: str) -> None:
    assert repr(decode_sample(text.encode())) == repr(eval(text.replace("[", "(").replace("]", ")")))


@pytest.mark.parametrize(
    "value",
    ["null", "[true, 1, 1]", "[1.0, 1, 1]", '["1", 1, 1]', "[-1, 1, 1]", "[1, -1, 1]", "[1, 1]", "[1, 1, 1, 1]"]
    + [f"[1, 1, {number}]" for number in ("1e400", "NaN", "Infinity", "1e19", "9" * 400, "9" * 5000, '"\\ud800"')]
    + ["[" * DEEP, "[" * DEEP + "]" * DEEP, '{"a":' * DEEP],
)
def test_decoder_raises_value_error_for_other_values(value: str) -> None:
    with pytest.raises(ValueError, match="validation error"):
        decode_sample(f'{{"0": {value}}}'.encode())


@pytest.mark.parametrize("key", ["-1", "01", "x", "", "1e3", "99999999", "1\\n"])
def test_decoder_raises_value_error_for_keys_that_are_no_index(key: str) -> None:
    with pytest.raises(ValueError, match="validation error"):
        decode_sample(f'{{"{key}": [1, 1, 1]}}'.encode())


@given(st.binary(max_size=40))
def test_decoder_raises_only_value_error(content: bytes) -> None:
    try:
        value: Any = decode_object(content)
    except ValueError:
        return
    assert isinstance(value, dict)


def test_readers_raise_os_error_for_everything_but_files(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "dangling").symlink_to("nowhere")
    (tmp_path / "folder").mkdir()
    for name in ("pipe", "loop", "dangling", "folder", "nothing"):
        with pytest.raises(OSError, match=name):
            read_bytes(tmp_path / name)
        with pytest.raises(OSError, match=name):
            read_json(tmp_path / name, decode_object)
