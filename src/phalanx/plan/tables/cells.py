"""Numbers in the cells of a table."""

from __future__ import annotations

from phalanx.plan.tables.csv_rows import Row
from phalanx.spec.base import require
from phalanx.spec.errors import UserError

MAX_VALUE = 1e12
"""Maximum of any number in a row."""


MAX_LAYERS = 10_000


def read_count(row: Row, column: str, default: int | None = None) -> int:
    """Return the integer in a cell, or the default if the cell is empty.

    Without a default, the column is required. Raises UserError if the cell does not contain an integer.
    """
    value = read_number(row, column, default)
    require(value == int(value), column, row.get(column), problem="is not a whole number", fix="correct the cell")
    return int(value)


def read_number(row: Row, column: str, default: float | None = None) -> float:
    """Return the number in a cell, or the default if the cell is empty.

    Without a default, the column is required. Raises UserError if a required cell is empty, or a cell does not contain
    a number.
    """
    text = (row.get(column) or "").strip()
    if not text and default is not None:
        return default
    try:
        value = float(text)
    except ValueError:
        problem = "is not a number" if text else "is required but empty"
        raise UserError(column, text or None, problem, fix="enter a number") from None
    if value == 0 and default is not None:
        return 0.0 if column == "zero" else default
    if not 0 < value <= MAX_VALUE:
        raise UserError(column, text, f"must be above 0 and at most {MAX_VALUE:.0e}", fix="correct the cell")
    return value
