"""Losses on different held-out texts are neither joined nor compared."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from phalanx.report.compare_runs import compare_runs, report_data
from phalanx.report.facts import report_facts
from phalanx.report.formatting import format_comparison
from phalanx.report.html import figures
from phalanx.report.html.page import main
from phalanx.report.run_data import read_run
from tests.helpers.cli_runner import command_output
from tests.helpers.trained_runs import copy_run, two_rank_run

Facts = dict[str, Any]


def evaluated_run(folder: Path, *evaluations: Facts) -> Path:
    """Return a copy of a run's directory with other evaluations."""
    directory = copy_run(two_rank_run(), folder)
    file = directory / "metrics.jsonl"
    steps = [line for line in file.read_text().splitlines() if "held_out_loss" not in line]
    file.write_text("\n".join([*steps, *map(json.dumps, evaluations)]) + "\n")
    return directory


def evaluation(step: int, loss: float, tokens: int, text: str | None = None) -> Facts:
    """Return a record of an evaluation. Without `text`, it is that of a
    version which recorded only the number of tokens."""
    held_out_set = {} if text is None else {"held_out_set": text}
    return {"step": step, "held_out_loss": loss, "held_out_tokens": tokens, **held_out_set}


CHANGED = (
    evaluation(2, 5.0, 1024, "a"),
    evaluation(4, 4.0, 1024, "a"),
    evaluation(6, 4.5, 4096, "b"),
    evaluation(8, 4.4, 4096, "b"),
)


def test_held_out_losses_are_one_curve_for_each_text(tmp_path: Path) -> None:
    facts = report_facts(read_run(evaluated_run(tmp_path, *CHANGED)))
    assert facts["curves"]["held_out"] == [
        {"held_out_tokens": 1024, "held_out_set": "a", "loss": [[2, 5.0], [4, 4.0]]},
        {"held_out_tokens": 4096, "held_out_set": "b", "loss": [[6, 4.5], [8, 4.4]]},
    ]
    assert facts["problems"] == [
        "the held-out text changed once, the last time after step 4 (1,024 tokens before, 4,096 tokens since): "
        "losses before and after are not comparable"
    ]


def test_problem_of_changed_held_out_text_leaves_out_equal_numbers_of_tokens(tmp_path: Path) -> None:
    directory = evaluated_run(tmp_path, evaluation(2, 5.0, 1024, "a"), evaluation(4, 4.0, 1024, "b"))
    assert report_facts(read_run(directory))["problems"] == [
        "the held-out text changed once, the last time after step 2: losses before and after are not comparable"
    ]


@pytest.mark.parametrize(
    ("evaluations", "curves"),
    [
        ([(2, 1024, "a"), (4, 1024, "b")], [[2], [4]]),
        ([(2, 1024, None), (4, 1024, "a"), (6, 1024, "a")], [[2, 4, 6]]),
        ([(2, 1024, None), (4, 1024, "a"), (6, 1024, "b")], [[2, 4], [6]]),
        ([(2, 1024, None), (4, 2048, None)], [[2], [4]]),
        ([(2, 1024, "a"), (4, 4096, "b"), (6, 1024, "a")], [[4], [2, 6]]),
    ],
    ids=["equal length", "earlier version", "earlier version and other text", "earlier versions", "back to the first"],
)
def test_curves_follow_text_and_not_only_its_length(evaluations: Any, curves: list[list[int]], tmp_path: Path) -> None:
    records = [evaluation(step, 4.0, tokens, text) for step, tokens, text in evaluations]
    facts = report_facts(read_run(evaluated_run(tmp_path, *records)))
    assert [[step for step, _ in curve["loss"]] for curve in facts["curves"]["held_out"]] == curves
    assert len(facts["problems"]) == (len(curves) > 1)


def test_page_and_text_mark_change_of_held_out_text(tmp_path: Path) -> None:
    directory = evaluated_run(tmp_path, *CHANGED)
    facts = report_facts(read_run(directory))
    figure = figures.curves([facts], ["one"])
    assert figure is not None
    first, second = (trace for trace in figure["data"] if "held-out" in trace.get("name", ""))
    assert (first["x"], second["x"]) == ([2, 4], [6, 8])
    assert (first["name"], second["name"]) == ("held-out text 1 (1,024 tokens)", "held-out text 2 (4,096 tokens)")
    assert first["marker"]["symbol"] != second["marker"]["symbol"]
    assert first["marker"]["color"] != second["marker"]["color"]
    page = main(report_data([facts]))
    assert "<dt>validation loss</dt><dd>4.400<small>perplexity 81.5 over 4,096 tokens</small>" in page
    assert "the held-out text changed once" in page
    assert "the held-out text changed once" in command_output("report", directory, width=400)


def test_one_held_out_text_needs_no_number(tmp_path: Path) -> None:
    facts = report_facts(read_run(evaluated_run(tmp_path, *CHANGED[:2])))
    figure = figures.curves([facts], ["one"])
    assert figure is not None
    assert [trace["name"] for trace in figure["data"] if "held-out" in trace.get("name", "")] == [
        "held-out text (validation)"
    ]
    assert "<dd>4.000<small>perplexity 54.6</small>" in main(report_data([facts]))
    assert facts["problems"] == []


def test_runs_with_other_held_out_text_are_not_compared(tmp_path: Path) -> None:
    runs = [
        report_facts(read_run(evaluated_run(tmp_path / str(number), *evaluations)))
        for number, evaluations in enumerate([CHANGED[:2], CHANGED, CHANGED[2:]])
    ]
    comparison = compare_runs(runs)
    (row,) = [row for row in comparison["rows"] if row["quantity"] == "held-out loss"]
    assert row["measured"] == [4.0, 4.4, 4.4]
    assert row["ratio"] == [1.0, None, None]
    (sentence,) = [line for line in format_comparison(comparison) if "held-out" in line]
    assert sentence == (
        "The runs were last evaluated on different held-out text, so that validation losses are not comparable: "
        "1,024 tokens and 4,096 tokens."
    )
    (row,) = [row for row in compare_runs(runs[1:])["rows"] if row["quantity"] == "held-out loss"]
    assert row["ratio"] == [1.0, 1.0]
