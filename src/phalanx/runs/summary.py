"""Summaries of run directories: a row of `phalanx runs`, from the ends of their files.

Nothing of a directory has to be valid: other programs, other versions and full disks have written some of them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

from phalanx.data.bad_records import BAD_RECORDS_FILE, read_bad_records
from phalanx.runs.create import RUN_FILE
from phalanx.runs.events import EVENTS_FILE, FAILED, FINISHED, LIFECYCLE_EVENTS, STARTED, decode_event, mtime_or_none
from phalanx.runs.jsonl import lines_from_end
from phalanx.runs.lock import is_running
from phalanx.runs.metrics import METRICS_FILE, decode_metrics
from phalanx.runs.swarm_records import JOURNAL_FILE
from phalanx.spec.errors import UserError
from phalanx.spec.files.hub import hub_name
from phalanx.spec.files.tables import MARKER_FILE, Table, read_toml

SPEED_STEPS = 20
"""Number of last steps whose median speed is shown."""
SIZES = ("tp", "pp", "cp", "ep")
UNREADABLE = "unreadable"
EVALUATION = re.compile(rb'"held_out_loss"')
"""The text by which lines of evaluations are found without decoding the others."""


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """A row about a run directory. Unknown values are None."""

    directory: Path
    state: str
    """running, finished (the last step is done), stopped, failed, killed (no process and no record of an end), swarm
    (a coordinator), new, unknown (perhaps on another host) or unreadable."""
    step: int = 0
    steps: int | None = None
    loss: float | None = None
    held_out_loss: float | None = None
    """Loss of the last evaluation."""
    tokens_per_second: float | None = None
    model: str | None = None
    layout: str | None = None
    ranks: int | None = None
    finish_reason: str | None = None
    """Why the run ended before the steps that were planned."""
    updated: float | None = None
    """Time of the last step or event, in seconds since 1970."""
    bad_records: int = 0
    """Broken records of the data that were skipped."""
    problems: tuple[str, ...] = ()


def find_runs(directory: Path) -> tuple[list[Path], list[Path]]:
    """Return the run directories in a directory, which may be one itself, and its other directories.

    Raises UserError if the directory cannot be read.
    """
    if _looks_like_run(directory):
        return [directory], []
    try:
        folders = sorted(path for path in directory.iterdir() if path.is_dir())
    except OSError as error:
        fix = "give a directory that contains run directories (output_dir)"
        raise UserError("directory", str(directory), f"cannot be read: {error.strerror}", fix) from None
    runs = [path for path in folders if _looks_like_run(path)]
    return runs, [path for path in folders if path not in runs]


def _looks_like_run(directory: Path) -> bool:
    return any(os.path.exists(directory / name) for name in (MARKER_FILE, RUN_FILE, METRICS_FILE))


def summarize_run(directory: Path) -> RunSummary:
    """Return the summary of a run directory, whatever is missing or damaged there."""
    problems: list[str] = []
    table: Table = {}
    try:
        table = read_toml(directory / RUN_FILE)
    except UserError as error:
        problems.append(f"{RUN_FILE}: {error.problem}")
    except OSError as error:
        problems.append(f"{RUN_FILE}: {error.strerror}")
    metrics = _last_metrics(directory, problems)
    last = metrics[0] if metrics else {}
    event = _last_event(directory)
    steps = _value(table, "training", "steps", int)
    step = max(last.get("step", 0), event.get("step", 0))
    times = [last.get("time"), event.get("time"), mtime_or_none(directory / RUN_FILE)]
    evaluation = next((record for record in metrics if "held_out_loss" in record), {})
    step_records = [record for record in metrics if "held_out_loss" not in record]
    ranks = step_records[0].get("ranks") if step_records else None
    speeds = [speed for record in step_records if (speed := record.get("tokens_per_second"))]
    state = _state(directory, event, is_complete=steps is not None and step >= steps)
    return RunSummary(
        directory=directory,
        state=UNREADABLE if problems and not metrics else state,
        step=step,
        steps=steps,
        loss=step_records[0].get("loss") if step_records else None,
        held_out_loss=evaluation.get("held_out_loss"),
        tokens_per_second=median(speeds) if speeds else None,
        model=_describe_model(table) if table else None,
        layout=_describe_layout(table, ranks) if table else None,
        ranks=ranks,
        finish_reason=event.get("reason") if event.get("kind") == FINISHED else None,
        updated=next((time for time in times if isinstance(time, int | float)), None),
        bad_records=len(read_bad_records(directory / BAD_RECORDS_FILE)),
        problems=tuple(problems),
    )


def _last_metrics(directory: Path, problems: list[str]) -> list[Mapping[str, Any]]:
    """Return the last `SPEED_STEPS` records, newest first, and the last evaluation."""
    records: list[Mapping[str, Any]] = []
    try:
        lines = lines_from_end(directory / METRICS_FILE)
        for line in islice(lines, SPEED_STEPS):
            with suppress(ValueError):
                records.append(decode_metrics(line))
        if not any("held_out_loss" in record for record in records):
            with suppress(ValueError):
                records += [decode_metrics(line) for line in islice(filter(EVALUATION.search, lines), 1)]
    except FileNotFoundError:
        pass
    except OSError as error:
        problems.append(f"{METRICS_FILE} cannot be read: {error.strerror}")
    return records


def _last_event(directory: Path) -> Mapping[str, Any]:
    """Return the last start, end or failure of a run; an empty record if there is none."""
    with suppress(OSError):
        for line in lines_from_end(directory / EVENTS_FILE):
            with suppress(ValueError):
                event: Mapping[str, Any] = decode_event(line)
                if event["kind"] in LIFECYCLE_EVENTS:
                    return event
    return {}


def _state(directory: Path, event: Mapping[str, Any], is_complete: bool) -> str:
    is_active = is_running(directory)
    if is_active:
        return "running"
    if os.path.exists(directory / JOURNAL_FILE):
        return "swarm"
    if is_complete and event.get("kind", FINISHED) == FINISHED:
        return "finished"
    if not event:
        return "new" if is_active is False else "unknown"
    ends = {FINISHED: "stopped", FAILED: "failed"}
    return ends.get(event["kind"], "killed" if is_active is False and event["kind"] == STARTED else "unknown")


def _value(table: Any, section: str, field: str, kind: type) -> Any:
    """Return a field of a run file if it has the expected type, else None."""
    inner = table.get(section)
    value = inner.get(field) if isinstance(inner, dict) else None
    return value if type(value) is kind else None


def _describe_model(table: Table) -> str:
    """Return the preset of the model, or its width and depth."""
    if source := _value(table, "model", "from_hf", str):
        return Path(source).name if (name := hub_name(source)) is None else name.repo
    width, depth = (_value(table, "model", field, int) for field in ("hidden_size", "num_layers"))
    shape = f"{depth}x{width}" if width and depth else ""
    return " ".join(filter(None, (_value(table, "model", "preset", str), shape))) or "?"


def _describe_layout(table: Table, ranks: int | None) -> str:
    """Return the data-parallel strategy, and the degrees above 1."""
    sizes = {axis: _value(table, "layout", axis, int) or 1 for axis in SIZES}
    dp = (ranks or 1) // max(1, sizes["tp"] * sizes["pp"] * sizes["cp"])
    degrees = {"dp": dp, **sizes}
    strategy = _value(table, "layout", "data_parallel", str) or "ddp"
    return " ".join([strategy, *(f"{axis} {size}" for axis, size in degrees.items() if size > 1)])


def sort_summaries(rows: Iterable[RunSummary], key: str) -> Iterator[RunSummary]:
    """Yield summaries by a field: names and losses ascending, others from the largest; unknown values last."""
    ascending = key in ("directory", "state", "model", "layout", "loss", "held_out_loss")
    known = [row for row in rows if getattr(row, key) is not None]
    yield from sorted(known, key=lambda row: getattr(row, key), reverse=not ascending)
    yield from (row for row in rows if getattr(row, key) is None)
