"""The rules of `phalanx doctor`: rows of rules.toml, and the evaluation of measured values by them."""

from __future__ import annotations

import operator
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from importlib.resources import files
from typing import Any, Literal

from phalanx.doctor.finding import DoctorFinding, Measured, Severity, Value

COMPARISONS: dict[str, Callable[[Any, Any], bool]] = {
    "<": operator.lt,
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
    "in": lambda value, limit: value in limit,
    "not in": lambda value, limit: value not in limit,
    "matches": lambda value, pattern: bool(re.search(pattern, value)),
    "does not match": lambda value, pattern: not re.search(pattern, value),
}
"""How a value that violates a rule compares with the limit."""


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A measured quantity, its expected value and the source of it, and the remedy for a violation.

    A field is a key of a row; rules.toml explains the keys.
    """

    id: str
    severity: Literal["WARN", "FAIL"]
    quantity: str
    inputs: tuple[str, ...] = ()
    violated_if: str = ""
    limit: Any = None
    share: float = 1.0
    parameters: dict[str, float] = field(default_factory=dict)
    threshold: str
    limit_text: str = ""
    unit: str = ""
    source: str
    remedy: str
    command: str

    def check(self, measured: Measured | Mapping[str, Measured], limit: Any = None) -> list[DoctorFinding]:
        """Return the violations, or one OK finding with the range of the measured values.

        `measured` is the value of each device, or that of the whole host. `limit` replaces the rule's own if it depends
        on the machine or the run; a device without one violates nothing.
        """
        values = measured if isinstance(measured, Mapping) else {"": measured}
        limits = limit if isinstance(limit, Mapping) else dict.fromkeys(values, self.limit if limit is None else limit)
        if not self.violated_if:
            raise ValueError(f"{self.id} of rules.toml has no violated_if. Add it, or decide in the check.")

        def is_violated(value: Measured, limit: Any) -> bool:
            return COMPARISONS[self.violated_if](value, limit if self.share == 1 else self.share * limit)

        violations = [
            self.violation(device, value, self.limit_text.format(limit=limits[device]))
            for device, value in values.items()
            if device in limits and is_violated(value, limits[device])
        ]
        return violations or [self.ok_range(values.values())]

    def ok_range(self, values: Iterable[Value]) -> DoctorFinding:
        """Return the OK finding with the smallest and the largest value of the devices, or SKIP without devices."""
        distinct = sorted(set(values))
        if not distinct:
            return self.skip("no device reports a value")
        return self.ok(distinct[0] if len(distinct) == 1 else f"{distinct[0]} to {distinct[-1]}")

    def report(self, violations: Iterable[tuple[str, Value]], ok: Value) -> list[DoctorFinding]:
        """Return a finding per violation that the caller found, or one OK finding.

        `ok` is the measured value of the OK finding.
        """
        return [self.violation(device, value) for device, value in violations] or [self.ok(ok)]

    def violation(self, device: str, measured: Value, threshold: str = "", host: str = "") -> DoctorFinding:
        """Return the finding of a violation."""
        return self._make_finding(self.severity, measured, device=device, threshold=threshold, host=host)

    def ok(self, measured: Value) -> DoctorFinding:
        """Return the finding of an expected value."""
        return self._make_finding("OK", measured)

    def skip(self, reason: str) -> DoctorFinding:
        """Return the finding of a rule that cannot be checked or does not apply here."""
        return self._make_finding("SKIP", reason)

    def _make_finding(
        self, severity: Severity, measured: Value, device: str = "", threshold: str = "", host: str = ""
    ) -> DoctorFinding:
        is_problem = severity in ("WARN", "FAIL")
        remedy, command = (
            text.replace("{device}", device).replace("{gpu}", device.removeprefix("GPU")) if is_problem else ""
            for text in (self.remedy, self.command)
        )
        if isinstance(measured, float) and measured.is_integer():
            measured = int(measured)
        return DoctorFinding(
            id=self.id,
            severity=severity,
            host=host,
            device=device,
            measured=measured,
            unit=self.unit,
            threshold=threshold or self.threshold,
            source=self.source,
            remedy=remedy,
            command=command,
        )


@dataclass(frozen=True)
class RuleSection:
    """The rules of one check."""

    title: str
    rules: tuple[Rule, ...]


FIELDS = {rule_field.name for rule_field in fields(Rule)}
REQUIRED_FIELDS = {
    rule_field.name
    for rule_field in fields(Rule)
    if rule_field.default is MISSING and rule_field.default_factory is MISSING
}


def read_rules(text: str) -> dict[str, RuleSection]:
    """Return the sections of a rules file by the name of their check.

    Raises ValueError if a row has an unknown key, lacks one, or contradicts another.
    """
    sections = {}
    rule_ids: set[str] = set()
    for name, table in tomllib.loads(text).items():
        if table.keys() != {"title", "rules"}:
            raise ValueError(f"[{name}] of rules.toml has the keys {', '.join(table)}. Give it a title and rules.")
        rules = tuple(_read_rule(row) for row in table["rules"])
        for rule in rules:
            if rule.id in rule_ids:
                raise ValueError(f"rules.toml: id = '{rule.id}' occurs twice. Give each rule its own id.")
            rule_ids.add(rule.id)
        sections[name] = RuleSection(table["title"], rules)
    return sections


def _read_rule(row: dict[str, Any]) -> Rule:
    location = f"rules.toml, {row.get('id', 'a rule without id')}"
    if unknown := sorted(row.keys() - FIELDS):
        raise ValueError(f"{location}: {', '.join(unknown)} is not a key of a rule. Use {', '.join(sorted(FIELDS))}.")
    if missing := sorted(key for key in REQUIRED_FIELDS if not row.get(key)):
        raise ValueError(f"{location}: {', '.join(missing)} is missing. Add the key to the row.")
    if row["severity"] not in ("WARN", "FAIL"):
        raise ValueError(f"{location}: severity = {row['severity']!r} is not a severity. Use WARN or FAIL.")
    if row.get("violated_if", "<") not in COMPARISONS:
        fix = f"Use one of {', '.join(COMPARISONS)}."
        raise ValueError(f"{location}: violated_if = {row['violated_if']!r} is not a comparison. {fix}")
    inputs = tuple(row.get("inputs", ()))
    values = {"inputs": ", ".join(inputs), **row.get("parameters", {})}
    if "limit" in row:
        values["limit"] = ", ".join(map(str, row["limit"])) if isinstance(row["limit"], list) else row["limit"]
    try:
        texts = {key: row[key].format(**values) for key in ("quantity", "threshold")}
        row.get("limit_text", "").format(limit=row.get("limit", 1))
    except (KeyError, IndexError, ValueError) as error:
        raise ValueError(f"{location}: a text names {error}, which the row does not define. Define it.") from None
    return Rule(**{**row, **texts, "inputs": inputs})


SECTIONS = read_rules(files("phalanx.doctor").joinpath("rules.toml").read_text())
RULES = {rule.id: rule for section in SECTIONS.values() for rule in section.rules}


def skip_rules(reason: str, *ids: str) -> list[DoctorFinding]:
    """Return the findings of rules that cannot be checked or do not apply here, for one reason."""
    return [RULES[rule_id].skip(reason) for rule_id in ids]
