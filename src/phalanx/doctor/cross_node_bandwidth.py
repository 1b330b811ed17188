"""Evaluation of measured bandwidths between nodes: of a run's collectives, and of each pair of nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median_high

from phalanx.doctor.finding import CheckRule, DoctorFinding
from phalanx.spec.formatting import GB, GIB, MIB

LARGE_BYTES = 64 * MIB
"""Minimum size at which a collective is limited by bandwidth, not by latency (Primus: 64 MB and 1 GB)."""
HUGE_BYTES = GIB
MIN_BANDWIDTH_SHARE = 0.55
MIN_HUGE_BANDWIDTH_SHARE = 0.7
"""Share of the links' bandwidth that collectives must reach, and the share from `HUGE_BYTES` on.

Healthy nodes of 8 A100 and 8 H200 reach 0.60 (all-to-all) to 0.77 at 64 MiB, and 0.73 and more from 1 GiB on
(stas00/ml-engineering's and SimuMax's sweeps of nccl-tests).
"""
SLOW_RATIO = 0.75
"""NVRx classifies a rank below 0.75 of the median as a straggler."""
WRONG = CheckRule(
    id="between.wrong",
    quantity="wrong elements in the result of a collective",
    severity="FAIL",
    threshold="0",
    unit="numbers",
    source="nccl-tests (#wrong)",
    remedy="drain these nodes: some memory, link or GPU corrupts data silently",
    command="phalanx bench collectives RUN.toml; dcgmi diag -r 3",
)
BANDWIDTH = CheckRule(
    id="between.busbw",
    quantity=f"bus bandwidth of a collective of {LARGE_BYTES // MIB} MiB and more",
    severity="WARN",
    threshold=f"at least {MIN_BANDWIDTH_SHARE:.0%} of the links' bandwidth, from {HUGE_BYTES // GIB} GiB on "
    f"{MIN_HUGE_BANDWIDTH_SHARE:.0%}",
    unit="GB/s",
    source="stas00/ml-engineering, SimuMax (published sweeps of nccl-tests)",
    remedy="check which links it uses, whether NCCL fell back to sockets, and the pairs below",
    command="phalanx placement RUN.toml; phalanx doctor --nccl-log LOG",
)
PAIR = CheckRule(
    id="between.slow_node",
    quantity="bandwidth of a node with its best partner, relative to the median node's",
    severity="FAIL",
    threshold=f"at least {SLOW_RATIO:.0%}",
    unit="%",
    source="NVRx (straggler below 0.75 of the median)",
    remedy="exclude the node, and check its cards, cables and counters",
    command="srun --exclude=$(cat failing_nodes.txt) ...",
)
LINK = CheckRule(
    id="between.slow_pair",
    quantity="bandwidth between two nodes, relative to the same",
    severity="WARN",
    threshold=f"at least {SLOW_RATIO:.0%}",
    unit="%",
    source="NVRx (straggler below 0.75 of the median)",
    remedy="check the connection between these two: cables, leaf switches, routing",
    command="torchrun --nnodes 2 ... -m phalanx.doctor.multi_node_benchmark RUN.toml --out DIR",
)
FAILED = CheckRule(
    id="between.failed",
    quantity="ranks of this measurement",
    severity="FAIL",
    threshold="all finished it",
    unit="",
    source="ours",
    remedy="find the first failure on that host; ranks that only lost a peer blame no host",
    command="cat DIR/failures/rank-*.json",
)
RULES = (FAILED, WRONG, BANDWIDTH, PAIR, LINK)


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
    wrong = [WRONG.violation(result.name, result.wrong) for result in results if result.wrong]
    largest = {result.name: result for result in sorted(results, key=lambda result: result.size_bytes)}
    large_results = [
        result for result in largest.values() if result.size_bytes >= LARGE_BYTES and result.link_bytes_per_second
    ]
    slow = [
        _slow_finding(result)
        for result in large_results
        if result.bus_bytes_per_second < _required_bytes_per_second(result)
    ]
    if not large_results:
        slow = [BANDWIDTH.skip("no collective of that size uses links of known speed")]
    elif not slow:
        slow = [BANDWIDTH.ok(f"{len(large_results)} collectives")]
    return [*(wrong or [WRONG.ok(0)]), *slow]


def _slow_finding(result: CollectiveResult) -> DoctorFinding:
    expected_gb_per_second = _required_bytes_per_second(result) / GB
    device = f"{result.name}, {result.ranks} ranks, {result.size_bytes:,} B"
    return BANDWIDTH.violation(
        device, round(result.bus_bytes_per_second / GB, 2), f"at least {expected_gb_per_second:.3g}"
    )


def _required_bytes_per_second(result: CollectiveResult) -> float:
    share = MIN_HUGE_BANDWIDTH_SHARE if result.size_bytes >= HUGE_BYTES else MIN_BANDWIDTH_SHARE
    return share * (result.link_bytes_per_second or 0)


def check_node_pairs(bytes_per_second: Mapping[tuple[str, str], float]) -> list[DoctorFinding]:
    """Find slow nodes and slow pairs of nodes.

    A node is slow if its bandwidth with every other node is low; else a slow pair is reported. The reference is the
    median over nodes of the bandwidth with their best partner, which is healthy if more than half of the nodes are. The
    median of all pairs would not be: with one slow node of three, two of the three pairs are slow.
    """
    if not bytes_per_second:
        return [PAIR.skip("one node")]
    hosts = sorted({host for pair in bytes_per_second for host in pair})
    best_speed = {host: max(speed for pair, speed in bytes_per_second.items() if host in pair) for host in hosts}
    typical_speed = median_high(best_speed.values())
    host_percent = {host: round(100 * speed / typical_speed, 1) for host, speed in best_speed.items()}
    pair_percent = {pair: round(100 * speed / typical_speed, 1) for pair, speed in bytes_per_second.items()}
    slow_hosts = [host for host, percent in host_percent.items() if percent < 100 * SLOW_RATIO]
    slow_pairs = [
        pair for pair, percent in pair_percent.items() if percent < 100 * SLOW_RATIO and not set(pair) & set(slow_hosts)
    ]
    return [
        *(
            [PAIR.violation("network", host_percent[host], host=host) for host in slow_hosts]
            or [PAIR.ok(min(host_percent.values()))]
        ),
        *(
            [LINK.violation(" - ".join(pair), pair_percent[pair]) for pair in slow_pairs]
            or [LINK.ok(min(pair_percent.values()))]
        ),
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
