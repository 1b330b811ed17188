"""Step records of GPUs whose sensors were sampled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from phalanx.report.run_data import RunData
from phalanx.runs.step_records import RankRecord
from phalanx.spec.run import RunSpec

USUAL: dict[str, Any] = {
    "power_watts": 600.0,
    "clock_mhz": 1755,
    "temperature_celsius": 60,
    "utilization": 0.98,
    "throttle_reasons": ["sw_power_cap"],
    "ecc_corrected": 0,
    "ecc_uncorrected": 0,
}
"""Sample of a healthy GPU at its power cap."""


def sampled_lines(count: int = 4, **changes: Any) -> list[dict[str, Any]]:
    """Return records of steps of half a second, every other one with a sample; `changes` apply to all samples."""
    lines: list[dict[str, Any]] = [
        {"step": step, "start": step / 2, "seconds": {"passes": 0.5}} for step in range(1, 2 * count)
    ]
    for line in lines[::2]:
        line["gpu_sample"] = {**USUAL, **changes}
    return lines


def gpu_run(steps_by_rank: dict[int, list[dict[str, Any]]], run: RunSpec | None = None) -> RunData:
    """Return a run on GPUs with these step records."""
    ranks = {
        rank: RankRecord(
            rank=rank,
            host="node0",
            device="cuda",
            offset_seconds=0.0,
            error_seconds=0.0,
            memory_bytes=80 * 10**9,
            cores=None,
            steps=steps,
        )
        for rank, steps in steps_by_rank.items()
    }
    return RunData(directory=Path("run"), run=run, world_size=len(ranks), ranks=ranks)
