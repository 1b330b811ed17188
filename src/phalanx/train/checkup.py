"""`torchrun -m phalanx.train.checkup RUN.toml --out DIR`: whether the nodes of a run are fit together, by the run's
ranks: the collectives that its layout sends, each pair of nodes, their clocks, and what error counters grew by."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist

from phalanx.cost.stages import check_layout
from phalanx.measure import incident
from phalanx.measure.doctor import between, counters
from phalanx.measure.doctor.between import LARGE_BYTES, Reached, rounds
from phalanx.measure.doctor.finding import Finding
from phalanx.measure.doctor.gather import COLLECTIVES, failed, skew
from phalanx.measure.doctor.machine import Machine
from phalanx.measure.timing import seconds_each
from phalanx.parallel.mesh import build_mesh
from phalanx.spec.cluster import Cluster
from phalanx.spec.errors import UserError
from phalanx.spec.load import load_run
from phalanx.spec.run import RunSpec
from phalanx.train.agent import start_ranks
from phalanx.train.launch import (
    LAUNCHER,
    choose_device,
    join_ranks,
    leave,
    own_rank,
    report_plainly,
    set_environment,
    write_failure,
)
from phalanx.train.measuring import collectives
from phalanx.train.setup import absolute, to_toml

PAIR_BYTES, TRIED_BYTES = 64 * 2**20, 2**20
"""Sent each way between two ranks of a pair of nodes (Primus: 64 MB), and to learn how long that would take."""
PAIR_SECONDS = 0.5
"""Of the slowest pair for one message: over slow networks these are smaller."""
TIMEOUT_SECONDS = 120
"""Primus: then a report, not a hang."""
ITERATIONS = 5


def check(run: RunSpec, device: torch.device) -> list[Finding]:
    """What all ranks find together, on each of them. torch.distributed must be initialised."""
    world_size, machine = dist.get_world_size(), Machine()
    hosts: list[str] = _gathered(machine.host)
    told = dist.get_rank() == hosts.index(machine.host)  # one rank of a host speaks for it
    times: list[float] = _gathered_at_once()
    before = counters.read(machine) if told else {}
    ways = collectives(run, build_mesh(run.layout, world_size, device.type), device, ITERATIONS, _sizes(run.cluster))
    speeds = pairs(hosts, device)
    dist.barrier()
    mine = counters.grown(before, counters.read(machine)) if told else []
    grown = [
        Finding(**each)
        for found in _gathered([asdict(replace(each, host=machine.host)) for each in mine])
        for each in found
    ]
    clocks = {host: times[hosts.index(host)] for host in dict.fromkeys(hosts)}
    reached = [each for way in ways for each in reached_by(way, hosts, run.cluster)]
    return [*between.collectives(reached), *between.pairs(speeds), *skew(clocks), *grown]


def _sizes(cluster: Cluster) -> list[int]:
    """Beside those that the run sends one that is judged by bandwidth, where that of the links is known."""
    known = cluster.link_bytes_per_second or cluster.network_bytes_per_second
    return [LARGE_BYTES] if known else []


def reached_by(way: dict[str, Any], hosts: Sequence[str], cluster: Cluster) -> list[Reached]:
    """What a way of `measuring.collectives` reached, by size: the better of in place and not."""
    document, links = way["nccl_tests"], link_bytes_per_second(way, hosts, cluster)
    return [
        Reached(
            name=f"{way['operation']} among {way['among']}",
            ranks=way["ranks"],
            size_bytes=result["size"],
            bus_bytes_per_second=1e9 * max(result[place]["bus_bw"] for place in ("in_place", "out_of_place")),
            link_bytes_per_second=links,
            wrong=sum(result[place]["nwrong"] or 0 for place in ("in_place", "out_of_place")),
        )
        for result in document["results"]
    ]


def link_bytes_per_second(way: dict[str, Any], hosts: Sequence[str], cluster: Cluster) -> float | None:
    """The bus bandwidth that links allow the slowest of a way's groups; None where theirs is not known.

    Inside a node it is that of the links. Over nodes a ring enters and leaves each once, by the cards of all of the
    group's k ranks there; in an all-to-all each rank's card carries what goes to the n - k ranks elsewhere, of n - 1.
    """
    found = []
    for group in way["groups"]:
        here = [len(list(same)) for _, same in groupby(sorted(hosts[rank] for rank in group))]
        k, n, inside, network = min(here), len(group), cluster.link_bytes_per_second, cluster.network_bytes_per_second
        if len(here) == 1:
            limits = [inside]
        elif way["operation"] == "all_to_all":
            limits = [network and network * (n - 1) / (n - k)]
        else:
            limits = [network and network * (1 if way["operation"] == "send" else k), *([inside] if k > 1 else [])]
        if None in limits:
            return None
        found.append(min(limit for limit in limits if limit))
    return min(found, default=None)


def pairs(hosts: Sequence[str], device: torch.device) -> dict[tuple[str, str], float]:
    """Bytes per second that each two hosts exchange each way, all of their ranks at once."""
    tried = _exchanges(hosts, device, TRIED_BYTES)
    if not tried:
        return {}
    slowest = TRIED_BYTES / min(speed / ranks for speed, ranks in tried.values())
    size = int(min(PAIR_BYTES, TRIED_BYTES * max(1.0, PAIR_SECONDS / slowest)))
    return {pair: speed for pair, (speed, _) in _exchanges(hosts, device, size).items()}


def _exchanges(hosts: Sequence[str], device: torch.device, size_bytes: int) -> dict[tuple[str, str], tuple[float, int]]:
    """The same for messages of a size, and how many ranks of a host took part; pairs that share no host at once."""
    names = list(dict.fromkeys(hosts))
    ranks = {name: [rank for rank, host in enumerate(hosts) if host == name] for name in names}
    sent, received = (torch.zeros(size_bytes, dtype=torch.uint8, device=device) for _ in range(2))
    found: dict[tuple[str, str], tuple[float, int]] = {}
    for matched in rounds(len(names)) if len(names) > 1 else []:
        dist.barrier()
        mine = None
        for a, b in matched:
            partners = dict(zip(ranks[names[a]], ranks[names[b]], strict=False))
            partners |= {other: one for one, other in partners.items()}
            if dist.get_rank() in partners:
                call = partial(_exchange, sent, received, partners[dist.get_rank()])
                mine = (names[a], names[b]), median(seconds_each(call, device, ITERATIONS))
        told = [each for each in _gathered(mine) if each is not None]
        for pair in {each[0] for each in told}:
            seconds = [each[1] for each in told if each[0] == pair]
            found[pair] = len(seconds) / 2 * size_bytes / max(seconds), len(seconds) // 2
    return found


def _exchange(sent: torch.Tensor, received: torch.Tensor, partner: int) -> None:
    there, back = dist.P2POp(dist.isend, sent, partner), dist.P2POp(dist.irecv, received, partner)
    for work in dist.batch_isend_irecv([there, back]):
        work.wait()


def _gathered(value: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def _gathered_at_once() -> list[float]:
    """What every rank's clock says after a barrier, which takes less than clocks may differ."""
    dist.barrier()
    return _gathered(time.time())


def checked(run: RunSpec, nproc: int) -> list[Finding]:
    """What local ranks find for a run, or why one failed."""
    set_environment(nproc)
    with TemporaryDirectory(prefix="phalanx-checkup-") as folder:
        directory = Path(folder)
        file = directory / "run.toml"
        file.write_text(to_toml(absolute(run)))
        code = start_ranks(nproc, (__name__, str(file), "--out", folder), partial(report_plainly, directory))
        if code:
            return failed(directory) or [between.FAILED.broken("ranks", f"exit code {code}")]
        return [Finding(**each) for each in json.loads((directory / COLLECTIVES).read_text())]


def main() -> None:
    parser = argparse.ArgumentParser("phalanx.train.checkup", description="Check the nodes of a run, on this rank.")
    parser.add_argument("run", type=Path, help="a run file")
    parser.add_argument("--out", type=Path, required=True, help=f"the directory in which rank 0 writes {COLLECTIVES}")
    leave(work(parser.parse_args()))


def work(asked: argparse.Namespace) -> int:
    """Check on this rank; returns the exit code."""
    rank, ranks = own_rank(), int(os.environ.get("WORLD_SIZE", "1"))
    asked.out.mkdir(parents=True, exist_ok=True)
    incident.forget(asked.out, rank)
    if rank == 0:  # what an earlier start left would be taken for this one's
        incident.forget_from(asked.out, ranks)
        (asked.out / COLLECTIVES).unlink(missing_ok=True)
    try:
        run = load_run(asked.run, environment={})
        if ranks == 1:
            raise UserError("phalanx.train.checkup", ranks, "rank sends nothing", "start several by torchrun")
        check_layout(run, ranks)  # before they wait for each other
        found = check(run, join_ranks(choose_device(run), min(TIMEOUT_SECONDS, run.training.timeout_seconds)))
        if rank == 0:
            (asked.out / COLLECTIVES).write_text(json.dumps([asdict(each) for each in found], indent=1))
    except Exception as error:
        write_failure(asked.out, rank, 0, error)
        if LAUNCHER not in os.environ:
            print(f"phalanx: {error}" if isinstance(error, UserError) else traceback.format_exc(), file=sys.stderr)
        return 2 if isinstance(error, UserError) else 1
    return 0


if __name__ == "__main__":
    main()
