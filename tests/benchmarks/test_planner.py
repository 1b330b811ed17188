"""The accuracy report of a table whose true errors are known."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from benchmarks.planner import (
    REPORT,
    head,
    interval_lines,
    memory_lines,
    recorded_sections,
    rows_with_baseline,
    search_speed,
    source_table,
    step_time_table,
)
from benchmarks.planner_choice import sweeps
from benchmarks.published import ROWS, PublishedRun, read_published_runs, step_time_rows
from phalanx.plan.tables.predict import Prediction, predict_rows
from tests.helpers.published_rows import MEGATRON_22B_ROW

RESULT_COLUMNS = {"step_time_s": "", "tflops_per_gpu": "", "mfu": "", "memory_gib": "", "notes": "", "source": ""}


def write_csv(path: Path, rows: list[dict[str, str]]) -> Path:
    with path.open("w", newline="") as file:
        table = csv.DictWriter(file, [*MEGATRON_22B_ROW, *RESULT_COLUMNS])
        table.writeheader()
        table.writerows({**RESULT_COLUMNS, **row} for row in rows)
    return path


def sweep_rows() -> list[dict[str, str]]:
    """Return layouts of one model on 16 devices, with the name of a source of sweeps."""
    layouts = [("8", "2", "1"), ("8", "1", "2"), ("4", "4", "1"), ("4", "2", "2"), ("2", "8", "1"), ("8", "1", "4")]
    common = {**MEGATRON_22B_ROW, "gpus": "16", "global_batch": "64", "zero": "1"}
    return [
        {
            **common,
            "id": f"vtm-{index:04}",
            "tp": tp,
            "pp": pp,
            "dp": str(16 // int(tp) // int(pp)),
            "micro_batch": size,
            "schedule": "1f1b" if pp != "1" else "no-pipeline",
        }
        for index, (tp, pp, size) in enumerate(layouts)
    ]


def predict_all(rows: list[dict[str, str]]) -> list[Prediction]:
    predictions = predict_rows(rows)
    assert all(isinstance(row, Prediction) for row in predictions)
    return predictions  # type: ignore[return-value]


@pytest.fixture
def known_runs(tmp_path: Path) -> list[PublishedRun]:
    """Return runs that took 10 % longer than predicted."""
    rows = sweep_rows()
    for row, prediction in zip(rows, predict_all(rows), strict=True):
        row["step_time_s"], row["memory_gib"] = str(1.1 * prediction.step_time_s), str(prediction.memory_gib)
    rows.append({**MEGATRON_22B_ROW, "id": "vtm-9999", "layers": ""})
    return read_published_runs(write_csv(tmp_path / "runs.csv", rows))


def test_accuracy_report_computes_step_time_errors(known_runs):
    predicted_rows = rows_with_baseline(step_time_rows(known_runs))
    assert len(predicted_rows) == len(sweep_rows())
    lines = list(step_time_table(predicted_rows, {"vtm": 12.0}))
    assert any(line.startswith("| vtm | 6 | 9.1 | -9.1 | 9 | 12.0 |") for line in lines)
    assert any(line.startswith("\nThe mean error over 6 rows is 9.1 % (target 8): no") for line in lines)
    assert any(line.startswith("| vtm | 6 | 9.1 | -9.1 | 9 | - |") for line in step_time_table(predicted_rows, {}))
    within_interval = [row.truth <= row.predicted.step_time_high_s for row in predicted_rows]
    assert next(interval_lines(predicted_rows)).startswith(f"{sum(within_interval) / 6:.1%} of 6 rows")


def test_accuracy_report_rank_correlation_is_one_for_perfect_ranking(known_runs):
    line = list(sweeps(known_runs))[-1]
    assert line == "| vtm | 1 | 0 | 0.0 %, met | 0.0 %, met | 1.00, met |"


def test_accuracy_report_counts_failed_first_choice(known_runs):
    rows = [dict(row.row) for row in known_runs]
    best = min(range(len(rows)), key=lambda index: float(rows[index]["step_time_s"]))
    failed = PublishedRun(rows[best], known_runs[best].job, None, None, out_of_memory=True)
    line = list(sweeps([*known_runs[:best], failed, *known_runs[best + 1 :]]))[-1]
    assert line.startswith("| vtm | 1 | 1 | -, no | -, no |")


def test_accuracy_report_compares_memory_with_published_values(known_runs):
    assert any(line.startswith("| vtm | 6 | 0.0 | ") for line in memory_lines(known_runs))
    assert any(line.startswith("| vtm | 6 | 0.0 | +0.0 | met |") for line in memory_lines(known_runs))


def test_accuracy_report_compares_search_speed_with_targets():
    text = search_speed(64_192, 3.47, 5.0)
    assert text == "64,192 layouts in 3.47 s (target 5): met, 18,499 per second (target 20,000): no"
    assert search_speed(40_000, 1.0, None) == "40,000 layouts in 1.00 s, 40,000 per second (target 20,000): met"


def test_accuracy_report_header_contains_command_line():
    with_left_out, quick = (head(Path("runs.csv"), leave_out)[2] for leave_out in (True, False))
    assert "planner runs.csv --left-out`" in with_left_out
    assert "planner runs.csv`" in quick
    assert head(ROWS, True)[2].startswith("Written by `python -m benchmarks.planner --left-out`.")


def test_accuracy_page_is_that_of_the_published_rows():
    page = REPORT.read_text()
    runs = read_published_runs(ROWS)
    mean_error = [
        line.strip()
        for line in step_time_table(
            rows_with_baseline([row for row in step_time_rows(runs) if not row.low_precision]), {}
        )
        if "The mean error" in line
    ]
    for lines in (mean_error, memory_lines(runs), source_table(ROWS), *recorded_sections().values()):
        assert "\n".join(lines) in page, "python -m benchmarks.planner --left-out writes the page"
