"""Tables of results for notebooks and pandas."""

import sys
from types import SimpleNamespace

import pytest

from phalanx.spec.errors import UserError
from phalanx.spec.result_tables import data_frame, html_table


def test_html_table_escapes_text():
    html = html_table(("a<b",), [("<script>",)], "x & y")
    assert html == (
        "<table><caption>x &amp; y</caption><thead><tr><th>a&lt;b</th></tr></thead>"
        "<tbody><tr><td>&lt;script&gt;</td></tr></tbody></table>"
    )


def test_data_frame_without_pandas_names_the_fix(monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(UserError, match="requires pandas, which is not installed\n  fix: pip install pandas"):
        data_frame([])


def test_data_frame_passes_rows_to_pandas(monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", SimpleNamespace(DataFrame=lambda rows: ("frame", rows)))
    assert data_frame(({"a": 1},)) == ("frame", [{"a": 1}])
