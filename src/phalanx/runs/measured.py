"""Files with the measurements of each rank in one step (`--profile-memory`).

The measurements are memory by part, and every collective.

RUN_DIR/measured/rank-00000.json      the measurements of a rank
RUN_DIR/measured/comparison.json      predictions and measurements
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, NotRequired

from typing_extensions import TypedDict

from phalanx.runs.decode import Count, Number, Rank, decoder, read_json, require_keys, unreadable_file
from phalanx.spec.files.replace import replace_file

MEASURED_DIR = "measured"
COMPARISON_FILE = "comparison.json"


class MeasuredCollective(TypedDict):
    """The collectives of one operation and group in the measured step."""

    operation: str
    executed_as: str
    group: list[Rank]
    calls: Count
    bytes: Count
    """Bytes of the requested operation."""
    sent_bytes: Number
    """Bytes that a rank sends with a ring algorithm."""
    seconds: Number
    exposed_seconds: Number


class Measured(TypedDict):
    """The measurements of a rank."""

    step: NotRequired[Count]
    held_bytes: dict[str, Number]
    """Bytes by part between the backward pass and the update."""
    peak_bytes: Annotated[dict[str, Number], require_keys("total")]
    """Peak bytes by part."""
    flops: NotRequired[Number]
    collectives: list[MeasuredCollective]


_decode_measured = decoder(Measured)


def measured_file(directory: Path, rank: int) -> Path:
    """Return the file to which a rank writes its measurements."""
    return directory / MEASURED_DIR / f"rank-{rank:05d}.json"


def write_measured(directory: Path, rank: int, measured: dict[str, Any]) -> None:
    """Write the measurements of a rank: memory by part, in bytes, and the collectives."""
    file = measured_file(directory, rank)
    file.parent.mkdir(exist_ok=True)
    replace_file(file, json.dumps(measured, indent=1))


def read_measured(directory: Path) -> list[dict[str, Any]]:
    """Return the measurements of each rank, in rank order, without damaged ones."""
    return [measured for _, measured in sorted(_read_measured_files(directory, []).items())]


def read_measured_since(
    directory: Path, resumed_at_step: int, world_size: int, problems: list[str]
) -> dict[int, dict[str, Any]]:
    """Return the measurements of each rank since the last start, which continued from `resumed_at_step`.

    `world_size` is 0 if it is unknown. Damaged files are added to `problems`.
    """
    return {
        rank: measured
        for rank, measured in _read_measured_files(directory, problems).items()
        if measured.get("step", resumed_at_step + 1) > resumed_at_step and rank < (world_size or rank + 1)
    }


def _read_measured_files(directory: Path, problems: list[str]) -> dict[int, dict[str, Any]]:
    """Return the measurements in all files by rank. Damaged files are added to `problems`."""
    measured_by_rank = {}
    for file in sorted((directory / MEASURED_DIR).glob("rank-*.json")):
        number = file.stem.removeprefix("rank-")
        try:
            measured = read_json(file, _decode_measured)
        except (OSError, ValueError):
            measured = None
        if measured is None or not number.isdecimal():
            problems.append(unreadable_file(file))
        else:
            measured_by_rank[int(number)] = measured
    return measured_by_rank
