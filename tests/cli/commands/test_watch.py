"""`phalanx watch` on ended runs and on a running one."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import typer

from phalanx.cli.commands.watch import watch
from phalanx.cli.views.report import evaluation_lines, format_latest_step, render_live, sparkline
from phalanx.report import formatting
from phalanx.report.compare_runs import report_data
from phalanx.report.facts import report_facts
from phalanx.report.run_data import read_run
from phalanx.runs.events import FAILED, FINISHED, STARTED, append_event
from phalanx.spec.errors import UserError
from phalanx.testing.processes import run_python, start_python
from tests.helpers.cli_runner import command_output
from tests.helpers.trained_runs import (
    TIMEOUT_SECONDS,
    copy_run,
    hybrid_run,
    mixture_run,
    read_source_losses,
    single_threaded_environment,
    stop_after,
    train_command,
    two_rank_run,
    wait_for,
    write_run_file,
)
from tests.helpers.watch_server import watch_server


def test_watch_prints_one_line_per_step_when_not_on_terminal():
    printed = command_output("watch", two_rank_run()).splitlines()
    facts = report_facts(read_run(two_rank_run()))
    evaluations = [f"step {step}  held-out loss {loss:.3f}" for step, loss in facts["curves"]["held_out"][0]["loss"]]
    assert [printed[4], printed[9]] == evaluations
    lines = [*printed[:4], *printed[5:9]]
    assert [line.split("  ")[0] for line in lines] == [f"step {step}/8" for step in range(1, 9)]
    for line, loss in zip(lines, facts["curves"]["loss"], strict=True):
        assert f"loss {loss:.3f}" in line


def test_watch_shows_losses_of_sources(tmp_path):
    run = copy_run(mixture_run(), tmp_path)
    losses = read_source_losses(run)
    facts = report_facts(read_run(run))
    held_out = {name: curves["held_out_loss"][0][1] for name, curves in facts["curves"]["sources"].items()}
    lines = command_output("watch", run).splitlines()
    assert lines[3].startswith("step 4/8  loss ")
    assert f"  json {losses['json'][3]:.3f}  email {losses['email'][3]:.3f}  " in lines[3]
    assert lines[4].endswith(f"  json {held_out['json']:.3f}  email {held_out['email']:.3f}")
    screen = "\n".join(str(part) for part in render_live(facts).renderables)
    assert f"{sparkline(losses['email'], 60)}  loss of email" in screen
    assert command_output("watch", run).splitlines()[-1] in screen


def test_evaluation_lines_include_losses_that_were_not_finite():
    """Two evaluations of one step, on different text, and one of them without a loss."""
    facts = report_facts(read_run(two_rank_run()))
    facts["curves"]["held_out"].insert(0, {**facts["curves"]["held_out"][0], "loss": [[4, None]]})
    assert [step for step, _ in evaluation_lines(facts)] == [4, 4, 8]
    assert evaluation_lines(facts)[0][1] == "step 4  held-out loss -"


def test_watch_follows_running_training_to_its_last_step():
    file = write_run_file("followed", {"training.steps": 12})
    train = start_python(
        train_command(file, 1), env=single_threaded_environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        wait_for(train, (file.parent / "followed" / "run.toml").is_file)
        watch = [sys.executable, "-m", "phalanx", "watch", str(file.parent / "followed"), "--every", "0.1"]
        done = run_python(watch, text=True, timeout=TIMEOUT_SECONDS)
    finally:
        train.terminate()
        train.wait(60)
    assert (done.returncode, done.stderr) == (0, "")
    assert re.findall(r"^step (\d+)/12  loss ", done.stdout, re.MULTILINE) == [str(step) for step in range(1, 13)]


@pytest.fixture
def failed_run(tmp_path: Path) -> Path:
    """Write a run whose rank 1 has just failed after step 5."""
    run = copy_run(two_rank_run(), tmp_path)
    stop_after(run, 5)
    (run / "events.jsonl").write_text((run / "events.jsonl").read_text().splitlines(keepends=True)[0])
    append_event(run, FAILED, rank=1, step=5, reason="was killed by SIGKILL")
    (run / "failures").mkdir()
    record = {"rank": 1, "step": 5, "time": 1.0, "reason": "was killed by SIGKILL", "code": 1}
    (run / "failures" / "rank-00001.json").write_text(json.dumps(record))
    return run


def test_watch_reports_failure_and_continues_when_run_restarts(failed_run):
    watch = [sys.executable, "-m", "phalanx", "watch", str(failed_run), "--every", "0.1"]
    with start_python(watch, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            failure_message = "phalanx: rank 1 failed: was killed by SIGKILL; waiting for the run to continue\n"
            assert process.stderr.readline() == failure_message
            (failed_run / "failures" / "rank-00001.json").unlink()
            append_event(failed_run, STARTED, step=5, ranks=2)  # the restarted run has not acquired its lock yet
            assert "the run has stopped; the run failed once and resumed" in process.stderr.readline()
            shutil.copy(two_rank_run() / "metrics.jsonl", failed_run)
            stdout, stderr = process.communicate(timeout=60)
        finally:
            process.kill()
    assert (process.returncode, stderr) == (0, "")
    assert re.findall(r"^step (\d)/8", stdout, re.MULTILINE) == list("12345678")


@pytest.mark.parametrize("ended", [True, False])
def test_watch_exits_1_when_failed_run_does_not_restart(failed_run, ended):
    """The launcher records the end of the run, or stops writing."""
    if ended:
        append_event(failed_run, FINISHED, step=5)
    else:
        for file in failed_run.rglob("*"):
            os.utime(file, (1e9, 1e9))
    with pytest.raises(typer.Exit) as exit_info:
        watch(failed_run)
    assert exit_info.value.exit_code == 1


def test_render_live_shows_progress_bottleneck_and_rank_times():
    from rich.console import Console

    facts = report_facts(read_run(hybrid_run()))
    console = Console(width=160, file=io.StringIO())
    console.print(render_live(facts))
    text = console.file.getvalue()
    for expected in (
        "step 8/8",
        formatting.bottleneck_headline(facts["verdict"]),
        formatting.format_seconds(facts["ranks"][3]["compute"]),
        "▁",
    ):
        assert expected in text


def test_seconds_left_uses_duration_of_latest_steps():
    facts = report_facts(read_run(two_rank_run()))
    facts["run"] |= {"step": 8, "steps": 108}
    facts["curves"]["step_seconds"] = [100.0] * 5 + [2.0] * 20
    assert formatting.seconds_left(facts) == 200.0
    assert format_latest_step(facts).endswith("3:20 left")


def test_sparkline_draws_curve_as_block_characters():
    assert sparkline([3.0, 2.0, None, 1.0], 60) == "█▅▁"
    assert sparkline([1.0] * 500, 60) == "▁" * 60
    assert sparkline([None], 60) == ""


def test_watch_web_serves_page_and_facts_to_localhost_only():
    with watch_server(hybrid_run()) as address:
        expected = json.loads(json.dumps(report_data([report_facts(read_run(hybrid_run()))])))
        assert json.load(urllib.request.urlopen(f"{address}facts.json", timeout=60)) == expected
        part = urllib.request.urlopen(f"{address}main.html", timeout=60).read().decode()
        assert part.startswith("<main>")
        assert 'data-every="0.2"' in urllib.request.urlopen(address, timeout=60).read().decode()
        for path, host, code in (("run.toml", "localhost", 404), ("facts.json", "evil.example", 403)):
            with pytest.raises(urllib.error.HTTPError) as error_info:
                urllib.request.urlopen(urllib.request.Request(address + path, headers={"Host": host}), timeout=60)
            assert error_info.value.code == code


def test_watch_web_rejects_port_in_use():
    with watch_server(two_rank_run()) as address:
        port = address.rpartition(":")[2].strip("/")
        with pytest.raises(UserError, match=f"--port = {port} cannot be served"):
            command_output("watch", two_rank_run(), "--web", "--port", port)


def test_watch_prometheus_serves_metrics_at_metrics_path_only():
    with watch_server(two_rank_run(), "--prometheus", "0") as address:
        response = urllib.request.urlopen(address.replace("0.0.0.0", "127.0.0.1") + "?by=name", timeout=60)
        assert response.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
        assert 'phalanx_step{run="two"} 8\n' in response.read().decode()
        port = int(re.search(r":(\d+)/metrics", address)[1])
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=60)
        with pytest.raises(UserError, match=f"--prometheus = {port} cannot be served"):
            command_output("watch", two_rank_run(), "--prometheus", port)
    with pytest.raises(UserError, match="cannot be combined with --web"):
        command_output("watch", two_rank_run(), "--prometheus", 0, "--web")
