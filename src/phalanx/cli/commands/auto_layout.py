"""`layout = "auto"`: the planner chooses, for commands that need a layout."""

from __future__ import annotations

import sys

from phalanx.spec.errors import UserError
from phalanx.spec.layout import Layout
from phalanx.spec.run import RunSpec


def choose_layout(run: RunSpec) -> tuple[RunSpec, str]:
    """The run with the fastest layout whose memory is almost surely enough on the ranks of its cluster, or if none is
    the one with least risk, and what the planner says of the first ten, as JSON. Says on stderr what was taken."""
    import json

    from phalanx.cli.common.progress import search_progress
    from phalanx.cli.views.plan import plan_to_json
    from phalanx.plan.search.explain import plan_or_raise

    described = run.model_copy(update={"auto_layout": False})
    ranks = run.cluster.ranks
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
        raise UserError("layout", "auto", "needs to know how many ranks there are", fix=fix)
    return choose_layout(run.model_copy(update={"cluster": run.cluster.model_copy(update={"nproc_per_node": ranks})}))


def replan_layout(run: RunSpec, nproc: int | None, ranks: int) -> Layout:
    """Return the planner's layout for other ranks than a run was meant for, `nproc` of them a node (None: all on this
    one). Of a machine that is not described it uses what the run measured; before that, the run's own layout stays.

    Raises UserError where no layout fits.
    """
    from phalanx.cost.exact.layout_checks import check_layout
    from phalanx.plan.search.candidates import known_precisions
    from phalanx.report.run_data import read_run
    from phalanx.runs.create import run_directory

    per_node = nproc or ranks
    recorded_run = read_run(run_directory(run)).run
    cluster = (recorded_run or run).cluster.model_copy(update={"nproc_per_node": per_node, "nodes": ranks // per_node})
    speeds = [cluster.peak_flops, cluster.memory_bytes, cluster.hbm_bytes_per_second]
    if ranks > cluster.fast_link_domain_size:
        speeds.append(cluster.network_bytes_per_second)
    if None in speeds:
        check_layout(run, ranks)
        return run.layout
    training = run.training
    if training.precision not in known_precisions(cluster):  # what the planner knows of any machine
        training = training.model_copy(update={"precision": "bf16"})
    return choose_layout(run.model_copy(update={"cluster": cluster, "training": training}))[0].layout
