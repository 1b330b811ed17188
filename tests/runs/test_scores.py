"""Scores of tasks in a run directory, and their table in reports."""

from __future__ import annotations

from pathlib import Path

from phalanx.report.facts import group_scores
from phalanx.report.formatting import score_rows
from phalanx.runs.scores import SCORES_FILE, add_scores, read_scores

RESULTS = {
    "gsm8k": {
        "alias": "gsm8k",
        "exact_match,strict-match": 0.1,
        "exact_match,flexible-extract": 0.6,
        "exact_match_stderr,strict-match": "N/A",
        "sample_len": 100,
    },
    "words": {"acc,none": 0.5, "acc_stderr,none": 0.01, "perplexity,none": float("nan")},
}


def test_scores_keep_filters_shots_and_limits_apart(tmp_path: Path) -> None:
    add_scores(tmp_path, 10, RESULTS)
    add_scores(tmp_path, 20, {"words": {"acc,none": 0.75}})
    add_scores(tmp_path, 20, {"words": {"acc,none": 0.0}}, num_fewshot=5, limit=2)
    header, rows = score_rows(group_scores(read_scores(tmp_path)))
    assert header == ["task", "metric", "step 10", "step 20"]
    assert rows == [
        ["gsm8k", "exact_match (strict-match)", "0.1", "-"],
        ["gsm8k", "exact_match (flexible-extract)", "0.6", "-"],
        ["words", "acc", "0.5", "0.75"],
        ["words, 5 examples, 2 questions", "acc", "-", "0"],
    ]


def test_damaged_lines_are_left_out(tmp_path: Path) -> None:
    add_scores(tmp_path, 10, RESULTS)
    scores = read_scores(tmp_path)
    with open(tmp_path / SCORES_FILE, "a") as file:
        file.write('{"task": "other"}\n[1]\n{"step": 1, "tas')
    assert read_scores(tmp_path) == scores
    assert read_scores(tmp_path / "none") == []
