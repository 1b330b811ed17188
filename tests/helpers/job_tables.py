"""Jobs for tests: one row of columns with every value named."""

from phalanx.cost.estimate.job_table import JobTable, job_table
from phalanx.cost.kinds import ActivationCheckpointing, AttentionKernel, ScheduleKind
from phalanx.plan.tables.job_columns import model_columns, stage_columns
from phalanx.plan.tables.machine_columns import machine_columns
from phalanx.plan.tables.trainer_behavior import trainer_behavior
from phalanx.spec.files.load import load_machine, load_model_spec


def make_job_row(
    model: str = "llama3-8b", machine: str = "h100", sequence: int = 4096, **choices: float
) -> dict[str, float]:
    """A row of columns: `model` on `machine`, one rank, whatever `choices` say otherwise."""
    degrees = {axis: float(choices.pop(axis, 1)) for axis in ("dp", "tp", "pp", "cp", "ep")}
    ranks = degrees["dp"] * degrees["tp"] * degrees["pp"] * degrees["cp"]
    order = ScheduleKind.ONE_F_ONE_B if degrees["pp"] > 1 else ScheduleKind.NONE
    usual = {
        **model_columns(load_model_spec(model), sequence),
        **machine_columns(load_machine(machine), int(ranks)),
        **trainer_behavior("", "bf16", 1, 0),
        **degrees,
        "ranks": ranks,
        "virtual_stages": 1,
        "zero_stage": 0,
        "shard_group_size": 1,
        "micro_batch": 1,
        "micro_batches": 8,
        "recompute": ActivationCheckpointing.NONE,
        "sequence_parallel": float(degrees["tp"] > 1),
        "schedule": order,
        "attention": AttentionKernel.FLASH_3,
    }
    chosen = {**usual, **choices}
    return chosen | stage_columns(chosen)


def make_job_table(*rows: dict[str, float]) -> JobTable:
    """Several as columns."""
    return job_table(rows)
