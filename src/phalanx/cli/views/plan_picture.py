"""Picture of an explained layout: `phalanx plan explain RUN.toml K --picture FILE`."""

from __future__ import annotations

from phalanx.cli.views.plan_notes import describe_setup
from phalanx.plan.search.explain import PART_DESCRIPTIONS
from phalanx.plan.search.result import Plan
from phalanx.report.drawing.step_breakdown import Bar, Breakdown
from phalanx.spec.resolved_run import ResolvedRun

MAX_OTHER_LAYOUTS = 4
"""Number of layouts in a picture in addition to the explained one."""


def breakdown(resolved: ResolvedRun, plan: Plan, index: int) -> Breakdown:
    """Return the picture of the explanation of `plan.layouts[index]`."""
    layout = plan.layouts[index]
    others = [(number, other) for number, other in enumerate(plan.layouts, 1) if number != index + 1]
    stages = {f"{name} stage": parts for name, parts in layout.stages.items()}
    if layout.candidate.pp == 1:
        stages = {"every rank": layout.stages["last"]}
    return Breakdown(
        title=f"{describe_setup(resolved)}, layout {index + 1}",
        layout=str(layout.candidate),
        meaning=PART_DESCRIPTIONS,
        seconds=layout.parts,
        other_layouts={number: Bar(str(other.candidate), other.parts) for number, other in others[:MAX_OTHER_LAYOUTS]},
        bytes=[Bar(name, parts) for name, parts in stages.items()],
        counted_bytes=layout.memory_bytes,
        memory_bytes=float(resolved.run.cluster.rank_memory_bytes or 0),
    )
