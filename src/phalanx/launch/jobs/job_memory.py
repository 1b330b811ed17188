"""Planned memory of a job's ranks, compared with the memory of their cards before the job file is written."""

from __future__ import annotations

from collections.abc import Iterator

from phalanx.cost.exact.rank_memory import worker_memories
from phalanx.launch.jobs.job import ClusterJob, shell_join
from phalanx.plan.search.oom_risk import (
    MAX_OOM_PROBABILITY,
    describe_fit,
    describe_host_need,
    device_and_host_bytes,
    layout_oom_probability,
)
from phalanx.plan.search.recomputation import choose_recomputation
from phalanx.spec.errors import UserError
from phalanx.spec.formatting import format_gib, plural
from phalanx.spec.learning_rate import is_small_model
from phalanx.spec.resolved_run import ResolvedRun
from phalanx.spec.run import RunSpec
from phalanx.spec.small_run_defaults import unset_choices_of_large_model


def job_notes(job: ClusterJob) -> Iterator[str]:
    """Yield notes on a job before it is written: choices that are not set, and whether its ranks fit in memory.

    Raises UserError if the ranks do not fit, by the count of `phalanx memory`, and `job.force` is not set.
    """
    run = job.run
    _, unset_note = unset_choices_of_large_model(run)
    if unset_note is not None:
        yield unset_note
    if run.auto_layout:
        yield 'layout = "auto": the layout is chosen at the start, for the memory of the GPUs'
        return
    if run.model.implementation is not None:
        yield "memory: not checked, because model.implementation is a network that Phalanx does not count"
        return
    if run.cluster.memory_bytes is None:
        owner = "rank" if run.cluster.device == "cpu" else "GPU"
        yield f"memory: not checked, because that of a {owner} is unknown; set cluster.preset or cluster.memory_bytes"
        return
    for nodes in sorted({job.min_nodes, job.max_nodes}):
        yield _describe_memory(job, nodes)


def lacks_layout(run: RunSpec, ranks: int) -> bool:
    """Return whether the planner must choose the layout: that of a large model is not set.

    Raises UserError if the machine, which the planner needs, is not described.
    """
    is_planned = not is_small_model(run.model) and run.model.implementation is None and ranks > 1
    if not is_planned or run.auto_layout or run.layout.model_fields_set:
        return False
    if run.cluster.preset is None:
        problem = f"is not set; by default ({run.layout.data_parallel}) each rank would hold the whole model"
        fix = "add --set cluster.preset=MACHINE to plan it (`phalanx info --list`), or --set layout.data_parallel=..."
        raise UserError("layout", None, problem, fix)
    return True


def _describe_memory(job: ClusterJob, nodes: int) -> str:
    """Return a line on the memory of the fullest rank. Raises UserError if it does not fit."""
    cluster = job.run.cluster.replace(nodes=nodes, nproc_per_node=job.nproc)
    run = job.run.replace(cluster=cluster)
    if run.layout.auto_checkpointing:
        run = run.replace(layout=choose_recomputation(ResolvedRun.on_cluster(run)).layout)
    memories = worker_memories(ResolvedRun.on_cluster(run))
    device_bytes, host_bytes = device_and_host_bytes(cluster, memories)
    p_oom = layout_oom_probability(cluster, device_bytes, host_bytes)
    planned = format_gib(max(memory.device for memory in memories))
    size = f"{plural(nodes, 'node')} of {plural(job.nproc, 'rank')}"
    owner = "rank" if cluster.uses_cpu else "GPU"
    available = f"{format_gib(cluster.rank_memory_bytes or 0)} of a {owner}"
    available += f" ({cluster.preset})" if cluster.preset else ""
    if p_oom < MAX_OOM_PROBABILITY or job.force:
        return f"memory: with {size}, {planned} on the fullest rank; {describe_fit(p_oom)} in the {available}"
    fitting = "the layouts that fit; or add --force"
    if layout_oom_probability(cluster, device_bytes, 0) < MAX_OOM_PROBABILITY:
        need = describe_host_need(cluster, host_bytes, offloads=run.layout.offloads)
        problem = f"does not fit with {size}. {need}"
        fix = f"{_format_command(job, 'plan')} lists {fitting}"
        raise UserError("cluster.host_memory_bytes", cluster.host_memory_bytes, problem, fix)
    fix = f"{_format_command(job, 'advise oom')} lists what frees memory, {_format_command(job, 'plan')} {fitting}"
    raise UserError("planned memory", planned, f"{describe_fit(p_oom)} in the {available} with {size}", fix)


def _format_command(job: ClusterJob, name: str, *options: str) -> str:
    """Return a command for the run of a job, with the machines and the overrides of the job."""
    sizes = ["--nodes", str(job.min_nodes), "--nproc", str(job.nproc)]
    machine = [] if job.run.cluster.preset else ["--machine", "MACHINE"]
    return f"`phalanx {name} {shell_join([str(job.file), *machine, *sizes, *job.overrides, *options])}`"
