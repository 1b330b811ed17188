"""`phalanx report` on runs that were trained."""

from __future__ import annotations

import json

import pytest

from phalanx.report import formatting
from phalanx.spec.errors import UserError
from phalanx.spec.formatting import format_ratio
from tests.helpers import cli_runner
from tests.helpers.cli_runner import command_json, command_output
from tests.helpers.trained_runs import hybrid_run, two_rank_run


def test_report_prints_bottleneck_and_all_compared_numbers(hybrid_facts):
    text = command_output("report", hybrid_run(), width=160)
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert formatting.bottleneck_headline(hybrid_facts["verdict"]) in text
    assert f"change first: {hybrid_facts['verdict']['suggestion']}" in text
    for _, rows in formatting.group_rows(hybrid_facts["comparison"]):
        for row in rows:
            numbers = [formatting.format_number(row[which], row["unit"]) for which in ("predicted", "measured")]
            assert f"{formatting.row_label(row)} {' '.join(numbers)} {format_ratio(row['ratio'])}" in lines
    for rank in hybrid_facts["ranks"]:
        assert any(
            line.startswith(f"{rank['rank']} on {rank['host']} {formatting.format_seconds(rank['compute'])}")
            for line in lines
        )


def test_report_prints_no_ansi_colors_when_not_on_terminal():
    assert "\x1b" not in command_output("report", hybrid_run())


def test_report_json_equals_facts(hybrid_facts):
    printed = command_json("report", hybrid_run())
    assert printed == {"runs": [json.loads(json.dumps(hybrid_facts))], "comparison": None}


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


def test_report_and_watch_help_do_not_import_numpy_pydantic_or_torch():
    assert not cli_runner.imported_packages("report", "--help")
    assert not cli_runner.imported_packages("watch", "--help")
