"""`phalanx report` on runs that were trained."""

from __future__ import annotations

import json

import pytest

from phalanx.report import formatting
from phalanx.report.facts import report_facts
from phalanx.report.run_data import read_run
from phalanx.spec.errors import UserError
from phalanx.spec.formatting import format_ratio
from tests.helpers import cli_runner
from tests.helpers.cli_runner import known, shown
from tests.helpers.trained_runs import hybrid, two_ranks


@pytest.fixture(scope="module")
def found():
    return report_facts(read_run(hybrid()))


def test_report_prints_bottleneck_and_all_compared_numbers(found):
    text = shown("report", hybrid(), width=160)
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert formatting.bottleneck_headline(found["verdict"]) in text
    assert f"change first: {found['verdict']['suggestion']}" in text
    for _, rows in formatting.group_rows(found["comparison"]):
        for row in rows:
            numbers = [formatting.format_number(row[which], row["unit"]) for which in ("predicted", "measured")]
            assert f"{formatting.row_label(row)} {' '.join(numbers)} {format_ratio(row['ratio'])}" in lines
    for rank in found["ranks"]:
        assert any(
            line.startswith(f"{rank['rank']} on {rank['host']} {formatting.format_seconds(rank['compute'])}")
            for line in lines
        )


def test_report_prints_no_ansi_colors_when_not_on_terminal():
    assert "\x1b" not in shown("report", hybrid())


def test_report_json_equals_facts(found):
    printed = known("report", hybrid())
    assert printed == {"runs": [json.loads(json.dumps(found))], "comparison": None}


def test_report_html_path_defaults_to_run_or_working_directory(tmp_path, monkeypatch):
    assert f"page: {hybrid() / 'report.html'}" in shown("report", hybrid())
    assert (hybrid() / "report.html").is_file()
    shown("report", two_ranks(), "--html", tmp_path / "one.html")
    assert (tmp_path / "one.html").is_file()
    monkeypatch.chdir(tmp_path)
    assert "page: report.html" in shown("report", two_ranks(), hybrid())
    assert (tmp_path / "report.html").is_file()


@pytest.mark.parametrize("option", ["--html", "--trace"])
def test_report_rejects_unwritable_output_file(option, tmp_path):
    with pytest.raises(UserError, match=f"{option} = .*cannot be written: No such file"):
        shown("report", hybrid(), option, tmp_path / "nowhere" / "file")


def test_report_and_watch_help_do_not_import_numpy_pydantic_or_torch():
    assert not cli_runner.imported("report", "--help")
    assert not cli_runner.imported("watch", "--help")
