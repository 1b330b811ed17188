"""Simulation of a layout's pipeline: its schedule with the planner's times of each part of the model."""

from __future__ import annotations

from collections.abc import Iterable

from phalanx.cost.estimate.block_time import StageTime
from phalanx.cost.estimate.step_time import layer_seconds, layer_seconds_without_recomputation
from phalanx.plan.search.candidate_columns import candidate_jobs
from phalanx.plan.search.candidates import CandidateLayout
from phalanx.plan.tables.job_columns import time_constants_for
from phalanx.program.pipeline_split import layers_per_stage, recomputed_layers
from phalanx.schedule.registry import build_schedule
from phalanx.schedule.schedule import Schedule
from phalanx.schedule.simulate import ActionTimes, Timeline, simulate
from phalanx.spec.layers import expert_layers
from phalanx.spec.resolved_run import ResolvedRun


def simulate_candidate(resolved: ResolvedRun, candidate: CandidateLayout) -> Timeline:
    """Return the simulated timeline of every pipeline rank, in seconds.

    It covers the compute and the bubble of a step, without sends and data-parallel communication.
    """
    stages = _estimate_stage_times(resolved, candidate)
    times = ActionTimes(
        forward=[float(stage.forward[0]) for stage in stages],
        input_grad=[float(stage.backward[0]) - float(stage.weight_grad[0]) for stage in stages],
        weight_grad=[float(stage.weight_grad[0]) for stage in stages],
    )
    return simulate(_build_candidate_schedule(candidate), times)


def show_command(resolved: ResolvedRun, candidate: CandidateLayout) -> str:
    """Return the `phalanx pipeline show` command of the schedule; all ranks are as slow as the slowest."""
    schedule = _build_candidate_schedule(candidate)
    stages = _estimate_stage_times(resolved, candidate)
    rank_times = (_sum_stage_times(stages[stage] for stage in schedule.stages_of(rank)) for rank in range(candidate.pp))
    slowest = max(rank_times, key=lambda rank: float(rank.forward_backward[0]))
    forward, backward, weight = (float(part[0]) for part in (slowest.forward, slowest.backward, slowest.weight_grad))
    times = ",".join(f"{seconds:.4g}" for seconds in (forward, backward - weight, weight))
    virtual = f" --virtual-stages {candidate.virtual_stages}" if candidate.virtual_stages > 1 else ""
    sizes = f"--stages {candidate.pp} --microbatches {candidate.micro_batches}{virtual}"
    return f"phalanx pipeline show {candidate.schedule} {sizes} --times {times}"


def _build_candidate_schedule(candidate: CandidateLayout) -> Schedule:
    return build_schedule(candidate.schedule, candidate.pp, candidate.micro_batches, candidate.virtual_stages)


def _estimate_stage_times(resolved: ResolvedRun, candidate: CandidateLayout) -> list[StageTime]:
    """Return the times of each stage. The first includes the embedding, and the last the head."""
    run = resolved.run
    constants = time_constants_for(run.cluster)
    jobs = candidate_jobs(resolved, [candidate])
    layers_times = layer_seconds(constants, jobs)
    plain = layer_seconds_without_recomputation(constants, jobs, layers_times)
    layout_run = run.model_copy(update={"layout": candidate.layout()})
    recomputed = recomputed_layers(layout_run)
    with_experts = set(expert_layers(run.model))

    def block_time(layer: int) -> StageTime:
        times = layers_times if layer in recomputed else plain
        return times.routed if layer in with_experts else times.dense

    stages = [_sum_stage_times(map(block_time, layers)) for layers in layers_per_stage(layout_run)]
    stages[0] += layers_times.embedding
    stages[-1] += layers_times.head
    return stages


def _sum_stage_times(stages: Iterable[StageTime]) -> StageTime:
    first, *remaining = stages
    return sum(remaining, first)
