"""The run that `phalanx plan` plans, a run file on the machines of the command line, and the search for its layouts."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from phalanx.cli.common.progress import search_progress

if TYPE_CHECKING:
    from phalanx.plan.search.result import Plan
    from phalanx.spec.cluster import ClusterSpec
    from phalanx.spec.resolved_run import ResolvedRun

MIN_SEARCHED = 10
"""Minimum number of layouts to search, so that a safer one than the first can be found."""


def rank_layouts(resolved: ResolvedRun, num_layouts: int = MIN_SEARCHED, all_schedules: bool = False) -> Plan:
    """Return at least `num_layouts` layouts in the order of the table of `phalanx plan`."""
    from phalanx.plan.search.explain import plan_or_raise

    with search_progress(resolved.world_size) as report:
        keep = max(num_layouts, MIN_SEARCHED)
        return plan_or_raise(resolved, keep, report, group_schedules=not all_schedules)


def run_on_cluster(
    run: Path,
    machine: str | None,
    nodes: int | None,
    nproc: int | None,
    overrides: list[str],
    topology: Path | None = None,
) -> ResolvedRun:
    """Return the run on the machines that the options name.

    An option that is None leaves the run file's value; without one, a node has as many ranks as cores or devices. A
    topology overrides the run file and the machine except for nproc; --set overrides the topology.
    """
    from phalanx.spec.base import require
    from phalanx.spec.cluster import MAX_NODES
    from phalanx.spec.files.load import load_run
    from phalanx.spec.resolved_run import ResolvedRun

    run_spec = load_run(run, overrides, machine=machine)
    if topology is not None:
        topology_overrides = _infer_topology_overrides(topology, run_spec.cluster)
        run_spec = load_run(run, [*topology_overrides, *overrides], machine=machine)
    is_possible = nodes is None or nodes <= MAX_NODES
    require(is_possible, "--nodes", nodes, "is more than any cluster has", fix=f"use at most {MAX_NODES:,}")
    cluster = run_spec.cluster
    is_given = nproc is not None or cluster.nproc_per_node is not None
    nproc = nproc or cluster.planned_nproc_per_node
    cluster = cluster.replace(nodes=nodes or cluster.nodes, nproc_per_node=nproc)
    if not is_given:
        # A plan then lists it among its assumptions.
        cluster.model_fields_set.discard("nproc_per_node")
    return ResolvedRun.on_cluster(run_spec.replace(cluster=cluster, auto_layout=False))


def _infer_topology_overrides(topology: Path, cluster: ClusterSpec) -> list[str]:
    """Return the cluster fields that the topology of a node determines, in the format of --set."""
    from phalanx.spec.topology.read import infer_cluster, read_topology

    inferred = infer_cluster(read_topology(topology), cluster.preset)
    for name, reason in inferred.unknown.items():
        if getattr(cluster, name) is None:
            print(f"--topology does not determine cluster.{name}: {reason}", file=sys.stderr)
    return [
        f"cluster.{name}={value}"
        for name, value in inferred.fields.items()
        if name != "nproc_per_node" or cluster.nproc_per_node is None
    ]
