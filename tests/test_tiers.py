"""Every test that `make test` leaves out has a test that stands for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.covering import covering_subset
from tests.helpers.tiers import Rule, item_id, read_rules

TESTS = Path(__file__).parent
RULES = read_rules()


def defined_tests(test_id: str) -> list[str]:
    """Return the tests of a file, or those whose names start as in the id."""
    file, _, name = test_id.partition("::")
    lines = (TESTS / file).read_text().splitlines()
    return [line for line in lines if line.startswith(f"def {name.partition('[')[0] or 'test_'}")]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.tests)
def test_rule_names_tests_and_what_stands_for_them(rule: Rule) -> None:
    assert defined_tests(rule.tests)
    if not rule.keeps_some:
        assert defined_tests(rule.stands_for_them)
        left_out = [other.tests for other in RULES if not other.keeps_some]
        assert not rule.stands_for_them.startswith(tuple(left_out))


def test_what_stands_for_left_out_tests_is_collected(request: pytest.FixtureRequest) -> None:
    """The collection includes all tests."""
    if request.config.args not in (["tests"], [str(TESTS)]):
        pytest.skip("only a session of all tests collects them all")
    collected = [item_id(item) for item in request.session.items]
    if not request.config.getoption("all"):
        assert not [item_id(item) for item in request.session.items if item.get_closest_marker("alone")]
    for rule in RULES:
        for start in rule.kept:
            assert any(test_id.startswith(f"{rule.tests}[{start}") for test_id in collected), f"{rule.tests}[{start}"
        if not rule.keeps_some:
            assert any(test_id.startswith(rule.stands_for_them) for test_id in collected), rule.stands_for_them


def test_covering_subset_shows_each_feature_at_least_cost() -> None:
    features = [{"a", "b"}, {"a"}, {"b"}, {"c", "a"}, {"c"}]
    assert covering_subset(features, [1, 1, 1, 1, 1]) == [0, 3]
    assert covering_subset(features, [9, 1, 1, 9, 1]) == [1, 2, 4]
