"""Measurements that calibration reads from a run directory."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from phalanx.report import measured_run
from phalanx.report.measured_machine import _apply_measurements
from phalanx.report.measured_run import read_measured_run, with_measured_parts
from phalanx.report.run_data import read_run
from phalanx.runs.step_records import RankRecord
from phalanx.spec.cluster import ClusterSpec
from phalanx.spec.errors import UserError
from phalanx.spec.files.write import to_toml
from tests.helpers.synthetic_machine import make_run


def write_run_directory(path: Path, seconds: list[float], ranks: int = 2, **fields: object) -> Path:
    path.mkdir()
    (path / "run.toml").write_text(to_toml(make_run(ranks, micro_batch_size=4)))
    records = [
        {
            "step": step,
            "ranks": ranks,
            "step_seconds": step_seconds,
            "tokens_per_second": 4096 / step_seconds,
            "peak_memory_bytes": 7,
            **fields,
        }
        for step, step_seconds in enumerate(seconds, 1)
    ]
    lines = [*map(json.dumps, records), json.dumps({"step": len(seconds), "held_out_loss": 1.0})]
    (path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    return path


def test_read_measured_run_skips_warm_up_steps(tmp_path):
    read = read_measured_run(write_run_directory(tmp_path / "run", [9, 8, 1, 3, 2]))
    assert (read.step_seconds, read.ranks, read.memory_bytes, read.run.cluster.nproc_per_node) == (2, 2, 7, 2)


def test_read_measured_run_uses_steps_of_last_world_size(tmp_path):
    path = write_run_directory(tmp_path / "run", [5, 5, 5, 5, 5])
    more_ranks = write_run_directory(tmp_path / "more", [9, 8, 1, 1, 1], ranks=4)
    (path / "metrics.jsonl").write_text(
        (path / "metrics.jsonl").read_text() + (more_ranks / "metrics.jsonl").read_text()
    )
    assert read_measured_run(path).step_seconds == 1
    assert read_measured_run(path).ranks == 4


def test_read_measured_run_uses_steps_since_last_start(tmp_path):
    path = write_run_directory(tmp_path / "run", [5, 5, 5, 5, 5], began_after=0)
    # The records are those of a version that did not record ranks.
    old = (path / "metrics.jsonl").read_text().replace('"ranks": 2, ', "")
    restarted = write_run_directory(tmp_path / "more", [9, 8, 1, 1, 1], began_after=5)
    (path / "metrics.jsonl").write_text(old + (restarted / "metrics.jsonl").read_text())
    assert read_measured_run(path).step_seconds == 1


def test_read_measured_run_derives_peak_flops_from_mfu(tmp_path):
    read = read_measured_run(write_run_directory(tmp_path / "run", [1, 1, 1, 1, 1], mfu=0.5))
    half_mfu = read_measured_run(write_run_directory(tmp_path / "half", [1, 1, 1, 1, 1], mfu=0.25))
    assert half_mfu.peak_flops == pytest.approx(2 * read.peak_flops)


@pytest.mark.parametrize(
    ("corrupt", "message"),
    [
        (lambda path: (path / "metrics.jsonl").unlink(), "has no metrics.jsonl"),
        (lambda path: (path / "metrics.jsonl").write_text('{"step": 1, "step_seconds": 1}\n'), "number of ranks"),
        (lambda path: (path / "metrics.jsonl").write_text("{'step'}\n"), "has a damaged line"),
        (lambda path: write_run_directory(path / "short", [1, 1, 1, 1]).rename(path.parent / "s"), ""),
    ],
)
def test_read_measured_run_rejects_invalid_run_directory(tmp_path, corrupt, message):
    path = write_run_directory(tmp_path / "run", [1, 1, 1, 1, 1])
    corrupt(path)
    if not message:
        path, message = tmp_path / "s", "at least 3 are required after"
    with pytest.raises(UserError, match=message):
        read_measured_run(path)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_measured_run_is_planned_for_device_that_ranks_recorded(device, tmp_path, monkeypatch):
    """With the default `cluster.device = "auto"`, a run on GPUs was once compared with a plan for CPUs."""
    directory = write_run_directory(tmp_path / "run", [1.0] * 8)
    run_data = read_run(directory)
    records = {
        0: RankRecord(
            rank=0, host="host", device=device, offset_seconds=0.0, error_seconds=0.0, memory_bytes=8 * 10**10, cores=4
        )
    }
    monkeypatch.setattr(measured_run, "read_run", lambda _: replace(run_data, ranks=records))
    monkeypatch.setattr(measured_run, "collective_times", lambda _: ())
    monkeypatch.setattr(measured_run, "step_times", lambda _: None)
    measured = with_measured_parts(read_measured_run(directory), directory)
    assert (measured.memory.unused > 0) == (device == "cuda")
    assert _apply_measurements(ClusterSpec(), 1, None, records).device == device
