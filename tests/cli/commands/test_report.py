"""`phalanx report` on trained runs."""

from __future__ import annotations

import json
import shutil

import pytest

from phalanx.report import formatting
from phalanx.report.gpu_profile.step import profile_gpu_step
from phalanx.report.gpu_profile.trace import parse_gpu_trace
from phalanx.runs.step_records import rank_record_file
from phalanx.spec.errors import UserError
from phalanx.spec.formatting import format_ratio
from tests.helpers import cli_runner
from tests.helpers.cli_runner import command_json, command_output
from tests.helpers.gpu_samples import USUAL
from tests.helpers.gpu_traces import step_events
from tests.helpers.trained_runs import hybrid_run, two_rank_run


def test_report_prints_bottleneck_and_all_compared_numbers(hybrid_facts):
    text = command_output("report", hybrid_run(), width=160)
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert formatting.bottleneck_headline(hybrid_facts["verdict"]) in text
    assert f"change first: {hybrid_facts['verdict']['suggestion']}" in text
    for _, rows in formatting.group_rows(hybrid_facts["comparison"]):
        for row in rows:
            numbers = [formatting.format_number(row[column], row["unit"]) for column in ("predicted", "measured")]
            label = formatting.row_label(row, hybrid_facts["run"]["ranks"])
            assert f"{label} {' '.join(numbers)} {format_ratio(row['ratio'])}" in lines
    for rank in hybrid_facts["ranks"]:
        assert any(
            line.startswith(f"{rank['rank']} on {rank['host']} {formatting.format_seconds(rank['compute'])}")
            for line in lines
        )


def test_report_prints_table_of_gpus_from_step_records(tmp_path):
    directory = tmp_path / "run"
    shutil.copytree(two_rank_run(), directory)
    file = rank_record_file(directory, 1)
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    last_step = [line for line in lines if "stages" in line][-1]
    trace = parse_gpu_trace(step_events("step"))
    last_step["gpu"] = profile_gpu_step(trace.events, trace.annotations["step"])
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    text = command_output("report", directory, width=160)
    printed_lines = [" ".join(line.split()) for line in text.splitlines()]
    assert f"times of the GPUs in step {last_step['step']}" in printed_lines
    assert "exposed communication of mesh_tp 50.0 µs 5.0 %" in printed_lines
    assert "times of the GPUs" not in command_output("report", two_rank_run())


def test_report_prints_sensors_of_gpus_from_step_records(tmp_path):
    directory = tmp_path / "run"
    shutil.copytree(two_rank_run(), directory)
    for rank, clock in enumerate((1755, 1200)):
        file = rank_record_file(directory, rank)
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        for line in lines:
            if "stages" in line:
                line["gpu_sample"] = {**USUAL, "clock_mhz": clock}
        file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    printed_lines = [" ".join(line.split()) for line in command_output("report", directory, width=160).splitlines()]
    assert "SM clock, median 1,755 MHz 1,200 MHz" in printed_lines
    assert any("SM clock of 1,200 MHz (median of the other ranks: 1,755 MHz)" in line for line in printed_lines)
    assert any(line.startswith("mean power 600 W per GPU, maximum temperature 60 °C, ") for line in printed_lines)
    facts = command_json("report", directory)["runs"][0]["gpu_samples"]
    assert [rank["clock_mhz"] for rank in facts["ranks"]] == [1755, 1200]
    assert facts["joules_per_token"] > 0


def test_report_prints_no_ansi_colors_when_not_on_terminal():
    assert "\x1b" not in command_output("report", hybrid_run())


def test_report_json_equals_facts(hybrid_facts):
    report = command_json("report", hybrid_run())
    assert report == {"runs": [json.loads(json.dumps(hybrid_facts))], "comparison": None}


def test_report_html_path_defaults_to_run_or_working_directory(tmp_path, monkeypatch):
    assert f"page: {hybrid_run() / 'report.html'}" in command_output("report", hybrid_run())
    assert (hybrid_run() / "report.html").is_file()
    command_output("report", two_rank_run(), "--html", tmp_path / "one.html")
    assert (tmp_path / "one.html").is_file()
    monkeypatch.chdir(tmp_path)
    assert "page: report.html" in command_output("report", two_rank_run(), hybrid_run())
    assert (tmp_path / "report.html").is_file()


@pytest.mark.parametrize("option", ["--html", "--trace"])
def test_report_rejects_unwritable_output_file(option, tmp_path):
    with pytest.raises(UserError, match=f"{option} = .*cannot be written: No such file"):
        command_output("report", hybrid_run(), option, tmp_path / "nowhere" / "file")


def test_report_and_watch_help_do_not_import_numpy_or_torch():
    assert cli_runner.imported_packages("report", "--help") <= {"pydantic"}
    assert cli_runner.imported_packages("watch", "--help") <= {"pydantic"}
