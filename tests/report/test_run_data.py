"""Run directories in any state: each is readable, is reported in the
terminal and on a page, and missing data is named."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import tomli_w

from phalanx.plan.search.evaluate import evaluate_layout
from phalanx.report.facts import report_facts
from phalanx.report.run_data import read_run
from phalanx.runs.events import FAILED, ROLLED_BACK, append_event
from phalanx.runs.lock import acquire_run_lock
from phalanx.runs.step_records import FORMAT
from phalanx.spec.errors import UserError
from phalanx.spec.resolved_run import ResolvedRun
from phalanx.testing.processes import run_python
from tests.helpers.cli_runner import command_json, command_output
from tests.helpers.trained_runs import (
    copy_run,
    hybrid_run,
    mixture_run,
    read_source_losses,
    stop_after,
    two_rank_run,
)


def _truncate_file(file: Path, share: float = 0.6) -> None:
    content = file.read_bytes()
    file.write_bytes(content[: int(share * len(content))])


def _keep_first_step_only(run: Path) -> None:
    """Truncate the records after the first step, during the write of the second."""
    for file in [run / "metrics.jsonl", *(run / "trace").glob("*")]:
        lines = file.read_text().splitlines(keepends=True)
        first = 1 if file.name == "metrics.jsonl" else 2
        file.write_text("".join(lines[:first]) + lines[first][:40])


def _remove_all_steps(run: Path) -> None:
    for file in ("metrics.jsonl", "events.jsonl"):
        (run / file).write_text("")
    shutil.rmtree(run / "trace")
    shutil.rmtree(run / "measured", ignore_errors=True)


def _set_other_trace_format(run: Path) -> None:
    for file in (run / "trace").glob("*"):
        file.write_text(file.read_text().replace(f'"format": {FORMAT}', '"format": 0'))


def _add_unknown_field(run: Path) -> None:
    table = tomllib.loads((run / "run.toml").read_text())
    table["training"]["flux_capacitor"] = 3
    (run / "run.toml").write_text(tomli_w.dumps(table))


def _remove_last_stage_records(run: Path) -> None:
    for rank in (1, 3):
        (run / "trace" / f"rank-{rank:05d}.jsonl").unlink(missing_ok=True)


def _point_to_missing_schedule(run: Path) -> None:
    table = tomllib.loads((run / "run.toml").read_text())
    table["layout"] |= {"schedule_file": str(run / "gone.csv")} if table["layout"]["pp"] > 1 else {}
    (run / "run.toml").write_text(tomli_w.dumps(table))


def _prepend_binary_bytes(run: Path) -> None:
    (run / "metrics.jsonl").write_bytes(b"\xff\xfe\x00\n" + (run / "metrics.jsonl").read_bytes())


def _set_unknown_device(run: Path) -> None:
    for file in (run / "trace").glob("*.jsonl"):
        header, _, steps = file.read_text().partition("\n")
        file.write_text(json.dumps({**json.loads(header), "device": "abacus"}) + "\n" + steps)


DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "one step is done": (_keep_first_step_only, "too few steps were recorded"),
    "no step is done": (_remove_all_steps, "no step has been written yet"),
    "a run is stopped": (lambda run: stop_after(run, 4), "step 4 of 8: the run has stopped"),
    "metrics are cut": (
        lambda run: _truncate_file(run / "metrics.jsonl"),
        "metrics.jsonl ends at step 4, but step",
    ),
    "metrics are empty": (
        lambda run: (run / "metrics.jsonl").write_text(""),
        "metrics.jsonl ends at step 0, but step",
    ),
    "metrics are lost": (lambda run: (run / "metrics.jsonl").unlink(), "metrics.jsonl is missing"),
    "metrics are no text": (_prepend_binary_bytes, "metrics.jsonl: 1 lines cannot be read"),
    "a record is cut": (lambda run: _truncate_file(run / "trace" / "rank-00001.jsonl"), "earlier than other records"),
    "a record is lost": (lambda run: (run / "trace" / "rank-00001.jsonl").unlink(), "no record of 1 of"),
    "rank 0 is lost": (lambda run: (run / "trace" / "rank-00000.jsonl").unlink(), "no record of 1 of"),
    "a stage is lost": (_remove_last_stage_records, "no record of"),
    "a record is empty": (lambda run: (run / "trace" / "rank-00001.jsonl").write_text(""), "has no header"),
    "an older version": (lambda run: shutil.rmtree(run / "trace"), "no records of ranks"),
    "another format": (_set_other_trace_format, f"has format 0; this version reads {FORMAT}"),
    "an unknown device": (_set_unknown_device, "the recorded machine is not valid"),
    "an unknown field": (_add_unknown_field, "run.toml is not valid in this version"),
    "run.toml is cut": (
        lambda run: (run / "run.toml").write_text('name = "cu'),
        "run.toml is not valid in this version",
    ),
}


@pytest.mark.parametrize("run", [two_rank_run, hybrid_run])
@pytest.mark.parametrize("damage", DAMAGES)
def test_report_of_damaged_run_lists_problem_and_shows_rest(run, damage, tmp_path):
    directory = copy_run(run(), tmp_path)
    damage_run, problem_text = DAMAGES[damage]
    damage_run(directory)
    (facts,) = command_json("report", directory)["runs"]
    assert problem_text in "\n".join(facts["problems"])
    assert facts == json.loads(json.dumps(report_facts(read_run(directory))))
    text = " ".join(command_output("report", directory, width=200).split())
    for problem in (" ".join(problem.split()) for problem in facts["problems"]):
        assert problem in text
    assert "</html>" in (directory / "report.html").read_text()


def test_report_lists_missing_schedule_file_and_keeps_bottleneck(tmp_path):
    directory = copy_run(hybrid_run(), tmp_path)
    _point_to_missing_schedule(directory)
    (facts,) = command_json("report", directory)["runs"]
    assert "run.toml names a schedule that does not exist" in facts["problems"][0]
    assert facts["verdict"] is not None


def test_report_facts_have_no_bottleneck_when_stage_records_are_missing(tmp_path):
    directory = copy_run(hybrid_run(), tmp_path)
    _remove_last_stage_records(directory)
    facts = report_facts(read_run(directory))
    assert facts["verdict"] is None
    assert facts["problems"][-1] == "no verdict is possible: no rank recorded 1 of 2 stages"
    assert [rank["rank"] for rank in facts["ranks"]] == [0, 2]


@pytest.mark.parametrize("run", [two_rank_run, hybrid_run])
def test_report_facts_list_no_problems_for_complete_run(run):
    assert report_facts(read_run(run()))["problems"] == []


@pytest.mark.parametrize("file", ["rank-00000.json", "rank-00002.json"])
@pytest.mark.parametrize("text", ["", "{}", "[]", '{"held_bytes": {}'])
def test_report_skips_corrupted_measured_memory_files(file, text, tmp_path):
    directory = copy_run(hybrid_run(), tmp_path)
    (directory / "measured" / file).write_text(text)
    (facts,) = command_json("report", directory)["runs"]
    assert f"measured/{file} cannot be read" in facts["problems"]
    assert {row["role"] for row in facts["comparison"]} == {"", "pp0", "pp1"}


@pytest.mark.parametrize("make", [lambda path: None, Path.mkdir, Path.touch])
@pytest.mark.parametrize("command", ["report", "watch"])
def test_report_and_watch_reject_directory_without_run(command, make, tmp_path):
    make(tmp_path / "run")
    with pytest.raises(UserError) as error_info:
        command_output(command, tmp_path / "run")
    assert (error_info.value.field, error_info.value.value) == ("run directory", str(tmp_path / "run"))
    assert not list(tmp_path.rglob("*.html"))


def _rewrite_lines(file: Path, change: Callable[[dict], dict]) -> None:
    lines = [change(json.loads(line)) for line in file.read_text().splitlines()]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.mark.parametrize(
    ("every", "last_step", "is_reported"), [(1, 0, True), (1, 8, False), (3, 6, False), (3, 3, True), (9, 0, False)]
)
def test_report_expects_only_steps_that_metrics_every_writes(every, last_step, is_reported, tmp_path):
    """A signal stopped a run of 20 steps after step 8."""
    directory = copy_run(two_rank_run(), tmp_path)
    table = tomllib.loads((directory / "run.toml").read_text())
    table["training"]["steps"] = 20
    table["metrics"]["every"] = every
    (directory / "run.toml").write_text(tomli_w.dumps(table))
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    written_lines = [line for line in lines if line["step"] <= last_step and line["step"] % every == 0]
    (directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in written_lines))
    problem = f"metrics.jsonl ends at step {last_step}, but step 8 was reached: its last lines are lost"
    assert (problem in read_run(directory).problems) == is_reported


def test_planned_passes_of_ranks_that_share_cores_take_the_predicted_time():
    hybrid = read_run(hybrid_run())
    for cores in (2, 64):
        cluster = hybrid.run.cluster.replace(cores=cores, nproc_per_node=4)
        run_data = replace(hybrid, run=hybrid.run.replace(cluster=cluster))
        planned = report_facts(run_data)["timeline"]["planned"]
        evaluated = evaluate_layout(ResolvedRun(run_data.run, 4), hybrid.run.layout)
        assert max(end for *_, end in planned) == pytest.approx(evaluated.schedule_seconds, rel=0.02)


def test_report_bubble_is_unchanged_without_host_wait_times(tmp_path):
    directory = copy_run(hybrid_run(), tmp_path)
    for file in (directory / "trace").glob("*"):
        _rewrite_lines(file, lambda line: {name: value for name, value in line.items() if name != "wait_seconds"})
    complete, without_waits = (report_facts(read_run(run)) for run in (hybrid_run(), directory))
    bubbles = [
        row["measured"]
        for facts in (complete, without_waits)
        for row in facts["comparison"]
        if row["quantity"] == "bubble"
    ]
    assert bubbles[0] == bubbles[1] > 0
    assert "exposed communication" not in {row["quantity"] for row in without_waits["comparison"]}
    assert "communication" not in {finding["kind"] for finding in without_waits["findings"]}


def test_report_omits_predicted_vs_measured_rows_after_resume_on_fewer_ranks(tmp_path):
    directory = copy_run(hybrid_run(), tmp_path)
    for file in (directory / "trace").glob("*"):
        opening = json.loads(file.read_text().splitlines()[0]) | {"step": 8, "ranks": 2}
        if opening["rank"] < 2:
            file.write_text(file.read_text() + json.dumps(opening) + "\n")
    facts = report_facts(read_run(directory))
    assert facts["run"]["ranks"] == 2
    assert {row["role"] for row in facts["comparison"]} == set()


def test_report_facts_list_layout_invalid_for_world_size(tmp_path):
    directory = copy_run(two_rank_run(), tmp_path)
    table = tomllib.loads((directory / "run.toml").read_text())
    table["layout"] |= {"tp": 4}
    (directory / "run.toml").write_text(tomli_w.dumps(table))
    facts = report_facts(read_run(directory))
    assert any("run.toml does not match the 2 ranks" in problem for problem in facts["problems"])
    assert facts["curves"]["step"] == list(range(1, 9))


def test_watch_exits_with_reason_of_rank_failure(tmp_path):
    directory = copy_run(two_rank_run(), tmp_path)
    stop_after(directory, 5)
    (directory / "failures").mkdir()
    failure = {"rank": 1, "step": 5, "time": 1.0, "reason": "OSError: the disk is full\nsecond line", "code": 1}
    (directory / "failures" / "rank-00001.json").write_text(json.dumps(failure))
    assert report_facts(read_run(directory))["problems"] == ["rank 1 failed: OSError: the disk is full"]
    done = run_watch(directory)
    assert (done.returncode, "step 5/8" in done.stdout) == (1, True)
    assert done.stderr == "phalanx: rank 1 failed: OSError: the disk is full\n"


def run_watch(directory: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "phalanx", "watch", str(directory)]
    return run_python(command, text=True, timeout=120)


def test_read_run_reports_killed_rank_before_connection_errors(tmp_path):
    """Ranks that lost their connection to the killed rank wrote failure records before the launcher did."""
    directory = copy_run(two_rank_run(), tmp_path)
    (directory / "failures").mkdir()
    connection_lost = {"rank": 0, "step": 5, "time": 1.0, "reason": "RuntimeError: Connection reset by peer", "code": 1}
    killed = {
        "rank": 1,
        "time": 2.0,
        "reason": "was killed by SIGKILL and wrote no failure record; possible cause: out of memory",
        "code": 1,
    }
    for failure in (connection_lost, killed):
        (directory / "failures" / f"rank-0000{failure['rank']}.json").write_text(json.dumps(failure))
    problems = read_run(directory).problems
    assert problems[0] == "rank 1 was killed by SIGKILL and wrote no failure record; possible cause: out of memory"


def test_read_run_reports_restarts_and_rollbacks(tmp_path):
    directory = copy_run(two_rank_run(), tmp_path)
    for step in (3, 5):
        append_event(directory, FAILED, rank=1, step=step, reason="was killed by SIGKILL", verdict=[])
    assert read_run(directory).problems[-1].startswith("the run failed 2 times and resumed, the last time at ")
    assert read_run(directory).problems[-1].endswith("rank 1 was killed by SIGKILL, step 5")
    append_event(directory, ROLLED_BACK, after=7, to=4, reason="a spike")
    assert read_run(directory).problems[-1].startswith("the run rolled back once, the last time at ")
    assert read_run(directory).problems[-1].endswith(": a spike; from step 7 to step 4")


def test_watch_exits_with_code_1_when_run_was_stopped_early(tmp_path):
    directory = copy_run(two_rank_run(), tmp_path)
    stop_after(directory, 4)
    done = run_watch(directory)
    assert (done.returncode, done.stderr) == (1, "phalanx: step 4 of 8: the run has stopped\n")


def test_read_run_detects_running_state_from_lock(tmp_path, monkeypatch):
    directory = copy_run(two_rank_run(), tmp_path)
    stop_after(directory, 4)
    monkeypatch.setattr("phalanx.runs.lock.SHUTDOWN_GRACE_SECONDS", 0.2)
    lock = acquire_run_lock(directory)
    assert read_run(directory).problems == ["step 4 of 8: the run is still active"]
    with pytest.raises(UserError, match=f"is in use by process {os.getpid()} on"):
        acquire_run_lock(directory)
    lock.close()
    (directory / "lock").write_text("1 on another-host")
    assert read_run(directory).in_progress is None
    for name in ("lock", "launcher.lock"):
        (directory / name).unlink()
    assert "the run is still active, or has stopped" in read_run(directory).problems[0]


def test_run_data_has_losses_of_each_source_and_leaves_out_damaged_ones(tmp_path: Path) -> None:
    run = copy_run(mixture_run(), tmp_path)
    assert list(read_run(run).source_losses) == ["json", "email"]
    expected = read_source_losses(run)
    records = (run / "metrics.jsonl").read_text().splitlines()
    damaged = {**json.loads(records[0]), "loss/json": "1e3", "loss/email": math.nan}
    (run / "metrics.jsonl").write_text("\n".join([json.dumps(damaged), *records[1:]]) + "\n")
    losses = read_run(run).source_losses
    evaluations = read_run(run).evaluations
    for name, curve in expected.items():
        assert losses[name]["loss"] == list(zip(range(2, 9), curve[1:], strict=True))
        held_out = [(step, line[f"held_out_loss/{name}"]) for step, line in zip((4, 8), evaluations, strict=True)]
        assert losses[name]["held_out_loss"] == held_out


def test_run_data_leaves_out_losses_of_sources_on_earlier_held_out_text(tmp_path: Path) -> None:
    run = copy_run(mixture_run(), tmp_path)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    next(line for line in lines if "held_out_loss" in line)["held_out_set"] = "another"
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert [step for step, _ in read_run(run).source_losses["email"]["held_out_loss"]] == [8]


def test_report_prints_losses_of_each_source_and_phases(tmp_path: Path) -> None:
    run = copy_run(mixture_run(), tmp_path)
    file = run / "run.toml"
    file.write_text(file.read_text().replace("phase = []", "phase = [{ from_step = 6, learning_rate = 1e-4 }]"))
    text = command_output("report", run, width=160)
    losses = read_source_losses(run)
    evaluation = read_run(run).evaluations[-1]
    assert "phase[0] (from step 7): learning rate 0.0001" in text
    assert f"json {losses['json'][-1]:.3f}  email {losses['email'][-1]:.3f}" in text
    assert f"json {evaluation['held_out_loss/json']:.3f}  email {evaluation['held_out_loss/email']:.3f}" in text
