"""What a rank notes of a run as it goes, in the run directory: a line for each step, and for what stands between steps.

RUN_DIR/trace/rank-00000.jsonl      of each rank

The first line of every start says who writes (`RunHeader`), the others what happened (`StepRecord`, `PauseRecord`). A
profiled step has more: when each pass, wait and collective was, and the contents of memory (`StepProfiler`).
All times are seconds of the rank's own time.perf_counter(); the opening says what to add to have that of rank 0."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NotRequired, TypedDict

from phalanx.runs.jsonl import JsonRecord, read_valid_jsonl
from phalanx.spec.errors import UserError

TRACE_DIR = "trace"
FORMAT = 2
MAX_MEMORY_POINTS = 400
"""Of memory over a step, so many moments are kept."""
MAX_STEP_LAG = 2
"""Steps that a rank's record may be behind others': they write now and then, and asynchronous workers apart."""


class RunHeader(TypedDict):
    """The first line of a start."""

    format: int
    rank: int
    ranks: int
    host: str
    device: str
    step: int
    """After which this start began."""
    clock_offset_seconds: float
    clock_error_seconds: float
    memory_bytes: int
    """Of the device."""
    cores: NotRequired[int]
    """That the ranks on a CPU may use."""


class StepRecord(TypedDict):
    """One step."""

    step: int
    start: float
    seconds: dict[str, float]
    """Of its phases, which follow each other: data, passes, reduce, optimizer."""
    stages: dict[str, dict[str, float]]
    """Seconds of the passes F, B, I and W by stage; waits for others' tensors are not in them, but for collectives."""
    wait_seconds: NotRequired[dict[str, float]]
    """Seconds in which the rank stood still for others, on a CPU: of passes for collectives in them (of these
    all_to_all), between them for other stages (pipeline), and in reduce and optimizer."""
    peak_memory_bytes: int
    expert_rows: NotRequired[int]
    """Rows of tokens that this rank's experts computed, where ranks have different ones."""
    hot_expert: NotRequired[tuple[int, int, float]]
    """Layer, expert, and its share of the layer's tokens, times the number of experts: the most over all layers."""
    clock: NotRequired[tuple[float, float]]
    """What to add to times of this step instead of the opening's offset, and how far off that may be."""
    spans: NotRequired[list[tuple[str, int, int, float, float]]]
    """Kind, stage, micro-batch, begin and end of each pass."""
    waits: NotRequired[list[tuple[str, float, float]]]
    collectives: NotRequired[list[CollectiveSpan]]
    memory: NotRequired[list[dict[str, float]]]
    """Bytes by part, and `at` when; such a step took longer for it."""
    expert_tokens: NotRequired[list[list[int]]]
    """Of each layer and expert, on all ranks."""


class CollectiveSpan(TypedDict):
    """One collective of a step that was looked at closely."""

    operation: str
    executed_as: str
    group: list[int]
    bytes: int
    start: float
    end: float | None
    """None where the backend does not tell."""
    exposed: float
    """Seconds of it in which the rank waited for it."""


class PauseRecord(TypedDict):
    """What stood between two steps: a checkpoint, an evaluation."""

    step: int
    pause: str
    start: float
    seconds: float


def parse_step_range(text: str) -> range:
    """The steps that "10:13" names, both ends among them.

    Raises UserError for anything else.
    """
    first, _, last = text.partition(":")
    if not (first.isdecimal() and last.isdecimal()):
        raise UserError("--profile-steps", text, "is not a window of steps", fix="write the first and the last: 10:13")
    if not 1 <= int(first) <= int(last):
        raise UserError(
            "--profile-steps", text, "is an empty window", fix="count from 1, and write the smaller number first"
        )
    return range(int(first), int(last) + 1)


def rank_record_file(directory: Path, rank: int) -> Path:
    """Where a rank of a run writes."""
    return directory / TRACE_DIR / f"rank-{rank:05d}.jsonl"


def downsample_memory(
    history: Sequence[tuple[float, Mapping[str, int]]], max_points: int = MAX_MEMORY_POINTS
) -> list[dict[str, float]]:
    """Memory over time at no more than so many moments: of each stretch of time the one at which all parts together
    were most."""
    if not history:
        return []
    start_time = history[0][0]
    end_time = history[-1][0]
    width = (end_time - start_time) / max_points or 1.0
    peaks: dict[int, tuple[float, Mapping[str, int]]] = {}
    for timestamp, bytes_by_part in history:
        interval = min(int((timestamp - start_time) / width), max_points - 1)
        if interval not in peaks or sum(bytes_by_part.values()) > sum(peaks[interval][1].values()):
            peaks[interval] = timestamp, bytes_by_part
    return [{"at": timestamp, **bytes_by_part} for timestamp, bytes_by_part in peaks.values()]


@dataclass(frozen=True)
class RankRecord:
    """What a rank noted since the run was last started."""

    rank: int
    host: str
    device: str
    offset_seconds: float
    """To add to its times, to have those of rank 0."""
    error_seconds: float
    memory_bytes: int
    """Of its device."""
    cores: int | None
    """That the ranks on its host may use, where they run on them."""
    steps: list[JsonRecord] = field(default_factory=list)
    """See `StepRecord`."""
    pauses: list[JsonRecord] = field(default_factory=list)


def read_rank_records(directory: Path, problems: list[str]) -> tuple[dict[int, RankRecord], int, int]:
    """Return the record of each rank since the last start, the number of ranks, and the step that it continued from.

    What cannot be read is added to `problems`.
    """
    starts: dict[int, list[JsonRecord]] = {}
    for file in sorted((directory / TRACE_DIR).glob("rank-*.jsonl")):
        lines = read_valid_jsonl(file, problems)
        headers = [index for index, line in enumerate(lines) if "format" in line]
        if not headers:
            problems.append(f"{TRACE_DIR}/{file.name} has no opening")
            continue
        last_start = lines[headers[-1] :]
        if (format_ := last_start[0]["format"]) != FORMAT:
            problems.append(f"{TRACE_DIR}/{file.name} has format {format_}; this version reads {FORMAT}")
            continue
        starts[last_start[0]["rank"]] = last_start
    if not starts:
        reason = "they came to no step, metrics.per_rank_records was off, or an older version ran"
        problems.append(f"{TRACE_DIR}/ has no records of ranks: {reason}")
        return {}, 0, 0
    newest = max((lines[0]["step"], lines[0]["ranks"]) for lines in starts.values())
    header = starts.get(0, next(iter(starts.values())))[0]
    resumed_at_step, world_size = (header["step"], header["ranks"]) if 0 in starts else newest
    records = {
        rank: _parse_rank_record(lines)
        for rank, lines in starts.items()
        if (lines[0]["step"], lines[0]["ranks"]) == (resumed_at_step, world_size)
    }
    problems += _incomplete_records(records, world_size)
    return records, world_size, resumed_at_step


def _incomplete_records(records: Mapping[int, RankRecord], world_size: int) -> list[str]:
    """Which ranks have no record, or one that ends before others do."""
    problems = []
    last_steps = {rank: record.steps[-1]["step"] for rank, record in records.items() if record.steps}
    behind = [rank for rank, step in last_steps.items() if step < max(last_steps.values()) - MAX_STEP_LAG]
    if behind:
        problems.append(f"the record of rank {behind[0]} ends before others do, at step {last_steps[behind[0]]}")
    missing = sorted(set(range(world_size)) - set(records))
    if missing:
        shown = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
        problems.append(f"no record of {len(missing)} of {world_size} ranks: {shown}")
    return problems


def _parse_rank_record(lines: Sequence[JsonRecord]) -> RankRecord:
    header = lines[0]
    steps = {line["step"]: line for line in lines[1:] if "seconds" in line and "stages" in line}
    return RankRecord(
        header["rank"],
        header["host"],
        header["device"],
        offset_seconds=header["clock_offset_seconds"],
        error_seconds=header["clock_error_seconds"],
        memory_bytes=header["memory_bytes"],
        cores=header.get("cores"),
        steps=list(steps.values()),
        pauses=[line for line in lines[1:] if "pause" in line],
    )
