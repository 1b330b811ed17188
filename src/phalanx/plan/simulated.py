"""A layout's pipeline, simulated: its very schedule, with the times that the planner gives each stage."""

from __future__ import annotations

from phalanx.cost.step import Stage, stage_seconds
from phalanx.plan.candidates import Candidate, jobs_of
from phalanx.plan.describe import times_of
from phalanx.schedule.named import named
from phalanx.schedule.simulate import Timeline, Times, simulate
from phalanx.spec.run import RunSpec


def timeline(run: RunSpec, world_size: int, candidate: Candidate) -> Timeline:
    """What every rank of a pipeline does when, in seconds: compute and bubble of a step, without sends and exchanges of
    data-parallel ranks. Embedding and head are on the first and the last stage."""
    first, middle, last = stage_seconds(times_of(run.cluster), jobs_of(run, world_size, [candidate]))
    schedule = named(candidate.schedule, candidate.pp, candidate.micro_batches, candidate.virtual_stages)
    chunks = schedule.stages // candidate.pp

    def of(part: str) -> list[float]:
        return [
            _of(middle, part) / chunks
            + (_of(first, part) - _of(middle, part) if stage == 0 else 0.0)
            + (_of(last, part) - _of(middle, part) if stage == schedule.stages - 1 else 0.0)
            for stage in range(schedule.stages)
        ]

    forward, backward, weight = of("forward"), of("backward"), of("weight")
    return simulate(schedule, Times(forward, [b - w for b, w in zip(backward, weight, strict=True)], weight))


def _of(stage: Stage, part: str) -> float:
    return float(getattr(stage, part)[0])
