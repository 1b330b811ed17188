"""Results of a search: one evaluated layout, and all of them in order of preference."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from phalanx.cost.kinds import Column
from phalanx.plan.search.candidates import CandidateLayout
from phalanx.plan.search.oom_risk import SAFE_OOM_PROBABILITY


@dataclass(frozen=True)
class EvaluatedLayout:
    """A layout with what it takes."""

    candidate: CandidateLayout
    step_seconds: float
    low_seconds: float
    high_seconds: float
    """Between `low` and `high` lie 80 of 100 steps."""
    parts: dict[str, float]
    """Seconds of the step by what they go to, which add up to it."""
    memory_bytes: float
    """Held by the fullest rank; on a machine that was calibrated with what a process has beside tensors."""
    host_bytes: float
    """In CPU memory, for the rank that offloads most."""
    stages: dict[str, dict[str, float]]
    """Bytes by part of the first and the last stage, as a formula estimates them."""
    stage_bytes: dict[str, float]
    """Bytes of the same stages counted as `memory_bytes` are; the parts' sum where nothing was counted."""
    p_oom: float
    tokens_per_second: float
    mfu: float
    """As the trainer's metrics have it: attention's causal half of the pairs counts. Tables of published rows count all
    pairs (`job_columns.flops_per_token`), as most publications do."""
    hfu: float
    """With what recomputation does once more."""

    @property
    def schedule_seconds(self) -> float:
        """Seconds of the passes and their schedule's bubble, without sends between stages."""
        return sum(self.parts[part] for part in ("compute", "exchange", "bubble"))

    @property
    def exposed(self) -> float:
        """Seconds of the step in which a rank only communicates."""
        return sum(self.parts[part] for part in ("exchange", "send", "data_parallel"))


@dataclass(frozen=True)
class Plan:
    """What a search found."""

    options: list[EvaluatedLayout]
    """Those that fit and can run, in order of preference."""
    layouts: list[CandidateLayout]
    """All that were considered, with offload variants of those that do not fit without."""
    fitting: int
    fastest: EvaluatedLayout | None
    """The one with the shortest step, whatever is preferred."""
    closest_to_fitting: EvaluatedLayout | None
    """The one that is nearest to fitting, where none does."""

    @property
    def considered(self) -> int:
        """The number of layouts that were considered."""
        return len(self.layouts)

    @property
    def first_safe(self) -> EvaluatedLayout | None:
        """The first whose memory is almost surely enough, if any of `options` is."""
        return next((option for option in self.options if option.p_oom < SAFE_OOM_PROBABILITY), None)

    @property
    def chosen(self) -> EvaluatedLayout:
        """What is used where nobody chooses: the first of `options` that is almost surely enough, or the surest."""
        return self.first_safe or min(self.options, key=lambda option: option.p_oom)

    @property
    def pareto_front(self) -> list[EvaluatedLayout]:
        """Of `options`, those that no other beats in both time and memory."""
        front: list[EvaluatedLayout] = []
        for option in sorted(self.options, key=lambda option: option.step_seconds):
            if not front or option.memory_bytes < front[-1].memory_bytes:
                front.append(option)
        return front


TIE_TOLERANCE = 0.001
"""Steps that differ by less are equally long: the simpler layout is preferred, then the smaller one."""


def preference_order(seconds: Column, axes: NDArray[np.int64], memory: Column) -> NDArray[np.int64]:
    """The order of preference: by time, and where times are alike by simplicity, then by memory."""
    time_bins = np.floor(np.log(seconds) / TIE_TOLERANCE)
    return np.lexsort((memory, axes, time_bins))
