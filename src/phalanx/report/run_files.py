"""Readers of the files in a run directory that may be truncated, of an older version, or missing.

Each appends to `problems` whatever it cannot read."""

from __future__ import annotations

import json
from collections.abc import Sequence, Set
from dataclasses import dataclass, field, fields
from pathlib import Path

from phalanx.runs.hang_dumps import read_failures
from phalanx.runs.jsonl import JsonRecord, parse_jsonl
from phalanx.runs.step_records import FORMAT
from phalanx.runs.swarm_records import RoundRecord

Line = JsonRecord
MAX_STEP_LAG = 2
"""Steps that a rank's record may be behind others': they write now and then, and asynchronous workers apart."""


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
    steps: list[Line] = field(default_factory=list)
    """See `runs.step_records.StepRecord`."""
    pauses: list[Line] = field(default_factory=list)


def read_json_lines(file: Path, problems: list[str], names: Set[str] = frozenset({"step"})) -> list[Line]:
    """Return the complete lines of a file that have these keys; the last line may still be incomplete."""
    records = [record for _, record in parse_jsonl(file.read_bytes())]
    valid = [record for record in records if record is not None and names <= record.keys()]
    if unreadable := len(records) - len(valid):
        problems.append(f"{file.parent.name}/{file.name}: {unreadable} lines cannot be read")
    return valid


def read_metrics(file: Path, problems: list[str]) -> list[Line]:
    """Return the lines of metrics.jsonl; none if the file is missing."""
    if not file.is_file():
        problems.append(f"{file.name} is missing")
        return []
    return read_json_lines(file, problems)


def read_rounds(file: Path, problems: list[str]) -> list[RoundRecord]:
    """Return the rounds of a node in its last swarm; round numbers restart with each swarm."""
    names = {each.name for each in fields(RoundRecord)}
    lines = read_json_lines(file, problems, names) if file.is_file() else []
    found = [RoundRecord(**{name: line[name] for name in names}) for line in lines]
    anew = [at for at in range(1, len(found)) if found[at].round < found[at - 1].round]
    return found[anew[-1] :] if anew else found


def read_rank_records(folder: Path, problems: list[str]) -> tuple[dict[int, RankRecord], int, int]:
    """Return the record of each rank since the last start, the number of ranks, and the step that it continued from."""
    starts: dict[int, list[Line]] = {}
    for file in sorted(folder.glob("rank-*.jsonl")):
        lines = read_json_lines(file, problems)
        openings = [place for place, line in enumerate(lines) if "format" in line]
        if not openings:
            problems.append(f"{folder.name}/{file.name} has no opening")
            continue
        last = lines[openings[-1] :]
        if last[0]["format"] != FORMAT:
            problems.append(f"{folder.name}/{file.name} has format {last[0]['format']}; this version reads {FORMAT}")
            continue
        starts[last[0]["rank"]] = last
    if not starts:
        why = "they came to no step, metrics.per_rank_records was off, or an older version ran"
        problems.append(f"{folder.name}/ has no records of ranks: {why}")
        return {}, 0, 0
    newest = max((lines[0]["step"], lines[0]["ranks"]) for lines in starts.values())
    first = starts.get(0, next(iter(starts.values())))[0]
    began_after, world_size = (first["step"], first["ranks"]) if 0 in starts else newest
    records = {
        rank: _parse_rank_record(lines)
        for rank, lines in starts.items()
        if (lines[0]["step"], lines[0]["ranks"]) == (began_after, world_size)
    }
    ended = {rank: record.steps[-1]["step"] for rank, record in records.items() if record.steps}
    behind = [rank for rank, step in ended.items() if step < max(ended.values()) - MAX_STEP_LAG]
    if behind:
        problems.append(f"the record of rank {behind[0]} ends before others do, at step {ended[behind[0]]}")
    missing = sorted(set(range(world_size)) - set(records))
    if missing:
        shown = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
        problems.append(f"no record of {len(missing)} of {world_size} ranks: {shown}")
    return records, world_size, began_after


def _parse_rank_record(lines: Sequence[Line]) -> RankRecord:
    opening = lines[0]
    steps = {line["step"]: line for line in lines[1:] if "seconds" in line and "stages" in line}
    pauses = [line for line in lines[1:] if "pause" in line]
    return RankRecord(
        opening["rank"],
        opening["host"],
        opening["device"],
        opening["clock_offset_seconds"],
        opening["clock_error_seconds"],
        opening["memory_bytes"],
        opening.get("cores"),
        list(steps.values()),
        pauses,
    )


def read_first_failure(directory: Path) -> str | None:
    """Return the reason of the first failed rank, if any.

    A killed rank cannot write its own record. Its launcher writes one without the step, later than the ranks that lost
    the connection to it."""
    records = read_failures(directory).values()
    if not records:
        return None
    first = min(records, key=lambda record: ("step" in record, record["time"]))
    reason = (first["reason"].splitlines() or [""])[0]
    return f"rank {first['rank']} {'failed: ' if 'step' in first else ''}{reason}"


def read_measurements(folder: Path, began_after: int, world_size: int, problems: list[str]) -> dict[int, Line]:
    """Return the measured step of each rank since the last start."""
    found = {}
    for file in sorted(folder.glob("rank-*.json")):
        try:
            line = json.loads(file.read_text(errors="replace"))
        except ValueError:
            line = None
        if isinstance(line, dict) and {"held_bytes", "peak_bytes", "collectives"} <= set(line):
            rank = int(file.stem.removeprefix("rank-"))
            if line.get("step", began_after + 1) > began_after and rank < (world_size or rank + 1):
                found[rank] = line
        else:
            problems.append(f"{folder.name}/{file.name} cannot be read")
    return found
