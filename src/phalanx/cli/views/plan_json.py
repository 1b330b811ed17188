"""Output of `phalanx plan --json`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from phalanx.cli.views.plan_notes import list_assumptions, training_to_json
from phalanx.plan.search.faster_layout import find_faster_layout
from phalanx.plan.search.oom_risk import node_host_bytes, safe_capacity_bytes
from phalanx.plan.search.phases import largest_phase, phase_costs
from phalanx.plan.search.result import Plan
from phalanx.plan.tables.machine_columns import host_memory
from phalanx.plan.training_cost import estimate_training_cost
from phalanx.spec.resolved_run import ResolvedRun


def plan_to_json(resolved: ResolvedRun, plan: Plan, top: int, tokens: float | None) -> dict[str, Any]:
    """Return the output of `phalanx plan --json` with the `top` first layouts; the plan has at least one.

    `tokens` are those of a full training; None for those of the run.
    """
    whole = resolved
    resolved = largest_phase(resolved)
    run = resolved.run
    faster = find_faster_layout(resolved, plan)
    front = plan.pareto_front
    return {
        "trainer": "Phalanx",
        "model": run.model.source_name,
        "devices": resolved.world_size,
        **training_to_json(run),
        "measured": run.cluster.calibration.identified_constants if run.cluster.calibration else [],
        "assumed": list_assumptions(resolved, plan.layouts[:top]),
        "rank_limit_bytes": safe_capacity_bytes(run.cluster),
        "node_host_memory_bytes": node_host_bytes(run.cluster, host_memory(run.cluster)),
        "considered": plan.searched,
        "fitting": plan.fitting,
        "layouts": [
            {
                **layout.to_json(),
                "on_front": layout in front,
                "node_host_bytes": node_host_bytes(run.cluster, layout.host_bytes),
            }
            for layout in plan.layouts[:top]
        ],
        "faster_but_too_large": faster and {**asdict(faster), "option": faster.option.to_json()},
        "taken": str(plan.best.candidate),
        **_training_to_json(whole, plan, tokens),
    }


def _training_to_json(resolved: ResolvedRun, plan: Plan, tokens: float | None) -> dict[str, Any]:
    """Return the cost of a full training, if its length is known, or of each phase under the layout that is taken."""
    if resolved.run.training.epochs is not None and tokens is None:
        return {"training": None}
    if not resolved.run.phase:
        return {"training": asdict(estimate_training_cost(resolved, plan.layouts[0], tokens))}
    phases = [
        {
            "phase": cost.phase.number,
            "first_step": cost.phase.first_step,
            "steps": cost.phase.steps,
            "tokens_per_step": cost.phase.run.training.tokens_per_step,
            "sequence": cost.phase.run.training.seq_len,
            "step_seconds": cost.layout.step_seconds,
            "memory_bytes": cost.layout.memory_bytes,
            "p_oom": cost.layout.p_oom,
            "seconds": cost.seconds,
        }
        for cost in phase_costs(resolved, plan.best.layout)
    ]
    return {"phases": phases}
