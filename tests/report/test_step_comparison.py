"""Reports show a run's targets next to its computed tokens if some targets are ignored."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from phalanx.cli.views.report import format_latest_step
from phalanx.report.compare_runs import report_data
from phalanx.report.facts import report_facts
from phalanx.report.formatting import measured_row
from phalanx.report.html.page import main
from phalanx.report.run_data import read_run
from phalanx.report.step_comparison import _measure_goodput
from phalanx.runs.events import FINISHED, STARTED
from phalanx.train.progress import format_metrics
from tests.helpers.cli_runner import command_output
from tests.helpers.trained_runs import copy_run, two_rank_run


def rewrite_steps(folder: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Path:
    """Return a copy of a run directory with changed step records."""
    directory = copy_run(two_rank_run(), folder)
    file = directory / "metrics.jsonl"
    records = [json.loads(line) for line in file.read_text().splitlines()]
    file.write_text("".join(json.dumps(change(record) if "loss" in record else record) + "\n" for record in records))
    return directory


def mask_most_targets(record: dict[str, Any]) -> dict[str, Any]:
    changes = {"targets": record["tokens"] // 16, "targets_per_second": record["tokens_per_second"] / 16}
    return {**record, **changes}


def drop_targets(record: dict[str, Any]) -> dict[str, Any]:
    """Return a record as earlier versions wrote it."""
    return {key: value for key, value in record.items() if not key.startswith("targets")}


def test_report_shows_targets_per_second_beside_tokens_per_second(tmp_path: Path) -> None:
    directory = rewrite_steps(tmp_path, mask_most_targets)
    facts = report_facts(read_run(directory))
    tokens, targets = (measured_row(facts, f"{name}_per_second") for name in ("tokens", "targets"))
    assert tokens is not None
    assert targets is not None
    assert targets["measured"] == pytest.approx(tokens["measured"] / 16)
    assert (targets["predicted"], targets["unit"]) == (None, "tokens/s")
    assert facts["curves"]["targets_per_second"] == pytest.approx(
        [speed / 16 for speed in facts["curves"]["tokens_per_second"]]
    )
    assert " tokens/s  " in format_latest_step(facts)
    assert " targets/s  " in format_latest_step(facts)
    assert "<dt>targets per second</dt>" in main(report_data([facts]))
    assert "targets per second" in command_output("report", directory)


@pytest.mark.parametrize("change", [dict, drop_targets], ids=["no target is ignored", "earlier version"])
def test_report_shows_only_tokens_if_no_target_is_known_to_be_ignored(change: Any, tmp_path: Path) -> None:
    facts = report_facts(read_run(rewrite_steps(tmp_path, change)))
    assert measured_row(facts, "tokens_per_second") is not None
    assert measured_row(facts, "targets_per_second") is None
    assert "targets_per_second" not in facts["curves"]
    assert "targets/s" not in format_latest_step(facts)


def test_progress_shows_targets_per_second_if_some_are_ignored() -> None:
    record = {"loss": 2.0, "tokens_per_second": 1600.0, "targets_per_second": 100.0, "mfu": 0.4}
    assert format_metrics(record) == "loss 2.000  1,600 tokens/s  100 targets/s  MFU 40.0%"
    assert format_metrics({**record, "targets_per_second": 1600.0}) == "loss 2.000  1,600 tokens/s  MFU 40.0%"


@pytest.mark.parametrize("phase_start", [0, 18])
def test_goodput_of_a_resumed_run_counts_each_step_once(phase_start: int) -> None:
    """Two starts of 12 steps, each of which trains for 12 of 15 s, with a record every 10 steps and a last one."""
    steps = [{"step": step, "start": 100.0 + step, "seconds": {"forward": 1.0}} for step in range(13, 25)]
    run_data = SimpleNamespace(
        ranks={0: SimpleNamespace(steps=steps, pauses=[{"start": 125.0, "seconds": 3.0}])},
        step_metrics=[{"step": step, "step_seconds": 1.0} for step in (10, 12, 20, 24)],
        run_events=[{"kind": STARTED, "time": 0.0}, {"kind": FINISHED, "time": 15.0}, {"kind": STARTED, "time": 99.0}],
        began_after=max(12, phase_start),
    )
    assert _measure_goodput(run_data) == pytest.approx(24 / 30)  # type: ignore[arg-type]
