"""Checks of a rank that creates its run, as under torchrun."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from phalanx.launch import process
from phalanx.spec.files.write import to_toml
from phalanx.train.worker import run_rank
from tests.helpers.small_runs import DENSE, small_run


def test_rank_that_creates_fp8_run_rejects_gpu_without_float8_products(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = {**DENSE, "hidden_size": 64}
    run = small_run(text, tmp_path, {"model": model, "training.precision": "fp8", "training.steps": 1})
    run_file = tmp_path / "run.toml"
    run_file.write_text(to_toml(run))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(process, "query_gpus", lambda _: [8.0])
    assert run_rank(run_file, [], resume=False, device="cpu", force=True) == 2
    assert "requires compute capability 9.0 or above, and a GPU of this machine has 8.0" in capsys.readouterr().err
