"""The rules of `phalanx doctor` are valid rows, and are evaluated as the rows define."""

from __future__ import annotations

import pytest

from phalanx.doctor import run_checks
from phalanx.doctor.rules import SECTIONS, read_rules

ROW = {
    "id": "gpu.busy",
    "severity": "WARN",
    "quantity": "memory in use",
    "violated_if": ">=",
    "limit": 2048,
    "threshold": "less than {limit}",
    "limit_text": "less than {limit:g}",
    "source": "Primus",
    "remedy": "stop the processes on {device}",
    "command": "nvidia-smi -i {gpu}",
}


def to_section(*rows: dict[str, object]) -> str:
    texts = ("".join(f"{key} = {value!r}\n" for key, value in row.items()) for row in rows)
    return "[gpus]\ntitle = 'GPUs'\n" + "".join(f"[[gpus.rules]]\n{text}" for text in texts)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sorce": "Primus"}, "sorce is not a key of a rule"),
        ({"source": ""}, "source is missing"),
        ({"severity": "BAD"}, "severity = 'BAD' is not a severity"),
        ({"violated_if": "=>"}, "violated_if = '=>' is not a comparison"),
        ({"threshold": "less than {limitt}"}, "a text names 'limitt', which the row does not define"),
        ({"limit_text": "less than {limt}"}, "a text names 'limt', which the row does not define"),
    ],
)
def test_read_rules_rejects_invalid_row(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=rf"rules\.toml, gpu\.busy: {message}"):
        read_rules(to_section(ROW | change))


def test_read_rules_rejects_missing_keys_unknown_sections_and_repeated_ids() -> None:
    without_source = {key: value for key, value in ROW.items() if key != "source"}
    with pytest.raises(ValueError, match="source is missing"):
        read_rules(to_section(without_source))
    with pytest.raises(ValueError, match=r"\[gpus\] of rules.toml has the keys rules"):
        read_rules(to_section(ROW).replace("title = 'GPUs'", ""))
    with pytest.raises(ValueError, match="occurs twice"):
        read_rules(to_section(ROW, ROW))


def test_rule_check_compares_each_device_with_its_limit() -> None:
    rule = read_rules(to_section(ROW))["gpus"].rules[0]
    (busy,) = rule.check({"GPU0": 4, "GPU3": 2048})
    assert (busy.device, busy.measured, busy.severity, busy.threshold) == ("GPU3", 2048, "WARN", "less than 2048")
    assert (busy.remedy, busy.command) == ("stop the processes on GPU3", "nvidia-smi -i 3")
    (busy,) = rule.check({"GPU0": 4, "GPU3": 2048}, limit={"GPU0": 1.5})
    assert (busy.device, busy.threshold) == ("GPU0", "less than 1.5")
    assert [(finding.severity, finding.measured) for finding in rule.check({"GPU0": 4, "GPU3": 9})] == [
        ("OK", "4 to 9")
    ]
    assert [(finding.severity, finding.measured) for finding in rule.check({})] == [
        ("SKIP", "no device reports a value")
    ]


def test_rule_check_raises_when_row_has_no_comparison() -> None:
    """Without the error, a row without `violated_if` would accept any value."""
    row = {key: value for key, value in ROW.items() if key != "violated_if"}
    with pytest.raises(ValueError, match=r"gpu\.busy of rules\.toml has no violated_if"):
        read_rules(to_section(row))["gpus"].rules[0].check(4096)


def test_rules_have_a_section_per_check() -> None:
    assert [*SECTIONS] == [*run_checks.CHECKS, "doctor", "nodes", "between", "counters"]
