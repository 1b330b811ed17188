"""The parts of the GPU benchmarks that need no GPU: their command, their tables, and the judgment of differences."""

from __future__ import annotations

import importlib
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.gpu.__main__ import PARTS
from benchmarks.gpu.harness import Table, relative_error
from benchmarks.gpu.host import idle_share
from benchmarks.gpu.parity import largest_difference

ROOT = Path(__file__).parents[2]


def run_command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", *arguments],
        cwd=ROOT,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_gpu_benchmark_help_lists_parts() -> None:
    stdout = run_command("--help").stdout
    assert all(f"{name} " in stdout and description in stdout for name, description in PARTS.items())


def test_gpu_benchmark_fails_without_gpu() -> None:
    done = run_command("--part", "kernels")
    assert done.returncode == 2
    assert "PyTorch finds no GPU on this machine" in done.stderr


@pytest.mark.parametrize("name", PARTS)
def test_gpu_part_has_title_columns_and_notes(name: str) -> None:
    part = importlib.import_module(f"benchmarks.gpu.{name}")
    assert part.TITLE
    assert part.NOTES.strip()
    assert callable(part.measure)


def test_gpu_index_lists_parts() -> None:
    index = (ROOT / "docs/results/benchmarks/gpu.md").read_text()
    assert all(f"--part {name}`" in index for name in PARTS)


def test_table_keeps_rows_around_failing_one(capsys: pytest.CaptureFixture[str]) -> None:
    table = Table(("what", "outcome"))
    table.measure("first", lambda: ["a|b"])
    table.measure("second", lambda: 1 // 0)  # type: ignore[arg-type,return-value]
    table.measure("third", lambda: [table.check("third", False)])
    assert table.lines[2:] == [
        "| first | a/b |",
        "| second | **ZeroDivisionError**: integer division or modulo by zero |",
        "| third | **no** |",
    ]
    assert table.failures == ["second", "third"]
    assert capsys.readouterr().out.splitlines() == table.lines[2:]


def test_table_begins_no_row_after_deadline() -> None:
    table = Table(("what", "outcome"))
    table.deadline = 0.0
    table.measure("late", lambda: ["done"])
    assert table.lines[-1] == "| late | not run: time limit of the part |"
    assert table.failures == ["late"]


def test_relative_error_is_nan_where_value_is_not_finite() -> None:
    right = torch.tensor([1.0, -4.0])
    assert relative_error([torch.tensor([1.0, -3.0])], [right]) == 0.25
    assert math.isnan(relative_error([torch.tensor([1.0, float("nan")])], [right]))


def test_largest_difference_is_infinite_where_loss_is_nan() -> None:
    assert largest_difference([(1.0, 2.2)], [(1.0, 2.0)]) == pytest.approx(0.1)
    assert largest_difference([(1.0, 2.0), (math.nan, 2.0)], [(1.0, 2.0), (1.0, 2.0)]) == math.inf


def test_idle_share_counts_gaps_between_overlapping_kernels() -> None:
    assert idle_share([(0.0, 4.0), (1.0, 2.0), (3.0, 5.0), (8.0, 10.0)]) == 0.3
    assert idle_share([]) is None
