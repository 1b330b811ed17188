"""Evaluation of measured bandwidths between nodes: of a run's collectives, and of each pair of nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median_high

from phalanx.doctor.finding import DoctorFinding
from phalanx.doctor.rules import RULES
from phalanx.spec.formatting import GB, GIB, MIB

BANDWIDTH = RULES["between.busbw"]
LARGE_BYTES = int(BANDWIDTH.parameters["min_mib"]) * MIB
HUGE_BYTES = int(BANDWIDTH.parameters["huge_gib"]) * GIB


@dataclass(frozen=True, kw_only=True)
class CollectiveResult:
    """The measurement of one collective at one size."""

    name: str
    """Operation and group, such as "all_reduce among data"."""
    ranks: int
    size_bytes: int
    bus_bytes_per_second: float
    link_bytes_per_second: float | None
    """Bus bandwidth that a rank's links allow, or None if it is unknown."""
    wrong: int


def check_collectives(results: Sequence[CollectiveResult]) -> list[DoctorFinding]:
    """Check each collective at its largest size."""
    wrong = RULES["between.wrong"].report(((result.name, result.wrong) for result in results if result.wrong), ok=0)
    largest = {result.name: result for result in sorted(results, key=lambda result: result.size_bytes)}
    large = [result for result in largest.values() if result.size_bytes >= LARGE_BYTES and result.link_bytes_per_second]
    if not large:
        return [*wrong, BANDWIDTH.skip("no collective of that size uses links of known speed")]
    slow = []
    for result in large:
        share = BANDWIDTH.parameters["huge_limit"] if result.size_bytes >= HUGE_BYTES else BANDWIDTH.limit
        required = share * (result.link_bytes_per_second or 0)
        if result.bus_bytes_per_second < required:
            device = f"{result.name}, {result.ranks} ranks, {result.size_bytes:,} B"
            measured = round(result.bus_bytes_per_second / GB, 2)
            slow.append(BANDWIDTH.violation(device, measured, f"at least {required / GB:.3g}"))
    return [*wrong, *(slow or [BANDWIDTH.ok(f"{len(large)} collectives")])]


def check_node_pairs(bytes_per_second: Mapping[tuple[str, str], float]) -> list[DoctorFinding]:
    """Find slow nodes and slow pairs of nodes.

    A node is slow if its bandwidth with every other node is low; else a slow pair is reported. The reference is the
    median over nodes of the bandwidth with their best partner, which is healthy if more than half of the nodes are. The
    median of all pairs would not be: with one slow node of three, two of the three pairs are slow.
    """
    node_rule = RULES["between.slow_node"]
    pair_rule = RULES["between.slow_pair"]
    if not bytes_per_second:
        return [node_rule.skip("one node")]
    hosts = sorted({host for pair in bytes_per_second for host in pair})
    best_speed = {host: max(speed for pair, speed in bytes_per_second.items() if host in pair) for host in hosts}
    typical_speed = median_high(best_speed.values())
    host_percent = {host: round(100 * speed / typical_speed, 1) for host, speed in best_speed.items()}
    pair_percent = {pair: round(100 * speed / typical_speed, 1) for pair, speed in bytes_per_second.items()}
    slow_hosts = {host for host, percent in host_percent.items() if percent < node_rule.limit}
    slow_pairs = [
        (" - ".join(pair), percent)
        for pair, percent in pair_percent.items()
        if percent < pair_rule.limit and not slow_hosts & set(pair)
    ]
    slow_nodes = [node_rule.violation("network", host_percent[host], host=host) for host in hosts if host in slow_hosts]
    return [
        *(slow_nodes or [node_rule.ok(min(host_percent.values()))]),
        *pair_rule.report(slow_pairs, ok=min(pair_percent.values())),
    ]


def round_robin_pairs(nodes: int) -> list[list[tuple[int, int]]]:
    """Return all pairs of nodes in rounds with at most one partner per node, by the circle method."""
    seats: list[int | None] = [*range(nodes), *([None] if nodes % 2 else [])]
    rounds = []
    for _ in range(len(seats) - 1):
        half = len(seats) // 2
        matched = zip(seats[:half], reversed(seats[half:]), strict=True)
        rounds.append([(min(a, b), max(a, b)) for a, b in matched if a is not None and b is not None])
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return rounds
