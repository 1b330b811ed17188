"""Comparison of predicted and measured memory and traffic of one step of a run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from phalanx.cost.exact.rank_memory import rank_memory
from phalanx.cost.exact.traffic import traffic_by_role
from phalanx.cost.formulas.collectives import Traffic
from phalanx.spec.parallel_dims import pipeline_stage_groups, uses_model_parallelism
from phalanx.spec.resolved_run import ResolvedRun

STATE = ("parameters", "gradients", "optimizer", "offloaded")
PARTS = (*STATE, "activations", "communication")
WORKING = (*STATE, "working")
"""Parts that are comparable with model parallelism.

Received activations are measured as communication, so only the sum of activations and communication is comparable.
"""
TEACHER = "teacher"
"""Weights of the teacher of a run with distillation, which other runs do not show."""
TOTAL = "total"
"""Peak of the sum, which is less than the sum of the peaks, because parts peak at different times."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One predicted quantity and its measurement; None if unknown."""

    role: str
    """Ranks or rounds of the quantity; "" for the full run."""
    quantity: str
    unit: str
    predicted: float | None
    measured: float | None
    interval: tuple[float, float] | None = None
    """Range in which the measurement is expected."""

    @property
    def ratio(self) -> float | None:
        """Measured / predicted."""
        return self.measured / self.predicted if self.predicted and self.measured is not None else None

    def to_json(self) -> dict[str, Any]:
        """Return the row that files of a run directory contain."""
        return {"role": self.role, "quantity": self.quantity, "predicted": self.predicted, "measured": self.measured}


def compare_with_prediction(resolved: ResolvedRun, measured: Mapping[int, dict[str, Any]]) -> list[Comparison]:
    """Compare memory by part and traffic by operation, in bytes, for the fullest rank of each role.

    Parameters, gradients and optimizer state count between the backward pass and the update, other parts at their peak.
    """
    run = resolved.run
    memory = rank_memory(resolved)
    is_model_parallel = uses_model_parallelism(run.layout)
    traffic = traffic_by_role(resolved)
    rows = []

    def add(role: str, quantity: str, predicted: float, measured: float) -> None:
        rows.append(Comparison(role=role, quantity=quantity, unit="B", predicted=predicted, measured=measured))

    for role, predicted in memory.items():
        ranks = [measured[rank] for rank in ranks_in_role(role, resolved) if rank in measured]
        if not ranks:
            continue
        for part in WORKING if is_model_parallel else PARTS:
            measurement = "held_bytes" if part in STATE else "peak_bytes"
            add(role, part, getattr(predicted, part), max(rank[measurement].get(part, 0) for rank in ranks))
        if predicted.teacher:
            add(role, TEACHER, predicted.teacher, max(rank["held_bytes"].get(TEACHER, 0) for rank in ranks))
        add(role, TOTAL, predicted.total, max(rank["peak_bytes"]["total"] for rank in ranks))
        # PowerSGD sends from callbacks in other threads, which are not recorded.
        predicted_bytes = (
            {} if run.layout.gradient_compression == "powersgd" else bytes_by_operation(traffic.get(role, []))
        )
        for operation, size in predicted_bytes.items():
            sent_bytes = max(bytes_sent_by_operation(rank["collectives"], operation) for rank in ranks)
            add(role, operation, round(size), round(sent_bytes))
    return rows


def ranks_in_role(role: str, resolved: ResolvedRun) -> list[int]:
    """Return the ranks in a role of `rank_memory`."""
    servers = resolved.dims.servers
    match role:
        case "rank" | "worker":
            return list(range(servers, resolved.world_size))
        case "server":
            return list(range(servers))
        case _:
            stage = int(role.removeprefix("pp"))
            return list(pipeline_stage_groups(resolved.dims)[stage])


def bytes_by_operation(traffic: list[Traffic]) -> dict[str, float]:
    """Return the total bytes per operation."""
    total: dict[str, float] = defaultdict(float)
    for row in traffic:
        total[row.operation] += row.bytes
    return total


def bytes_sent_by_operation(collectives: list[dict[str, Any]], operation: str) -> float:
    """Return the bytes that a rank sent, or received, with an operation."""
    field = "bytes" if operation == "recv" else "sent_bytes"
    return sum(float(row[field]) for row in collectives if row["operation"] == operation)
