"""Layout selection by the planner for `layout = "auto"`, for commands that need a layout."""

from __future__ import annotations

import sys

from phalanx.spec.errors import UserError
from phalanx.spec.layout import Layout
from phalanx.spec.resolved_run import ResolvedRun
from phalanx.spec.run import RunSpec


def choose_layout(run: RunSpec) -> tuple[RunSpec, str]:
    """Return the run with the planner's layout, and the planner's report on the first ten as JSON.

    The layout is the fastest whose memory is almost certainly sufficient on the cluster's ranks, or else the one with
    the least risk. Prints the selection to stderr.
    """
    import json

    from phalanx.cli.common.progress import search_progress
    from phalanx.cli.views.plan_json import plan_to_json
    from phalanx.plan.search.explain import plan_or_raise
    from phalanx.plan.search.phases import layout_of_run

    resolved = ResolvedRun.on_cluster(run.replace(auto_layout=False))
    with search_progress(resolved.world_size) as report:
        plan = plan_or_raise(resolved, report=report)
    best = plan.best
    seconds = f"{best.step_seconds:.3f} s a step predicted"
    print(f"layout: {best.candidate} (of {plan.searched:,}; {seconds})", file=sys.stderr)
    layout = layout_of_run(resolved.run, best.candidate.layout())
    resolved = ResolvedRun.on_cluster(resolved.run.replace(layout=layout))
    return resolved.run, json.dumps(plan_to_json(resolved, plan, top=10, tokens=None), indent=2)


def choose_layout_for(run: RunSpec, ranks: int | None) -> tuple[RunSpec, str]:
    """Return the run with the planner's layout for `ranks` ranks per node, as `choose_layout` does.

    Raises UserError if the number of ranks is unknown.
    """
    if ranks is None:
        fix = "set cluster.nproc_per_node, or add --nproc"
        raise UserError("layout", "auto", "requires the number of ranks", fix=fix)
    return choose_layout(run.replace(cluster=run.cluster.replace(nproc_per_node=ranks)))


def replan_layout(run: RunSpec, nproc: int | None, ranks: int) -> Layout:
    """Return the planner's layout for other ranks than the run file's; `nproc` is None if all are on this node.

    For a machine without a description the planner uses the run's measurements; before there are any, the layout of
    the run's directory stays. A node's own layout may have another automatic recomputation, and ranks would then
    hang. Raises UserError if no layout fits.
    """
    from phalanx.cost.exact.layout_checks import check_layout
    from phalanx.plan.search.candidates import known_precisions
    from phalanx.report.run_data import read_run
    from phalanx.runs.create import RUN_FILE, run_directory
    from phalanx.spec.files.load import load_run

    per_node = nproc or ranks
    directory = run_directory(run)
    recorded_run = read_run(directory).run
    run = load_run(directory / RUN_FILE, environment={})
    cluster = (recorded_run or run).cluster.replace(nproc_per_node=per_node, nodes=ranks // per_node)
    speeds = [cluster.peak_flops, cluster.memory_bytes, cluster.hbm_bytes_per_second]
    if ranks > cluster.fast_link_domain_size:
        speeds.append(cluster.network_bytes_per_second)
    if None in speeds:
        check_layout(ResolvedRun(run, ranks))
        return run.layout
    training = run.training
    if training.precision not in known_precisions(cluster):
        # The planner knows bf16 on any machine.
        training = training.replace(precision="bf16")
    return choose_layout(run.replace(cluster=cluster, training=training))[0].layout
