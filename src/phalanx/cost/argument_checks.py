"""Range checks for arguments of formulas."""

from __future__ import annotations

from math import inf

from phalanx.spec.errors import UserError


def require_at_least_one(**values: int) -> None:
    """Raise UserError for the first value below 1."""
    for name, value in values.items():
        if value < 1:
            raise UserError(name, value, "must be 1 or more")


def require_positive(**values: float) -> None:
    """Raise UserError for the first value that is not positive and finite."""
    for name, value in values.items():
        if not 0 < value < inf:
            raise UserError(name, value, "must be above 0 and finite")


def require_non_negative(**values: float) -> None:
    """Raise UserError for the first value that is negative or not finite."""
    for name, value in values.items():
        if not 0 <= value < inf:
            raise UserError(name, value, "must be 0 or more and finite")
