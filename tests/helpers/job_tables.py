"""Jobs for tests: rows of columns with every value named."""

from typing import Any

from phalanx.cost.estimate.job_table import JobRow, JobTable, job_table
from phalanx.cost.kinds import AttentionKernel
from phalanx.plan.tables.job_columns import model_columns, stage_columns
from phalanx.plan.tables.machine_columns import machine_columns
from phalanx.plan.tables.trainer_behavior import trainer_behavior
from phalanx.spec.files.load import load_machine, load_model_spec


def make_job_row(model: str = "llama3-8b", machine: str = "h100", sequence: int = 4096, **choices: Any) -> JobRow:
    """Return a row of columns: `model` on `machine` and one rank, changed by `choices`."""
    degrees = {axis: float(choices.pop(axis, 1)) for axis in ("dp", "tp", "pp", "cp", "ep")}
    ranks = degrees["dp"] * degrees["tp"] * degrees["pp"] * degrees["cp"]
    usual = {
        **model_columns(load_model_spec(model), sequence),
        **machine_columns(load_machine(machine), int(ranks)),
        **trainer_behavior("", "bf16", 1, 0),
        **degrees,
        "virtual_stages": 1,
        "zero_stage": 0,
        "shard_group_size": 1,
        "micro_batch": 1,
        "micro_batches": 8,
        "recompute": "none",
        "sequence_parallel": float(degrees["tp"] > 1),
        "schedule": "1f1b" if degrees["pp"] > 1 else "none",
        "attention": AttentionKernel.FLASH_3,
    }
    row = {**usual, **choices}
    return row | stage_columns(row)


def make_job_table(*rows: JobRow) -> JobTable:
    """Return several rows as columns."""
    return job_table(rows)
