"""Text that names the kinds of a model's layers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.spec.errors import UserError
from phalanx.spec.layer_pattern import parse_layers


@pytest.mark.parametrize(
    ("text", "layers"),
    [
        ("a", "a"),
        ("a b", "ab"),
        ("a*3 b", "aaab"),
        ("(a*2 b)*2", "aabaab"),
        (" ( a (b c)*2 ) * 2 a ", "abcbcabcbca"),
        ("(a)", "a"),
    ],
)
def test_parse_layers_returns_the_kind_of_each_layer(text: str, layers: str) -> None:
    assert "".join(parse_layers(text)) == layers


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "names no layers"),
        ("()", "closes no group"),
        ("a b)", "closes no group"),
        ("a, b", "cannot be read from ', b' on"),
        ("(a b", "lacks a closing parenthesis"),
        ("(" * 3000 + "a", "lacks a closing parenthesis"),
        ("a*", r"cannot be read from '\*' on"),
        ("a*b", r"cannot be read from '\*b' on"),
        ("3 a", "cannot be read from '3 a' on"),
        ("*3 a", "repeats no layer"),
        ("a*0", "repeats no layer"),
        ("((a*9999)*9999)*9999", "more than 10,000 layers"),
        ("a*" + "9" * 5000, "cannot be read"),
        ("a*6000 b*6000", "more than 10,000"),
    ],
)
def test_parse_layers_names_what_is_wrong(text: str, problem: str) -> None:
    with pytest.raises(UserError, match=problem) as error_info:
        parse_layers(text)
    assert "dense*3 sparse*58" in str(error_info.value)


@given(st.lists(st.tuples(st.sampled_from(["full", "window_2", "_x"]), st.integers(1, 5)), min_size=1, max_size=6))
def test_parse_layers_reads_the_counts_that_were_written(runs: list[tuple[str, int]]) -> None:
    text = " ".join(f"{name}*{count}" for name, count in runs)
    assert parse_layers(text) == [name for name, count in runs for _ in range(count)]
