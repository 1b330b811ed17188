"""Comparison of the traced program with the plan: collectives by group, memory by part, FLOPs."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any, Literal

from phalanx.cost.exact.flops import rank_flops
from phalanx.cost.exact.parameter_shapes import parameter_shapes
from phalanx.cost.exact.rank_memory import rank_memory
from phalanx.cost.exact.scalar_reductions import scalar_reduction_traffic
from phalanx.cost.exact.traffic import server_loads, traffic_by_group
from phalanx.cost.formulas.collectives import Traffic
from phalanx.plan.predicted_vs_measured import STATE
from phalanx.spec.communication_groups import Group, group_ranks
from phalanx.spec.parallel_dims import parallel_dims, pipeline_stage_groups, uses_model_parallelism
from phalanx.spec.run import RunSpec
from phalanx.verify.parameter_server_traffic import parameter_server_collectives

RELATIVE_TOLERANCE = 0.05
"""Maximum deviation of memory and FLOPs, relative to the plan."""
Kind = Literal["collective", "memory", "flops"]


@dataclass(frozen=True)
class PlanCheck:
    """A planned quantity of a rank's step, and its traced value."""

    kind: Kind
    what: str
    """An operation of torch.distributed, a part of memory, or FLOPs."""
    among: str
    """The group of the operation: its axes, or other shared property (`GroupKind`)."""
    ranks: int
    """Number of ranks of the group."""
    planned: float
    """Bytes that a rank sends or has in memory, or FLOPs."""
    traced: float
    planned_calls: int = 0
    traced_calls: int = 0
    agrees: bool = True
    why: str = ""
    """The cause of a difference, if known."""


def compare_with_plan(run: RunSpec, world_size: int, traced: dict[str, Any]) -> list[PlanCheck]:
    """Return the checks of one traced rank (`verify.dry_run`).

    Args:
        run: Run of the plan.
        world_size: Number of ranks.
        traced: Trace of the rank.
    """
    return [
        *_compare_collectives(run, world_size, traced),
        *_compare_memory(run, world_size, traced),
        _compare_flops(run, world_size, traced),
    ]


# -- collectives -------------------------------------------------------------------------------------------------------


def _compare_collectives(run: RunSpec, world_size: int, traced: dict[str, Any]) -> list[PlanCheck]:
    planned = planned_collectives(run, world_size, traced["rank"])
    executed: dict[tuple[str, Group], tuple[float, int]] = {}
    for row in traced["collectives"]:
        if len(row["group"]) > 1 and row["operation"] != "recv":  # what one receives another sends
            key = row["operation"], tuple(row["group"])
            size, calls = executed.get(key, (0.0, 0))
            executed[key] = size + row["sent_bytes"], calls + row["calls"]
    lines = []
    for key in sorted({*planned, *executed}, key=lambda key: (len(key[1]), key)):
        operation, group = key
        rows = planned.get(key, [])
        (size, calls) = executed.get(key, (0.0, 0))
        expected = sum(row.bytes for row in rows)
        expected_calls = sum(row.calls for row in rows)
        agrees = abs(expected - size) <= 1e-9 * max(expected, size) and expected_calls == calls
        names = ", ".join(sorted({row.group_kind for row in rows})) or "?"
        explanation = "" if agrees else _explain_difference(run, operation)
        lines.append(
            PlanCheck(
                "collective",
                operation,
                names,
                ranks=len(group),
                planned=expected,
                traced=size,
                planned_calls=expected_calls,
                traced_calls=calls,
                agrees=agrees,
                why=explanation,
            )
        )
    return lines


def planned_collectives(run: RunSpec, world_size: int, rank: int) -> dict[tuple[str, Group], list[Traffic]]:
    """Return the planned traffic of a rank by operation and ranks of the group.

    Args:
        run: Run of the plan.
        world_size: Number of ranks.
        rank: Rank whose traffic is planned.
    """
    sizes = parallel_dims(run.layout, world_size)
    rows_by_group = defaultdict[tuple[str, Group], list[Traffic]](list)
    if sizes.servers:
        return parameter_server_collectives(run, world_size, rank)
    stage = sizes.coordinates(rank)["pp"]
    traffic = list(traffic_by_group(run, world_size, rank).values())[stage]
    for row in [*traffic, *scalar_reduction_traffic(run, world_size, stage)]:
        rows_by_group[row.operation, group_ranks(run, sizes, row.group_kind, rank=rank)].append(row)
    return dict(rows_by_group)


def _explain_difference(run: RunSpec, operation: str) -> str:
    if operation == "all_to_all" and run.optimizer.name == "muon" and uses_model_parallelism(run.layout):
        return "not planned: Muon sends sharded matrices to the rank that computes their update"
    if run.layout.gradient_compression == "powersgd" and operation == "all_reduce":
        return "not planned: PowerSGD sends low-rank matrices for each bucket"
    return ""


# -- memory and FLOPs --------------------------------------------------------------------------------------------------


def _compare_memory(run: RunSpec, world_size: int, traced: dict[str, Any]) -> list[PlanCheck]:
    """Return the checks of a rank's memory.

    The plan is that of the first rank of each stage, which has the maximum memory; others may have less. Ranks are
    traced as on a CPU, whose kernels save other tensors than CUDA's."""
    if run.cluster.uses_cuda:
        run = run.on_device("cpu")
    sizes = parallel_dims(run.layout, world_size)
    rank = traced["rank"]
    stage_memory = list(rank_memory(run, world_size).values())
    stage = sizes.coordinates(rank)["pp"]
    planned = stage_memory[stage]
    is_fullest = rank == pipeline_stage_groups(sizes)[stage][0]
    if sizes.servers:
        loads = [*server_loads(parameter_shapes(run.model), sizes.servers), 0]
        planned = stage_memory[rank >= sizes.servers]
        is_fullest = loads[min(rank, sizes.servers)] in (0, max(loads))
    lines = []
    for part in (*STATE, "total"):
        kind = "peak_bytes" if part == "total" else "held_bytes"
        expected = getattr(planned, part)
        actual = traced[kind].get(part, 0)
        expected += planned.offloaded if part == "total" else 0  # ranks are traced as on a CPU, whose memory is one
        tolerance = RELATIVE_TOLERANCE if part == "total" else 0.0
        agrees = actual <= (1 + tolerance) * expected and (actual >= (1 - tolerance) * expected or not is_fullest)
        explanation = (
            ""
            if is_fullest or actual >= expected
            else "smaller than the plan, which is for the rank that needs the most"
        )
        if expected or actual:
            lines.append(
                PlanCheck("memory", part, "", ranks=1, planned=expected, traced=actual, agrees=agrees, why=explanation)
            )
    return lines


def _compare_flops(run: RunSpec, world_size: int, traced: dict[str, Any]) -> PlanCheck:
    expected = rank_flops(run, world_size, traced["rank"])
    actual = traced["flops"]
    return PlanCheck(
        "flops",
        "step",
        "",
        ranks=1,
        planned=expected,
        traced=actual,
        agrees=abs(actual - expected) <= RELATIVE_TOLERANCE * expected,
    )
