"""A layout's pipeline, simulated: its very schedule, with the times that the planner gives each part of the model."""

from __future__ import annotations

from phalanx.cost.stages import stage_layers
from phalanx.cost.step import Stage, part_seconds
from phalanx.plan.candidates import Candidate, jobs_of
from phalanx.plan.describe import times_of
from phalanx.schedule.named import named
from phalanx.schedule.simulate import Timeline, Times, simulate
from phalanx.spec.run import RunSpec


def timeline(run: RunSpec, world_size: int, candidate: Candidate) -> Timeline:
    """What every rank of a pipeline does when, in seconds: compute and bubble of a step, without sends and exchanges of
    data-parallel ranks. Embedding and head are on the first and the last stage."""
    parts = part_seconds(times_of(run.cluster), jobs_of(run, world_size, [candidate]))
    schedule = named(candidate.schedule, candidate.pp, candidate.micro_batches, candidate.virtual_stages)
    block = {True: parts.routed, False: parts.dense}
    stages = []
    for layers in stage_layers(run.model_copy(update={"layout": candidate.layout()})):
        first, *others = (block[run.model.is_moe(layer)] for layer in layers)
        stages.append(sum(others, first))
    stages[0] += parts.embedding
    stages[-1] += parts.head

    def of(part: str) -> list[float]:
        return [_of(stage, part) for stage in stages]

    forward, backward, weight = of("forward"), of("backward"), of("weight")
    return simulate(schedule, Times(forward, [b - w for b, w in zip(backward, weight, strict=True)], weight))


def _of(stage: Stage, part: str) -> float:
    return float(getattr(stage, part)[0])
