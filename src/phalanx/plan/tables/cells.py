"""Read numbers from the cells of a table."""

from __future__ import annotations

from phalanx.plan.tables.csv_rows import Row
from phalanx.spec.base import require
from phalanx.spec.errors import UserError

MAX_VALUE = 1e12
"""Of any number in a row."""


MAX_LAYERS = 10_000


def read_count(row: Row, column: str, default: int | None = None) -> int:
    """Raises UserError for what is no whole number."""
    value = read_number(row, column, default)
    require(value == int(value), column, row.get(column), problem="is not a whole number", fix="correct it")
    return int(value)


def read_number(row: Row, column: str, default: float | None = None) -> float:
    """Raises UserError for a column that is empty, and needed, or no number."""
    text = (row.get(column) or "").strip()
    if not text and default is not None:
        return default
    try:
        value = float(text)
    except ValueError:
        problem = "is not a number" if text else "is needed, and empty"
        raise UserError(column, text or None, problem, fix="fill it in") from None
    if value == 0 and default is not None:
        return 0.0 if column == "zero" else default
    if not 0 < value <= MAX_VALUE:
        raise UserError(column, text, f"must be above 0 and at most {MAX_VALUE:.0e}", fix="correct it")
    return value
