"""Schedules by the names in run files and commands."""

from __future__ import annotations

from functools import cache, lru_cache
from pathlib import Path

from phalanx.schedule.published import PUBLISHED
from phalanx.schedule.schedule import Schedule, read_csv
from phalanx.schedule.validate import violations
from phalanx.spec.errors import UserError
from phalanx.spec.layout import Layout, compiles_whole_blocks
from phalanx.spec.pipeline_schedules import SCHEDULES


@lru_cache(256)
def build_schedule(name: str, p: int, m: int, v: int = 2) -> Schedule:
    """Return the published schedule `name` for p ranks and m micro-batches.

    Raises UserError if the name is unknown, or the schedule does not support these numbers.
    """
    if name not in PUBLISHED:
        raise UserError("schedule", name, "is not known", fix=f"use one of {', '.join(PUBLISHED)}")
    return PUBLISHED[name](p, m, v) if SCHEDULES[name].has_virtual_stages else PUBLISHED[name](p, m)


def layout_schedule(layout: Layout, micro_batches: int) -> Schedule:
    """Return the schedule of a layout's pipeline.

    Raises UserError if the schedule does not support this number of micro-batches.
    """
    if layout.schedule_file is not None:
        schedule = load_schedule_csv(layout.schedule_file, layout.pp)
        if schedule.micro_batches != micro_batches:
            problem = f"has {schedule.micro_batches} micro-batches, but a step of this run has {micro_batches}"
            fix = (
                "change layout.micro_batch_size or training.tokens_per_step, or create a schedule with "
                f"--microbatches {micro_batches}"
            )
            raise UserError("layout.schedule_file", layout.schedule_file, problem, fix)
        return schedule
    return build_schedule(layout.schedule, layout.pp, micro_batches, layout.virtual_stages)


def representative_schedule(layout: Layout) -> Schedule:
    """Return a schedule of the layout for properties that do not depend on the number of micro-batches.

    Such properties are the stages and their ranks."""
    if layout.schedule_file is not None:
        return load_schedule_csv(layout.schedule_file, layout.pp)
    return layout_schedule(layout, 2 * layout.pp)


def layout_compiles_whole_blocks(layout: Layout) -> bool:
    """Return whether each block of a layout is compiled to one graph."""
    splits_backward = representative_schedule(layout).splits_backward
    return compiles_whole_blocks(layout.tp * layout.cp * layout.ep, splits_backward, layout.fsdp_unit)


@cache
def load_schedule_csv(path: str, ranks: int) -> Schedule:
    """Return the schedule in a CSV file for this number of ranks.

    Raises UserError if the file cannot be read, or its schedule cannot run.
    """
    field = "layout.schedule_file"
    try:
        text = Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(field, path, f"cannot be read: {error}", fix="use the CSV file of a schedule") from None
    schedule = Schedule.from_rows(read_csv(text, path))
    if schedule.ranks != ranks:
        raise UserError(field, path, f"is for {schedule.ranks} ranks", fix=f"set layout.pp = {schedule.ranks}")
    if problems := violations(schedule):
        suffix = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        problem = f"cannot run: {problems[0]}{suffix}"
        fix = f"list the violations with phalanx pipeline check {path}"
        raise UserError(field, path, problem, fix)
    return schedule
