"""What a check says: rules, which say beforehand what is well and where that is from, and findings under them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeVar

Severity = Literal["OK", "WARN", "FAIL", "SKIP"]
Value = str | int | float
Measured = TypeVar("Measured", str, int, float)


@dataclass(frozen=True)
class DoctorFinding:
    """One thing that was looked at, on one device of one host."""

    id: str
    """The rule's; of a whole check that was skipped, the check's name."""
    severity: Severity
    host: str
    device: str
    """GPU3, mlx5_0, eth0, a path, a PCI address; empty for the whole host."""
    measured: Value
    """Of what is skipped: why."""
    unit: str
    threshold: str
    """What is well, in words: "at least 8"."""
    source: str
    """Where the threshold is from."""
    remedy: str
    command: str
    """Which shows more of it, or mends it."""


@dataclass(frozen=True)
class CheckRule:
    """What is measured, what is well, who says so, and what to do where it is not."""

    id: str
    quantity: str
    severity: Literal["WARN", "FAIL"]
    """Of what breaks it."""
    threshold: str
    unit: str
    source: str
    remedy: str
    command: str
    """`{device}` in remedy and command stands for the device, `{gpu}` for a GPU as nvidia-smi -i takes it."""

    def violation(self, device: str, measured: Value, threshold: str = "", host: str = "") -> DoctorFinding:
        """A finding that something is not as it should be; `threshold` where it depends on the machine or the run."""
        return self._finding(self.severity, device, measured, threshold=threshold, host=host)

    def ok(self, measured: Value) -> DoctorFinding:
        """A finding that all is as it should be."""
        return self._finding("OK", "", measured)

    def skip(self, reason: str) -> DoctorFinding:
        """A finding that this could not be looked at, or has no meaning here."""
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
            self.id,
            severity,
            host,
            device=device,
            measured=measured,
            unit=self.unit,
            threshold=threshold,
            source=self.source,
            remedy=remedy,
            command=command,
        )


class CheckSkipped(Exception):  # noqa: N818
    """A check has no meaning on this machine, or cannot look: the message says why."""


def check_values(
    rule: CheckRule, measured: Mapping[str, Measured], wrong: Callable[[Measured], bool], threshold: str = ""
) -> list[DoctorFinding]:
    """What a rule says of some devices: those that break it, else one finding that all is well, with what was measured
    on them."""
    broken = [rule.violation(device, value, threshold) for device, value in measured.items() if wrong(value)]
    if broken:
        return broken
    values = sorted(set(measured.values()))
    if not values:
        return [rule.skip("nothing says")]
    return [rule.ok(values[0] if len(values) == 1 else f"{values[0]} to {values[-1]}")]


def most_common(values: Iterable[Measured]) -> Measured | None:
    """The value that most have; of several as frequent the first. None of none."""
    counted = Counter(values).most_common(1)
    return counted[0][0] if counted else None
