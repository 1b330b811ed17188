"""Facts of the GPUs during a run, from samples of their sensors: clocks, power, temperature, ECC errors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import fmean, median
from typing import Any

from phalanx.report.run_data import RunData
from phalanx.runs.step_records import RankRecord
from phalanx.runs.throttle_reasons import SLOWDOWNS, THROTTLE_REASONS
from phalanx.spec.formatting import UNKNOWN, format_percent

Facts = dict[str, Any]
MIN_CLOCK_RATIO = 0.9
"""Minimum clock relative to the median of the other ranks: equal GPUs at their power cap differ by a few percent."""
MAX_RANKS_SHOWN = 8
"""Maximum number of ranks in the table: those with the lowest clock."""
ROWS: dict[str, tuple[str, Callable[[float], str]]] = {
    "clock_mhz": ("SM clock, median", "{:,.0f} MHz".format),
    "power_watts": ("power, mean", "{:,.0f} W".format),
    "temperature_celsius": ("temperature, maximum", "{:.0f} °C".format),
    "utilization": ("utilization, mean", format_percent),
    "ecc_corrected": ("corrected ECC errors", "{:,}".format),
    "ecc_uncorrected": ("uncorrected ECC errors", "{:,}".format),
}
"""Rows of the table: name and format."""


def gpu_sample_facts(run_data: RunData) -> Facts | None:
    """Return the facts of the GPUs since the last start, or None without samples.

    `findings` has the ranks whose clocks were throttled or lower than those of the others, and new ECC errors.
    """
    ranks = [*filter(None, (_summarize_rank_samples(record) for _, record in sorted(run_data.ranks.items())))]
    if not ranks:
        return None
    energies = [rank["joules_per_step"] for rank in ranks]
    joules_per_token = None
    if run_data.run is not None and len(ranks) >= run_data.world_size and None not in energies:
        joules_per_token = float(sum(energies) / run_data.run.training.tokens_per_step)
    powers = [rank["power_watts"] for rank in ranks if rank["power_watts"] is not None]
    temperatures = [rank["temperature_celsius"] for rank in ranks if rank["temperature_celsius"] is not None]
    return {
        "power_watts": fmean(powers) if powers else None,
        "temperature_celsius": max(temperatures, default=None),
        "joules_per_token": joules_per_token,
        "findings": [*_find_slow_clocks(ranks), *_find_ecc_errors(ranks)],
        "ranks": ranks,
    }


def _summarize_rank_samples(record: RankRecord) -> Facts | None:
    """Return the values of a rank's GPU over its samples, or None without samples."""
    lines = [line for line in record.steps if "gpu_sample" in line]
    if not lines:
        return None
    samples: list[Mapping[str, Any]] = [line["gpu_sample"] for line in lines]
    clocks = _present_values(samples, "clock_mhz")
    utilizations = _present_values(samples, "utilization")
    reasons = _present_values(samples, "throttle_reasons")
    counts = Counter(reason for active in reasons for reason in active)
    power, joules_per_step = _measure_power(lines)
    return {
        "rank": record.rank,
        "host": record.host,
        "samples": len(samples),
        "clock_mhz": median(clocks) if clocks else None,
        "power_watts": power,
        "joules_per_step": joules_per_step,
        "temperature_celsius": max(_present_values(samples, "temperature_celsius"), default=None),
        "utilization": fmean(utilizations) if utilizations else None,
        "throttled": {name: counts[name] / len(reasons) for name in THROTTLE_REASONS.values() if counts[name]},
        "ecc_corrected": max(_present_values(samples, "ecc_corrected"), default=None),
        "ecc_uncorrected": max(_present_values(samples, "ecc_uncorrected"), default=None),
    }


def _present_values(samples: Sequence[Mapping[str, Any]], name: str) -> list[Any]:
    return [sample[name] for sample in samples if name in sample]


def _measure_power(lines: Sequence[Mapping[str, Any]]) -> tuple[float | None, float | None]:
    """Return a rank's mean power, and its energy per step with evaluations and checkpoints.

    Both are from the energy counter between the first and the last sample. Without it, power is the mean of samples.
    """
    first_line = lines[0]
    last_line = lines[-1]
    powers = _present_values([line["gpu_sample"] for line in lines], "power_watts")
    power = fmean(powers) if powers else None
    begin, end = (
        line["start"] + sum(line["seconds"].values()) for line in (first_line, last_line)
    )  # samples follow steps
    seconds = end - begin
    steps = last_line["step"] - first_line["step"]
    if not steps or seconds <= 0:
        return power, None
    if "energy_joules" in first_line["gpu_sample"] and "energy_joules" in last_line["gpu_sample"]:
        power = (last_line["gpu_sample"]["energy_joules"] - first_line["gpu_sample"]["energy_joules"]) / seconds
    return power, None if power is None else power * seconds / steps


def _find_slow_clocks(ranks: Sequence[Facts]) -> Iterator[Facts]:
    """Yield the ranks with a lower clock than the others, or throttled by a fault in at least one sample."""
    clocks = {rank["rank"]: rank["clock_mhz"] for rank in ranks if rank["clock_mhz"] is not None}
    for rank in ranks:
        number = rank["rank"]
        others = [clock for other, clock in clocks.items() if other != number]
        is_low = number in clocks and bool(others) and clocks[number] < MIN_CLOCK_RATIO * median(others)
        if is_low or any(reason in rank["throttled"] for reason in SLOWDOWNS):
            clock_text = f"SM clock of {clocks[number]:,.0f} MHz" if number in clocks else "unknown SM clock"
            other_text = f" (median of the other ranks: {median(others):,.0f} MHz)" if is_low else ""
            reasons = ", ".join(
                f"{name} in {format_percent(part)} of samples" for name, part in rank["throttled"].items()
            )
            cause = f"throttled by {reasons}" if reasons else "without a reported reason"
            yield _build_finding(rank, f"{clock_text}{other_text}, {cause}")


def _find_ecc_errors(ranks: Sequence[Facts]) -> Iterator[Facts]:
    """Yield the ranks with ECC errors since the start."""
    for rank in ranks:
        counts = {kind: rank[f"ecc_{kind}"] for kind in ("uncorrected", "corrected")}
        texts = [f"{count:,} {kind}" for kind, count in counts.items() if count]
        if texts:
            fix = ": drain the node, and reset or replace the GPU" if counts["uncorrected"] else ""
            yield _build_finding(rank, f"{' and '.join(texts)} ECC errors since the start{fix}")


def _build_finding(rank: Facts, evidence: str) -> Facts:
    return {"rank": rank["rank"], "host": rank["host"], "evidence": evidence}


def describe_slow_clock(run_data: RunData, rank: int) -> str:
    """Return why a rank's GPU is slow, as text after a semicolon; "" if its clock is like that of the others."""
    facts = gpu_sample_facts(run_data)
    slow = _find_slow_clocks(facts["ranks"]) if facts is not None else ()
    return next((f"; its GPU: {finding['evidence']}" for finding in slow if finding["rank"] == rank), "")


def summary_lines(facts: Mapping[str, Any]) -> list[str]:
    """Return power, temperature and energy in one line, and a line for each finding."""
    numbers = []
    if facts["power_watts"] is not None:
        numbers.append(f"mean power {facts['power_watts']:,.0f} W per GPU")
    if facts["temperature_celsius"] is not None:
        numbers.append(f"maximum temperature {facts['temperature_celsius']:.0f} °C")
    if facts["joules_per_token"] is not None:
        numbers.append(f"{facts['joules_per_token']:.3g} J per token")
    findings = [f"rank {finding['rank']} on {finding['host']}: {finding['evidence']}" for finding in facts["findings"]]
    return [*([", ".join(numbers)] if numbers else []), *findings]


def table_title(facts: Mapping[str, Any]) -> str:
    """Return the title of the table."""
    count = len(facts["ranks"])
    selection_note = f", the {MAX_RANKS_SHOWN} of {count} with the lowest clock" if count > MAX_RANKS_SHOWN else ""
    return f"GPUs during the run{selection_note}"


def table_rows(facts: Mapping[str, Any]) -> list[list[str]]:
    """Return the rows of the table with a column per rank; the first row is the header."""
    slowest = sorted(facts["ranks"], key=lambda rank: rank["clock_mhz"] or 0)[:MAX_RANKS_SHOWN]
    ranks = sorted(slowest, key=lambda rank: int(rank["rank"]))
    rows = [["", *(f"rank {rank['rank']}" for rank in ranks)]]
    for name, (title, show) in ROWS.items():
        cells = [UNKNOWN if rank[name] is None else show(rank[name]) for rank in ranks]
        if cells.count(UNKNOWN) < len(cells):
            rows.append([title, *cells])
    for reason in THROTTLE_REASONS.values():
        shares = [rank["throttled"].get(reason, 0.0) for rank in ranks]
        if any(shares):
            rows.append([f"throttled: {reason}", *map(format_percent, shares)])
    return rows
