"""Numbers, sizes, durations and lists as text; units of bytes."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

MIB = 2**20
WRITTEN_BY = "Written by: phalanx"
"""Header of files that commands write to a path chosen by the user. It marks files that they may overwrite."""
GIB = 2**30
GB = 1e9
SI_PREFIXES = ("", "k", "M", "G", "T", "P")
COUNT_PREFIXES = ("", "k", "M", "B", "T")
UNKNOWN = "-"
_CONTROL_CHARACTERS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)
"""Characters that control a terminal or the direction of text, and halves of characters, which cannot be printed."""


def printable(text: str) -> str:
    r"""Return a text with its control characters, other than tabs and line breaks, as escapes such as "\x1b".

    Host names, errors and other text of files could otherwise change what a terminal shows, or its clipboard.
    """
    return _CONTROL_CHARACTERS.sub(lambda match: match[0].encode("unicode_escape", "surrogatepass").decode(), text)


def number_fix(name: str, value: object) -> str:
    """Return the fix for a number with a unit, such as "4M": what it may mean, in powers of 1024 and 1000.

    The result is empty for any other value. `name` precedes the number, such as "seq_len =" or "--tokens".
    """
    match = re.fullmatch(r"(\d{1,9}(?:\.\d+)?) ?([kmgbt])(?:i?b)?", str(value).lower())
    if match is None:
        return ""
    power = {"k": 1, "m": 2, "g": 3, "b": 3, "t": 4}[match[2]]
    binary, decimal = (round(float(match[1]) * base**power) for base in (1024, 1000))
    return f"write the number without a unit: {name} {binary} ({match[1]} x 2^{10 * power}), or {name} {decimal}"


def format_digits(value: float) -> str:
    """Format a number with three digits, trailing zeros included: "12.0"."""
    return f"{value:,.{0 if value >= 99.95 else 1 if value >= 9.995 else 2}f}"


def perplexity(loss: float | None) -> float | None:
    """Return e to the power of a loss in nats per token; None without a loss, and beyond the range of floats."""
    return math.exp(loss) if loss is not None and loss < 700 else None


def format_perplexity(loss: float | None) -> str:
    """Format the perplexity of a loss in nats per token with three digits: "35.9", or "-" if there is none."""
    value = perplexity(loss)
    return UNKNOWN if value is None else format_digits(value)


def format_optional(value: float | None) -> str:
    """Format a number with up to three digits, or return "-" for None."""
    return UNKNOWN if value is None else f"{value:.3g}"


def format_si(number: float, prefixes: Sequence[str] = SI_PREFIXES) -> str:
    """Format a number with three digits and the prefix of its power of 1000: "8.03 G", or "8.03 B" for a count."""
    scaled, prefix = _split_prefix(number, prefixes)
    digits = format_digits(scaled).replace(",", "") if prefix else f"{scaled:.0f}"
    return f"{digits} {prefix}"


def format_bytes(size: float, trailing_zeros: bool = False) -> str:
    """Format bytes with up to three digits: "1.5 GB". With trailing zeros, columns line up: "1.50 GB"."""
    scaled, prefix = _split_prefix(size, (*SI_PREFIXES, "E"))
    digits = f"{scaled:.3g}"
    return f"{format_digits(float(digits)) if trailing_zeros and prefix else digits} {prefix}B"


def format_gb_or_mb(size: float) -> str:
    """Format bytes with fixed decimals: "1.23 GB", and below 1 GB "12.0 MB"."""
    return f"{size / GB:.2f} GB" if size >= GB else f"{size / 1e6:.1f} MB"


def format_gib(size: float) -> str:
    """Format bytes as binary gigabytes: "12.3 GiB"."""
    return f"{size / GIB:.1f} GiB"


def format_count(value: int) -> str:
    """Format a large count: "1.84 million"."""
    for word, min_value in (("trillion", 1e12), ("billion", 1e9), ("million", 1e6)):
        if value >= min_value:
            return f"{format_digits(value / min_value)} {word}"
    return f"{value:,}"


def format_seconds(value: float) -> str:
    """Format a duration with three digits: "12.3 ms"; from two minutes on in clock format: "1:02:03"."""
    if value >= 120:
        minutes, seconds = divmod(round(value), 60)
        hours, minutes = divmod(minutes, 60)
        return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
    if not value:
        return "0 s"
    for unit, min_seconds in (("s", 1.0), ("ms", 1e-3), ("µs", 0.0)):
        if value >= 0.9995 * min_seconds:
            return f"{format_digits(value / (min_seconds or 1e-6))} {unit}"
    return f"{value:.3g} s"


def format_seconds_change(value: float) -> str:
    """Format a difference of two durations with its sign: "+1.25 s", "-12 ms"."""
    if abs(value) >= 1:
        return f"{value:+.2f} s"
    return f"{value * 1e3:+.0f} ms" if abs(value) >= 1e-3 else f"{value * 1e6:+.0f} µs"


def format_duration(seconds: float) -> str:
    """Format a long duration in the largest unit of which it has at least two: "2.5 hours"."""
    for unit, size in (("days", 86_400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:,.{1 if seconds < 100 * size else 0}f} {unit}"
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.2g} s"


def format_ratio(ratio: float | None) -> str:
    """Format the ratio of a measurement to its reference: "1.03x"."""
    return UNKNOWN if ratio is None else f"{format_digits(ratio)}x"


def format_percent(value: float) -> str:
    """Format a share: "12.3 %"; from 99.5 % on without decimals."""
    return f"{100 * value:.1f} %" if abs(value) < 0.995 else f"{100 * value:.0f} %"


def plural(count: int, noun: str, one: str = "1") -> str:
    """Return a count with its noun: "1 node", "2 nodes". `one` replaces the digit 1."""
    return f"{one} {noun}" if count == 1 else f"{count} {noun}s"


def join_words(words: Sequence[str]) -> str:
    """Join words in a list: "a, b and c"."""
    return f"{', '.join(words[:-1])} and {words[-1]}" if len(words) > 1 else "".join(words)


def _split_prefix(number: float, prefixes: Sequence[str]) -> tuple[float, str]:
    """Divide a number by 1000 until three digits precede its decimal point; return it with the prefix."""
    power = 0
    while number >= 999.5 and power < len(prefixes) - 1:
        number, power = number / 1000, power + 1
    return number, prefixes[power]
