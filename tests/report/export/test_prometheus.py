"""The metrics of a run for Prometheus, read by its own parser, and the alerts that use them."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from phalanx.report.export.prometheus import FAMILIES, RunMetrics, exposition
from phalanx.report.run_data import read_run
from phalanx.runs.checkpoints import checkpoints
from phalanx.runs.events import STARTED, append_event, read_events
from phalanx.runs.lock import acquire_run_lock
from phalanx.runs.swarm_records import JOURNAL_FILE
from phalanx.train.loggers import JsonLinesLogger
from tests.helpers.trained_runs import copy_run, hybrid_run, two_rank_run

ROOT = Path(__file__).parents[3]
Samples = dict[str, dict[tuple[str, ...], float]]


def parse_exposition(text: str) -> Samples:
    """Return values by name and then by labels, without those of the run."""
    samples: Samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = tuple(value for key, value in sorted(sample.labels.items()) if key != "run")
            assert labels not in samples.setdefault(sample.name, {})
            samples[sample.name][labels] = sample.value
    return samples


def read_metrics(directory: Path, run_metrics: RunMetrics | None = None) -> Samples:
    return parse_exposition(
        (run_metrics or RunMetrics(directory)).exposition_text(checkpoints(directory / "checkpoints"))
    )


@pytest.mark.parametrize("run", [two_rank_run, hybrid_run])
def test_prometheus_metrics_match_run_records(run: Callable[[], Path]) -> None:
    samples, recorded = read_metrics(run()), read_run(run())
    last = recorded.step_metrics[-1]
    expected = {
        "phalanx_step": last["step"],
        "phalanx_loss_nats_per_token": last["loss"],
        "phalanx_gradient_norm": last["grad_norm"],
        "phalanx_learning_rate": last["learning_rate"],
        "phalanx_step_seconds": last["step_seconds"],
        "phalanx_tokens_per_second": last["tokens_per_second"],
        "phalanx_mfu_ratio": last["mfu"],
        "phalanx_tokens": last["tokens"],
        "phalanx_skipped_steps": 0,
        "phalanx_held_out_loss_nats_per_token": recorded.evaluations[-1]["held_out_loss"],
        "phalanx_planned_steps": 8,
        "phalanx_checkpoint_step": 8,
        "phalanx_under_way": 0,
        "phalanx_failed_ranks": 0,
        "phalanx_starts_total": 1,
        "phalanx_checkpoint_interval_steps": recorded.run.checkpoint.every,
        "phalanx_start_timestamp_seconds": recorded.run_events[0]["time"],
        "phalanx_last_step_timestamp_seconds": max(
            file.stat().st_mtime for file in (run() / "metrics.jsonl", *(run() / "trace").glob("rank-*.jsonl"))
        ),
        "phalanx_checkpoint_timestamp_seconds": (run() / "checkpoints" / "step-00000008").stat().st_mtime,
    }
    assert {name: samples[name][()] for name in expected} == expected
    lines = {str(rank): record.steps[-1] for rank, record in recorded.ranks.items()}
    assert len(lines) == recorded.world_size
    for name, field in (("phalanx_rank_step", "step"), ("phalanx_peak_memory_bytes", "peak_memory_bytes")):
        assert samples[name] == {(rank,): line[field] for rank, line in lines.items()}
    for name, field in (("phalanx_phase_seconds", "seconds"), ("phalanx_wait_seconds", "wait_seconds")):
        assert samples[name] == {(phase, rank): s for rank, line in lines.items() for phase, s in line[field].items()}
    for (rank,), seconds in samples["phalanx_compute_seconds"].items():
        passes = sum(sum(kinds.values()) for kinds in lines[rank]["stages"].values())
        assert seconds == pytest.approx(passes - lines[rank]["wait_seconds"]["passes"])
    for rank, record in recorded.ranks.items():
        assert samples["phalanx_rank_info"]["cpu", record.host, str(rank)] == 1
        assert samples["phalanx_device_memory_bytes"][(str(rank),)] == record.memory_bytes
    assert set(samples) == set(FAMILIES)


def test_prometheus_metric_names_follow_naming_conventions() -> None:
    """Only counters end in _total, and units are base units (prometheus.io/docs/practices/naming)."""
    for name, (kind, text) in FAMILIES.items():
        assert re.fullmatch(r"phalanx_[a-z_]+", name)
        assert (kind == "counter") == name.endswith("_total")
        assert kind in ("gauge", "counter")
        assert text.endswith(".")
        assert not re.search(r"_(ms|millis|gb|mb|minutes|percent)\b", name)


def test_prometheus_metrics_report_nan_loss_and_failed_ranks(tmp_path: Path) -> None:
    run = copy_run(two_rank_run(), tmp_path)
    run_metrics = RunMetrics(run)
    assert read_metrics(run, run_metrics)["phalanx_loss_nats_per_token"][()] > 0
    *_, last = [line for line in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()) if "loss" in line]
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({**last, "step": 9, "loss": None, "grad_norm": None, "skipped_steps": 1}) + "\n")
        file.write('{"step": 10, "lo')  # still being written
    (run / "failures").mkdir()
    (run / "failures" / "rank-00001.json").write_text("{}")
    shutil.rmtree(run / "checkpoints")
    lock = acquire_run_lock(run)
    assert lock is not None
    samples = read_metrics(run, run_metrics)
    lock.close()
    assert math.isnan(samples["phalanx_loss_nats_per_token"][()])
    assert (samples["phalanx_step"][()], samples["phalanx_skipped_steps"][()]) == (9, 1)
    assert (samples["phalanx_failed_ranks"][()], samples["phalanx_under_way"][()]) == (1, 1)
    assert "phalanx_checkpoint_step" not in samples


def test_prometheus_metrics_drop_old_ranks_after_restart_with_fewer(tmp_path: Path) -> None:
    run = copy_run(two_rank_run(), tmp_path)
    run_metrics = RunMetrics(run)
    assert len(read_metrics(run, run_metrics)["phalanx_rank_info"]) == 2
    file = run / "trace" / "rank-00000.jsonl"
    opening, *lines = file.read_text().splitlines(keepends=True)
    restart_line = json.dumps({**json.loads(opening), "step": 4, "ranks": 1}) + "\n"
    aside = file.with_suffix(".partial")  # as `JsonLinesLogger` does
    aside.write_text("".join([opening, *lines[:4], restart_line]))
    aside.replace(file)
    samples = read_metrics(run, run_metrics)
    assert [labels[-1] for labels in samples["phalanx_rank_info"]] == ["0"]
    assert "phalanx_rank_step" not in samples  # the rank has finished no step yet


def test_prometheus_counters_never_decrease_after_rollback(tmp_path: Path) -> None:
    """Prometheus reads a decreasing counter as a restart from 0. When a run rolls back, later steps and
    later starts are removed from the records of ranks."""
    run = copy_run(two_rank_run(), tmp_path)
    record, run_metrics = run / "trace" / "rank-00000.jsonl", RunMetrics(run)
    opening = json.loads(record.read_text().splitlines()[0])

    def start(after_step: int) -> Samples:
        JsonLinesLogger(run / "metrics.jsonl", after_step).close()
        notes = JsonLinesLogger(record, after_step)
        notes.write({**opening, "step": after_step})
        notes.close()
        append_event(run, STARTED, ranks=2, step=after_step)
        return read_metrics(run, run_metrics)

    before = [start(8), start(8)][-1]
    after = start(4)
    assert (before["phalanx_starts_total"][()], after["phalanx_starts_total"][()]) == (3, 4)
    assert after["phalanx_tokens"][()] == before["phalanx_tokens"][()] / 2
    for name, (kind, _) in FAMILIES.items():
        assert kind == "gauge" or after[name][()] >= before[name][()]


def test_prometheus_metrics_of_unstarted_run_have_plan_and_start_time(tmp_path: Path) -> None:
    """Before the first step, the time of the last step is that of the last start, so that alerts notice a long wait."""
    shutil.copy(two_rank_run() / "run.toml", tmp_path)
    start_time = (tmp_path / "run.toml").stat().st_mtime
    expected = {
        "phalanx_step": 0,
        "phalanx_planned_steps": 8,
        "phalanx_checkpoint_interval_steps": 500,
        "phalanx_failed_ranks": 0,
        "phalanx_failures_total": 0,
        "phalanx_starts_total": 0,
        "phalanx_start_timestamp_seconds": start_time,
        "phalanx_last_step_timestamp_seconds": start_time,
    }
    assert {name: values[()] for name, values in read_metrics(tmp_path).items()} == expected
    append_event(tmp_path, STARTED, ranks=2, step=0)
    began = float(read_events(tmp_path)[0]["time"])
    assert began > start_time
    assert read_metrics(tmp_path)["phalanx_last_step_timestamp_seconds"][()] == began


def test_prometheus_last_step_time_uses_rank_records(tmp_path: Path) -> None:
    """With metrics.every = 100, rank records contain each step and
    metrics.jsonl few. Records before the last start are old."""
    run = copy_run(two_rank_run(), tmp_path)
    run_metrics, last = RunMetrics(run), "phalanx_last_step_timestamp_seconds"
    stepped = read_metrics(run, run_metrics)[last][()] + 100
    os.utime(run / "trace" / "rank-00001.jsonl", (stepped, stepped))
    assert read_metrics(run, run_metrics)[last][()] == stepped
    os.utime(run / "run.toml", (stepped + 100, stepped + 100))
    assert (
        read_metrics(run, run_metrics)[last][()]
        == read_metrics(run, run_metrics)["phalanx_start_timestamp_seconds"][()]
        == stepped + 100
    )


@pytest.mark.parametrize(("every", "interval"), [("20", 20), ("0", 8), ('"auto"', 0)])
def test_prometheus_checkpoint_interval_matches_run_toml(tmp_path: Path, every: str, interval: int) -> None:
    text = (two_rank_run() / "run.toml").read_text()
    (tmp_path / "run.toml").write_text(text.replace("[checkpoint]\nevery = 500", f"[checkpoint]\nevery = {every}"))
    assert read_metrics(tmp_path)["phalanx_checkpoint_interval_steps"][()] == interval


def test_prometheus_metrics_omit_steps_for_swarm_coordinator(tmp_path: Path) -> None:
    shutil.copy(two_rank_run() / "run.toml", tmp_path)
    (tmp_path / JOURNAL_FILE).touch()
    assert not {"phalanx_step", "phalanx_last_step_timestamp_seconds"} & set(read_metrics(tmp_path))


@given(st.text(), st.floats(allow_nan=True, allow_infinity=True))
def test_exposition_round_trips_labels_and_values(label: str, value: float) -> None:
    text = exposition([("phalanx_step", {"run": label}, value), ("phalanx_step", {"run": label + "x"}, 7)])
    [family] = text_string_to_metric_families(text)
    assert [sample.labels["run"] for sample in family.samples] == [label, label + "x"]
    read = family.samples[0].value
    assert read == value or (math.isnan(read) and math.isnan(value))
    assert (family.type, family.documentation) == FAMILIES["phalanx_step"]


def load_alert_rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load((ROOT / "examples" / "alerts.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def test_example_alerts_pass_promtool_unit_tests() -> None:
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not installed (apt-get install prometheus)")
    rules = ROOT / "tests" / "report" / "export" / "alerts_test.yml"
    done = subprocess.run(["promtool", "test", "rules", str(rules)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_example_alerts_use_exported_metrics_and_are_documented() -> None:
    metric_names = set()
    for rule in load_alert_rules():
        used = set(re.findall(r"\bphalanx_\w+", rule["expr"] + rule["annotations"]["summary"]))
        assert used <= set(FAMILIES), rule["alert"]
        metric_names |= used
        assert len(rule["annotations"]["do"].strip().splitlines()) == 1
        assert rule["labels"]["severity"] in ("page", "ticket")
    assert len(metric_names) > 10
    text = (ROOT / "docs" / "guides" / "reports-and-monitoring.md").read_text()
    for name in [*FAMILIES, *(rule["alert"] for rule in load_alert_rules())]:
        assert f"`{name}`" in text
