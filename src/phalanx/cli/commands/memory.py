"""`phalanx memory`: the memory of each rank of a run, under its layout and under others."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from typing import Annotated, Any, get_args

from rich.table import Column, Table
from typer import Option

from phalanx.cli.commands.info import describe
from phalanx.cli.common.options import Json, Machine, Overrides, Ranks, RunOrModel
from phalanx.cli.common.text import print_line, text_table
from phalanx.cost.exact.cuda_process import CONTEXT_BYTES
from phalanx.cost.exact.layout_checks import require_planned_layout
from phalanx.cost.exact.rank_memory import RankMemory, rank_memory
from phalanx.cost.formulas.collectives import Strategy
from phalanx.launch.recomputation import resolve_recomputation
from phalanx.plan.search.oom_risk import (
    MAX_OOM_PROBABILITY,
    SAFE_OOM_PROBABILITY,
    describe_fit,
    describe_host_need,
    describe_memory_limit,
    ranks_oom_probability,
)
from phalanx.spec.base import divisors
from phalanx.spec.errors import UserError
from phalanx.spec.files.load import load_run
from phalanx.spec.formatting import GIB, format_si, plural
from phalanx.spec.layout import Layout, describe_recomputation, without_inapplicable_options
from phalanx.spec.parallel_dims import MODEL_PARALLEL_AXES
from phalanx.spec.phases import errors_of_phase, phases_to_show
from phalanx.spec.resolved_run import ResolvedRun
from phalanx.spec.terminal import Terminal

PARTS = ("parameters", "gradients", "optimizer", "activations", "communication", "total")
CUDA_PARTS = ("unused", "nccl", "device")
"""Parts of a GPU's memory other than tensors. All except the context are included."""
WIDTH = 175
"""Width of the table, so that a narrow terminal wraps lines instead of numbers."""
NOTES = (
    "*: the layout of the run; each strategy shows its fullest rank, or with --all every stage and role",
    "exact: parameters, gradients, optimizer state (and a teacher's weights) of the fullest rank",
    "estimated: peak activations of one micro-batch (in a pipeline: of all in flight), and an upper bound of "
    "communication buffers",
    "total: peak of the sum, less than the sum of the parts, which peak at different times",
    f"may not fit: P(OOM) {SAFE_OOM_PROBABILITY:.0%} or more; does not fit: {MAX_OOM_PROBABILITY:.0%} or more, as in "
    "`phalanx advise oom`; in `phalanx plan` the P(OOM) of an estimate counts if it is larger",
)
CUDA_NOTE = (
    "unused: reserved by PyTorch's allocator beyond the total (estimated); nccl: NCCL's buffers (published "
    f"measurements); device: sum of these; the CUDA context takes {CONTEXT_BYTES / GIB:.1f} GiB more"
)


@dataclass(frozen=True, kw_only=True)
class MemoryRow:
    """A role under a layout, or the reason why the layout cannot run."""

    data: Strategy
    own: bool
    role: str = "rank"
    micro_batch: int | None = None
    memory: RankMemory | None = None
    fits: bool | None = None
    """None if the memory is unknown; a server is in CPU memory."""
    p_oom: float | None = None
    problem: str = ""
    dp_shard: int | None = None
    """Ranks of a sharded copy with hsdp, if the run file does not set it."""


def memory(
    run: RunOrModel,
    ranks: Ranks = None,
    machine: Machine = None,
    all_: Annotated[bool, Option("--all", help="Show every role and stage, not only the fullest rank.")] = False,
    set_: Overrides = None,
    json_: Json = False,
) -> None:
    """Show the bytes of the fullest rank under each strategy: before anything runs, and without torch.

    Examples:

        phalanx memory run.toml --ranks 8

        phalanx memory run.toml --ranks 64 --machine h100 --set model.preset=llama3-8b

        phalanx memory run.toml --ranks 8 --all --set layout.pp=2

        phalanx memory run.toml --ranks 8 --set layout.activation_checkpointing=full --json
    """
    run_spec = load_run(run, set_ or [], machine=machine)
    require_planned_layout(run_spec)
    cluster = run_spec.cluster
    nproc = cluster.planned_nproc_per_node
    world_size = ranks or nproc * cluster.nodes
    ranks_source = "cluster.nproc_per_node x cluster.nodes"
    if ranks is not None:
        ranks_source = "--ranks"
    elif cluster.nproc_per_node is None:
        ranks_source = f"{nproc} per node, because cluster.nproc_per_node is not set; see --ranks"
    # CPU ranks share a node's memory.
    cluster = cluster.replace(nproc_per_node=-(-world_size // cluster.nodes))
    run_spec = resolve_recomputation(run_spec.replace(cluster=cluster), world_size)
    resolved = ResolvedRun(run_spec, world_size)
    rows = memory_rows(resolved)
    of_phases = []
    for phase in phases_to_show(run_spec):
        with errors_of_phase(phase):
            resolved_phase = ResolvedRun(phase.run, world_size)
            of_phases.append((phase, resolved_phase, memory_rows(resolved_phase)))
    if json_:
        table = memory_to_json(resolved, rows)
        if of_phases:
            table["phases"] = [
                {"phase": phase.number, "first_step": phase.first_step, **memory_to_json(resolved_phase, phase_rows)}
                for phase, resolved_phase, phase_rows in of_phases
            ]
        print(json.dumps(table, indent=2))
        return
    _print_memory(resolved, ranks_source, rows=rows if all_ else fullest_ranks(rows))
    for phase, resolved_phase, phase_rows in of_phases:
        print(f"\n{phase.name}:")
        _print_memory(resolved_phase, ranks_source, rows=phase_rows if all_ else fullest_ranks(phase_rows))


def memory_rows(resolved: ResolvedRun) -> list[MemoryRow]:
    """Return the memory of the run under every strategy that the ranks permit."""
    own = resolved.layout
    rows = []
    for strategy in get_args(Strategy):
        is_own = strategy == own.data_parallel
        layout = own if is_own else _replace_strategy(own, strategy, resolved.world_size)
        if layout is not None:
            strategy_rows = _count_layout_memory(resolved, layout, is_own)
            rows += strategy_rows if is_own else [replace(row, dp_shard=layout.dp_shard) for row in strategy_rows]
    return rows


def fullest_ranks(rows: Sequence[MemoryRow]) -> list[MemoryRow]:
    """Keep the row with the most bytes for each strategy.

    For a parameter server this is a worker, which has a device.
    """
    return [
        max(group, key=lambda row: (row.role != "server", row.memory.device if row.memory else 0))
        for _, group in groupby(rows, key=lambda row: row.data)
    ]


def _replace_strategy(layout: Layout, strategy: Strategy, world_size: int) -> Layout | None:
    """Return the layout with another strategy, without inapplicable options; None if it cannot exist."""
    layout = without_inapplicable_options(layout.model_copy(update={"data_parallel": strategy}))
    if strategy != "hsdp":
        return layout
    sizes = divisors(world_size // (layout.pp * layout.cp * layout.tp))[1:-1]
    shards = [size for size in sizes if size * layout.cp * layout.tp % layout.ep == 0]
    return layout.model_copy(update={"dp_shard": shards[-1]}) if shards else None


def _count_layout_memory(resolved: ResolvedRun, layout: Layout, is_own: bool) -> list[MemoryRow]:
    strategy = layout.data_parallel
    cluster = resolved.run.cluster
    try:
        resolved = replace(resolved, run=resolved.run.replace(layout=layout))
        memory_by_role = rank_memory(resolved)
        micro_batch = resolved.batch.micro_batch_size
    except UserError as error:
        return [MemoryRow(data=strategy, own=is_own, problem=str(error).partition("\n")[0])]
    rows = []
    for role, memory in memory_by_role.items():
        is_known = cluster.rank_memory_bytes is not None and role != "server"
        p_oom = ranks_oom_probability(cluster, [memory]) if is_known else None
        fits = None if p_oom is None else p_oom < SAFE_OOM_PROBABILITY
        rows.append(
            MemoryRow(
                data=strategy, own=is_own, role=role, micro_batch=micro_batch, memory=memory, fits=fits, p_oom=p_oom
            )
        )
    return rows


def memory_to_json(resolved: ResolvedRun, rows: list[MemoryRow]) -> dict[str, Any]:
    """Return the output of `phalanx memory --json` for the rows of the table."""
    run = resolved.run
    return {
        "model": run.model.source_name,
        "ranks": resolved.world_size,
        "precision": run.training.precision,
        "optimizer": run.optimizer.name,
        "sequence": run.training.seq_len,
        "memory_bytes": run.cluster.rank_memory_bytes,
        "layouts": [
            {
                **asdict(row),
                "memory": row.memory and asdict(row.memory) | {"total": row.memory.total, "device": row.memory.device},
            }
            for row in rows
        ],
    }


def _print_memory(resolved: ResolvedRun, ranks_source: str, rows: list[MemoryRow]) -> None:
    run = resolved.run
    console = Terminal(width=max(Terminal().width, WIDTH))
    console.print(run.model_name, style="bold", end="  ", highlight=False)
    print_line(console, describe(run.model))
    sizes = {row.micro_batch for row in rows if row.micro_batch}
    tokens = f"{run.training.seq_len} tokens"
    batch = f"micro-batch {sizes.pop()} x {tokens}" if len(sizes) == 1 else f"sequences of {tokens}"
    shared = [f"{axis} {getattr(run.layout, axis)}" for axis in MODEL_PARALLEL_AXES if getattr(run.layout, axis) > 1]
    ranks = ", ".join([f"{plural(resolved.world_size, 'rank')} ({ranks_source})", *shared])
    arithmetic = f"{run.training.precision}, {run.optimizer.name}"
    print_line(console, f"{ranks}, {arithmetic}, {batch}, {describe_recomputation(run.layout)}")
    console.print()
    console.print(_build_memory_table(resolved, rows), soft_wrap=True)
    for row in rows:
        if row.problem:
            print_line(console, f"{_row_label(row, resolved.world_size)}: {row.problem}", "yellow")
    console.print()
    notes = [*NOTES, CUDA_NOTE if run.cluster.uses_cuda else "not counted: allocator, libraries"]
    if run.cluster.rank_memory_bytes is not None:
        notes.append(describe_memory_limit(run.cluster))
    host_bytes = max((row.memory.host for row in rows if row.own and row.memory), default=0)
    if host_need := describe_host_need(run.cluster, host_bytes, offloads=run.layout.offloads):
        notes.append(host_need)
    for note in notes:
        print_line(console, note, "dim")


def _build_memory_table(resolved: ResolvedRun, rows: list[MemoryRow]) -> Table:
    has_teacher = resolved.run.distillation is not None
    parts = (*PARTS[:3], *(["teacher"] if has_teacher else []), *PARTS[3:])
    parts = (*parts, *(CUDA_PARTS if resolved.run.cluster.uses_cuda else ()))
    offloads = any(row.memory and _offloaded_bytes(row.memory) for row in rows)
    differs = len({row.micro_batch for row in rows if row.micro_batch}) > 1
    columns = [*parts, *(["offloaded"] if offloads else []), *(["micro-batch"] if differs else []), ""]
    table = text_table(Column("bytes per rank", no_wrap=True), numbers=columns)
    for row in rows:
        if row.memory is None:
            table.add_row(_row_label(row, resolved.world_size), *["-"] * len(parts))
            continue
        cells = [f"{format_si(getattr(row.memory, part))}B" for part in parts]
        cells += [f"{format_si(_offloaded_bytes(row.memory))}B"] if offloads else []
        cells += [str(row.micro_batch)] if differs else []
        verdict = "" if row.p_oom is None or row.fits else describe_fit(row.p_oom)
        color = "red" if verdict == "does not fit" else "yellow"
        style = color if row.fits is False else "bold" if row.own else ""
        table.add_row(_row_label(row, resolved.world_size), *cells, verdict, style=style)
    return table


def _offloaded_bytes(memory: RankMemory) -> int:
    return memory.offloaded + memory.offloaded_activations


def _row_label(row: MemoryRow, world_size: int) -> str:
    """Return the strategy, and the role if there are two; mark the run's own strategy."""
    strategy = "one process" if world_size == 1 and row.data == "ddp" else row.data
    role = "" if row.role == "rank" else f" {row.role}"
    shard = f" of {row.dp_shard}" if row.dp_shard else ""
    return f"{'*' if row.own else ' '} {strategy}{shard}{role}"
