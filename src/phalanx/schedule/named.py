"""Schedules by the names that run files and commands use."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from phalanx.schedule.action import Schedule
from phalanx.schedule.generate import dualpipe_v, gpipe, interleaved, naive, one_f_one_b, zb_h1, zb_h2, zb_v
from phalanx.spec.errors import UserError
from phalanx.spec.layout import Layout

PUBLISHED: dict[str, Callable[[int, int], Schedule]] = {
    "naive": naive,
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": interleaved,
    "zb-h1": zb_h1,
    "zb-h2": zb_h2,
    "zb-v": zb_v,
    "dualpipe-v": dualpipe_v,
}


def named(name: str, p: int, m: int, v: int = 2) -> Schedule:
    """The published schedule of that name for p ranks and m micro-batches; v are the stages of each rank that
    "interleaved" has.

    Raises UserError for an unknown name, or for numbers that the schedule cannot have.
    """
    if name not in PUBLISHED:
        raise UserError("schedule", name, "is not known", f"use one of {', '.join(PUBLISHED)}")
    return interleaved(p, m, v) if name == "interleaved" else PUBLISHED[name](p, m)


@cache
def schedule_of(layout: Layout, micro_batches: int) -> Schedule:
    """The schedule of a layout's pipeline.

    Raises UserError if it cannot run so many micro-batches.
    """
    return named(layout.schedule, layout.pp, micro_batches, layout.virtual_stages)


def any_schedule_of(layout: Layout) -> Schedule:
    """One that every layout has, for what does not depend on micro-batches: its stages, and which rank has which."""
    return schedule_of(layout, 2 * layout.pp)
