"""Published runs and their results, for fitting and testing the constants of the planner.

`published_runs.csv` has 2,269 rows of papers, model cards and repositories, which the column `source` names. Columns up
to `schedule`, and `facts`, are known before a run. `step_time_s`, `tflops_per_gpu`, `mfu` and `memory_gib` are results,
which `notes` explains: some step times were computed from published tokens or FLOP/s. A `memory_gib` such as ">80"
without a step time is a run that did not fit.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from phalanx.plan.tables.csv_rows import Row, read_rows
from phalanx.plan.tables.row_to_job import TableJob, job_from_row
from phalanx.plan.tables.trainer_behavior import is_low_precision
from phalanx.spec.errors import UserError

ROWS = Path(__file__).with_name("published_runs.csv")


@dataclass(frozen=True)
class PublishedRun:
    """Row that can be predicted, and its published results."""

    row: Row
    job: TableJob
    step_seconds: float | None
    memory_gib: float | None
    out_of_memory: bool

    @property
    def source(self) -> str:
        """Publication of the row."""
        return self.row["id"].rsplit("-", 1)[0]

    @property
    def group(self) -> str:
        """Publication of the row, or one of its tables: rows whose errors are averaged."""
        source, row = self.source, self.row
        groups = {
            "hage": "hage flash" if "flash" in row["facts"] else "hage torch/fused",
            "zb4": f"zb4 {row['schedule'].rstrip('*')}",
            "foundry": f"foundry {row['gpu_type'][:4]}",
            "megascale": "megascale own" if row["facts"].startswith("MegaScale") else "megascale Megatron-LM",
            "vtm": "vtm tp16" if row["tp"] == "16" else "vtm",
            "sc21t2": "sc21t2 ZeRO-3" if row["zero"] == "3" else "sc21t2 PTD-P",
        }
        return groups.get(source, source) + (" 8 bits" if self.low_precision else "")

    @property
    def low_precision(self) -> bool:
        return is_low_precision(self.row["precision"])

    @property
    def four_bits(self) -> bool:
        return "fp4" in self.row["precision"]

    @property
    def ran_in_sweep_with_failures(self) -> bool:
        """True for a row that ran in a sweep whose failures were also published."""
        return self.source == "hage" and not self.out_of_memory

    @property
    def has_rank_memory(self) -> bool:
        """True if the memory of the row is that of the fullest rank of a stated layout."""
        is_stated = bool(self.row["micro_batch"] and self.row["recompute"]) and not self.low_precision
        is_stated = is_stated and "seq len not stated" not in self.row["facts"]
        return is_stated and (self.memory_gib is not None or self.out_of_memory or self.ran_in_sweep_with_failures)


def read_published_runs(path: Path) -> list[PublishedRun]:
    """Return all rows that can be predicted."""
    runs = []
    for row in read_rows(path):
        try:
            job = job_from_row(row)
        except UserError:
            continue
        memory_text = row["memory_gib"]
        failed = memory_text.startswith(">")
        runs.append(
            PublishedRun(
                row,
                job,
                step_seconds=float(row["step_time_s"]) if row["step_time_s"] else None,
                memory_gib=float(memory_text) if memory_text and not failed else None,
                out_of_memory=failed and not row["step_time_s"],
            )
        )
    return runs


def format_verdict(reached: bool | np.bool) -> str:
    """Return the verdict that follows a figure and its target."""
    return "met" if reached else "no"


def step_time_rows(runs: list[PublishedRun]) -> list[PublishedRun]:
    """Return the rows whose step time was published."""
    return [row for row in runs if row.step_seconds]
