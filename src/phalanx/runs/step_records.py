"""What a rank notes of a run as it goes, in the run directory: a line for each step, and for what stands between steps.

RUN_DIR/trace/rank-00000.jsonl      of each rank

The first line of every start says who writes (`RunHeader`), the others what happened (`StepRecord`, `PauseRecord`). A
profiled step has more: when each pass, wait and collective was, and the contents of memory (`StepProfiler`).
All times are seconds of the rank's own time.perf_counter(); the opening says what to add to have that of rank 0."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NotRequired, TypedDict

from phalanx.spec.errors import UserError

TRACE_DIR = "trace"
FORMAT = 2
MAX_MEMORY_POINTS = 400
"""Of memory over a step, so many moments are kept."""


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
        raise UserError("--profile-steps", text, "is not a window of steps", "write the first and the last: 10:13")
    if not 1 <= int(first) <= int(last):
        raise UserError(
            "--profile-steps", text, "is an empty window", "count from 1, and write the smaller number first"
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
    start_time, end_time = history[0][0], history[-1][0]
    width = (end_time - start_time) / max_points or 1.0
    peaks: dict[int, tuple[float, Mapping[str, int]]] = {}
    for timestamp, bytes_by_part in history:
        interval = min(int((timestamp - start_time) / width), max_points - 1)
        if interval not in peaks or sum(bytes_by_part.values()) > sum(peaks[interval][1].values()):
            peaks[interval] = timestamp, bytes_by_part
    return [{"at": timestamp, **bytes_by_part} for timestamp, bytes_by_part in peaks.values()]
