"""Parsers of short texts: numbers, lists, and lines of outputs."""

from __future__ import annotations

import re


def leading_number(text: str | None) -> float | None:
    """Return the number at the start of a text, or None."""
    match = re.match(r"\s*(-?\d+(\.\d+)?)", text or "")
    return float(match[1]) if match else None


def first_line(text: str) -> str:
    """Return the first line that is not blank, or "nothing"."""
    return next((line.strip() for line in text.splitlines() if line.strip()), "nothing")


def last_line(text: str) -> str:
    """Return the last line that is not blank, or an empty text."""
    return text.strip().rpartition("\n")[2]


def first_match(pattern: str, text: str | None) -> str | None:
    """Return the first group of a pattern whose ^ and $ match at lines, or None."""
    match = re.search(pattern, text or "", re.MULTILINE)
    return match[1] if match else None
