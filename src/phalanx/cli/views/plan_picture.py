"""Picture of an explained layout: `phalanx plan explain RUN.toml K --picture FILE`."""

from __future__ import annotations

from phalanx.cli.views.plan_notes import describe_setup
from phalanx.plan.search.explain import PART_DESCRIPTIONS
from phalanx.plan.search.result import Plan
from phalanx.report.drawing.step_breakdown import Bar, Breakdown
from phalanx.spec.run import RunSpec

MAX_OTHER_LAYOUTS = 4
"""Number of layouts in a picture in addition to the explained one."""


def breakdown(run: RunSpec, world_size: int, plan: Plan, index: int) -> Breakdown:
    """Return the picture of a layout's explanation.

    Args:
        run: Run with the model, the batch and the cluster.
        world_size: Number of ranks.
        plan: Result of the search.
        index: Index of the layout in `plan.layouts`.
    """
    option = plan.layouts[index]
    all_other_indices = [other_index for other_index in range(len(plan.layouts)) if other_index != index]
    other_indices = all_other_indices[:MAX_OTHER_LAYOUTS]
    stages = {f"{name} stage": parts for name, parts in option.stages.items()}
    if option.candidate.pp == 1:
        stages = {"every rank": option.stages["last"]}
    return Breakdown(
        title=f"{describe_setup(run, world_size)}, layout {index + 1}",
        layout=str(option.candidate),
        meaning=PART_DESCRIPTIONS,
        seconds=option.parts,
        other_layouts={
            other_index + 1: Bar(str(plan.layouts[other_index].candidate), plan.layouts[other_index].parts)
            for other_index in other_indices
        },
        bytes=[Bar(name, parts) for name, parts in stages.items()],
        counted_bytes=option.memory_bytes,
        memory_bytes=float(run.cluster.rank_memory_bytes or 0),
    )
