"""Plan a run from Python: search, predict, memory and traffic. No torch."""

from __future__ import annotations

from collections.abc import Callable

from phalanx.cost.exact.rank_memory import RankMemory, rank_memory
from phalanx.cost.exact.traffic import traffic_by_role
from phalanx.cost.formulas.collectives import Traffic
from phalanx.plan.search.candidates import CandidateLayout
from phalanx.plan.search.evaluate import evaluate_layout, evaluate_layout_text
from phalanx.plan.search.explain import plan_or_raise
from phalanx.plan.search.result import EvaluatedLayout, Plan
from phalanx.plan.search.search import ProgressCallback
from phalanx.spec.base import divisors
from phalanx.spec.cluster import DEFAULT_DEVICES_PER_NODE
from phalanx.spec.errors import UserError
from phalanx.spec.layout import Layout
from phalanx.spec.resolved_run import ResolvedRun
from phalanx.spec.run import RunSpec


def plan_run(
    run: RunSpec,
    world_size: int,
    *,
    top: int = 20,
    where: Callable[[CandidateLayout], bool] = lambda _: True,
    progress: ProgressCallback = lambda *_: None,
) -> Plan:
    """Search for the fastest layouts of a run that fit in memory, as `phalanx plan` does.

    The search takes seconds, and neither a GPU nor torch.

    Args:
        run: The run. Its `cluster` describes the machine, such as `load_run(..., machine="h100")`. Its `layout` is
            ignored, except for `offload_directory` and the choices that no prediction depends on.
        world_size: The number of ranks. Nodes have `cluster.nproc_per_node` ranks, by default up to 8.
        top: The number of layouts to return.
        where: Keep only the layouts for which this returns True. The argument has the fields `data_parallel`, `dp`,
            `tp`, `pp`, `cp`, `ep`, `micro_batch_size`, `schedule` and the others of `CandidateLayout`.
        progress: Called with the name of the phase, the number done and the total.

    Returns:
        The layouts in order of preference: by step time, and among steps within 5 % the simplest layout first.

    Raises:
        UserError: No layout fits, with what would fit; or a speed of the machine is unknown.

    Example:
        >>> run = phalanx.run_from_table({"model": {"preset": "llama3-8b"}, "cluster": {"preset": "h100"},
        ...                               "training": {"seq_len": 8192, "tokens_per_step": 1048576}})
        >>> plan = phalanx.plan_run(run, world_size=8, top=3)
        >>> len(plan.layouts), plan.best.p_oom < 0.05
        (3, True)
        >>> plan = phalanx.plan_run(run, world_size=8, top=3, where=lambda layout: layout.tp == 4)
        >>> {layout.candidate.tp for layout in plan.layouts}
        {4}
    """
    placed = place_on_nodes(run, world_size).replace(auto_layout=False)
    return plan_or_raise(ResolvedRun(placed, world_size), top, report=progress, is_wanted=where)


def predict(run: RunSpec, world_size: int, layout: Layout | str | None = None) -> EvaluatedLayout:
    """Predict the step time, the memory and the OOM risk of one layout.

    Args:
        run: The run, with the machine in its `cluster`.
        world_size: The number of ranks.
        layout: A layout, or its text such as "tp=4,pp=2,data_parallel=zero1" or a row of `phalanx plan`. By default the
            layout of the run.

    Returns:
        The layout with its step time (seconds, with the interval of 80 of 100 steps), memory (bytes) and MFU.

    Raises:
        UserError: The layout cannot run on `world_size` ranks, or the planner does not know it.

    Example:
        >>> run = phalanx.run_from_table({"model": {"preset": "llama3-8b"}, "cluster": {"preset": "h100"}})
        >>> ddp, zero3 = (phalanx.predict(run, 8, f"data_parallel={name}") for name in ("ddp", "zero3"))
        >>> zero3.memory_bytes < ddp.memory_bytes
        True
        >>> ddp.low_seconds < ddp.step_seconds < ddp.high_seconds
        True
    """
    placed = place_on_nodes(run, world_size)
    if isinstance(layout, str):
        return evaluate_layout_text(ResolvedRun(placed, world_size), layout)
    return evaluate_layout(ResolvedRun(placed, world_size), layout or run.layout)


def memory(run: RunSpec, world_size: int) -> dict[str, RankMemory]:
    """Count the bytes that each rank of a run allocates under its layout, tensor by tensor.

    Args:
        run: The run.
        world_size: The number of ranks.

    Returns:
        The fullest rank of each role: "rank"; in a pipeline "pp0", "pp1" and so on; with a parameter server "server"
        and "worker". `total` is the peak in bytes. Parts peak at different times and do not add up to it.

    Raises:
        UserError: The layout cannot run on `world_size` ranks.

    Example:
        >>> run = phalanx.load_run("run.toml", ["layout.data_parallel=zero1"])
        >>> two, four = (phalanx.memory(run, world_size)["rank"] for world_size in (2, 4))
        >>> two.parameters == four.parameters, round(two.optimizer / four.optimizer, 1)
        (True, 2.0)
    """
    return rank_memory(ResolvedRun(place_on_nodes(run, world_size), world_size))


def traffic(run: RunSpec, world_size: int) -> dict[str, list[Traffic]]:
    """Count the bytes that each rank of a run sends in one optimizer step, per collective operation.

    Args:
        run: The run.
        world_size: The number of ranks.

    Returns:
        A list per role, with the roles of `memory`. `bytes` is the number of bytes that a rank sends in a step,
        `calls` the number of calls.

    Raises:
        UserError: The layout cannot run on `world_size` ranks.

    Example:
        >>> run = phalanx.load_run("run.toml", ["layout.data_parallel=zero1"])
        >>> sorted({row.operation for row in phalanx.traffic(run, 2)["rank"]})
        ['all_gather', 'reduce_scatter']
    """
    return traffic_by_role(ResolvedRun(place_on_nodes(run, world_size), world_size))


def place_on_nodes(run: RunSpec, world_size: int) -> RunSpec:
    """Return the run with the nodes that `world_size` ranks fill.

    A node has `cluster.nproc_per_node` ranks. Without it the ranks are divided over `cluster.nodes`; if that is 1, GPUs
    are put on nodes of up to 8, and CPU ranks on one node.

    Raises UserError if the ranks do not fill the nodes.
    """
    cluster = run.cluster
    if cluster.nproc_per_node:
        per_node = min(cluster.nproc_per_node, world_size)
    elif cluster.nodes > 1 and world_size % cluster.nodes == 0:
        per_node = world_size // cluster.nodes
    elif cluster.cores is not None:
        per_node = world_size
    else:
        per_node = max(size for size in divisors(world_size) if size <= DEFAULT_DEVICES_PER_NODE)
    if world_size % per_node:
        fix = f"use a multiple of cluster.nproc_per_node ({per_node})"
        raise UserError("world_size", world_size, "does not fill its nodes", fix=fix)
    changes = {"nodes": world_size // per_node, "nproc_per_node": per_node}
    return run.replace(cluster=cluster.replace(**changes))
