"""`layout = "auto"`: the planner chooses, for commands that need a layout."""

from __future__ import annotations

import sys

from phalanx.spec.errors import UserError
from phalanx.spec.run import RunSpec


def choose_layout(run: RunSpec) -> tuple[RunSpec, str]:
    """The run with the fastest layout whose memory is almost surely enough on the ranks of its cluster, or if none is
    the one with least risk, and what the planner says of the first ten, as JSON. Says on stderr what was taken."""
    import json

    from phalanx.cli.common.progress import search_progress
    from phalanx.cli.views.plan import plan_to_json
    from phalanx.plan.search.explain import plan_or_raise

    described, ranks = run.model_copy(update={"auto_layout": False}), run.cluster.ranks
    with search_progress(ranks) as report:
        plan = plan_or_raise(described, ranks, report=report)
    best = plan.chosen
    seconds = f"{best.step_seconds:.3f} s a step predicted"
    print(f"layout: {best.candidate} (of {plan.considered:,}; {seconds})", file=sys.stderr)
    resolved = described.model_copy(update={"layout": best.candidate.layout()})
    return resolved, json.dumps(plan_to_json(resolved, ranks, plan, top=10, tokens=None), indent=2)


def choose_layout_for(run: RunSpec, ranks: int | None) -> tuple[RunSpec, str]:
    """The same for so many ranks a node.

    Raises UserError where nobody says how many.
    """
    if ranks is None:
        fix = "set cluster.nproc_per_node, or give --nproc"
        raise UserError("layout", "auto", "needs to know how many ranks there are", fix)
    return choose_layout(run.model_copy(update={"cluster": run.cluster.model_copy(update={"nproc_per_node": ranks})}))
