"""Rules, which define expected values and their sources, and the findings of checks under these rules."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeVar

Severity = Literal["OK", "WARN", "FAIL", "SKIP"]
Value = str | int | float
Measured = TypeVar("Measured", str, int, float)


@dataclass(frozen=True, kw_only=True)
class DoctorFinding:
    """The result of one rule on one device of one host."""

    id: str
    """The id of the rule, or the name of a check that was skipped as a whole."""
    severity: Severity
    host: str
    device: str
    """GPU3, mlx5_0, eth0, a path, a PCI address; empty for the whole host."""
    measured: Value
    """The measured value; for a skipped rule, the reason."""
    unit: str
    threshold: str
    """The expected value as text, such as "at least 8"."""
    source: str
    """Source of the threshold."""
    remedy: str
    command: str
    """A command that shows details, or fixes the problem."""


@dataclass(frozen=True, kw_only=True)
class CheckRule:
    """A measured quantity, its expected value and the source of it, and the remedy for a violation."""

    id: str
    quantity: str
    severity: Literal["WARN", "FAIL"]
    """Severity of a violation."""
    threshold: str
    unit: str
    source: str
    remedy: str
    command: str
    """A shell command.

    In remedy and command, `{device}` is the device, and `{gpu}` a GPU as nvidia-smi -i accepts it.
    """

    def violation(self, device: str, measured: Value, threshold: str = "", host: str = "") -> DoctorFinding:
        """Return the finding of a violation.

        Args:
            device: The device; empty for the whole host.
            measured: The measured value.
            threshold: The expected value, if it depends on the machine or the run.
            host: The host, if it is not the checked one.
        """
        return self._finding(self.severity, device, measured, threshold=threshold, host=host)

    def ok(self, measured: Value) -> DoctorFinding:
        """Return the finding of an expected value."""
        return self._finding("OK", "", measured)

    def skip(self, reason: str) -> DoctorFinding:
        """Return the finding of a rule that cannot be checked or does not apply here."""
        return self._finding("SKIP", "", reason)

    def _finding(
        self, severity: Severity, device: str, measured: Value, threshold: str = "", host: str = ""
    ) -> DoctorFinding:
        gpu = device.removeprefix("GPU")
        templates = (self.remedy, self.command)
        remedy, command = (text.replace("{device}", device).replace("{gpu}", gpu) for text in templates)
        threshold = threshold or self.threshold
        if isinstance(measured, float) and measured.is_integer():
            measured = int(measured)
        if severity in ("OK", "SKIP"):
            remedy = command = ""
        return DoctorFinding(
            id=self.id,
            severity=severity,
            host=host,
            device=device,
            measured=measured,
            unit=self.unit,
            threshold=threshold,
            source=self.source,
            remedy=remedy,
            command=command,
        )


class CheckSkipped(Exception):  # noqa: N818
    """A check that does not apply to this machine, or cannot run; the message is the reason."""


def check_values(
    rule: CheckRule, measured: Mapping[str, Measured], wrong: Callable[[Measured], bool], threshold: str = ""
) -> list[DoctorFinding]:
    """Return the violations of a rule, or one OK finding with the range of the measured values.

    Args:
        rule: The rule.
        measured: The measured value of each device.
        wrong: Whether a value violates the rule.
        threshold: The expected value, if it depends on the machine or the run.
    """
    broken = [rule.violation(device, value, threshold) for device, value in measured.items() if wrong(value)]
    if broken:
        return broken
    values = sorted(set(measured.values()))
    if not values:
        return [rule.skip("no device reports a value")]
    return [rule.ok(values[0] if len(values) == 1 else f"{values[0]} to {values[-1]}")]


def most_common(values: Iterable[Measured]) -> Measured | None:
    """Return the most frequent value, the first one in a tie, or None without values."""
    counted = Counter(values).most_common(1)
    return counted[0][0] if counted else None
