"""The findings of checks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, TypeVar

Severity = Literal["OK", "WARN", "FAIL", "SKIP"]
Value = str | int | float
Measured = TypeVar("Measured", str, int, float)


@dataclass(frozen=True, kw_only=True)
class DoctorFinding:
    """The result of one rule on one device of one host."""

    id: str
    """The id of the rule, or the name of a check that was skipped as a whole."""
    severity: Severity
    host: str
    device: str
    """GPU3, mlx5_0, eth0, a path, a PCI address; empty for the whole host."""
    measured: Value
    """The measured value; for a skipped rule, the reason."""
    unit: str
    threshold: str
    """The expected value as text, such as "at least 8"."""
    source: str
    """Source of the threshold."""
    remedy: str
    command: str
    """A command that shows details, or fixes the problem."""


class CheckSkipped(Exception):  # noqa: N818
    """A check that does not apply to this machine, or cannot run; the message is the reason."""


def most_common(values: Iterable[Measured]) -> Measured | None:
    """Return the most frequent value, the first one in a tie, or None without values."""
    counted = Counter(values).most_common(1)
    return counted[0][0] if counted else None
