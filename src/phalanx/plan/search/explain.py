"""Why a layout is as fast as it is, why others lose, and what would help."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from phalanx.plan.search.candidate_columns import candidate_jobs
from phalanx.plan.search.candidates import CandidateLayout
from phalanx.plan.search.oom_risk import process_bytes
from phalanx.plan.search.result import TIE_TOLERANCE, EvaluatedLayout, Plan
from phalanx.plan.search.search import ProgressCallback, search_layouts
from phalanx.plan.tables.machine_columns import host_memory
from phalanx.spec.cluster import ClusterSpec
from phalanx.spec.errors import UserError
from phalanx.spec.formatting import GIB, format_seconds_change
from phalanx.spec.run import RunSpec

PART_DESCRIPTIONS = {
    "compute": "products, attention and passes over memory",
    "exchange": "exchanges of ranks that share products, sequences or experts",
    "bubble": "waiting for other stages",
    "send": "sends between stages",
    "data_parallel": "gradients and parameters, as far as nothing hides them",
    "update": "the optimizer",
    "offload": "copies from and to where state rests, and the optimizer there",
    "waiting": "for the slowest of many nodes",
}
"""Of the parts of a step."""


def plan_or_raise(
    run: RunSpec,
    world_size: int,
    keep: int = 20,
    report: ProgressCallback = lambda *_: None,
    group_schedules: bool = True,
) -> Plan:
    """Search for layouts in order of preference.

    Raises UserError where nothing fits, with what would.
    """
    plan = search_layouts(run, world_size, keep, report=report, prefer_simple=True, group_schedules=group_schedules)
    if not plan.options:
        fix = suggest_fit(run, world_size, plan)
        raise UserError("layout", None, f"no layout of {plan.considered:,} fits", fix=fix)
    return plan


def describe_differences(option: EvaluatedLayout, best: EvaluatedLayout, min_share: float = 0.005) -> list[str]:
    """What a layout spends more on, or less, than the best one: parts of at least `least` of its step, then what others
    add up to, if that is a hundredth of all or more."""
    option_parts = option.parts
    best_parts = best.parts
    differences = [(option_parts[part] - best_parts[part], meaning) for part, meaning in PART_DESCRIPTIONS.items()]
    large_differences = sorted(
        (part for part in differences if abs(part[0]) > min_share * best.step_seconds), reverse=True
    )
    more = option.step_seconds - best.step_seconds
    remainder = more - sum(part for part, _ in large_differences)
    if abs(remainder) > 0.01 * abs(more) and (large_differences or not equally_fast(option, best)):
        large_differences.append((remainder, "all else" if large_differences else "in small parts"))
    return [f"{format_seconds_change(part)} {meaning}" for part, meaning in large_differences]


def equally_fast(option: EvaluatedLayout, best: EvaluatedLayout) -> bool:
    """Whether a layout is as fast as the best one, as the search ranks them."""
    return abs(option.step_seconds / best.step_seconds - 1) < TIE_TOLERANCE


def explain_slowdown(run: RunSpec, option: EvaluatedLayout, best: EvaluatedLayout) -> str:
    """Why a layout loses against the best one, in a line."""
    more = option.step_seconds - best.step_seconds
    reasons = describe_differences(option, best)
    across = slow_link_warnings(run, option.candidate)
    explanation = "; ".join([*reasons, *across]) or "equally fast; the best is simpler or smaller"
    return f"{format_seconds_change(more)}: {explanation}"


def slow_link_warnings(run: RunSpec, candidate: CandidateLayout) -> list[str]:
    """What of a layout leaves the domain of fast links."""
    domain = run.cluster.fast_link_domain_size
    warnings = []
    if candidate.tp > domain:
        warnings.append(f"tp = {candidate.tp} leaves the domain of {domain} devices with fast links")
    world_size = candidate.dp * candidate.tp * candidate.pp * candidate.cp
    if candidate.ep > max(1.0, candidate_jobs(run, world_size, [candidate]).fast_link_ranks_per_stage[0]):
        warnings.append(f"the exchange of ep = {candidate.ep} leaves the domain of {domain}")
    return warnings


@dataclass(frozen=True)
class WhatIf:
    """A change, and the best layout after it."""

    change: str
    option: EvaluatedLayout | None
    speedup: float
    """Of tokens per second; 0 where nothing fits."""


def evaluate_what_ifs(run: RunSpec, world_size: int, fastest: EvaluatedLayout) -> Iterator[WhatIf]:
    """What would make a job faster than its fastest layout does: more memory, faster links, a larger batch."""
    cluster = run.cluster
    training = run.training

    def double_field(field: str) -> RunSpec | None:
        value = getattr(cluster, field)
        return value and run.model_copy(update={"cluster": cluster.model_copy(update={field: 2 * value})})

    changes = {
        "twice the memory": double_field("memory_bytes"),
        "fast links twice as fast": double_field("link_bytes_per_second"),
        "a network twice as fast": double_field("network_bytes_per_second"),
        "twice the tokens per step": run.model_copy(
            update={"training": training.model_copy(update={"tokens_per_step": 2 * training.tokens_per_step})}
        ),
    }
    for change, changed in changes.items():
        if changed is not None:
            options = search_layouts(changed, world_size, keep=1).options
            option = options[0] if options else None
            yield WhatIf(change, option, option.tokens_per_second / fastest.tokens_per_second if option else 0.0)


def suggest_fit(run: RunSpec, world_size: int, plan: Plan) -> str:
    """What to change where no layout fits: by how much memory is short, and how many times the nodes would do."""
    if plan.closest_to_fitting is None:
        raise ValueError("something fits")
    suggestion = (
        f"the smallest, {plan.closest_to_fitting.candidate}, "
        f"takes {describe_memory_use(run.cluster, plan.closest_to_fitting)}"
    )
    if run.cluster.network_bytes_per_second is None:
        return f"{suggestion}; set cluster.network_bytes_per_second to see on how many nodes it fits"
    sequences = run.training.tokens_per_step // run.training.seq_len
    for times in (2, 4, 8, 16, 32, 64):
        ranks = times * world_size
        larger = run.cluster.model_copy(update={"nodes": run.cluster.nodes * times})
        try:
            options = search_layouts(run.model_copy(update={"cluster": larger}), ranks, keep=1).options
        except UserError:
            break
        if options:
            return f"{suggestion}; on {times} times as many devices ({ranks}) it fits: {options[0].candidate}"
    return f"{suggestion}; more devices with {sequences} sequences a step do not help: shorten training.seq_len"


def describe_memory_use(cluster: ClusterSpec, option: EvaluatedLayout) -> str:
    """What a layout takes of the memory that it fills most: the device's, with driver and libraries, or the CPU's."""
    used = option.memory_bytes if cluster.calibration else process_bytes(cluster, option.memory_bytes)
    device = used / GIB, (cluster.rank_memory_bytes or 1) / GIB, "device"
    host = option.host_bytes / GIB, host_memory(cluster) / GIB, "CPU"
    taken, there, kind = max(device, host, key=lambda memory: memory[0] / memory[1])
    return f"{taken:.1f} GiB of {there:.1f} of {kind} memory (P(OOM) {option.p_oom:.0%})"
