"""What the arguments of formulas must be."""

from __future__ import annotations

from math import inf

from phalanx.spec.errors import UserError


def require_at_least_one(**values: int) -> None:
    """Raises UserError that names the first value below 1."""
    for name, value in values.items():
        if value < 1:
            raise UserError(name, value, "must be 1 or more")


def require_positive(**values: float) -> None:
    """Raises UserError that names the first value that is not above 0, or not finite."""
    for name, value in values.items():
        if not 0 < value < inf:
            raise UserError(name, value, "must be above 0 and finite")


def require_non_negative(**values: float) -> None:
    """Raises UserError that names the first value below 0, or not finite."""
    for name, value in values.items():
        if not 0 <= value < inf:
            raise UserError(name, value, "must be 0 or more and finite")
