"""The search: every layout's memory, then the time of those that are likely to fit, ranked."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from phalanx.cost.compute import mfu, recomputed_flops_per_token, training_flops_per_token
from phalanx.cost.footprint import footprint, fullness, out_of_memory
from phalanx.cost.jobs import OWN_RECOMPUTE, Column
from phalanx.cost.memory import rank_memory
from phalanx.cost.stages import check_layout
from phalanx.cost.step import step_seconds
from phalanx.plan.candidates import Candidate, candidates, jobs_of, offloaded
from phalanx.plan.describe import half_width_of, memory_of, times_of
from phalanx.plan.fits import LIKELY, SURE, held_and_host, held_risk, in_process
from phalanx.spec.errors import UserError
from phalanx.spec.run import RunSpec

COUNTED = 1000
"""Layouts that are counted at most: beyond so many that fit by the formula and not as counted, none is looked for."""
PARTS = ("compute", "exchange", "bubble", "send", "data_parallel", "update", "offload", "waiting")


@dataclass(frozen=True)
class Option:
    """A layout with what it takes."""

    candidate: Candidate
    step_seconds: float
    low_seconds: float
    high_seconds: float
    """Between `low` and `high` lie 80 of 100 steps."""
    parts: dict[str, float]
    """Seconds of the step by what they go to; `exchange` is part of `compute`."""
    memory_bytes: float
    """Held by the fullest rank; on a machine that was calibrated with what a process has beside tensors."""
    host_bytes: float
    """In CPU memory, for the rank that offloads most."""
    stages: dict[str, dict[str, float]]
    """Bytes by part of the first and the last stage."""
    p_oom: float
    tokens_per_second: float
    mfu: float
    """As the trainer's metrics have it: attention's causal half of the pairs counts. Tables of published rows count all
    pairs (`describe.flops_per_token`), as most publications do."""
    hfu: float
    """With what recomputation does once more."""

    @property
    def exposed(self) -> float:
        """Seconds of the step in which a rank only communicates."""
        return sum(self.parts[part] for part in ("exchange", "send", "data_parallel"))


@dataclass(frozen=True)
class Plan:
    """What a search found."""

    options: list[Option]
    """Those that fit and can run, fastest first."""
    considered: int
    fitting: int
    smallest: Option | None
    """The one that is nearest to fitting, where none does."""

    @property
    def sure(self) -> Option | None:
        """The fastest whose memory is almost surely enough, if any of `options` is."""
        return next((option for option in self.options if option.p_oom < SURE), None)

    @property
    def taken(self) -> Option:
        """What is used where nobody chooses: the fastest of `options` that is almost surely enough, or the surest."""
        return self.sure or min(self.options, key=lambda option: option.p_oom)

    @property
    def front(self) -> list[Option]:
        """Of `options`, those that no other beats in both time and memory."""
        found: list[Option] = []
        for option in self.options:
            if not found or option.memory_bytes < found[-1].memory_bytes:
                found.append(option)
        return found


ALIKE = 0.001
"""Steps that differ by less are equally long: the simpler layout is preferred, then the smaller one."""


Report = Callable[[str, int, int], None]
"""Told during a search what is being done, how much of it is, and of how much."""


def search(
    run: RunSpec,
    world_size: int,
    keep: int = 20,
    report: Report = lambda *_: None,
    wanted: Callable[[Candidate], bool] = lambda _: True,
) -> Plan:
    """The `keep` fastest layouts that are wanted and likely to fit.

    Memory of all is computed before the time of any: no bound on time is needed, and none is lost. Nothing is offloaded
    of what fits without: that never makes a step shorter.
    Raises UserError for a cluster whose speeds are not known, and where no layout divides the ranks.
    """
    found = candidates(run, world_size)
    if not found:
        raise UserError(
            "cluster.nodes x cluster.nproc", world_size, "ranks share this model and this batch in no layout",
            "use a number of ranks whose factors divide the sequences of a step and the model",
        )  # fmt: skip
    report("evaluating layouts", 0, len(found))
    found, ordered = widened(run, world_size, found)
    report("evaluating layouts", len(found), len(found))
    report("counting what the fastest hold", 0, keep)
    offered: list[Option] = []
    offering = offers(run, world_size, filter(wanted, ordered))  # with what offload makes of some
    for option in islice((option for option in offering if wanted(option.candidate)), keep):
        offered.append(option)
        report("counting what the fastest hold", len(offered), keep)
    least = None if offered else nearest(run, world_size, found)
    return Plan(offered, len(found), len(ordered), least)


def widened(run: RunSpec, world_size: int, found: list[Candidate]) -> tuple[list[Candidate], list[Candidate]]:
    """Layouts with what offload makes of those that are not likely to fit; and which of all these are, in order."""
    risk = risk_of(run, world_size, found)
    more = [other for at in np.flatnonzero(risk >= LIKELY) for other in offloaded(run, found[at])]
    fitting = [found[at] for at in np.flatnonzero(risk < LIKELY)]
    return [*found, *more], in_order(run, world_size, [*fitting, *more])


def offers(run: RunSpec, world_size: int, ordered: Iterable[Candidate]) -> Iterator[Option]:
    """Of layouts in order those that can run, and fit as they are counted: of the first `COUNTED`. What offload makes
    of those that fit by the formula only has its own place, which is later."""
    later: list[Option] = []
    for candidate in islice(ordered, COUNTED):
        if not can_run(run, world_size, candidate):
            continue
        option = evaluate(run, world_size, [candidate])[0]
        while later and later[0].step_seconds < option.step_seconds:
            yield from _likely(counted(run, world_size, later.pop(0)))
        option = counted(run, world_size, option)
        yield from _likely(option)
        if option.p_oom >= LIKELY:
            later += evaluate(run, world_size, list(offloaded(run, candidate)))
            later.sort(key=lambda other: other.step_seconds)
    for option in later:
        yield from _likely(counted(run, world_size, option))


def _likely(option: Option) -> Iterator[Option]:
    if option.p_oom < LIKELY:
        yield option


def in_order(run: RunSpec, world_size: int, found: list[Candidate]) -> list[Candidate]:
    """Of some layouts those that are likely to fit, in the order of preference; not all of them can run."""
    if not found:
        return []
    jobs, c = jobs_of(run, world_size, found), memory_of(run.cluster)
    held = footprint(c, jobs)
    memory = np.broadcast_to(held.allocated, len(found))
    risk = np.broadcast_to(out_of_memory(c, jobs, held), len(found))
    fitting = np.flatnonzero(risk < LIKELY)
    if not len(fitting):
        return []
    seconds = np.broadcast_to(step_seconds(times_of(run.cluster), jobs.take(fitting)).total, len(fitting))
    fastest = fitting[rank(seconds, np.array([found[at].axes for at in fitting]), memory[fitting])]
    return [found[at] for at in fastest]


def risk_of(run: RunSpec, world_size: int, found: list[Candidate]) -> Column:
    """The probability that memory is not enough for each of some layouts."""
    jobs, c = jobs_of(run, world_size, found), memory_of(run.cluster)
    return np.broadcast_to(out_of_memory(c, jobs, footprint(c, jobs)), len(found))


def smallest(run: RunSpec, world_size: int, found: list[Candidate]) -> Candidate:
    """Of some layouts the one that most likely fits: that least fills the device's memory and the CPU's."""
    jobs, c = jobs_of(run, world_size, found), memory_of(run.cluster)
    return found[int(np.argmin(np.broadcast_to(fullness(c, jobs, footprint(c, jobs)), len(found))))]


def nearest(run: RunSpec, world_size: int, found: list[Candidate]) -> Option:
    """What the smallest of some layouts takes, as it is counted if it can run."""
    option = evaluate(run, world_size, [smallest(run, world_size, found)])[0]
    return counted(run, world_size, option) if can_run(run, world_size, option.candidate) else option


def rank(seconds: Column, axes: NDArray[np.int64], memory: Column) -> NDArray[np.int64]:
    """The order of preference: by time, and where times are alike by simplicity, then by memory."""
    alike = np.floor(np.log(seconds) / ALIKE)
    return np.lexsort((memory, axes, alike))


def can_run(run: RunSpec, world_size: int, candidate: Candidate) -> bool:
    """Whether Phalanx trains it."""
    try:
        check_layout(run.model_copy(update={"layout": candidate.layout()}), world_size)
    except UserError:
        return False
    return True


def counted(run: RunSpec, world_size: int, option: Option) -> Option:
    """An option with what Phalanx itself would hold, counted tensor by tensor as `phalanx memory` does, which may be
    more than the formula has for any trainer."""
    own = run.model_copy(update={"layout": option.candidate.layout()})
    held, host = held_and_host(run.cluster, rank_memory(own, world_size).values())
    used = in_process(run.cluster, held) if run.cluster.measured else held
    risk = max(option.p_oom, held_risk(run.cluster, held, host))
    return replace(option, memory_bytes=used, host_bytes=host, p_oom=risk)


def evaluate(run: RunSpec, world_size: int, found: list[Candidate]) -> list[Option]:
    """What each of some layouts takes, in their order."""
    if not found:
        return []
    jobs, size = jobs_of(run, world_size, found), len(found)
    c = memory_of(run.cluster)
    time, held = step_seconds(times_of(run.cluster), jobs), footprint(c, jobs)
    risk = out_of_memory(c, jobs, held)
    spread = np.exp(half_width_of(run.cluster, jobs))
    tokens, sequence = run.training.tokens_per_step, run.training.sequence
    flops, peak = training_flops_per_token(run.model, sequence), float(jobs.peak_flops[0])
    again = {name: recomputed_flops_per_token(run.model, sequence, kind) for name, kind in OWN_RECOMPUTE.items()}

    def number(column: Column, at: int) -> float:
        return float(np.broadcast_to(column, size)[at])

    options = []
    for at, candidate in enumerate(found):
        seconds = number(time.total, at)
        stages = {
            name: {part: number(getattr(stage, part), at) for part in ("state", "activations", "logits", "buffers")}
            for name, stage in (("first", held.first), ("last", held.last))
        }
        speed = tokens / seconds
        options.append(
            Option(
                candidate,
                seconds,
                seconds / number(spread, at),
                seconds * number(spread, at),
                {part: number(getattr(time, part), at) for part in PARTS},
                number(held.allocated, at),
                number(held.host, at),
                stages,
                number(risk, at),
                speed,
                mfu(speed, flops, peak, world_size),
                mfu(speed, flops + again[candidate.recompute], peak, world_size),
            )
        )
    return options
