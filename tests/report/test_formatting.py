"""Numbers of the report as text."""

from __future__ import annotations

import pytest

from phalanx.report import formatting


@pytest.mark.parametrize(
    ("value", "unit", "expected"),
    [
        (None, "s", "-"),
        (0, "s", "0 s"),
        (0.0000123, "s", "12.3 µs"),
        (0.9999, "s", "1.00 s"),
        (61, "s", "61.0 s"),
        (125.4, "s", "2:05"),
        (3723, "s", "1:02:03"),
        (0, "B", "0 B"),
        (999, "B", "999 B"),
        (15e6, "B", "15.0 MB"),
        (0.0713, "", "7.1 %"),
        (1.0, "", "100 %"),
        (12345.6, "tokens/s", "12,346"),
        (2.41, "loss", "2.410"),
    ],
)
def test_format_number_chooses_digits_by_unit(value, unit, expected):
    assert formatting.format_number(value, unit) == expected


@pytest.mark.parametrize(
    ("values", "texts"),
    [
        ([["/w/a.jsonl", "/w/b"], ["/w/a.jsonl"], None], ["a.jsonl, b", "a.jsonl", "-"]),
        ([["/old/x/text"], ["/new/x/text"]], ["old/x/text", "new/x/text"]),
        (["hf:org/name", "a\nb", ""], ["hf:org/name", r"a\nb", '""']),
        ([True, [0.9, 0.95], []], ["true", "0.9, 0.95", "[]"]),
        (["x" * 50 + "1", "x" * 50 + "2"], ["…xxxxxxxx1", "…xxxxxxxx2"]),
        (["a" * 50, "b" * 50], ["a" * 32 + "…", "b" * 32 + "…"]),
        (["x" * 50 + "1", "x" * 50 + "2", "y"], ["x" * 50 + "1", "x" * 50 + "2", "y"]),
        (["x" * 50, "x" * 51], ["…xxxxxxxx", "…xxxxxxxxx"]),
    ],
)
def test_setting_texts_are_short_and_show_the_difference(values: list[object], texts: list[str]) -> None:
    assert formatting.setting_texts(values) == texts
