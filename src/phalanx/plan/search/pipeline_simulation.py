"""Simulation of a layout's pipeline: its schedule with the planner's times of each part of the model."""

from __future__ import annotations

from collections.abc import Iterable

from phalanx.cost.estimate.block_time import StageTime
from phalanx.cost.estimate.step_time import layer_seconds, layer_seconds_without_recomputation
from phalanx.cost.exact.pipeline_split import layers_per_stage, recomputed_layers
from phalanx.plan.search.candidate_columns import candidate_jobs
from phalanx.plan.search.candidates import CandidateLayout
from phalanx.plan.tables.job_columns import time_constants_for
from phalanx.schedule.registry import build_schedule
from phalanx.schedule.schedule import Schedule
from phalanx.schedule.simulate import ActionTimes, Timeline, simulate
from phalanx.spec.run import RunSpec


def simulate_candidate(run: RunSpec, world_size: int, candidate: CandidateLayout) -> Timeline:
    """Return the simulated timeline of every pipeline rank, in seconds.

    It covers the compute and the bubble of a step, without sends and data-parallel communication.

    Args:
        world_size: Number of ranks.
        candidate: Candidate layout.
    """
    stages = _stage_times(run, world_size, candidate)
    forward, backward, weight = (
        [_part_seconds(stage, part) for stage in stages] for part in ("forward", "backward", "weight_grad")
    )
    return simulate(
        _build_candidate_schedule(candidate),
        ActionTimes(
            forward=forward, input_grad=[b - w for b, w in zip(backward, weight, strict=True)], weight_grad=weight
        ),
    )


def show_command(run: RunSpec, world_size: int, candidate: CandidateLayout) -> str:
    """Return the `phalanx pipeline show` command of the schedule; all ranks are as slow as the slowest.

    Args:
        world_size: Number of ranks.
        candidate: Candidate layout.
    """
    schedule = _build_candidate_schedule(candidate)
    stages = _stage_times(run, world_size, candidate)
    ranks = (_sum_stage_times(stages[stage] for stage in schedule.stages_of(rank)) for rank in range(candidate.pp))
    slowest = max(ranks, key=lambda rank: _part_seconds(rank, "forward_backward"))
    forward, backward, weight = (_part_seconds(slowest, part) for part in ("forward", "backward", "weight_grad"))
    times = ",".join(f"{seconds:.4g}" for seconds in (forward, backward - weight, weight))
    virtual = f" --virtual-stages {candidate.virtual_stages}" if candidate.schedule == "interleaved" else ""
    sizes = f"--stages {candidate.pp} --microbatches {candidate.micro_batches}{virtual}"
    return f"phalanx pipeline show {candidate.schedule} {sizes} --times {times}"


def _build_candidate_schedule(candidate: CandidateLayout) -> Schedule:
    return build_schedule(candidate.schedule, candidate.pp, candidate.micro_batches, v=candidate.virtual_stages)


def _stage_times(run: RunSpec, world_size: int, candidate: CandidateLayout) -> list[StageTime]:
    """Return the times of each stage's blocks; the first also has the embedding, the last the head."""
    constants = time_constants_for(run.cluster)
    jobs = candidate_jobs(run, world_size, [candidate])
    parts = layer_seconds(constants, jobs)
    plain = layer_seconds_without_recomputation(constants, jobs, parts)
    layout_run = run.model_copy(update={"layout": candidate.layout()})
    recomputed = recomputed_layers(layout_run)

    def block_time(layer: int) -> StageTime:
        times = parts if layer in recomputed else plain
        return times.routed if run.model.is_moe_layer(layer) else times.dense

    stages = [_sum_stage_times(map(block_time, layers)) for layers in layers_per_stage(layout_run)]
    stages[0] += parts.embedding
    stages[-1] += parts.head
    return stages


def _sum_stage_times(stages: Iterable[StageTime]) -> StageTime:
    first, *remaining = stages
    return sum(remaining, first)


def _part_seconds(stage: StageTime, part: str) -> float:
    return float(getattr(stage, part)[0])
