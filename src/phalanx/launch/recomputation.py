"""Choice of `layout.activation_checkpointing = "auto"` for the memory of the machine, before any process is started."""

from __future__ import annotations

import logging

from phalanx.cost.exact.rank_memory import worker_memories
from phalanx.debug.oom import cgroup_memory_limit, physical_memory_bytes
from phalanx.launch.preflight import on_machine
from phalanx.plan.search.oom_risk import describe_fit
from phalanx.plan.search.recomputation import choose_recomputation
from phalanx.spec.errors import UserError
from phalanx.spec.layout import check_inapplicable_options, describe_recomputation
from phalanx.spec.phases import other_phases
from phalanx.spec.resolved_run import ResolvedRun
from phalanx.spec.run import RunSpec

logger = logging.getLogger(__name__)


def resolve_recomputation(
    run: RunSpec, world_size: int, gpu_memory_bytes: int | None = None, nproc: int | None = None
) -> RunSpec:
    """Return the run with its recomputation chosen if it is "auto", and log the choice.

    The memory is the smaller of the cluster's and this machine's. Ranks on CPUs share it. `nproc` is the number of
    ranks on this machine; by default equally many on each node of the cluster. Raises UserError if the memory is
    unknown, or the layout cannot run.
    """
    if not run.layout.auto_checkpointing:
        return run
    check_inapplicable_options(run.layout)
    nproc = nproc or -(-world_size // run.cluster.nodes)
    cluster = run.cluster.replace(nodes=-(-world_size // nproc))
    actual_bytes = machine_memory_bytes() if cluster.uses_cpu else gpu_memory_bytes
    known_bytes = [size for size in (cluster.memory_bytes, actual_bytes) if size is not None]
    if not known_bytes:
        problem = "requires the memory of a GPU, which is unknown"
        fix = 'set cluster.memory_bytes, or cluster.preset (see `phalanx info --list`), such as "h100"'
        raise UserError("layout.activation_checkpointing", "auto", problem, fix)
    device = "cpu" if cluster.uses_cpu else "cuda"
    candidates = [run, *(phase.run for phase in other_phases(run))]
    planned_runs = [on_machine(each.replace(cluster=cluster), nproc, min(known_bytes), device) for each in candidates]
    resolved_runs = [ResolvedRun(planned, world_size) for planned in planned_runs]
    # Of several phases, the one that needs the most memory decides.
    choice = choose_recomputation(max(resolved_runs, key=_planned_bytes) if run.phase else resolved_runs[0])
    details = [f"{describe_fit(choice.p_oom)} in memory"]
    if choice.step_seconds is not None:
        details.append(f"{choice.step_seconds:.3f} s a step predicted")
    chosen = f"{describe_recomputation(choice.layout)} ({', '.join(details)})"
    logger.info("activation checkpointing chosen: %s", chosen)
    own = {name: getattr(run.layout, name) for name in ("micro_batch_size", "split_seq_len")}
    return run.replace(layout=choice.layout.replace(**own))


def _planned_bytes(resolved: ResolvedRun) -> float:
    """Return the bytes of the fullest rank."""
    return max(memory.total + memory.host for memory in worker_memories(resolved))


def machine_memory_bytes() -> int:
    """Return the CPU memory of this machine, or of this process's cgroup if it is less."""
    memory_bytes = physical_memory_bytes()
    return min(memory_bytes, cgroup_memory_limit() or memory_bytes)
