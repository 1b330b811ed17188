"""Start of a rank from a run file, as under torchrun."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from phalanx.launch import process
from phalanx.spec.files.write import to_toml
from phalanx.spec.run import RunSpec
from phalanx.train import create_run, worker
from phalanx.train.rank_options import RankOptions
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
    assert worker.run_rank(run_file, RankOptions(resume=False, device="cpu", force=True)) == 2
    assert "requires compute capability 9.0 or above, and a GPU of this machine has 8.0" in capsys.readouterr().err


def test_rank_chooses_recomputation_once_for_ranks_of_its_machine(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = {"activation_checkpointing": "auto", "micro_batch_size": 1}
    run_file = tmp_path / "file.toml"
    changes = {"layout": layout, "training.steps": 1, "optimizer.warmup_steps": 0, "cluster": {"device": "cpu"}}
    run_file.write_text(to_toml(small_run(text, tmp_path, changes)))
    resolve, local_ranks = create_run.resolve_recomputation, []

    def record(run: RunSpec, world_size: int, gpu_memory_bytes: int | None, nproc: int | None = None) -> RunSpec:
        local_ranks.append(nproc)
        return resolve(run, world_size, gpu_memory_bytes, nproc)

    monkeypatch.setattr(create_run, "resolve_recomputation", record)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    assert worker.run_rank(run_file, RankOptions(resume=False)) == 0
    assert local_ranks == [3]
