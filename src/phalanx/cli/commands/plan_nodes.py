"""`phalanx plan --nodes MIN:MAX`: the best layout on each number of nodes."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from phalanx.cli.common.progress import search_progress
from phalanx.spec.errors import UserError

if TYPE_CHECKING:
    from phalanx.spec.resolved_run import ResolvedRun

    LoadRun = Callable[[int | None], ResolvedRun]
    """Return the run on a number of nodes."""

MAX_NODE_COUNTS = 16
"""Maximum number of node counts that are all planned; of more, the minimum, its doublings and the maximum."""


def parse_node_counts(text: str | None) -> list[int | None]:
    """Return the numbers of nodes to plan for: of "4" or "2:4"; [None] if the option is not given."""
    if text is None:
        return [None]
    from phalanx.launch.jobs.job import parse_nodes

    min_nodes, max_nodes = parse_nodes(text)
    if max_nodes - min_nodes < MAX_NODE_COUNTS:
        return list(range(min_nodes, max_nodes + 1))
    doublings = [min_nodes << power for power in range(max_nodes.bit_length()) if min_nodes << power < max_nodes]
    return [*doublings, max_nodes]


def show_node_counts(load: LoadRun, counts: Sequence[int | None], as_json: bool) -> None:
    """Print the best layout on each number of nodes. Raises UserError if none fits on any."""
    from phalanx.cli.views.plan_nodes import NodeCount, node_counts_to_json, print_node_counts
    from phalanx.plan.search.explain import plan_or_raise

    loaded = [load(nodes) for nodes in counts]
    planned = []
    error = None
    for resolved in loaded:
        num_nodes = resolved.run.cluster.nodes
        ranks = resolved.world_size
        try:
            with search_progress(ranks) as report:
                planned.append(NodeCount(num_nodes, ranks, plan_or_raise(resolved, report=report).best))
        except UserError as caught:
            error = caught
            planned.append(NodeCount(num_nodes, ranks, problem=f"{caught.field} {caught.problem}"))
    if error is not None and not any(count.best for count in planned):
        raise error
    run = loaded[0].run
    if as_json:
        print(json.dumps(node_counts_to_json(run, planned), indent=2))
    else:
        print_node_counts(run, planned)
