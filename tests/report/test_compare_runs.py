"""Comparison of runs in a table."""

from __future__ import annotations

import math
import re

import pytest

from phalanx.report import formatting
from phalanx.report.compare_runs import compare_runs, report_data, run_labels
from phalanx.report.facts import report_facts
from phalanx.report.run_data import read_run
from tests.helpers.cli_runner import command_json, command_output
from tests.helpers.trained_runs import copy_run, hybrid_run, mixture_run, two_rank_run


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
    assert comparison["differences"][0] == (
        "These are different models: their losses, times and bytes differ for this reason too."
    )
    assert comparison["loss_apart"] is None
    assert comparison["settings"]["ranks"] == [2, 4]
    assert comparison["settings"]["model.moe.num_experts"] == [None, 4]
    assert comparison["settings"]["layout.pp"] == [1, 2]


def with_settings(facts, name, **settings):
    return {**facts, "run": {**facts["run"], "name": name, "settings": {**facts["run"]["settings"], **settings}}}


def test_compare_runs_titles_say_what_differs(two_rank_facts):
    runs = [
        with_settings(two_rank_facts, "a", **{"training.seed": 1, "layout.offload": None}),
        with_settings(two_rank_facts, "b", **{"training.seed": 2, "layout.offload": "cpu"}),
    ]
    comparison = compare_runs(runs)
    assert comparison["titles"] == ["a: training.seed=1", "b: training.seed=2, layout.offload=cpu"]
    assert comparison["settings"] == {"training.seed": [1, 2], "layout.offload": [None, "cpu"]}
    assert comparison["same_model"] is True


def test_compare_runs_titles_have_at_most_three_settings_and_those_that_matter_first(two_rank_facts):
    fields = ("checkpoint.every", "metrics.every", "training.seed", "optimizer.weight_decay")
    runs = [with_settings(two_rank_facts, name, **dict.fromkeys(fields, name)) for name in "ab"]
    assert compare_runs(runs)["titles"] == [
        "a: training.seed=a, optimizer.weight_decay=a, checkpoint.every=a, and 1 more",
        "b: training.seed=b, optimizer.weight_decay=b, checkpoint.every=b, and 1 more",
    ]


@pytest.mark.parametrize(
    ("changes", "is_comparable"),
    [
        ({"training.seed": 2, "data.held_out": ["/other"]}, True),
        ({"data.train": ["/other"]}, False),
        ({"data.tokenizer_vocab": 300}, False),
        ({"training.seq_len": 8}, False),
    ],
)
def test_compare_runs_compares_training_losses_only_on_the_same_tokens(two_rank_facts, changes, is_comparable):
    comparison = compare_runs([two_rank_facts, with_settings(two_rank_facts, "b", **changes)])
    (row,) = [row for row in comparison["rows"] if row["quantity"] == "loss"]
    sentences = formatting.format_comparison(comparison)
    assert row["ratio"] == ([1.0, 1.0] if is_comparable else [1.0, None])
    assert any("losses differ by at most" in sentence for sentence in sentences) == is_comparable
    message = f"Training losses are not comparable, because the runs differ in {', '.join(changes)}."
    assert (message in sentences) != is_comparable


def test_comparison_rows_begin_with_results_and_end_with_settings_of_no_effect(two_rank_facts):
    settings = {"evaluation.prompt": "a\nb", "training.steps": 5, "checkpoint.every": 3}
    other = with_settings(two_rank_facts, "b", **settings)
    rows = formatting.comparison_rows(compare_runs([two_rank_facts, {**other, "run": {**other["run"], "step": 5}}]))
    labels = [label for label, _ in rows]
    results = ["last step", "loss", "validation loss", "perplexity", "tokens per second", "peak memory of a rank"]
    assert labels[:8] == [*results, "training.steps", "whole step"]
    assert sorted(labels[-2:]) == ["checkpoint.every", "evaluation.prompt"]
    assert dict(rows)["evaluation.prompt"][1] == ("a\nb", "a\\nb", "")


def test_compare_runs_has_perplexity_and_last_steps_that_differ(two_rank_facts):
    behind = {**two_rank_facts, "run": {**two_rank_facts["run"], "step": 5}}
    rows = {row["quantity"]: row["measured"] for row in compare_runs([two_rank_facts, behind])["rows"]}
    assert rows["last step"] == [8, 5]
    assert rows["perplexity"] == [pytest.approx(math.exp(loss)) for loss in rows["held-out loss"]]
    assert "last step" not in [row["quantity"] for row in compare_runs([two_rank_facts] * 2)["rows"]]


def test_report_of_many_runs_prints_one_table_with_a_row_per_run(tmp_path):
    runs = [copy_run(two_rank_run(), tmp_path / str(number)) for number in range(4)]
    output = command_output("report", *runs, "--html", tmp_path / "page.html", width=300)
    rows = [line for line in output.splitlines() if line.startswith("two in ")]
    assert len(rows) == 4
    assert "validation" in output
    assert "First change" not in output
    assert "change first" not in output


def test_report_of_many_runs_says_how_many_columns_do_not_fit(tmp_path):
    runs = [copy_run(two_rank_run(), tmp_path / str(number)) for number in range(4)]
    page = tmp_path / "page.html"
    comparison = command_json("report", *runs)["comparison"]
    wide, narrow = (command_output("report", *runs, "--html", page, width=width) for width in (400, 80))
    assert "left out" not in wide
    heads = set(re.findall(r"\w+", narrow.partition("two in ")[0]))
    assert {"loss", "validation", "perplexity", "tokens", "memory"} <= heads
    assert "goodput" not in heads
    (note,) = [line for line in narrow.splitlines() if "left out" in line]
    assert note.endswith(f"columns left out; see {page} or --json")
    row = next(line for line in narrow.splitlines() if line.startswith("two in "))
    _, *shown_cells = re.split(" {2,}", row.strip())
    assert int(note.split()[0]) == len(formatting.comparison_rows(comparison)) - len(shown_cells)


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


def test_compare_runs_has_losses_of_sources_with_ratios_on_equal_text(two_rank_facts):
    mixture = report_facts(read_run(mixture_run()))
    rows = dict(formatting.comparison_rows(compare_runs([mixture, mixture])))
    loss = mixture["curves"]["sources"]["email"]["held_out_loss"][-1][1]
    assert rows["validation loss of email"] == [(loss, f"{loss:.3f}", ""), (loss, f"{loss:.3f}", "1.00x")]
    assert list(rows).index("validation loss of email") < list(rows).index("whole step")
    rows = dict(formatting.comparison_rows(compare_runs([mixture, two_rank_facts])))
    assert rows["validation loss of email"] == [(loss, f"{loss:.3f}", ""), (None, "-", "")]


def test_report_prints_losses_of_runs_on_one_scale(tmp_path):
    short = copy_run(two_rank_run(), tmp_path)
    lines = (short / "metrics.jsonl").read_text().splitlines(keepends=True)
    (short / "metrics.jsonl").write_text("".join(line for line in lines if line[1:10] < '"step": 5'))
    text = command_output("report", short, two_rank_run(), "--html", tmp_path / "page.html", width=160)
    curves = report_facts(read_run(two_rank_run()))["curves"]["loss"]
    position = text.splitlines().index(f"loss, on one scale from {min(curves):.3f} to {max(curves):.3f}")
    first, second = (line.split()[0] for line in text.splitlines()[position + 1 : position + 3])
    assert len(first) == 4
    assert second.startswith(first)
