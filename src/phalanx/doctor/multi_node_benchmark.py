"""Benchmark of the nodes of a run by the run's ranks.

`torchrun -m phalanx.doctor.multi_node_benchmark RUN.toml --out DIR` measures the collectives that the layout sends,
each pair of nodes, their clocks, and the growth of error counters.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist

from phalanx.bench.ranks import benchmark_collectives
from phalanx.bench.timing import time_calls
from phalanx.cost.exact.layout_checks import check_layout
from phalanx.doctor import cross_node_bandwidth, error_counters
from phalanx.doctor.compare_nodes import COLLECTIVES_FILE, clock_skew_findings, failed_rank_findings
from phalanx.doctor.cross_node_bandwidth import LARGE_BYTES, CollectiveResult, round_robin_pairs
from phalanx.doctor.finding import DoctorFinding
from phalanx.doctor.machine import Machine
from phalanx.doctor.rules import RULES
from phalanx.launch.elastic_agent import launch_ranks
from phalanx.launch.failures import report_with_traceback, write_failure
from phalanx.launch.process import (
    LAUNCHER_PID_ENV,
    env_rank,
    exit_rank,
    init_distributed,
    select_device,
    set_worker_environment,
)
from phalanx.launch.starters import set_rank_variables
from phalanx.parallel.comm.objects import all_gather_objects
from phalanx.parallel.mesh import build_mesh
from phalanx.runs import hang_dumps
from phalanx.spec.cluster import ClusterSpec
from phalanx.spec.errors import UserError
from phalanx.spec.files.load import load_run
from phalanx.spec.files.write import to_toml, with_absolute_paths
from phalanx.spec.log import log_to_stderr
from phalanx.spec.resolved_run import ResolvedRun
from phalanx.spec.run import RunSpec

logger = logging.getLogger(__name__)

PAIR_BYTES = 64 * 2**20
WARMUP_BYTES = 2**20
"""Bytes that two ranks send each way (Primus: 64 MB), and those of the warm-up, which is timed."""
PAIR_SECONDS = 0.5
"""Maximum time of one message of the slowest pair; over slow networks messages are smaller."""
TIMEOUT_SECONDS = 120
"""Primus: a failure report after this time instead of a hang."""
ITERATIONS = 5


def check_nodes(run: RunSpec, device: torch.device) -> list[DoctorFinding]:
    """Return the findings of all ranks, on each of them. torch.distributed must be initialized."""
    world_size = dist.get_world_size()
    machine = Machine()
    hosts: list[str] = all_gather_objects(machine.host)
    # One rank reports for its host.
    is_host_reporter = dist.get_rank() == hosts.index(machine.host)
    # Clocks are read after a barrier, which takes less time than they may differ.
    dist.barrier()
    times: list[float] = all_gather_objects(time.time())
    before = error_counters.read_counters(machine) if is_host_reporter else {}
    mesh = build_mesh(run.layout, world_size, device.type)
    # If the speed of links is known, a size that is limited by it is measured in addition to the run's sizes.
    knows_speed = run.cluster.link_bytes_per_second or run.cluster.network_bytes_per_second
    sweep = [LARGE_BYTES] if knows_speed else []
    benchmarks = benchmark_collectives(run, mesh, device, iterations=ITERATIONS, sweep=sweep)
    speeds = measure_node_pairs(hosts, device)
    dist.barrier()
    growth = error_counters.counter_findings(before, error_counters.read_counters(machine)) if is_host_reporter else []
    gathered = all_gather_objects([asdict(replace(finding, host=machine.host)) for finding in growth])
    counter_growth = [DoctorFinding(**fields) for host_findings in gathered for fields in host_findings]
    clocks = {host: times[hosts.index(host)] for host in dict.fromkeys(hosts)}
    results = [result for benchmark in benchmarks for result in achieved_bandwidth(benchmark, hosts, run.cluster)]
    return [
        *cross_node_bandwidth.check_collectives(results),
        *cross_node_bandwidth.check_node_pairs(speeds),
        *clock_skew_findings(clocks),
        *counter_growth,
    ]


def achieved_bandwidth(benchmark: dict[str, Any], hosts: Sequence[str], cluster: ClusterSpec) -> list[CollectiveResult]:
    """Return the bandwidth of a collective by size: the better one of in place and out of place.

    `hosts` is the host of each rank.
    """
    links = expected_bus_bandwidth(benchmark, hosts, cluster)
    return [
        CollectiveResult(
            name=f"{benchmark['operation']} among {benchmark['among']}",
            ranks=benchmark["ranks"],
            size_bytes=result["size"],
            bus_bytes_per_second=1e9 * max(result[mode]["bus_bw"] for mode in ("in_place", "out_of_place")),
            link_bytes_per_second=links,
            wrong=sum(result[mode]["nwrong"] or 0 for mode in ("in_place", "out_of_place")),
        )
        for result in benchmark["nccl_tests"]["results"]
    ]


def expected_bus_bandwidth(benchmark: dict[str, Any], hosts: Sequence[str], cluster: ClusterSpec) -> float | None:
    """Return the bus bandwidth that links allow for a benchmark's slowest group, or None if unknown.

    Within a node it is that of the links. Across nodes, a ring enters and leaves each node once, over the cards of all
    of the group's k ranks there. In an all-to-all, each rank's card carries the data for n - k of the n - 1 other
    ranks. `hosts` is the host of each rank.
    """
    bandwidths = []
    link = cluster.link_bytes_per_second
    network = cluster.network_bytes_per_second
    for group in benchmark["groups"]:
        ranks_per_host = Counter(hosts[rank] for rank in group)
        k = min(ranks_per_host.values())
        n = len(group)
        if len(ranks_per_host) == 1:
            limits = [link]
        elif benchmark["operation"] == "all_to_all":
            limits = [network and network * (n - 1) / (n - k)]
        else:
            limits = [network and network * (1 if benchmark["operation"] == "send" else k), *([link] if k > 1 else [])]
        if None in limits:
            return None
        bandwidths.append(min(limit for limit in limits if limit))
    return min(bandwidths, default=None)


def measure_node_pairs(hosts: Sequence[str], device: torch.device) -> dict[tuple[str, str], float]:
    """Return the bytes per second that each two hosts exchange each way, with all of their ranks at once."""
    # NCCL creates a group's communicator in its first call, which needs all ranks. With an odd number of hosts, one
    # host has no partner.
    dist.all_reduce(torch.zeros(1, device=device))
    warmup = _measure_exchanges(hosts, device, WARMUP_BYTES)
    if not warmup:
        return {}
    slowest = WARMUP_BYTES / min(speed / ranks for speed, ranks in warmup.values())
    size = int(min(PAIR_BYTES, WARMUP_BYTES * max(1.0, PAIR_SECONDS / slowest)))
    return {pair: speed for pair, (speed, _) in _measure_exchanges(hosts, device, size).items()}


def _measure_exchanges(
    hosts: Sequence[str], device: torch.device, size_bytes: int
) -> dict[tuple[str, str], tuple[float, int]]:
    """Return the bandwidth of each pair of hosts for one message size, and the number of ranks per host.

    Pairs that share no host are measured at the same time.
    """
    names = list(dict.fromkeys(hosts))
    ranks = {name: [rank for rank, host in enumerate(hosts) if host == name] for name in names}
    sent, received = (torch.zeros(size_bytes, dtype=torch.uint8, device=device) for _ in range(2))
    speeds: dict[tuple[str, str], tuple[float, int]] = {}

    def exchange(partner: int) -> None:
        operations = [dist.P2POp(dist.isend, sent, partner), dist.P2POp(dist.irecv, received, partner)]
        for work in dist.batch_isend_irecv(operations):
            work.wait()

    for host_pairs in round_robin_pairs(len(names)) if len(names) > 1 else []:
        dist.barrier()
        local_result = None
        for a, b in host_pairs:
            partners = dict(zip(ranks[names[a]], ranks[names[b]], strict=False))
            partners |= {partner: rank for rank, partner in partners.items()}
            if dist.get_rank() in partners:
                call = partial(exchange, partners[dist.get_rank()])
                local_result = (names[a], names[b]), median(time_calls(call, device, ITERATIONS))
        results = [result for result in all_gather_objects(local_result) if result is not None]
        for pair in {result[0] for result in results}:
            seconds = [result[1] for result in results if result[0] == pair]
            speeds[pair] = len(seconds) / 2 * size_bytes / max(seconds), len(seconds) // 2
    return speeds


def launch_check(run: RunSpec, nproc: int) -> list[DoctorFinding]:
    """Return the findings of local ranks for a run, or why one failed."""
    set_worker_environment(nproc)
    with TemporaryDirectory(prefix="phalanx-checkup-") as folder:
        directory = Path(folder)
        file = directory / "run.toml"
        file.write_text(to_toml(with_absolute_paths(run)))
        code = launch_ranks(nproc, (__name__, str(file), "--out", folder), partial(report_with_traceback, directory))
        if code:
            failed = RULES["between.failed"]
            return failed_rank_findings(directory) or [failed.violation("ranks", f"exit code {code}")]
        return [DoctorFinding(**fields) for fields in json.loads((directory / COLLECTIVES_FILE).read_text())]


def main() -> None:
    """Run the benchmark on this rank."""
    description = "Check the nodes of a run, on this rank."
    parser = argparse.ArgumentParser("phalanx.doctor.multi_node_benchmark", description=description)
    parser.add_argument("run", type=Path, help="a run file")
    help_text = f"the directory in which rank 0 writes {COLLECTIVES_FILE}"
    parser.add_argument("--out", type=Path, required=True, help=help_text)
    log_to_stderr()
    exit_rank(rank_main(parser.parse_args()))


def rank_main(args: argparse.Namespace) -> int:
    """Run the benchmark on this rank, write its findings or failure, and return the exit code."""
    try:
        set_rank_variables(os.environ)
    except UserError as error:
        logger.error("%s", error)
        return 2
    rank = env_rank()
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    args.out.mkdir(parents=True, exist_ok=True)
    hang_dumps.remove_dumps(args.out, rank)
    # Files of an earlier start would count as this one's.
    if rank == 0:
        hang_dumps.remove_dumps_from_rank(args.out, ranks)
        (args.out / COLLECTIVES_FILE).unlink(missing_ok=True)
    try:
        run = load_run(args.run, environment={})
        if ranks == 1:
            fix = "start several ranks with torchrun"
            raise UserError("number of ranks", ranks, "leaves nothing to send", fix=fix)
        # Before ranks wait for each other.
        check_layout(ResolvedRun(run, ranks))
        timeout = min(TIMEOUT_SECONDS, run.training.collective_timeout_seconds)
        findings = check_nodes(run, init_distributed(select_device(run), timeout))
        if rank == 0:
            (args.out / COLLECTIVES_FILE).write_text(json.dumps([asdict(finding) for finding in findings], indent=1))
    except Exception as error:
        write_failure(args.out, rank, 0, error=error)
        if LAUNCHER_PID_ENV not in os.environ:
            logger.error("%s", error, exc_info=not isinstance(error, UserError))
        return 2 if isinstance(error, UserError) else 1
    return 0


if __name__ == "__main__":
    main()
