"""Explanations of a layout's step time, of slower layouts, and of possible improvements."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from phalanx.plan.search.candidate_columns import candidate_jobs
from phalanx.plan.search.candidates import CandidateLayout
from phalanx.plan.search.oom_risk import process_bytes
from phalanx.plan.search.phases import fits_all_phases, largest_phase
from phalanx.plan.search.result import TIE_TOLERANCE, EvaluatedLayout, Plan
from phalanx.plan.search.search import ProgressCallback, search_layouts
from phalanx.plan.tables.machine_columns import host_memory
from phalanx.spec.cluster import ClusterSpec
from phalanx.spec.errors import UserError
from phalanx.spec.formatting import GIB, format_seconds_change
from phalanx.spec.phases import errors_of_phase, phases_of
from phalanx.spec.resolved_run import ResolvedRun
from phalanx.spec.run import RunSpec

PART_DESCRIPTIONS = {
    "compute": "matrix products, attention and memory passes",
    "exchange": "communication of tensor, context and expert parallelism",
    "bubble": "pipeline bubble",
    "send": "pipeline sends",
    "data_parallel": "exposed communication of gradients and parameters",
    "update": "the optimizer",
    "offload": "copies of offloaded state, and the optimizer on the host",
    "waiting": "waiting for the slowest of many nodes",
}
"""Description of the parts of a step."""


def plan_or_raise(
    resolved: ResolvedRun,
    keep: int = 20,
    report: ProgressCallback = lambda *_: None,
    group_schedules: bool = True,
    is_wanted: Callable[[CandidateLayout], bool] = lambda _: True,
) -> Plan:
    """Return the result of a search for layouts in order of preference.

    Times are those of the phase with the most tokens (`largest_phase`). With `group_schedules`, layouts that differ in
    their schedule only are shown up to the first safe one. Raises UserError if no layout is wanted, or none fits in all
    phases; then the fix says which change makes one fit.
    """
    if resolved.run.phase:
        return _plan_phases(resolved, keep, report, group_schedules, is_wanted)
    plan = search_layouts(resolved, keep, report, is_wanted, prefer_simple=True, group_schedules=group_schedules)
    if plan.layouts:
        return plan
    num_wanted = sum(map(is_wanted, plan.candidates))
    if not num_wanted:
        raise UserError("where", None, f"accepts none of {plan.searched:,} layouts", fix="relax the condition")
    raise UserError("layout", None, f"cannot be chosen: none of {num_wanted:,} fits", fix=suggest_fit(resolved, plan))


def _plan_phases(
    resolved: ResolvedRun,
    keep: int,
    report: ProgressCallback,
    group_schedules: bool,
    is_wanted: Callable[[CandidateLayout], bool],
) -> Plan:
    """Return the layouts that fit in all phases of a run, by the time of the largest."""
    largest = largest_phase(resolved)
    fits = fits_all_phases(resolved)
    plan = search_layouts(
        largest,
        keep,
        report,
        lambda candidate: is_wanted(candidate) and fits(candidate),
        prefer_simple=True,
        group_schedules=group_schedules,
    )
    if plan.layouts:
        return plan
    for phase in phases_of(resolved.run):
        with errors_of_phase(phase):
            plan_or_raise(ResolvedRun(phase.run, resolved.world_size), 1, is_wanted=is_wanted)
    problem = "cannot be chosen: each phase has layouts that fit, but none fits in all of them"
    fix = "set micro_batch_size in the phase with the longest sequences, or resume in that phase with another layout"
    raise UserError("layout", None, problem, fix)


def describe_differences(evaluated: EvaluatedLayout, best: EvaluatedLayout, min_share: float = 0.005) -> list[str]:
    """Return the parts of a step in which a layout spends more or less time than the best one.

    Only parts of at least `min_share` of the best step are listed, then the sum of the others if it is at least 1 % of
    the difference.
    """
    differences = [(evaluated.parts[part] - best.parts[part], meaning) for part, meaning in PART_DESCRIPTIONS.items()]
    large_differences = sorted(
        (part for part in differences if abs(part[0]) > min_share * best.step_seconds), reverse=True
    )
    added_seconds = evaluated.step_seconds - best.step_seconds
    remainder = added_seconds - sum(part for part, _ in large_differences)
    if abs(remainder) > 0.01 * abs(added_seconds) and (large_differences or not equally_fast(evaluated, best)):
        large_differences.append((remainder, "in other parts" if large_differences else "in small parts"))
    return [f"{format_seconds_change(part)} {meaning}" for part, meaning in large_differences]


def equally_fast(evaluated: EvaluatedLayout, best: EvaluatedLayout) -> bool:
    """Return whether a layout is as fast as the best one, in the search's ranking."""
    return abs(evaluated.step_seconds / best.step_seconds - 1) < TIE_TOLERANCE


def explain_slowdown(run: RunSpec, evaluated: EvaluatedLayout, best: EvaluatedLayout) -> str:
    """Return the reason why a layout is slower than the best one, on one line."""
    reasons = [*describe_differences(evaluated, best), *slow_link_warnings(run, evaluated.candidate)]
    explanation = "; ".join(reasons) or "equally fast, but the best is simpler or smaller"
    return f"{format_seconds_change(evaluated.step_seconds - best.step_seconds)}: {explanation}"


def slow_link_warnings(run: RunSpec, candidate: CandidateLayout) -> list[str]:
    """Return warnings for the communication of a layout that leaves the domain of fast links."""
    domain = run.cluster.fast_link_domain_size
    warnings = []
    if candidate.tp > domain:
        warnings.append(f"tp = {candidate.tp} leaves the domain of {domain} devices with fast links")
    world_size = candidate.dp * candidate.tp * candidate.pp * candidate.cp
    if candidate.ep > max(1.0, candidate_jobs(ResolvedRun(run, world_size), [candidate]).fast_link_ranks_per_stage[0]):
        warnings.append(f"the all-to-all of ep = {candidate.ep} leaves the domain of {domain} devices with fast links")
    return warnings


@dataclass(frozen=True, kw_only=True)
class WhatIf:
    """Change of a run, and the best layout after it."""

    change: str
    best: EvaluatedLayout | None
    speedup: float
    """New / old tokens per second; 0 if nothing fits."""


def evaluate_what_ifs(resolved: ResolvedRun, fastest: EvaluatedLayout) -> Iterator[WhatIf]:
    """Yield changes that could make a job faster: more memory, faster links, a larger batch."""
    run = resolved.run
    cluster = run.cluster
    training = run.training

    def double_field(field: str) -> RunSpec | None:
        value = getattr(cluster, field)
        return value and run.replace(cluster=cluster.replace(**{field: 2 * value}))

    changes = {
        "twice the memory": double_field("memory_bytes"),
        "fast links twice as fast": double_field("link_bytes_per_second"),
        "a network twice as fast": double_field("network_bytes_per_second"),
        "twice the tokens per step": run.replace(
            training=training.replace(tokens_per_step=2 * training.tokens_per_step)
        ),
    }
    for change, changed in changes.items():
        if changed is not None:
            layouts = search_layouts(replace(resolved, run=changed), keep=1).layouts
            best = layouts[0] if layouts else None
            speedup = best.tokens_per_second / fastest.tokens_per_second if best else 0.0
            yield WhatIf(change=change, best=best, speedup=speedup)


def suggest_fit(resolved: ResolvedRun, plan: Plan) -> str:
    """Return what to change if no layout fits: the missing memory, and a sufficient number of devices."""
    run = resolved.run
    smallest = plan.closest_to_fitting
    if smallest is None:
        raise ValueError("something fits")
    used = describe_memory_use(run.cluster, smallest)
    suggestion = f"the smallest layout, {smallest.candidate}, uses {used}"
    if run.cluster.network_bytes_per_second is None:
        return f"{suggestion}; set cluster.network_bytes_per_second to find a sufficient number of nodes"
    sequences = run.training.tokens_per_step // run.training.seq_len
    for multiple in (2, 4, 8, 16, 32, 64):
        ranks = multiple * resolved.world_size
        larger = run.cluster.model_copy(update={"nodes": run.cluster.nodes * multiple})
        try:
            layouts = search_layouts(ResolvedRun(run.model_copy(update={"cluster": larger}), ranks), keep=1).layouts
        except UserError:
            break
        if layouts:
            return (
                f"{suggestion}; with {multiple} times the devices ({ranks}), this layout fits: {layouts[0].candidate}"
            )
    return f"{suggestion}; with {sequences} sequences per step, more devices do not help: shorten training.seq_len"


def describe_memory_use(cluster: ClusterSpec, evaluated: EvaluatedLayout) -> str:
    """Return the use of the fuller memory: the device's, with driver and libraries, or the CPU's."""
    used_bytes = evaluated.memory_bytes if cluster.calibration else process_bytes(cluster, evaluated.memory_bytes)
    available_bytes = float(cluster.rank_memory_bytes or 1)
    memory_name = "device"
    if evaluated.host_bytes / host_memory(cluster) > used_bytes / available_bytes:
        memory_name = "CPU"
        used_bytes = evaluated.host_bytes
        available_bytes = host_memory(cluster)
    used = f"{used_bytes / GIB:.1f} GiB of {available_bytes / GIB:.1f}"
    return f"{used} of {memory_name} memory (P(OOM) {evaluated.p_oom:.0%})"
