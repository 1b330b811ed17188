"""Comparison of runs in a table."""

from __future__ import annotations

import pytest

from phalanx.report.compare_runs import compare_runs, report_data, run_labels
from phalanx.report.facts import report_facts
from phalanx.report.run_data import read_run
from tests.helpers.cli_runner import command_json, command_output
from tests.helpers.trained_runs import copy_run, hybrid_run, two_rank_run


@pytest.fixture(scope="module")
def two_rank_facts():
    return report_facts(read_run(two_rank_run()))


def test_compare_runs_finds_no_difference_for_identical_runs(two_rank_facts):
    comparison = compare_runs([two_rank_facts, two_rank_facts])
    assert comparison["same_model"] is True
    assert comparison["differences"] == []
    assert comparison["loss_apart"] == {"steps": 8, "largest_relative": 0.0}
    assert {ratio for row in comparison["rows"] for ratio in row["ratio"]} <= {1.0, None}


def test_compare_runs_compares_losses_per_step(two_rank_facts):
    curves = {
        **two_rank_facts["curves"],
        "loss": [1.1 * loss for loss in two_rank_facts["curves"]["loss"][:5]] + [None] * 3,
    }
    comparison = compare_runs([two_rank_facts, {**two_rank_facts, "curves": curves}])
    assert comparison["loss_apart"]["steps"] == 5
    assert comparison["loss_apart"]["largest_relative"] == pytest.approx(0.1)


def test_compare_runs_rows_have_ratios_to_first_run(two_rank_facts, hybrid_facts):
    rows = {row["quantity"]: row for row in compare_runs([two_rank_facts, hybrid_facts])["rows"]}
    all_facts = [
        next(row["measured"] for row in facts["comparison"] if row["quantity"] == "step")
        for facts in (two_rank_facts, hybrid_facts)
    ]
    assert rows["step"]["measured"] == all_facts
    assert rows["step"]["ratio"] == [1.0, all_facts[1] / all_facts[0]]
    assert rows["bubble"]["measured"][0] is None  # the first has no pipeline
    assert rows["bubble"]["ratio"] == [None, None]


def test_compare_runs_reports_different_models_and_world_sizes(two_rank_facts, hybrid_facts):
    comparison = compare_runs([two_rank_facts, hybrid_facts])
    assert comparison["same_model"] is False
    assert comparison["differences"][0].startswith("These are different models (moe the default and num_experts 4")
    assert comparison["loss_apart"] is None
    assert "The runs have different numbers of ranks: two 2; hybrid 4." in comparison["differences"]


def test_report_compares_runs_when_run_toml_is_unreadable(tmp_path):
    directory = copy_run(two_rank_run(), tmp_path)
    (directory / "run.toml").write_text("what = 'else'\n")
    comparison = command_json("report", two_rank_run(), directory, "--html", tmp_path / "page.html")["comparison"]
    assert comparison["same_model"] is None
    assert comparison["differences"][0].startswith("These runs may have different models: no usable run.toml in two in")


def test_report_text_and_page_contain_comparison_messages(tmp_path):
    page = tmp_path / "both.html"
    text = " ".join(command_output("report", two_rank_run(), hybrid_run(), "--html", page, width=300).split())
    for message in report_data([report_facts(read_run(run)) for run in (two_rank_run(), hybrid_run())])["comparison"][
        "differences"
    ]:
        assert message in text
        assert message in page.read_text()


def test_run_labels_are_unique():
    def named(*places):
        return run_labels([{"name": name, "directory": f"{folder}/{name}"} for folder, name in places])

    assert named(("runs", "a"), ("runs", "b")) == ["a", "b"]
    assert named(("old", "a"), ("new", "a"), ("new", "b")) == ["a in old", "a in new", "b"]
    assert named(("runs", "a"), ("runs", "a")) == ["a (1)", "a (2)"]
