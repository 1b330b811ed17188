"""A layout's pipeline, simulated: its very schedule, with the times that the planner gives each part of the model."""

from __future__ import annotations

from collections.abc import Iterable

from phalanx.cost.stages import stage_layers
from phalanx.cost.step import Stage, part_seconds
from phalanx.plan.candidates import Candidate, jobs_of
from phalanx.plan.describe import times_of
from phalanx.schedule.action import Schedule
from phalanx.schedule.named import named
from phalanx.schedule.simulate import Timeline, Times, simulate
from phalanx.spec.run import RunSpec


def timeline(run: RunSpec, world_size: int, candidate: Candidate) -> Timeline:
    """What every rank of a pipeline does when, in seconds: compute and bubble of a step, without sends and exchanges of
    data-parallel ranks."""
    stages = _stages(run, world_size, candidate)
    forward, backward, weight = ([_of(stage, part) for stage in stages] for part in ("forward", "backward", "weight"))
    return simulate(
        _schedule(candidate), Times(forward, [b - w for b, w in zip(backward, weight, strict=True)], weight)
    )


def show_command(run: RunSpec, world_size: int, candidate: Candidate) -> str:
    """The `phalanx pipeline show` that draws the schedule, with every rank as slow as the slowest."""
    schedule, stages = _schedule(candidate), _stages(run, world_size, candidate)
    ranks = (_sum(stages[stage] for stage in schedule.stages_of(rank)) for rank in range(candidate.pp))
    slowest = max(ranks, key=lambda rank: _of(rank, "both"))
    forward, backward, weight = (_of(slowest, part) for part in ("forward", "backward", "weight"))
    times = ",".join(f"{seconds:.4g}" for seconds in (forward, backward - weight, weight))
    virtual = f" --virtual-stages {candidate.virtual_stages}" if candidate.schedule == "interleaved" else ""
    sizes = f"--stages {candidate.pp} --microbatches {candidate.micro_batches}{virtual}"
    return f"phalanx pipeline show {candidate.schedule} {sizes} --times {times}"


def _schedule(candidate: Candidate) -> Schedule:
    return named(candidate.schedule, candidate.pp, candidate.micro_batches, candidate.virtual_stages)


def _stages(run: RunSpec, world_size: int, candidate: Candidate) -> list[Stage]:
    """Of the blocks that each has, the first with the embedding and the last with the head."""
    parts = part_seconds(times_of(run.cluster), jobs_of(run, world_size, [candidate]))
    block = {True: parts.routed, False: parts.dense}
    cut = stage_layers(run.model_copy(update={"layout": candidate.layout()}))
    stages = [_sum(block[run.model.is_moe(layer)] for layer in layers) for layers in cut]
    stages[0] += parts.embedding
    stages[-1] += parts.head
    return stages


def _sum(stages: Iterable[Stage]) -> Stage:
    first, *others = stages
    return sum(others, first)


def _of(stage: Stage, part: str) -> float:
    return float(getattr(stage, part)[0])
