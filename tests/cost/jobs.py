"""Jobs for tests: one row of columns with every value named."""

from phalanx.cost.jobs import Attention, Jobs, Order, Recompute, columns
from phalanx.plan.describe import habits, machine_columns, model_columns, stage_columns
from phalanx.spec.load import load_machine, load_model


def job(model: str = "llama3-8b", machine: str = "h100", sequence: int = 4096, **choices: float) -> dict[str, float]:
    """A row of columns: `model` on `machine`, one rank, whatever `choices` say otherwise."""
    degrees = {axis: float(choices.pop(axis, 1)) for axis in ("dp", "tp", "pp", "cp", "ep")}
    ranks = degrees["dp"] * degrees["tp"] * degrees["pp"] * degrees["cp"]
    order = Order.ONE_F_ONE_B if degrees["pp"] > 1 else Order.NONE
    usual = {
        **model_columns(load_model(model), sequence),
        **machine_columns(load_machine(machine)),
        **habits("", "bf16", 1, 0),
        **degrees,
        "ranks": ranks, "virtual": 1, "zero": 0, "shard": 1, "micro_batch": 1, "micro_batches": 8,
        "recompute": Recompute.NONE, "sequence_parallel": float(degrees["tp"] > 1), "order": order,
        "attention": Attention.FLASH_3,
    }  # fmt: skip
    chosen = {**usual, **choices}
    return chosen | stage_columns(chosen)


def jobs(*rows: dict[str, float]) -> Jobs:
    """Several as columns."""
    return columns(rows)
