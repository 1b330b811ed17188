"""Layout that is much faster than all that fit, and the memory that it lacks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import islice

import numpy as np

from phalanx.cost.estimate.memory import reserved_bytes
from phalanx.plan.search.candidates import CandidateLayout
from phalanx.plan.search.evaluate import can_run, evaluate, evaluate_layout, predict_layouts, with_exact_memory
from phalanx.plan.search.oom_risk import MAX_OOM_PROBABILITY, enough_bytes, process_bytes
from phalanx.plan.search.result import EvaluatedLayout, Plan
from phalanx.plan.tables.job_columns import memory_constants_for
from phalanx.plan.tables.machine_columns import host_memory
from phalanx.spec.errors import UserError
from phalanx.spec.resolved_run import ResolvedRun

MIN_SPEEDUP = 2.0
"""Minimum speedup over the fastest fitting layout at which a layout that does not fit is shown."""
MAX_COUNTED = 20
"""Maximum number of layouts whose memory is counted exactly: those with the lowest estimate."""
SEQ_LEN_DIVISORS = (2, 4)
"""Divisors of the sequence length that are tried."""


@dataclass(frozen=True, kw_only=True)
class FasterLayout:
    """Layout that does not fit and is much faster than the fastest fitting one."""

    option: EvaluatedLayout
    speedup: float
    missing_device_bytes: float
    """Device memory that the fullest rank lacks for a P(OOM) below `MAX_OOM_PROBABILITY`."""
    missing_host_bytes: float
    """CPU memory that a rank lacks for a P(OOM) below `MAX_OOM_PROBABILITY`."""
    fitting_seq_len: int | None
    """Sequence length with which the layout fits, if one of those tried does."""
    fitting_step_seconds: float | None


def find_faster_layout(resolved: ResolvedRun, plan: Plan) -> FasterLayout | None:
    """Return the layout that lacks least memory of those `MIN_SPEEDUP` times as fast as all that fit.

    The fastest of all layouts is less useful: it often needs several times the memory.
    """
    if plan.fastest is None:
        return None
    predictions = predict_layouts(resolved, plan.candidates)
    faster = np.flatnonzero(predictions.seconds <= plan.fastest.step_seconds / MIN_SPEEDUP)
    if not len(faster):
        return None
    smallest_first = faster[np.argsort(predictions.select(faster).memory_utilization, kind="stable")]
    runnable = (plan.candidates[index] for index in smallest_first if can_run(resolved, plan.candidates[index]))
    counted = [_count_shortage(resolved, candidate, plan.fastest) for candidate in islice(runnable, MAX_COUNTED)]
    too_large = [layout for layout in counted if layout.option.p_oom >= MAX_OOM_PROBABILITY]
    if not too_large:
        return None

    def missing_share(layout: FasterLayout) -> float:
        device_share = layout.missing_device_bytes / (resolved.run.cluster.rank_memory_bytes or 1)
        return max(device_share, layout.missing_host_bytes / host_memory(resolved.run.cluster))

    closest = min(too_large, key=lambda layout: (missing_share(layout), layout.option.step_seconds))
    return _with_fitting_sequences(resolved, closest)


def _count_shortage(resolved: ResolvedRun, candidate: CandidateLayout, fastest: EvaluatedLayout) -> FasterLayout:
    """Return a layout with the memory that it lacks: the maximum of the estimate and the exact count."""
    cluster = resolved.run.cluster
    by_formula = evaluate(resolved, [candidate])[0]
    counted = with_exact_memory(resolved, by_formula)
    memory = predict_layouts(resolved, [candidate]).memory
    reserved = float(np.max(reserved_bytes(memory_constants_for(cluster), memory)))
    used = counted.memory_bytes if cluster.calibration else process_bytes(cluster, counted.memory_bytes)
    host_bytes = max(by_formula.host_bytes, counted.host_bytes)
    enough_device_bytes = enough_bytes(cluster, cluster.rank_memory_bytes or 0, MAX_OOM_PROBABILITY)
    enough_host_bytes = enough_bytes(cluster, host_memory(cluster), MAX_OOM_PROBABILITY)
    return FasterLayout(
        option=counted,
        speedup=fastest.step_seconds / counted.step_seconds,
        missing_device_bytes=max(0.0, max(reserved, used) - enough_device_bytes),
        missing_host_bytes=max(0.0, host_bytes - enough_host_bytes),
        fitting_seq_len=None,
        fitting_step_seconds=None,
    )


def _with_fitting_sequences(resolved: ResolvedRun, layout: FasterLayout) -> FasterLayout:
    """Return `layout` with the longest tried sequence that fits, at equal tokens per step."""
    training = resolved.run.training
    for divisor in SEQ_LEN_DIVISORS:
        if training.seq_len % divisor:
            break
        shorter = training.model_copy(update={"seq_len": training.seq_len // divisor})
        shorter_run = replace(resolved, run=resolved.run.model_copy(update={"training": shorter}))
        try:
            evaluated = evaluate_layout(shorter_run, layout.option.layout)
        except UserError:
            continue
        if evaluated.p_oom < MAX_OOM_PROBABILITY:
            return replace(layout, fitting_seq_len=shorter.seq_len, fitting_step_seconds=evaluated.step_seconds)
    return layout
