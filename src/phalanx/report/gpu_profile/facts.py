"""Facts of the GPUs in a profiled step, and their table."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from phalanx.report.run_data import RunData
from phalanx.spec.formatting import UNKNOWN, format_percent, format_seconds

Facts = dict[str, Any]
MAX_RANKS_SHOWN = 8
"""Maximum number of ranks in the table: those with the longest compute time."""
TIMES = {
    "seconds": "step",
    "compute_seconds": "compute",
    "exposed_communication_seconds": "exposed communication",
    "exposed_memory_seconds": "exposed memcpy and memset",
    "idle_seconds": "idle",
    "late_launch_seconds": "  of it late launches",
}
"""Rows of times: the step, the parts that add up to it, and a part of the idle time."""
FAMILY_NAMES = {
    "matmul": "matrix products",
    "attention": "attention",
    "elementwise": "norms and elementwise",
    "optimizer": "optimizer",
    "nccl": "NCCL",
    "memory": "copies",
    "other": "other",
}
UNDESCRIBED = "undefined"
"""PyTorch's description of a group without one."""
TABLE_NOTE = (
    "Times of the GPU under torch.profiler. A step is compute, exposed communication, exposed memcpy and memset, and "
    "idle time. Times of kernels are sums over streams, with the number of kernels."
)
"""Explanation of the table."""


def gpu_facts(run_data: RunData) -> Facts | None:
    """Return the figures of each GPU (`GpuProfile`) in the last step with a trace; None without traces."""
    steps = [line["step"] for record in run_data.ranks.values() for line in record.steps if "gpu" in line]
    if not steps:
        return None
    last_step = max(steps)
    ranks = [
        {"rank": rank, **line["gpu"]}
        for rank, record in sorted(run_data.ranks.items())
        for line in record.steps
        if line["step"] == last_step and "gpu" in line
    ]
    return {"step": last_step, "ranks": ranks}


def table_title(gpu: Mapping[str, Any]) -> str:
    """Return the title of the table."""
    ranks = gpu["ranks"]
    selection_note = (
        f", the {MAX_RANKS_SHOWN} of {len(ranks)} that compute longest" if len(ranks) > MAX_RANKS_SHOWN else ""
    )
    return f"times of the GPUs in step {gpu['step']}{selection_note}"


def table_rows(gpu: Mapping[str, Any]) -> list[list[str]]:
    """Return the rows of the table with a column per rank; the first row is the header."""
    longest = sorted(gpu["ranks"], key=lambda rank: -rank["compute_seconds"])[:MAX_RANKS_SHOWN]
    ranks = sorted(longest, key=lambda rank: int(rank["rank"]))
    rows = [["", *(f"rank {rank['rank']}" for rank in ranks)]]
    rows += [[name, *(_format_share(rank[key], rank["seconds"]) for rank in ranks)] for key, name in TIMES.items()]
    # Ranks give the groups of one mesh axis different names and the same description; these groups are added.
    exposed: list[dict[str, float]] = []
    for rank in ranks:
        seconds: dict[str, float] = defaultdict(float)
        for group in rank["groups"]:
            seconds[_describe_group(group)] += group["exposed_seconds"]
        exposed.append(seconds)
    for group in dict.fromkeys(group for groups in exposed for group in groups):
        cells = [_format_share(groups.get(group), rank["seconds"]) for groups, rank in zip(exposed, ranks, strict=True)]
        rows.append([f"exposed communication of {group}", *cells])
    for family, name in FAMILY_NAMES.items():
        sums = [rank["families"].get(family) for rank in ranks]
        if any(sums):
            cells = [
                f"{format_seconds(total['seconds'])}  {total['count']:,} x" if total else UNKNOWN for total in sums
            ]
            rows.append([f"kernels: {name}", *cells])
    return rows


def _describe_group(group: Mapping[str, Any]) -> str:
    if group["description"] not in ("", UNDESCRIBED):
        return str(group["description"])
    return f"group {group['group']}" if group["group"] else "unknown groups"


def _format_share(seconds: float | None, step_seconds: float) -> str:
    return UNKNOWN if seconds is None else f"{format_seconds(seconds)}  {format_percent(seconds / step_seconds)}"
