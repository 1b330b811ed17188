"""Read a run directory as one measurement for the calibration."""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass
from math import nan
from pathlib import Path
from typing import Any

from phalanx.cost.exact.flops import training_flops_per_token
from phalanx.cost.exact.rank_memory import RankMemory, rank_memory
from phalanx.plan.calibrate.microbenchmarks import CollectiveTiming
from phalanx.plan.search.oom_risk import device_and_host_bytes
from phalanx.spec.errors import UserError
from phalanx.spec.files.load import load_run
from phalanx.spec.run import RunSpec

WARM_UP = 2
"""Steps at the start of a run that do not count: memory is new, and data-parallel buckets are not settled."""


LEAST_STEPS = 3


LEAST_WAIT = 0.03
"""Of a step."""


@dataclass(frozen=True)
class MeasuredRun:
    """One run, and what it took."""

    name: str
    run: RunSpec
    ranks: int
    step_seconds: float
    """Median."""
    memory_bytes: float
    """The most that the process of rank 0 held."""
    peak_flops: float | None
    """Of a rank, as it was measured or known when the run began."""
    tensor_bytes: float | None = None
    """The most that tensors of rank 0 held at one time, where the run measured that (`--profile-memory`)."""
    computing_seconds: float = nan
    """Of a step the slowest rank's passes without waits for others, where ranks noted that; NaN if they did not."""
    waiting_seconds: float = nan
    """Of a step, for collectives, of the rank that waits least, likewise."""
    device: str | None = None
    """What it ran on, where its ranks noted that."""
    exchanges: tuple[CollectiveTiming, ...] = ()
    """Collectives of steps that were looked at closely."""

    @property
    def memory(self) -> RankMemory:
        """Counted of its tensors, on rank 0."""
        return next(iter(rank_memory(self.run, self.ranks).values()))

    @property
    def held_bytes(self) -> float:
        """The most of these at one time, with what it offloads on a CPU."""
        return device_and_host_bytes(self.run.cluster.model_copy(update={"calibration": None}), [self.memory])[0]


def read_measured_run(directory: Path) -> MeasuredRun:
    """The steps of a run directory since it was last started.

    Raises UserError for what is no run directory, or too few steps.
    """
    file = directory / "metrics.jsonl"
    if not file.is_file():
        raise UserError("run directory", str(directory), "has no metrics.jsonl", "give what phalanx train made")
    records = [record for line in file.read_text().splitlines() if "step_seconds" in (record := _record(file, line))]
    ranks = records[-1].get("ranks") if records else None
    if ranks is None:
        raise UserError("run directory", str(directory), "does not say how many ranks it had", "run it anew")
    last: list[dict[str, Any]] = []
    for record in reversed(records):
        if (record.get("ranks"), record.get("resumed_at_step")) != (ranks, records[-1].get("resumed_at_step")):
            break
        last.append(record)
    measured = _measured_step(directory)
    slow = measured.get("step")  # and those that were looked at closely
    settled = [record for record in last[::-1][WARM_UP:] if record["step"] != slow and "profiled" not in record]
    if len(settled) < LEAST_STEPS:
        problem = (
            f"has {len(last)} steps; the first {WARM_UP} do not count, nor those that were looked at closely, and "
            f"{LEAST_STEPS} more are needed"
        )
        raise UserError("run directory", str(directory), problem, "raise training.steps")
    run = load_run(directory / "run.toml", environment={})
    run = run.model_copy(
        update={"cluster": run.cluster.model_copy(update={"nproc_per_node": ranks // run.cluster.nodes})}
    )
    mfu, flops = settled[-1].get("mfu"), training_flops_per_token(run.model, run.training.seq_len)
    peak = settled[-1]["tokens_per_second"] * flops / ranks / mfu if mfu else None
    seconds = statistics.median(record["step_seconds"] for record in settled)
    tensors = measured.get("peak_bytes", {}).get("total")
    return MeasuredRun(directory.name, run, ranks, seconds, settled[-1]["peak_memory_bytes"], peak, tensors)


def _measured_step(directory: Path) -> dict[str, Any]:
    """What rank 0 measured from inside, in one step that took longer for it; empty where none did."""
    file = directory / "measured" / "rank-00000.json"
    return _record(file, file.read_text()) if file.is_file() else {}


def _record(file: Path, line: str) -> dict[str, Any]:
    try:
        return dict(json.loads(line))
    except (ValueError, TypeError):
        raise UserError("run directory", str(file), f"is not JSON: {line[:40]}", "mend it") from None
