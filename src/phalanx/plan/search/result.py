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
    """Layout with its predicted cost."""

    candidate: CandidateLayout
    step_seconds: float
    low_seconds: float
    high_seconds: float
    """Upper end of the range from `low_seconds` that contains 80 of 100 steps."""
    parts: dict[str, float]
    """Seconds of the step by part; their sum is the step time."""
    memory_bytes: float
    """Bytes on the fullest rank; for a calibrated machine including memory of the process besides tensors."""
    host_bytes: float
    """Bytes in CPU memory, for the rank that offloads most."""
    stages: dict[str, dict[str, float]]
    """Estimated bytes by part of the first and the last stage."""
    stage_bytes: dict[str, float]
    """Bytes of the same stages, counted as `memory_bytes`; the sum of the parts without an exact count."""
    p_oom: float
    tokens_per_second: float
    mfu: float
    """Model FLOPs utilization as in the trainer's metrics, with the causal half of attention's pairs.

    Tables of published rows count all pairs (`job_columns.flops_per_token`), as most publications do.
    """
    hfu: float
    """Hardware FLOPs utilization, including recomputation."""

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
    """Result of a search."""

    options: list[EvaluatedLayout]
    """Layouts that fit and can run, in order of preference."""
    layouts: list[CandidateLayout]
    """All considered layouts, with offload variants of those that do not fit without offload."""
    fitting: int
    fastest: EvaluatedLayout | None
    """Layout with the shortest step, regardless of preference."""
    closest_to_fitting: EvaluatedLayout | None
    """Layout that is closest to fitting, if none fits."""

    @property
    def considered(self) -> int:
        """Number of considered layouts."""
        return len(self.layouts)

    @property
    def first_safe(self) -> EvaluatedLayout | None:
        """First of `options` whose memory is almost certainly sufficient, if any."""
        return next((option for option in self.options if option.p_oom < SAFE_OOM_PROBABILITY), None)

    @property
    def chosen(self) -> EvaluatedLayout:
        """Layout for automatic use: the first of `options` that almost certainly fits, or the safest one."""
        return self.first_safe or min(self.options, key=lambda option: option.p_oom)

    @property
    def pareto_front(self) -> list[EvaluatedLayout]:
        """Layouts of `options` that no other layout beats in both time and memory."""
        front: list[EvaluatedLayout] = []
        for option in sorted(self.options, key=lambda option: option.step_seconds):
            if not front or option.memory_bytes < front[-1].memory_bytes:
                front.append(option)
        return front


TIE_TOLERANCE = 0.001
"""Relative difference below which steps are equally long.

The simpler layout is then preferred, and after that the smaller one.
"""


def preference_order(seconds: Column, axes: NDArray[np.int64], memory: Column) -> NDArray[np.int64]:
    """Return the indices in order of preference: by time, then simplicity, then memory.

    Args:
        seconds: Step times, compared in bins of `TIE_TOLERANCE`.
        axes: Numbers of kinds of parallelism.
        memory: Bytes.
    """
    time_bins = np.floor(np.log(seconds) / TIE_TOLERANCE)
    return np.lexsort((memory, axes, time_bins))
