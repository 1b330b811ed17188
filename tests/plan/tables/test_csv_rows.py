"""Unreadable tables."""

from __future__ import annotations

import pytest

from phalanx.plan.tables.csv_rows import REQUIRED_COLUMNS, read_rows
from phalanx.spec.errors import UserError
from tests.helpers.published_rows import MEGATRON_22B_ROW


def test_read_rows_rejects_invalid_files(tmp_path):
    with pytest.raises(UserError, match="cannot be read"):
        read_rows(tmp_path / "none.csv")
    path = tmp_path / "table.csv"
    path.write_bytes(b"")
    with pytest.raises(
        UserError, match=f"table of runs = .*table.csv' is empty\n  fix: .*required are {REQUIRED_COLUMNS[0]}, "
    ):
        read_rows(path)
    path.write_text('[model]\npreset = "llama3-8b"\n')
    with pytest.raises(
        UserError, match=f"does not have the columns {', '.join(REQUIRED_COLUMNS)}\n  fix: .*optional are id, model, "
    ):
        read_rows(path)
    path.write_text(",".join(column for column in MEGATRON_22B_ROW if column not in ("tp", "gpu_type")))
    with pytest.raises(UserError, match="does not have the columns gpu_type, tp\n"):
        read_rows(path)
