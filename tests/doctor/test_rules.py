from typing import Any

import pytest
import tomli_w

from phalanx.doctor.rules import SECTIONS, read_rules
from phalanx.doctor.run_checks import CHECKS

ROW = {
    "id": "disk.full",
    "severity": "WARN",
    "quantity": "used space",
    "violated_if": ">=",
    "limit": 80,
    "threshold": "less than {limit}",
    "unit": "%",
    "source": "AZNHC",
    "remedy": "remove checkpoints",
    "command": "df -h",
}


def rules_text(*rows: dict[str, Any]) -> str:
    return tomli_w.dumps({"disk": {"title": "Disk", "rules": list(rows)}})


def test_read_rules_fills_limits_into_texts() -> None:
    (rule,) = read_rules(rules_text(ROW))["disk"].rules
    assert rule.threshold == "less than 80"
    assert [(found.severity, found.measured) for found in rule.check({"/a": 80, "/b": 79})] == [("WARN", 80)]
    assert [(found.severity, found.measured) for found in rule.check({"/a": 70, "/b": 79})] == [("OK", "70 to 79")]
    assert [found.severity for found in rule.check({})] == ["SKIP"]


def test_rule_check_uses_the_limit_of_each_device() -> None:
    (rule,) = read_rules(rules_text({**ROW, "violated_if": "<", "share": 0.5, "limit_text": "at least {limit:g}"}))[
        "disk"
    ].rules
    (found,) = rule.check({"a": 4.0, "b": 4.0, "without limit": 0.0}, limit={"a": 10.0, "b": 8.0})
    assert (found.device, found.measured, found.threshold) == ("a", 4, "at least 10")


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"treshold": "none"}, "disk.full: treshold is not a key of a rule"),
        ({"source": ""}, "disk.full: source is missing"),
        ({"remedy": ""}, "disk.full: remedy is missing"),
        ({"severity": "OK"}, "severity = 'OK' is not a severity"),
        ({"violated_if": "=<"}, "violated_if = '=<' is not a comparison"),
        ({"threshold": "at most {maximum}"}, "a text names 'maximum', which the row does not define"),
        ({"limit_text": "{limit:q}"}, "a text names"),
    ],
)
def test_read_rules_names_the_row_and_the_wrong_key(change: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=r"rules\.toml, disk\.full") as error:
        read_rules(rules_text({**ROW, **change}))
    assert problem in str(error.value)


def test_read_rules_rejects_repeated_ids_and_sections_without_title() -> None:
    with pytest.raises(ValueError, match=r"id = 'disk.full' occurs twice"):
        read_rules(rules_text(ROW, ROW))
    with pytest.raises(ValueError, match="a rule without id: id is missing"):
        read_rules(rules_text({key: value for key, value in ROW.items() if key != "id"}))
    with pytest.raises(ValueError, match="Give it a title and rules"):
        read_rules("[disk]\nrules = []\n")


def test_rule_check_without_a_comparison_raises() -> None:
    """A row that lacks violated_if must not pass for OK."""
    row = {key: value for key, value in ROW.items() if key != "violated_if"}
    (rule,) = read_rules(rules_text(row))["disk"].rules
    with pytest.raises(ValueError, match="has no violated_if"):
        rule.check(99)


def test_every_check_has_a_section_of_rules() -> None:
    assert CHECKS.keys() <= SECTIONS.keys()
