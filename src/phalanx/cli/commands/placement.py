"""`phalanx placement`: the position of each rank, the links of its traffic, and placement problems."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from rich.table import Table
from rich.text import Text
from typer import Option

from phalanx.cli.common.options import Json, Overrides, Ranks, RunOrModel
from phalanx.cli.common.output_file import check_replaceable
from phalanx.cli.common.text import text_table
from phalanx.plan.placement.collectives import BUFFER_BYTES, fabric_loads, nccl_latencies
from phalanx.plan.placement.findings import (
    LINK_KINDS,
    NodeLayout,
    bytes_by_link,
    nic_loads,
    node_layout,
    placement_findings,
    with_pxn,
)
from phalanx.plan.placement.traffic_matrix import TrafficMatrix, merge_matrices, traffic_matrices
from phalanx.report.drawing.heatmap import Heatmap, save_picture
from phalanx.spec.cluster import DEFAULT_DEVICES_PER_NODE
from phalanx.spec.files.load import load_run
from phalanx.spec.formatting import format_bytes, format_seconds, plural
from phalanx.spec.parallel_dims import MODEL_PARALLEL_AXES
from phalanx.spec.resolved_run import ResolvedRun
from phalanx.spec.terminal import Terminal
from phalanx.spec.topology.node import NodeTopology
from phalanx.spec.topology.read import infer_cluster, read_topology

MAX_HEATMAP_CELLS = 128
"""Maximum rows of a picture. Larger runs are shown by nodes, then by groups of nodes."""
MAX_NODES_SHOWN = 4
STYLES = {"good": "green", "note": "yellow", "bad": "red"}


def placement(
    run: RunOrModel,
    ranks: Ranks = None,
    nproc: Annotated[
        int | None,
        Option(
            help="Ranks per node; default: cluster.nproc_per_node, else the topology's GPUs, else 8.",
            min=1,
            metavar="N",
        ),
    ] = None,
    topology: Annotated[
        Path | None, Option(help="Output of `nvidia-smi topo -m`, or a topology file of NCCL.", metavar="FILE")
    ] = None,
    pxn: Annotated[
        bool,
        Option("--pxn", help="Count traffic as NCCL's PXN sends it: through the neighbor on the destination's rail."),
    ] = False,
    out: Annotated[
        Path | None, Option(help="Draw the traffic between nodes: .svg, .html or .png.", metavar="FILE")
    ] = None,
    set_: Overrides = None,
    json_: Json = False,
) -> None:
    """Show where ranks run, and the traffic of a step on each kind of link.

    The output has the bytes by kind of link, the share of cross-rail and spine traffic, the load of network cards, the
    bytes and latency of collectives over all ranks, and whether tensor-parallel groups stay inside the fast domain and
    stages on their rail.

    Examples:

        phalanx placement run.toml --ranks 64 --nproc 8 --set layout.tp=4 --set layout.pp=4

        phalanx placement run.toml --ranks 64 --set cluster.preset=h100 --out heat.html

        nvidia-smi topo -m > topo.txt && phalanx placement run.toml --ranks 16 --topology topo.txt --json
    """
    run_spec = load_run(run, set_ or [])
    node = read_topology(topology) if topology else None
    default_nproc = len(node.gpus) if node else DEFAULT_DEVICES_PER_NODE
    per_node = nproc or run_spec.cluster.nproc_per_node or min(default_nproc, ranks or default_nproc)
    world_size = ranks or per_node * run_spec.cluster.nodes
    site = node_layout(run_spec.cluster, per_node, node)
    resolved = ResolvedRun(run_spec, world_size)
    traffic = traffic_matrices(resolved, site.ranks_per_island)
    if pxn:
        traffic = {axis: with_pxn(matrix, site) for axis, matrix in traffic.items()}
    heat = traffic_heatmap(resolved, traffic, site)
    cells = [[a, b, float(heat.bytes[a, b])] for a, b in np.argwhere(heat.bytes > 0).tolist()]
    facts = placement_to_json(resolved, traffic, site, node)
    facts |= {"pxn": pxn, "sent": {"unit": heat.unit, "cells": cells}}
    if out is not None:
        check_replaceable("--out", out, out.suffix[1:])
        save_picture(heat, out)
        print(f"wrote {out}", file=sys.stderr)
    if json_:
        print(json.dumps(facts, indent=2))
    else:
        _print_placement(facts)


def placement_to_json(
    resolved: ResolvedRun, parts: dict[str, TrafficMatrix], site: NodeLayout, node: NodeTopology | None
) -> dict[str, Any]:
    """Return the output of `phalanx placement --json` without the matrix; bytes are per optimizer update.

    `parts` is the traffic per axis of the layout. `node` is the topology of a node, None without a file.
    """
    sizes = resolved.dims
    total_traffic = merge_matrices(resolved.world_size, list(parts.values()))
    links = bytes_by_link(total_traffic, site)
    network = links["rail"] + links["spine"]
    loads = nic_loads(total_traffic, site)
    cluster = resolved.run.cluster
    # Bytes per second of each device: the topology's if known, else the run file's
    speed = cluster.network_bytes_per_second
    if node is not None:
        speed = infer_cluster(node, cluster.preset).fields.get("network_bytes_per_second") or speed
    busiest_seconds = None
    if speed:
        busiest_bytes = max(max(load.sent_bytes, load.received_bytes) for load in loads)
        busiest_seconds = busiest_bytes * len({name for nics in site.nics for name in nics}) / (speed * site.nproc)
    return {
        "run": _describe_layout(resolved),
        "ranks": resolved.world_size,
        "nproc": site.nproc,
        "nodes": -(-resolved.world_size // site.nproc),
        "site": asdict(site),
        "numa_nodes": node.numa_nodes[: site.nproc] if node else None,
        "ranks_by_node": coordinates_by_node(resolved, site.nproc),
        "bytes": {axis: bytes_by_link(part, site) for axis, part in parts.items()} | {"total": links},
        "share_of_all": {
            link: links[link] / total_traffic.total if total_traffic.total else 0.0 for link in LINK_KINDS
        },
        "cross_rail_share_of_network": links["spine"] / network if network else 0.0,
        "nics": [asdict(load) for load in loads],
        "busiest_nic_seconds": busiest_seconds,
        "fabric_loads": fabric_loads(resolved.world_size, site, speed, cluster.oversubscription),
        "nccl_latencies": {} if cluster.uses_cpu else nccl_latencies(resolved.world_size, site),
        "findings": [asdict(finding) for finding in placement_findings(sizes, parts, site, cluster)],
    }


def coordinates_by_node(resolved: ResolvedRun, nproc: int) -> list[str]:
    """Return the coordinates of every node's ranks on each axis: "dp_shard 0, pp 0-1, tp 0-3"."""
    sizes = resolved.dims
    shape = [getattr(sizes, axis) for axis in sizes.axes]
    nodes = []
    for first_rank in range(0, resolved.world_size, nproc):
        node_ranks = (
            np.arange(max(first_rank, sizes.servers), min(first_rank + nproc, resolved.world_size)) - sizes.servers
        )
        num_servers = max(0, min(first_rank + nproc, sizes.servers) - first_rank)
        descriptions = [plural(num_servers, "server")] if num_servers else []
        for axis, coordinates in zip(sizes.axes, np.unravel_index(node_ranks, shape), strict=True):
            if getattr(sizes, axis) > 1 and len(node_ranks):
                low = coordinates.min()
                high = coordinates.max()
                descriptions.append(f"{axis} {low}" + (f"-{high}" if high > low else ""))
        nodes.append(", ".join(descriptions))
    return nodes


def traffic_heatmap(resolved: ResolvedRun, parts: dict[str, TrafficMatrix], site: NodeLayout) -> Heatmap:
    """Return the matrix of all traffic between ranks, nodes or groups of nodes, summed over the axes of the layout."""
    total_traffic = merge_matrices(resolved.world_size, list(parts.values()))
    nodes = -(-resolved.world_size // site.nproc)
    name = f"{_describe_layout(resolved)}, on {nodes} x {site.nproc}"
    if resolved.world_size <= MAX_HEATMAP_CELLS:
        return Heatmap(name, total_traffic.to_dense(), node=site.nproc if nodes > 1 else 0)
    nodes_per_cell = -(-nodes // MAX_HEATMAP_CELLS)
    unit = "node" if nodes_per_cell == 1 else f"block of {nodes_per_cell} nodes"
    return Heatmap(name, total_traffic.aggregated(site.nproc * nodes_per_cell).to_dense(), unit)


def _describe_layout(resolved: ResolvedRun) -> str:
    layout = resolved.layout
    axes = [f"{layout.data_parallel} dp {resolved.dims.dp_size}"]
    for axis in MODEL_PARALLEL_AXES:
        if getattr(layout, axis) > 1:
            is_outer = axis == "pp" and layout.rank_order == "pipeline_outer"
            axes.append(f"{axis} {getattr(layout, axis)}{' (outer)' if is_outer else ''}")
    return f"{resolved.run.model_name}, {', '.join(axes)}"


def _print_placement(facts: dict[str, Any]) -> None:
    console = Terminal(highlight=False, soft_wrap=True)
    nodes = f"{plural(facts['nodes'], 'node')} of {facts['nproc']}"
    console.print(f"{facts['run']}: {facts['ranks']} ranks on {nodes}", style="bold")
    for assumed in facts["site"]["assumed"]:
        console.print(f"assumed: {assumed}", style="dim")
    console.print(f"\nrank r is on node r // {facts['nproc']}, device r mod {facts['nproc']}")
    if facts["numa_nodes"] and None not in facts["numa_nodes"]:
        console.print(f"  NUMA node of device 0, 1, ...: {', '.join(map(str, facts['numa_nodes']))}")
    for node, ranks in enumerate(facts["ranks_by_node"][:MAX_NODES_SHOWN]):
        console.print(f"  node {node}: {ranks}")
    if facts["nodes"] > MAX_NODES_SHOWN:
        console.print(f"  ... and {facts['nodes'] - MAX_NODES_SHOWN} more nodes")
    if not sum(facts["bytes"]["total"].values()):
        console.print("\nthe run has no communication")
    else:
        console.print()
        console.print(_build_link_table(facts))
        console.print(_describe_network_traffic(facts))
        _print_collectives(console, facts)
    console.print()
    for finding in facts["findings"]:
        verdict = Text(f"{finding['verdict']:4} ", STYLES[finding["verdict"]])
        console.print(verdict + finding["message"] + (f"; {finding['fix']}" if finding["fix"] else ""))


def _build_link_table(facts: dict[str, Any]) -> Table:
    """Return a table of bytes by axis and kind of link."""
    table = text_table("bytes per step", numbers=(*LINK_KINDS.values(), "all"))
    for axis, links in facts["bytes"].items():
        cells = [format_bytes(links[link]) if links[link] else "-" for link in LINK_KINDS]
        table.add_row(axis, *cells, format_bytes(sum(links.values())), style="bold" if axis == "total" else "")
    table.add_row("share", *(f"{facts['share_of_all'][link]:.1%}" for link in LINK_KINDS), "")
    return table


def _describe_network_traffic(facts: dict[str, Any]) -> str:
    """Format the share of the spine, and the busiest network device."""
    total = facts["bytes"]["total"]
    if not total["rail"] + total["spine"]:
        return "\nthere is no traffic between nodes"
    busiest = max(facts["nics"], key=lambda nic: max(nic["sent_bytes"], nic["received_bytes"]))
    mean = sum(nic["sent_bytes"] for nic in facts["nics"]) / len(facts["nics"])
    seconds = facts["busiest_nic_seconds"]
    needs = f": at least {seconds:.3g} s" if seconds else ""
    relay = " (less with PXN: see --pxn)" if total["spine"] and not facts["pxn"] else ""
    return (
        f"\ntraffic between nodes: {format_bytes(total['rail'] + total['spine'])}, "
        f"{facts['cross_rail_share_of_network']:.1%} cross rails over the spine{relay}\n"
        f"busiest network device: {busiest['nic']} of node {busiest['node']}, "
        f"sends {format_bytes(busiest['sent_bytes'])}, "
        f"receives {format_bytes(busiest['received_bytes'])}{needs}; the mean sends {format_bytes(mean)}"
    )


def _print_collectives(console: Terminal, facts: dict[str, Any]) -> None:
    """Print the loads and latencies of collectives over all ranks, if their formulas apply."""
    if facts["fabric_loads"]:
        title = f"{format_bytes(BUFFER_BYTES)} over all ranks"
        table = text_table(title, numbers=("network card", "fast links", "by spine", "at least"))
        for name, load in facts["fabric_loads"].items():
            sent = [format_bytes(load[link]) for link in ("nic_bytes", "nvlink_bytes")]
            seconds = format_seconds(load["seconds"]) if load["seconds"] else "-"
            table.add_row(name, *sent, f"{load['spine_share']:.1%}", seconds)
        console.print()
        console.print(table)
    if facts["nccl_latencies"]:
        console.print("\nlatency of a small all-reduce over all ranks, by NCCL's tuning model for Intel hosts:")
    for algorithm, latencies in facts["nccl_latencies"].items():
        latencies_text = ", ".join(f"{protocol} {format_seconds(seconds)}" for protocol, seconds in latencies.items())
        console.print(f"  {algorithm}: {latencies_text}")
