"""Records that each rank writes to the run directory: one line per step and per pause between steps.

RUN_DIR/trace/rank-00000.jsonl                    the records of a rank
RUN_DIR/trace/rank-00000-step-000012.json.gz      the trace of a rank's GPU in a profiled step, for ui.perfetto.dev

The first line of every start identifies the rank (`RunHeader`); the others are steps and pauses (`StepRecord`,
`PauseRecord`). The record of a profiled step also contains the times of each pass, wait and collective, and the memory
by part (`StepProfiler`). All times are seconds of the rank's own time.perf_counter(); the header contains the offset to
the clock of rank 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NotRequired

from pydantic import Discriminator, Field, StringConstraints, Tag
from typing_extensions import TypedDict

from phalanx.runs.decode import Count, Index, Number, Rank, WorldSize, decoder, require_keys, unreadable_file
from phalanx.runs.gpu_profile import GpuProfile
from phalanx.runs.gpu_sample import GpuSample
from phalanx.runs.jsonl import JsonRecord, read_valid_jsonl
from phalanx.spec.errors import UserError

TRACE_DIR = "trace"
FORMAT: Final = 2
MAX_MEMORY_POINTS = 400
"""Maximum number of samples of memory over a step."""
MAX_LISTED_RANKS = 8
MAX_STEP_LAG = 2
"""Maximum number of steps that a rank's record may lag behind others.

Ranks write periodically, and asynchronous workers drift apart.
"""


class RunHeader(TypedDict):
    """The first line of a start."""

    format: Literal[2]
    """The value of `FORMAT`."""
    rank: Rank
    ranks: WorldSize
    host: str
    device: str
    step: Count
    """The step after which this start began."""
    clock_offset_seconds: Number
    clock_error_seconds: Number
    memory_bytes: Count
    """Memory of the device."""
    cores: NotRequired[Count | None]
    """Number of cores that ranks on a CPU may use."""


class OtherHeader(TypedDict):
    """The first line of a start that another version of Phalanx wrote."""

    format: int


MemorySample = Annotated[dict[str, Number], require_keys("at")]
"""Bytes by part, and the time `at`."""
PassKind = Annotated[str, StringConstraints(pattern=r"^[FBIW]$")]


class StepRecord(TypedDict):
    """The record of one step."""

    step: Count
    start: Number
    seconds: Annotated[dict[str, Number], require_keys("data", "passes", "reduce", "optimizer")]
    """Seconds of the phases, which follow each other."""
    stages: dict[Index, dict[PassKind, Number]]
    """Seconds of the passes F, B, I and W by stage.

    Waits for collectives are included, but not waits for tensors of other stages.
    """
    wait_seconds: NotRequired[dict[str, Number]]
    """Seconds in which a rank on a CPU waited for others.

    Keys: passes (collectives in them), all_to_all (part of passes), pipeline (other stages), reduce and optimizer.
    """
    peak_memory_bytes: Count
    expert_rows: NotRequired[Count]
    """Rows of tokens that this rank's experts computed, if ranks have different experts."""
    hot_expert: NotRequired[tuple[Count, Count, Number]]
    """Layer and expert with the maximum load, and its share of the layer's tokens times the expert count."""
    clock: NotRequired[tuple[Number, Number]]
    """Clock offset of this step, instead of the header's, and its error."""
    spans: NotRequired[list[tuple[PassKind, Count, Count, Number, Number]]]
    """Kind, stage, micro-batch, start and end of each pass."""
    waits: NotRequired[list[tuple[str, Number, Number]]]
    collectives: NotRequired[list[CollectiveSpan]]
    memory: NotRequired[Annotated[list[MemorySample], Field(min_length=1)]]
    """Samples of memory. A step with them takes longer."""
    expert_tokens: NotRequired[list[list[Count]]]
    """Tokens of each layer and expert, over all ranks."""
    gpu: NotRequired[GpuProfile]
    """Figures of the GPU's trace. A step with them has no collectives of its own."""
    gpu_sample: NotRequired[GpuSample]
    """Values of the GPU's sensors after the step, about once a second."""


class CollectiveSpan(TypedDict):
    """One collective of a profiled step."""

    operation: str
    executed_as: str
    group: list[Rank]
    bytes: Count
    start: Number
    end: Number | None
    """End of the collective, or None if the backend does not report it."""
    exposed: Number
    """Seconds of the collective in which the rank waited for it."""


class PauseRecord(TypedDict):
    """A pause between two steps: a checkpoint or an evaluation."""

    step: Count
    pause: str
    start: Number
    seconds: Number


def _classify_line(line: Any) -> str:
    if not isinstance(line, dict) or not line.keys() & {"format", "pause"}:
        return "step"
    if "pause" in line:
        return "pause"
    return "header" if line["format"] == FORMAT else "other header"


decode_rank_line = decoder(
    Annotated[
        Annotated[RunHeader, Tag("header")]
        | Annotated[OtherHeader, Tag("other header")]
        | Annotated[StepRecord, Tag("step")]
        | Annotated[PauseRecord, Tag("pause")],
        Discriminator(_classify_line),
    ]
)
"""Decode a line of a rank's records."""


def parse_step_range(text: str) -> range:
    """Return the steps that a range such as "10:13" names, both ends included.

    Raises UserError if the text is not a range of steps.
    """
    first, _, last = text.partition(":")
    if not (first.isdecimal() and last.isdecimal()):
        raise UserError(
            "--profile-steps", text, "is not a valid step range", fix="use the first and the last step, such as 10:13"
        )
    if not 1 <= int(first) <= int(last):
        fix = "use a first step of at least 1, and a last step of at least the first"
        raise UserError("--profile-steps", text, "is an empty step range", fix=fix)
    return range(int(first), int(last) + 1)


def rank_record_file(directory: Path, rank: int) -> Path:
    """Return the file to which a rank writes its records."""
    return directory / TRACE_DIR / f"rank-{rank:05d}.jsonl"


def gpu_trace_file(directory: Path, rank: int, step: int) -> Path:
    """Return the file to which a rank writes the trace of its GPU in a step."""
    return directory / TRACE_DIR / f"rank-{rank:05d}-step-{step:06d}.json.gz"


def downsample_memory(
    history: Sequence[tuple[float, Mapping[str, int]]], max_points: int = MAX_MEMORY_POINTS
) -> list[dict[str, float]]:
    """Return memory (time in seconds, and bytes by part) at no more than `max_points` times.

    Of each interval, the sample with the largest sum over all parts remains.
    """
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


@dataclass(frozen=True, kw_only=True)
class RankRecord:
    """The records of a rank since the last start of the run."""

    rank: int
    host: str
    device: str
    offset_seconds: float
    """Offset from the rank's clock to that of rank 0."""
    error_seconds: float
    memory_bytes: int
    """Memory of the rank's device."""
    cores: int | None
    """Number of cores that the ranks on the host may use, if they run on CPUs."""
    steps: list[JsonRecord] = field(default_factory=list)
    """Records of type `StepRecord`."""
    pauses: list[JsonRecord] = field(default_factory=list)


def read_rank_records(directory: Path, problems: list[str]) -> tuple[dict[int, RankRecord], int, int]:
    """Return the records of each rank since the last start, the number of ranks, and its first step.

    The last start continued from that step. Missing and unreadable records are added to `problems`.
    """
    starts: dict[int, list[JsonRecord]] = {}
    for file in sorted((directory / TRACE_DIR).glob("rank-*.jsonl")):
        lines = _read_last_start(directory, file, problems)
        if lines:
            starts[lines[0]["rank"]] = lines
    if not starts:
        problems.append(
            f"{TRACE_DIR}/ has no records of ranks: no step was finished, metrics.per_rank_records was off, or an "
            "older version of Phalanx ran"
        )
        return {}, 0, 0
    start_by_rank = {rank: (lines[0]["step"], lines[0]["ranks"]) for rank, lines in starts.items()}
    last_start = start_by_rank[0] if 0 in starts else max(start_by_rank.values())
    records = {}
    for rank, (header, *lines) in starts.items():
        if start_by_rank[rank] == last_start:
            records[rank] = RankRecord(
                rank=rank,
                host=header["host"],
                device=header["device"],
                offset_seconds=header["clock_offset_seconds"],
                error_seconds=header["clock_error_seconds"],
                memory_bytes=header["memory_bytes"],
                cores=header.get("cores"),
                steps=list({line["step"]: line for line in lines if "stages" in line}.values()),
                pauses=[line for line in lines if "pause" in line],
            )
    resumed_at_step, world_size = last_start
    last_steps = {rank: record.steps[-1]["step"] for rank, record in records.items() if record.steps}
    behind = [rank for rank, step in last_steps.items() if step < max(last_steps.values()) - MAX_STEP_LAG]
    if behind:
        last_step = last_steps[behind[0]]
        problems.append(f"the record of rank {behind[0]} ends at step {last_step}, earlier than other records")
    missing = sorted(set(range(world_size)) - set(records))
    if missing:
        listed = [*map(str, missing[:MAX_LISTED_RANKS]), *(["..."] if len(missing) > MAX_LISTED_RANKS else [])]
        problems.append(f"no record of {len(missing)} of {world_size} ranks: {', '.join(listed)}")
    return records, world_size, resumed_at_step


def _read_last_start(directory: Path, file: Path, problems: list[str]) -> list[JsonRecord]:
    """Return the lines of a rank's file from the last header on; none if this version cannot read them."""
    name = f"{TRACE_DIR}/{file.name}"
    lines: list[JsonRecord] = read_valid_jsonl(file, problems, decode_rank_line)
    headers = [index for index, line in enumerate(lines) if "format" in line]
    if not headers:
        problems.append(f"{name} has no header")
        return []
    last_start = lines[headers[-1] :]
    file_format = last_start[0]["format"]
    if file_format != FORMAT:
        problems.append(f"{name} has format {file_format}; this version reads {FORMAT}")
        return []
    rank = last_start[0]["rank"]
    if file != rank_record_file(directory, rank) or rank >= last_start[0]["ranks"]:
        problems.append(unreadable_file(file))
        return []
    return last_start
