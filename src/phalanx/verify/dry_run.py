"""Dry run of the training program on any rank of any world, without hardware.

The same layout is applied to the same model, and one step runs on PyTorch's fake process group and tensors without
values. Experts are balanced: every rank has an equal number of tokens for each other rank. Ranks are traced as CPU
ranks: a reduce-scatter is the all-to-all and the sum of gloo. Blocks are traced without compilation, and tensors that
are offloaded to files are in memory.

Why: `docs/design/decisions/dry-run-is-the-program.md`.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import time
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from itertools import islice, pairwise
from multiprocessing import forkserver
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from phalanx.cost.exact.layout_checks import check_layout
from phalanx.data.loader import rank_rows
from phalanx.model.sequence_context import Documents
from phalanx.model.transformer import Transformer
from phalanx.parallel.data import offload
from phalanx.parallel.data.ddp import DDP
from phalanx.parallel.data.offload import CpuOffload
from phalanx.parallel.mesh import build_mesh
from phalanx.schedule.registry import layout_schedule, representative_schedule
from phalanx.spec.components import named_components, require_trusted
from phalanx.spec.errors import UserError
from phalanx.spec.parallel_dims import expert_parallel_groups, process_groups
from phalanx.spec.resolved_run import ResolvedRun
from phalanx.spec.run import RunSpec
from phalanx.train.learner import Learner, MicroBatch, MicroPairs
from phalanx.train.profiling.step_profiler import StepRecorders, first_steady_step, profile_step
from phalanx.verify.fake_tensors import shape_only_tensors
from phalanx.verify.repeated_blocks import RepeatedBlocks
from phalanx.verify.repetition import few_chunks, forward_backward_once, num_traced_micro_batches

CPU = torch.device("cpu")
Traced = dict[str, Any]
"""Memory, traffic and FLOPs of a rank's step (see `profile_step`), and the cost of tracing it."""


def check_traceable(resolved: ResolvedRun) -> None:
    """Raise UserError for a run that cannot be traced, cannot run at all, or names code that is not trusted."""
    run = resolved.run
    for field, component in named_components(run):
        require_trusted(field, component)
    check_layout(resolved)
    if run.layout.max_staleness is not None:
        problem = "makes the traffic differ from step to step, so it cannot be compared with the plan"
        fix = "remove layout.max_staleness: the traffic of synchronous servers is equal in every step"
        raise UserError("layout.max_staleness", run.layout.max_staleness, problem, fix)


def trace_ranks(
    resolved: ResolvedRun, ranks: Sequence[int], max_workers: int = 2, full: bool = False
) -> Iterator[Traced]:
    """Yield the traces of these ranks in order, each from a separate process.

    With `full`, all micro-batches, blocks and chunks are traced, also equal ones (`verify.repetition`). Raises
    UserError before a process starts if the run cannot be traced.
    """
    check_traceable(resolved)
    context = multiprocessing.get_context("forkserver")
    # Import the modules that take seconds once, in the process from which workers fork.
    context.set_forkserver_preload([__name__, "torch._dynamo"])
    # The process from which workers fork is `python -c`, which would import modules of the working directory by name.
    with mock.patch.dict(os.environ, PYTHONSAFEPATH="1"):
        forkserver.ensure_running()
    # PyTorch caches meshes and shapes of earlier process groups, so each process traces only one rank.
    with ProcessPoolExecutor(min(max_workers, len(ranks)), context, max_tasks_per_child=1) as pool:
        try:
            yield from pool.map(partial(_trace_or_raise, resolved, full=full), ranks)
        finally:
            pool.shutdown(cancel_futures=True)


def corner_ranks(resolved: ResolvedRun) -> list[int]:
    """Return the first and the last rank of every axis.

    The result contains the first and the last rank of the world, and for each axis the rank that is last on this axis
    and first on all others. With parameter servers, it contains the first and the last server and worker.
    """
    sizes = resolved.dims
    if sizes.servers:
        return sorted({0, sizes.servers - 1, sizes.servers, resolved.world_size - 1})
    axis_ends = [process_groups(sizes, axis)[0][-1] for axis in sizes.axes]
    expert_ends = [group[-1] for group in expert_parallel_groups(sizes)[:1]]
    return sorted({0, *axis_ends, *expert_ends, resolved.world_size - 1})


class TraceError(RuntimeError):
    """A failure of a rank's program, as text, because some PyTorch errors cannot be sent between processes."""


def _trace_or_raise(resolved: ResolvedRun, rank: int, full: bool) -> Traced:
    try:
        return trace_rank(resolved, rank, full)
    except UserError:
        raise
    except Exception:
        raise TraceError(f"rank {rank}:\n{traceback.format_exc()}") from None


def trace_rank(resolved: ResolvedRun, rank: int, full: bool = False) -> Traced:
    """Trace a step of one rank in this process, which must not have a process group.

    With `full`, all micro-batches, blocks and chunks are traced, also equal ones.
    """
    started_at = time.perf_counter()
    torch.set_num_threads(1)
    world_size = resolved.world_size
    run = resolved.run.replace(training=resolved.run.training.replace(compile=False))
    if world_size > 1:
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        mesh = build_mesh(run.layout, world_size, CPU.type)
        with shape_only_tensors(), offload_in_memory(), nullcontext() if full else few_chunks():
            learner = Learner(run, mesh, CPU, _empty_weights, teacher_weights=_empty_weights)
            repeated = None if full else RepeatedBlocks(learner)
            # The first step creates the state of optimizers; DDP rebuilds its buckets in the second.
            for _ in range(first_steady_step(run) - 1 if isinstance(learner.strategy, DDP) else 1):
                run_step(learner, None, repeated, _count_warmup_micro_batches(run))
            _, profile = profile_step(learner, lambda recorders: run_step(learner, recorders, repeated))
            micros = learner.batch.gradient_accumulation_steps
            blocks = len(list(learner.module.blocks.children())) if isinstance(learner.module, Transformer) else 0
            traced_micros = micros if repeated is None else num_traced_micro_batches(learner, micros)
    finally:
        if world_size > 1:
            dist.destroy_process_group()
    traced = profile.as_dict
    for row in traced["collectives"]:
        del row["seconds"], row["exposed_seconds"]
    tracing = {
        "full": full,
        "micro_batches": micros,
        "traced_micro_batches": traced_micros,
        "blocks": blocks,
        "traced_blocks": blocks if repeated is None else blocks - repeated.num_repeated,
        "seconds": time.perf_counter() - started_at,
        "process_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }
    return {"rank": rank, **traced, "tracing": tracing}


def _empty_weights(name: str, shape: torch.Size) -> torch.Tensor:
    return torch.empty(shape)


def offload_in_memory() -> AbstractContextManager[object]:
    """Keep state in memory that is offloaded to files, in the same buckets and pieces."""
    return mock.patch.object(offload, "DiskOffload", return_value=CpuOffload())


def _count_warmup_micro_batches(run: RunSpec) -> int | None:
    """Return the number of micro-batches that suffices for a warm-up step."""
    if run.layout.pp == 1:
        return 1
    for count in range(1, 2 * representative_schedule(run.layout).stages):
        with suppress(UserError):
            layout_schedule(run.layout, count)
            return count
    return None


def run_step(
    learner: Learner,
    recorders: StepRecorders | None = None,
    repeated: RepeatedBlocks | None = None,
    max_micro_batches: int | None = None,
) -> None:
    """Run a step like `Trainer.train_step`, without reading its results.

    Without `recorders`, the step is not recorded. Without `repeated`, equal blocks and micro-batches all run.
    """
    micros = list(islice(_make_micro_batches(learner), max_micro_batches)) if learner.strategy.runs_model else []
    if repeated is None:
        learner.reduce(learner.forward_backward(micros))
    else:
        repeated.record_with(recorders)
        learner.reduce(forward_backward_once(learner, micros, recorders))
    learner.update(1.0)


def _make_micro_batches(learner: Learner) -> Iterator[MicroBatch]:
    """Yield micro-batches with this rank's rows of a step.

    Each row is one document. Documents are passed only if the run masks them.
    """
    run = learner.run
    batch = learner.batch
    rows = len(rank_rows(batch.global_batch_size, learner.mesh.dp_rank, batch.dp_size))
    sequence = run.training.seq_len
    num_local_tokens = len(np.arange(sequence)[learner.local_tokens(sequence)])
    for begin, end in pairwise([*range(0, rows, batch.micro_batch_size), rows]):
        ids, targets = (torch.empty(end - begin, num_local_tokens, device=learner.device).long() for _ in range(2))
        masked = Documents.whole_rows(end - begin, sequence, learner.device) if run.data.mask_documents else None
        ahead = torch.empty(run.model.num_prediction_layers, *ids.shape, device=learner.device).long()
        sources = np.zeros(end - begin, np.int64) if run.data.source else None
        terms = learner.loss_terms(sources, None, num_local_tokens)
        pairs = None if run.preference is None else _one_pair_per_row(ids)
        yield MicroBatch(ids, targets, masked, ahead, ahead, terms=terms, pairs=pairs)


def _one_pair_per_row(ids: torch.Tensor) -> MicroPairs:
    """Return pairs of which each row has one."""
    rows = len(ids)
    return MicroPairs(
        answer_of_token=torch.zeros_like(ids),
        documents=torch.arange(2 * rows, device=ids.device),
        num_targets=torch.ones(rows, 2, dtype=torch.float64, device=ids.device),
        reference=torch.zeros(rows, 2, dtype=torch.float64, device=ids.device),
        loss_weight=1.0,
    )
