"""Results of a search: one evaluated layout, and all of them in order of preference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from phalanx.cost.kinds import Column
from phalanx.plan.search.candidates import CandidateLayout
from phalanx.plan.search.oom_risk import SAFE_OOM_PROBABILITY
from phalanx.spec.formatting import format_gib, format_percent
from phalanx.spec.layout import Layout
from phalanx.spec.result_tables import data_frame, html_table

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True, kw_only=True)
class EvaluatedLayout:
    """A layout with its predicted step time, memory and OOM risk.

    Example:
        >>> layout = phalanx.plan_run(phalanx.load_run("run.toml", machine="h100"), 8).best
        >>> layout.layout.data_parallel, layout.p_oom < 0.05
        ('ddp', True)
        >>> round(sum(layout.parts.values()) / layout.step_seconds, 6)
        1.0
    """

    candidate: CandidateLayout
    step_seconds: float
    low_seconds: float
    high_seconds: float
    """The interval from `low_seconds` to `high_seconds` contains 80 of 100 steps."""
    parts: dict[str, float]
    """Seconds of the step per part. They add up to `step_seconds`."""
    memory_bytes: float
    """Memory of the fullest rank; on a calibrated machine including memory of the process besides tensors."""
    host_bytes: float
    """CPU memory of the rank that offloads most."""
    stages: dict[str, dict[str, float]]
    """Estimated bytes by part of the first and the last stage."""
    stage_bytes: dict[str, float]
    """Bytes of the same stages counted as `memory_bytes` are; the sum of the parts where nothing was counted."""
    p_oom: float
    """Probability that the memory of a rank is not enough."""
    tokens_per_second: float
    mfu: float
    """Model FLOPs utilization as in the trainer's metrics, with the causal half of attention's pairs.

    Tables of published rows count all pairs (`job_columns.flops_per_token`), as most publications do.
    """
    hfu: float
    """Like `mfu`, with recomputation counted."""

    @property
    def layout(self) -> Layout:
        """The layout as a run file contains it."""
        return self.candidate.layout()

    @property
    def schedule_seconds(self) -> float:
        """Seconds of the passes and the bubble of their schedule, without sends between stages."""
        return sum(self.parts[part] for part in ("compute", "exchange", "bubble"))

    @property
    def exposed(self) -> float:
        """Seconds of the step in which a rank only communicates."""
        return sum(self.parts[part] for part in ("exchange", "send", "data_parallel"))

    def to_json(self) -> dict[str, Any]:
        """Return the layout and its figures as `phalanx plan --json` prints them."""
        layout = self.layout.model_dump(mode="json", exclude_defaults=True)
        return {**asdict(self), "layout": layout, "candidate": str(self.candidate)}

    def to_row(self) -> dict[str, Any]:
        """Return the row of a table: the fields of the layout, then the figures."""
        figures = ("step_seconds", "low_seconds", "high_seconds", "tokens_per_second", "mfu", "hfu")
        return {
            "layout": str(self.candidate),
            **self.candidate._asdict(),
            **{name: getattr(self, name) for name in (*figures, "memory_bytes", "host_bytes", "p_oom", "exposed")},
        }

    def _repr_html_(self) -> str:
        parts = [(name, f"{seconds:.4g} s") for name, seconds in self.parts.items() if seconds]
        return html_table(_COLUMNS, [_format_figures(self)]) + html_table(("part of the step", "time"), parts)


_COLUMNS = ("layout", "step", "80 % of steps", "tokens/s", "MFU", "memory", "P(OOM)")


def _format_figures(layout: EvaluatedLayout) -> tuple[str, ...]:
    return (
        str(layout.candidate),
        f"{layout.step_seconds:.4g} s",
        f"{layout.low_seconds:.3g} to {layout.high_seconds:.3g} s",
        f"{layout.tokens_per_second:,.0f}",
        format_percent(layout.mfu),
        format_gib(layout.memory_bytes),
        format_percent(layout.p_oom),
    )


@dataclass(frozen=True, repr=False, kw_only=True)
class Plan:
    """The result of a search: the layouts that fit, in order of preference.

    Example:
        >>> plan = phalanx.plan_run(phalanx.load_run("run.toml", machine="h100"), 8, top=3)
        >>> len(plan.layouts), plan.searched >= plan.fitting > 0
        (3, True)
        >>> run = phalanx.load_run("run.toml").replace(layout=plan.best.layout)
        >>> sorted(plan.to_json())
        ['best', 'fitting', 'layouts', 'searched']
    """

    layouts: list[EvaluatedLayout]
    """Layouts that fit and can run, in order of preference."""
    candidates: list[CandidateLayout]
    """All layouts of the search, with offload variants of those that do not fit without."""
    fitting: int
    """The number of candidates whose estimated memory is likely to be enough."""
    fastest: EvaluatedLayout | None
    """The layout with the shortest step, whatever is preferred."""
    closest_to_fitting: EvaluatedLayout | None
    """The layout that is nearest to fitting, if none fits."""

    @property
    def searched(self) -> int:
        """The number of candidates."""
        return len(self.candidates)

    @property
    def first_safe(self) -> EvaluatedLayout | None:
        """The first of `layouts` whose memory is almost certainly enough; None if there is none."""
        return next((layout for layout in self.layouts if layout.p_oom < SAFE_OOM_PROBABILITY), None)

    @property
    def best(self) -> EvaluatedLayout:
        """The layout to train with.

        It is the first of `layouts` whose memory is almost certainly enough, or else the one with the lowest `p_oom`.
        """
        return self.first_safe or min(self.layouts, key=lambda layout: layout.p_oom)

    @property
    def pareto_front(self) -> list[EvaluatedLayout]:
        """The layouts that no other layout beats in both time and memory, the fastest first."""
        return pareto_front(self.layouts)

    def __repr__(self) -> str:
        best = f"best {self.best.candidate} ({self.best.step_seconds:.4g} s)" if self.layouts else "none fits"
        return f"Plan({len(self.layouts)} layouts of {self.searched} searched, {best})"

    def to_json(self) -> dict[str, Any]:
        """Return the plan as JSON values. `phalanx plan --json` adds the machine and the cost of the training."""
        return {
            "searched": self.searched,
            "fitting": self.fitting,
            "layouts": [layout.to_json() for layout in self.layouts],
            "best": str(self.best.candidate),
        }

    def to_dataframe(self) -> pandas.DataFrame:
        """Return a pandas DataFrame with one row per layout.

        Raises:
            UserError: pandas is not installed.
        """
        return data_frame([layout.to_row() for layout in self.layouts])

    def _repr_html_(self) -> str:
        caption = f"{self.searched:,} layouts searched, {self.fitting:,} likely to fit"
        return html_table(_COLUMNS, [_format_figures(layout) for layout in self.layouts], caption)


def pareto_front(layouts: Sequence[EvaluatedLayout]) -> list[EvaluatedLayout]:
    """Return the layouts that no other beats in both time and memory, the fastest first."""
    front: list[EvaluatedLayout] = []
    for layout in sorted(layouts, key=lambda layout: (layout.step_seconds, layout.memory_bytes)):
        if not front or layout.memory_bytes < front[-1].memory_bytes:
            front.append(layout)
    return front


TIE_TOLERANCE = 0.001
"""Relative difference below which steps are equally long.

The simpler layout is then preferred, and after that the smaller one.
"""


def preference_order(seconds: Column, axes: NDArray[np.int64], memory: Column) -> NDArray[np.int64]:
    """Return the indices in order of preference: by time, then simplicity, then memory.

    Times are compared in bins of `TIE_TOLERANCE`; `axes` are the numbers of kinds of parallelism.
    """
    time_bins = np.floor(np.log(seconds) / TIE_TOLERANCE)
    return np.lexsort((memory, axes, time_bins))
