"""Comparison of the traced program with the plan: collectives by group, memory by part, FLOPs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from phalanx.cost.exact.flops import rank_flops
from phalanx.cost.exact.rank_memory import RankMemory, rank_memory
from phalanx.cost.exact.scalar_reductions import scalar_reduction_traffic
from phalanx.cost.exact.traffic import server_loads, traffic_by_group
from phalanx.cost.formulas.collectives import Traffic
from phalanx.plan.predicted_vs_measured import STATE, TEACHER
from phalanx.spec.communication_groups import Group, group_ranks
from phalanx.spec.parallel_dims import pipeline_stage_groups, uses_model_parallelism
from phalanx.spec.parameter_shapes import trained_shapes
from phalanx.spec.resolved_run import ResolvedRun
from phalanx.spec.run import RunSpec
from phalanx.verify.parameter_server_traffic import parameter_server_collectives

MEMORY_TOLERANCE = 0.02
"""Maximum deviation of the peak of memory, relative to the plan."""
SMALL_BYTES = 2**18
SMALL_TOLERANCE = 0.05
"""Maximum relative deviation of the peak in small models, where it may exceed the plan by up to `SMALL_BYTES`.

The plan does not count tensors of a few numbers per row.
"""
FLOPS_TOLERANCE = 0.001
"""Maximum deviation of FLOPs, relative to the plan."""
Kind = Literal["collective", "memory", "flops"]


@dataclass(frozen=True, kw_only=True)
class PlanCheck:
    """A planned quantity of a rank's step, and its traced value."""

    kind: Kind
    quantity: str
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
    explanation: str = ""
    """The cause of a difference, if known."""


def compare_with_plan(resolved: ResolvedRun, traced: dict[str, Any]) -> list[PlanCheck]:
    """Return the checks of one traced rank (`verify.dry_run`)."""
    planned_flops = rank_flops(resolved, traced["rank"])
    agrees = abs(traced["flops"] - planned_flops) <= FLOPS_TOLERANCE * planned_flops
    flops = PlanCheck(
        kind="flops", quantity="step", among="", ranks=1, planned=planned_flops, traced=traced["flops"], agrees=agrees
    )
    return [*_compare_collectives(resolved, traced), *_compare_memory(resolved, traced), flops]


# -- collectives -------------------------------------------------------------------------------------------------------


def _compare_collectives(resolved: ResolvedRun, traced: dict[str, Any]) -> Iterator[PlanCheck]:
    """Yield a check per operation and group. Receives are not compared, because the sender's rank compares them."""
    planned = planned_collectives(resolved, traced["rank"])
    executed = defaultdict[tuple[str, Group], list[dict[str, Any]]](list)
    for row in traced["collectives"]:
        if len(row["group"]) > 1 and row["operation"] != "recv":
            executed[row["operation"], tuple(row["group"])].append(row)
    for key in sorted({*planned, *executed}, key=lambda key: (len(key[1]), key)):
        operation, group = key
        planned_rows = planned.get(key, [])
        planned_bytes = sum(row.bytes for row in planned_rows)
        planned_calls = sum(row.calls for row in planned_rows)
        sent_bytes = sum((row["sent_bytes"] for row in executed[key]), 0.0)
        calls = sum(row["calls"] for row in executed[key])
        agrees = abs(planned_bytes - sent_bytes) <= 1e-9 * max(planned_bytes, sent_bytes) and planned_calls == calls
        yield PlanCheck(
            kind="collective",
            quantity=operation,
            among=", ".join(sorted({row.group_kind for row in planned_rows})) or "?",
            ranks=len(group),
            planned=planned_bytes,
            traced=sent_bytes,
            planned_calls=planned_calls,
            traced_calls=calls,
            agrees=agrees,
            explanation="" if agrees else _explain_difference(resolved.run, operation),
        )


def planned_collectives(resolved: ResolvedRun, rank: int) -> dict[tuple[str, Group], list[Traffic]]:
    """Return the planned traffic of a rank by operation and ranks of the group."""
    sizes = resolved.dims
    rows_by_group = defaultdict[tuple[str, Group], list[Traffic]](list)
    if sizes.servers:
        return parameter_server_collectives(resolved, rank)
    stage = sizes.coordinates(rank)["pp"]
    traffic = list(traffic_by_group(resolved, rank).values())[stage]
    for row in [*traffic, *scalar_reduction_traffic(resolved, stage)]:
        rows_by_group[row.operation, group_ranks(resolved.run, sizes, row.group_kind, rank=rank)].append(row)
    return dict(rows_by_group)


def _explain_difference(run: RunSpec, operation: str) -> str:
    if operation == "all_to_all" and run.optimizer.name == "muon" and uses_model_parallelism(run.layout):
        return "not planned: Muon sends sharded matrices to the rank that computes their update"
    if run.layout.gradient_compression == "powersgd" and operation == "all_reduce":
        return "not planned: PowerSGD sends low-rank matrices for each bucket"
    return ""


# -- memory and FLOPs --------------------------------------------------------------------------------------------------


def _compare_memory(resolved: ResolvedRun, traced: dict[str, Any]) -> Iterator[PlanCheck]:
    """Yield the checks of a rank's memory.

    The plan counts the first rank of each stage, which has the maximum memory; other ranks may have less. Ranks are
    traced as on a CPU, whose kernels save other tensors than CUDA's.
    """
    if resolved.run.cluster.uses_cuda:
        resolved = replace(resolved, run=resolved.run.on_device("cpu"))
    planned, is_fullest = _find_planned_memory(resolved, traced["rank"])
    for part in (*STATE, TEACHER, "total"):
        planned_bytes = getattr(planned, part)
        traced_bytes = traced["peak_bytes" if part == "total" else "held_bytes"].get(part, 0)
        tolerance = 0.0
        if part == "total":
            # Ranks are traced as on a CPU, where offloaded tensors are in the same memory.
            planned_bytes += planned.offloaded
            tolerance = max(MEMORY_TOLERANCE * planned_bytes, min(SMALL_BYTES, SMALL_TOLERANCE * planned_bytes))
        is_at_most = traced_bytes <= planned_bytes + tolerance
        is_at_least = traced_bytes >= planned_bytes - tolerance
        is_smaller = not is_fullest and traced_bytes < planned_bytes
        if planned_bytes or traced_bytes:
            yield PlanCheck(
                kind="memory",
                quantity=part,
                among="",
                ranks=1,
                planned=planned_bytes,
                traced=traced_bytes,
                agrees=is_at_most and (is_at_least or not is_fullest),
                explanation="smaller than the plan, which is for the rank that needs the most" if is_smaller else "",
            )


def _find_planned_memory(resolved: ResolvedRun, rank: int) -> tuple[RankMemory, bool]:
    """Return the planned memory of a rank's role, and whether no rank of the role needs more."""
    sizes = resolved.dims
    role_memories = list(rank_memory(resolved).values())
    stage = sizes.coordinates(rank)["pp"]
    if not sizes.servers:
        return role_memories[stage], rank == pipeline_stage_groups(sizes)[stage][0]
    loads = [*server_loads(trained_shapes(resolved.run.model), sizes.servers), 0]
    is_fullest = loads[min(rank, sizes.servers)] in (0, max(loads))
    return role_memories[rank >= sizes.servers], is_fullest
