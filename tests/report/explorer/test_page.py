"""The explorer's page without a browser: it contains all layouts, needs no other file, and escapes its texts."""

from __future__ import annotations

import json
import re

import pytest

from phalanx.plan.search.explain import PART_DESCRIPTIONS
from phalanx.report.explorer.exploration import explore
from phalanx.report.explorer.page import CHOICE_COLUMNS, PageContext, details_of, packed_details, page, page_facts
from phalanx.spec.resolved_run import ResolvedRun
from tests.helpers.explorations import small_exploration, unpack_columns, unpack_json
from tests.helpers.planned_runs import make_run
from tests.helpers.report_page import parse_embedded_json

CONTEXT = PageContext(
    {
        "compare": "phalanx plan compare run.toml",
        "explore": "phalanx plan explore run.toml",
        "train": "phalanx train run.toml",
    },
    ["assumed: nothing"],
)


@pytest.fixture(scope="module")
def facts():
    return json.loads(json.dumps(page_facts(small_exploration(), CONTEXT)))


def test_progress_covers_every_part_of_the_work():
    tasks: dict[str, list[tuple[int, int]]] = {}

    def report(task: str, done: int, total: int) -> None:
        tasks.setdefault(task, []).append((done, total))

    run = make_run(sequences=16)
    exploration = explore(ResolvedRun(run, 8), 5, report=report)
    packed_details(exploration, report)
    assert list(tasks) == [
        "evaluating layouts",
        "counting memory of the fastest",
        "finding the Pareto front",
        "describing layouts",
    ]
    for reports in tasks.values():
        assert reports == sorted(reports)
        assert len(reports) > 1


def test_page_facts_have_every_layout(facts):
    exploration, (choices, columns) = small_exploration(), unpack_columns(facts["columns"])
    for name in CHOICE_COLUMNS:
        assert choices[name] == [getattr(layout, name) for layout in exploration.layouts]
    for part in PART_DESCRIPTIONS:
        expected = exploration.column(getattr(exploration.predictions.time, part)).tolist()
        assert columns[part] == pytest.approx(expected, rel=2.0**-16, abs=1e-30)


def test_page_has_one_memory_of_a_layout(facts):
    """The axis, the list and the details have the same value: the exact
    count if there is one, otherwise the estimate."""
    exploration, (_, columns) = small_exploration(), unpack_columns(facts["columns"])
    memory = exploration.column(exploration.predictions.memory.allocated_bytes).tolist()
    expected = [
        exploration.counted[row].memory_bytes if row in exploration.counted else memory[row]
        for row in range(len(memory))
    ]
    assert columns["memory"] == pytest.approx(expected, rel=2.0**-16)
    first = next(iter(exploration.ranked))
    assert (
        facts["counted"][str(first)]["memory_bytes"]
        == details_of(exploration, first)["counted_bytes"]
        == expected[first]
    )


def test_page_facts_have_counted_figures_of_choices_and_front(facts):
    exploration = small_exploration()
    assert facts["ranked"] == list(exploration.ranked)
    assert facts["front"] == list(exploration.front)
    for index, option in {**exploration.front, **exploration.ranked}.items():
        assert facts["counted"][str(index)]["memory_bytes"] == option.memory_bytes


def test_packed_details_are_those_of_choices_and_front():
    exploration = small_exploration()
    packed = packed_details(exploration)
    assert set(packed) == {*exploration.ranked, *exploration.front}
    index = next(iter(packed))
    assert unpack_json(packed[index]) == json.loads(json.dumps(details_of(exploration, index)))


def test_page_needs_no_network(facts):
    text = page(facts | {"details": {}, "web": False})
    assert parse_embedded_json(text, "facts") == facts | {"details": {}, "web": False}
    assert not re.findall(r"https?://", text)
    assert not re.findall(r"<(?:script|img|iframe)\b[^>]*\bsrc=|<link\b[^>]*\bhref=\"(?!data:)|@import|url\(", text)


def test_page_escapes_names(facts):
    evil = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"
    setup = facts["setup"] | {"title": evil, "notes": [evil]}
    text = page(facts | {"setup": setup, "details": {}, "web": False})
    assert "<script>alert" not in text
    assert "<img" not in re.sub(r"<script\b.*?</script>", "", text, flags=re.DOTALL)


def test_page_offers_colors_of_choices_that_differ_only(facts):
    text = page(facts | {"details": {}, "web": False})
    assert '<option value="tp">' in text
    assert '<option value="ep">' not in text  # the model has no experts
