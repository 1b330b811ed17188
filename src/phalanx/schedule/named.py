"""Schedules by the names that run files and commands use."""

from __future__ import annotations

from typing import Literal, get_args

from phalanx.schedule import generate
from phalanx.schedule.action import Schedule
from phalanx.spec.errors import UserError

Name = Literal["naive", "gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v", "dualpipe-v"]


def named(name: str, p: int, m: int, v: int = 2) -> Schedule:
    """The published schedule of that name for p ranks and m micro-batches; v are the stages of each rank that
    "interleaved" has.

    Raises UserError for an unknown name, or for numbers that the schedule cannot have.
    """
    match name:
        case "naive":
            return generate.naive(p, m)
        case "gpipe":
            return generate.gpipe(p, m)
        case "1f1b":
            return generate.one_f_one_b(p, m)
        case "interleaved":
            return generate.interleaved(p, m, v)
        case "zb-h1":
            return generate.zb_h1(p, m)
        case "zb-h2":
            return generate.zb_h2(p, m)
        case "zb-v":
            return generate.zb_v(p, m)
        case "dualpipe-v":
            return generate.dualpipe_v(p, m)
    raise UserError("schedule", name, "is not known", f"use one of {', '.join(get_args(Name))}")
