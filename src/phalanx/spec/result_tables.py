"""Results as tables: HTML for notebooks, and pandas DataFrames."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from phalanx.spec.errors import UserError

if TYPE_CHECKING:
    import pandas


def html_table(columns: Sequence[str], rows: Iterable[Sequence[object]], caption: str = "") -> str:
    """Return an HTML table for a notebook. All text is escaped."""
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    body = "".join(f"<tr>{''.join(f'<td>{escape(str(cell))}</td>' for cell in row)}</tr>" for row in rows)
    title = f"<caption>{escape(caption)}</caption>" if caption else ""
    return f"<table>{title}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def data_frame(rows: Sequence[Mapping[str, Any]]) -> pandas.DataFrame:
    """Return rows as a pandas DataFrame; raise UserError if pandas is not installed."""
    try:
        import pandas
    except ModuleNotFoundError:
        raise UserError("to_dataframe", None, "requires pandas, which is not installed", "pip install pandas") from None
    return pandas.DataFrame(list(rows))
