"""What is checked and printed when a run is created."""

from __future__ import annotations

from pathlib import Path

import pytest

from phalanx.train.create_run import check_and_prepare
from tests.helpers.small_runs import DENSE, MOE, save_two_checkpoints, small_run

UNEXPORTABLE = {
    "model.norm = 'layernorm'": {"model": {**DENSE, "norm": "layernorm"}},
    "model.moe.num_shared_experts = 1": {"model": MOE},
}


@pytest.mark.parametrize("field", UNEXPORTABLE)
def test_new_run_names_the_field_that_cannot_be_exported_once(text, tmp_path, capsys, field):
    check_and_prepare(small_run(text, tmp_path, UNEXPORTABLE[field]), 1, resume=False)
    lines = [line for line in capsys.readouterr().err.splitlines() if "cannot be exported" in line]
    assert len(lines) == 1
    assert field in lines[0]


def test_exportable_and_resumed_runs_print_nothing_about_export(text: Path, tmp_path: Path, capsys):
    check_and_prepare(small_run(text, tmp_path, {}), 1, resume=False)
    run = small_run(text, tmp_path, {"model": MOE})
    save_two_checkpoints(text, tmp_path)
    capsys.readouterr()
    check_and_prepare(run, 1, resume=True)
    assert "exported" not in capsys.readouterr().err
