"""Bubble and memory of the schedules that the planner predicts, one row each.

Bubbles are functions of the times of one micro-batch in all stages but the slowest: F of forward passes, B of gradients
of inputs, W of gradients of weights. p is the number of ranks, m of micro-batches, v of virtual stages."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np

from phalanx.cost.estimate.block_time import StageTime
from phalanx.cost.estimate.job_table import JobTable
from phalanx.cost.kinds import Column
from phalanx.spec.pipeline_schedules import ScheduleName

MAX_VIRTUAL_STAGES = 8


class ScheduleEstimate(NamedTuple):
    """Formulas of a schedule."""

    bubble_seconds: Callable[[JobTable, StageTime], Column]
    """Idle seconds of the slowest stage."""
    in_flight: Callable[[JobTable], tuple[Column, Column, Column]]
    """Micro-batches whose activations the first, the second and the last stage hold, if there are enough."""
    searched_stages: Callable[[int, int, int], Iterable[int]] = lambda p, m, layers: ()
    """Values of v that a search tries, by p, m and layers: none if m is too small to fill bubbles."""


def _whole_bubble(jobs: JobTable, others: StageTime) -> Column:
    """Return F + B + W."""
    return others.forward_backward


def _interleaved_bubble(jobs: JobTable, others: StageTime) -> Column:
    """Return (F + B + W) / v (arXiv 2104.04473, section 2.2)."""
    return others.forward_backward / np.maximum(jobs.virtual_stages, 1)


def _interleaved_in_flight(jobs: JobTable) -> tuple[Column, Column, Column]:
    """Return p + (p-1)/v for the first stage, and 2/v less for each further one (arXiv 2205.05198, section 4.2.3)."""
    p = jobs.pp
    v = np.maximum(jobs.virtual_stages, 1)
    return p + (p - 1) / v, p + (p - 3) / v, (p * (v - 1) + 1) / v


def _zb_h1_bubble(jobs: JobTable, others: StageTime) -> Column:
    """Return F + B - W: gradients of weights fill the bubble (arXiv 2401.10241, section 2.3)."""
    W = others.weight_grad
    return np.maximum(others.forward + (others.backward - W) - W, 0.0)


def _zb_h2_bubble(jobs: JobTable, others: StageTime) -> Column:
    """Return max(F, F + B - 2 W).

    With postponed optimizer checks, the next step starts in the ramp of the last one. The 2p - 1 forward passes at the
    start then fill the rest, except B - F where gradients of weights do not cover it."""
    F = others.forward
    W = others.weight_grad
    B = others.backward - W
    covered = F + B - 2 * W
    post_validated = np.clip(B - F, 0.0, np.maximum(covered, 0.0))
    return np.where(jobs.optimizer_post_validation > 0, post_validated, np.maximum(F, covered))


def _zb_v_bubble(jobs: JobTable, others: StageTime) -> Column:
    """Return max(F, B) / 2, or with postponed optimizer checks (B - F) / 2 (arXiv 2405.15362)."""
    F = others.forward
    B = others.backward - others.weight_grad
    return np.where(jobs.optimizer_post_validation > 0, np.maximum(B - F, 0.0), np.maximum(F, B)) / 2


SCHEDULE_ESTIMATES: dict[ScheduleName, ScheduleEstimate] = {
    "1f1b": ScheduleEstimate(
        _whole_bubble, lambda jobs: (jobs.pp, np.maximum(jobs.pp - 1, 1), np.ones_like(jobs.pp)), lambda p, m, _: (1,)
    ),
    "gpipe": ScheduleEstimate(_whole_bubble, lambda jobs: (jobs.micro_batches,) * 3),
    "zb-h1": ScheduleEstimate(_zb_h1_bubble, lambda jobs: (jobs.pp,) * 3, lambda p, m, _: (1,) * (m >= p)),
    "zb-h2": ScheduleEstimate(
        _zb_h2_bubble, lambda jobs: (2 * jobs.pp - 1,) * 3, lambda p, m, _: (1,) * (m >= 2 * p - 1)
    ),
    "zb-v": ScheduleEstimate(
        _zb_v_bubble, lambda jobs: (jobs.pp,) * 3, lambda p, m, layers: (1,) * (m >= 2 * p - 1 and layers >= 2 * p)
    ),
    "interleaved": ScheduleEstimate(
        _interleaved_bubble,
        _interleaved_in_flight,
        lambda p, m, layers: range(2, min(layers // p, MAX_VIRTUAL_STAGES) + 1) if m % p == 0 else (),
    ),
}
"""Formulas by schedule, in the order of a search. Naive and dualpipe-v are never faster than all of them."""
