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


def show_command(run: RunSpec, world_size: int, candidate: Candidate) -> str:
    """The `phalanx pipeline show` that draws the schedule, with every rank as slow as the slowest."""
    stages = stage_seconds(times_of(run.cluster), jobs_of(run, world_size, [candidate]))
    slowest = max(stages, key=lambda stage: _of(stage, "both"))
    forward, backward, weight = (_of(slowest, part) for part in ("forward", "backward", "weight"))
    times = ",".join(f"{seconds:.4g}" for seconds in (forward, backward - weight, weight))
    virtual = f" --virtual-stages {candidate.virtual_stages}" if candidate.schedule == "interleaved" else ""
    sizes = f"--stages {candidate.pp} --microbatches {candidate.micro_batches}{virtual}"
    return f"phalanx pipeline show {candidate.schedule} {sizes} --times {times}"


def _of(stage: Stage, part: str) -> float:
    return float(getattr(stage, part)[0])
