"""Text of numbers, sizes, durations and lists."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.spec import formatting


@given(st.floats(1, 9e17))
def test_format_si_and_bytes_round_to_three_digits(number: float) -> None:
    digits, prefix = formatting.format_si(number).split(" ")
    value = float(digits) * 1000 ** formatting.SI_PREFIXES.index(prefix)
    assert value == pytest.approx(number, rel=0.005 if prefix else 0.5)
    assert len(digits.replace(".", "")) == 3 or not prefix
    short, aligned = formatting.format_bytes(number), formatting.format_bytes(number, trailing_zeros=True)
    assert short.split(" ")[1] == aligned.split(" ")[1] == f"{prefix}B"
    assert float(short.split(" ")[0]) == float(aligned.split(" ")[0])


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0 "), (999, "999 "), (999.6, "1.00 k"), (8_030_261_248, "8.03 G"), (9_996, "10.0 k"), (99_960_000, "100 M")],
)
def test_format_si_rounds_to_three_digits_with_prefix(number: float, text: str) -> None:
    assert formatting.format_si(number) == text


@pytest.mark.parametrize(
    ("number", "text"), [(0, "0 B"), (999, "999 B"), (999.6, "1 kB"), (1.234e9, "1.23 GB"), (5e21, "5e+03 EB")]
)
def test_format_bytes_uses_decimal_units(number: float, text: str) -> None:
    assert formatting.format_bytes(number) == text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (formatting.format_si(8_030_261_248, formatting.COUNT_PREFIXES), "8.03 B"),
        (formatting.format_bytes(1.5e9), "1.5 GB"),
        (formatting.format_bytes(1.5e9, trailing_zeros=True), "1.50 GB"),
        (formatting.format_gb_or_mb(999_900_000), "999.9 MB"),
        (formatting.format_gb_or_mb(1_234_567_890), "1.23 GB"),
        (formatting.format_gib(1.5 * formatting.GIB), "1.5 GiB"),
        (formatting.format_count(1_840_000), "1.84 million"),
        (formatting.format_count(999_999), "999,999"),
        (formatting.format_percent(0.1234), "12.3 %"),
        (formatting.format_percent(0.995), "100 %"),
        (formatting.format_ratio(None), "-"),
        (formatting.format_ratio(1.034), "1.03x"),
        (formatting.format_optional(None), "-"),
        (formatting.format_optional(1.2345), "1.23"),
        (formatting.format_seconds(0.0123), "12.3 ms"),
        (formatting.format_seconds(120), "2:00"),
        (formatting.format_seconds_change(1.25), "+1.25 s"),
        (formatting.format_seconds_change(-0.0124), "-12 ms"),
        (formatting.format_seconds_change(5e-6), "+5 µs"),
        (formatting.format_duration(9_000), "2.5 hours"),
        (formatting.format_duration(1.234), "1.2 s"),
    ],
)
def test_number_formats_match_expected_text(text: str, expected: str) -> None:
    assert text == expected


@pytest.mark.parametrize("count", range(5))
def test_plural_has_s_unless_one(count: int) -> None:
    assert formatting.plural(count, "node") == f"{count} node" + "s" * (count != 1)
    assert formatting.plural(count, "node", one="one") == ("one node" if count == 1 else f"{count} nodes")


@pytest.mark.parametrize(
    ("words", "text"), [([], ""), (["a"], "a"), (["a", "b"], "a and b"), (["a", "b", "c"], "a, b and c")]
)
def test_join_words_uses_commas_and_and_before_the_last(words: list[str], text: str) -> None:
    assert formatting.join_words(words) == text
