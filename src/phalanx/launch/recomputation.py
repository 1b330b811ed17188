"""Choice of `layout.activation_checkpointing = "auto"` for the memory of the machine, before any process is started."""

from __future__ import annotations

import os
import sys

from phalanx.debug.oom import cgroup_memory_limit
from phalanx.launch.preflight import on_machine
from phalanx.plan.search.oom_risk import describe_fit
from phalanx.plan.search.recomputation import choose_recomputation
from phalanx.spec.errors import UserError
from phalanx.spec.layout import check_inapplicable_options, describe_recomputation
from phalanx.spec.run import RunSpec


def resolve_recomputation(run: RunSpec, world_size: int, gpu_memory_bytes: int | None = None) -> RunSpec:
    """Return the run with its recomputation chosen if it is "auto", and print the choice to stderr.

    The memory is that of the run's cluster. If it is unknown, ranks on CPUs share the memory of this machine.

    Args:
        run: The run.
        world_size: Number of ranks.
        gpu_memory_bytes: Memory of this machine's GPUs, if it is known.

    Raises:
        UserError: The memory is unknown, or the layout cannot run.
    """
    if not run.layout.auto_checkpointing:
        return run
    check_inapplicable_options(run.layout)
    nproc = -(-world_size // run.cluster.nodes)
    planned = run.model_copy(update={"cluster": run.cluster.model_copy(update={"nproc_per_node": nproc})})
    if run.cluster.rank_memory_bytes is None:
        device = "cpu" if run.cluster.uses_cpu else "cuda"
        memory_bytes = machine_memory_bytes() if run.cluster.uses_cpu else gpu_memory_bytes
        if memory_bytes is None:
            problem = "requires the memory of a GPU, which is unknown"
            fix = 'set cluster.memory_bytes, or cluster.preset (see `phalanx info --list`), such as "h100"'
            raise UserError("layout.activation_checkpointing", "auto", problem, fix=fix)
        planned = on_machine(planned, nproc, memory_bytes, device=device)
    choice = choose_recomputation(planned, world_size)
    details = [f"{describe_fit(choice.p_oom)} in memory"]
    if choice.step_seconds is not None:
        details.append(f"{choice.step_seconds:.3f} s a step predicted")
    print(
        f"activation checkpointing chosen: {describe_recomputation(choice.layout)} ({', '.join(details)})",
        file=sys.stderr,
    )
    return run.model_copy(update={"layout": choice.layout})


def machine_memory_bytes() -> int:
    """Return the CPU memory of this machine, or of this process's cgroup if it is less."""
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(memory_bytes, cgroup_memory_limit() or memory_bytes)
