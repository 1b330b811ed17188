"""Numbers of the report as text."""

from __future__ import annotations

from typing import get_args

import pytest

from phalanx.report import formatting
from phalanx.report.formatting import PROBLEM_TEXTS, format_problem
from phalanx.runs.problems import Problem, ProblemKind


@pytest.mark.parametrize(
    ("value", "unit", "expected"),
    [
        (None, "s", "-"),
        (0, "s", "0 s"),
        (0.0000123, "s", "12.3 µs"),
        (0.9999, "s", "1.00 s"),
        (61, "s", "61.0 s"),
        (125.4, "s", "2:05"),
        (3723, "s", "1:02:03"),
        (0, "B", "0 B"),
        (999, "B", "999 B"),
        (15e6, "B", "15.0 MB"),
        (0.0713, "", "7.1 %"),
        (1.0, "", "100 %"),
        (12345.6, "tokens/s", "12,346"),
        (2.41, "loss", "2.410"),
    ],
)
def test_format_number_chooses_digits_by_unit(value, unit, expected):
    assert formatting.format_number(value, unit) == expected


PROBLEMS = [
    (Problem("unreadable lines", {"file": "metrics.jsonl", "lines": 2}), "metrics.jsonl: 2 lines cannot be read"),
    (
        Problem("missing ranks", {"count": 10, "world_size": 16, "ranks": list(range(10))}),
        "no record of 10 of 16 ranks: 0, 1, 2, 3, 4, 5, 6, 7, ...",
    ),
    (Problem("unfinished", {"step": 4, "steps": "8", "is_active": False}), "step 4 of 8: the run has stopped"),
    (Problem("rolled back", {"times": 1, "last": "noon"}), "the run rolled back once, the last time at noon"),
    (Problem("restarted", {"times": 3, "last": "noon"}), "the run failed 3 times and resumed, the last time at noon"),
    (Problem("no prediction", {"error": "a: b\n  fix: c"}), "the step time cannot be predicted: a: b"),
]


@pytest.mark.parametrize(("problem", "text"), PROBLEMS, ids=[problem.kind for problem, _ in PROBLEMS])
def test_format_problem_fills_values_into_text_of_kind(problem: Problem, text: str) -> None:
    assert format_problem(problem) == text


def test_every_kind_of_problem_has_a_text() -> None:
    assert set(PROBLEM_TEXTS) == set(get_args(ProblemKind))
