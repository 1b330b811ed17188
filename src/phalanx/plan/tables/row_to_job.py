"""Conversion of a table row to the jobs that it can stand for, in the columns of published runs.

Only input columns are read (those up to `schedule`, and `facts`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from phalanx.cost.estimate.job_table import JobRow
from phalanx.cost.exact.flops import recomputed_flops_per_token
from phalanx.cost.exact.model_state import PUBLISHED_MIXED_PRECISION_ADAM
from phalanx.cost.kinds import AttentionKernel, Recomputation, Schedule
from phalanx.plan.tables.cells import read_count, read_number
from phalanx.plan.tables.csv_rows import Row
from phalanx.plan.tables.job_columns import flops_per_token, stage_columns
from phalanx.plan.tables.machine_columns import machine_columns
from phalanx.plan.tables.model_guess import model_from_row
from phalanx.plan.tables.row_machine import read_machine
from phalanx.plan.tables.trainer_behavior import is_low_precision, trainer_behavior
from phalanx.spec.base import divisors, require

MICRO_BATCHES = (1, 2, 4, 8, 16)
"""Micro-batch sizes that a trainer would try."""
ASSUMED_WIDTH_FACTOR = 1.3
"""Factor on the logarithmic width of the interval if a row requires assumptions."""


@dataclass(frozen=True, kw_only=True)
class TableJob:
    """One row: the jobs that it can stand for, and the basis of its figures."""

    name: str
    trainer: str
    choices: list[JobRow]
    assumed: list[str]
    recomputed_flops: list[float]
    """Recomputed FLOPs of a step for each of `choices`, in addition to `flops_per_step`."""
    flops_per_step: float
    peak_flops: float
    """Peak of all devices, at the precision of training."""
    ranks: float

    @property
    def width(self) -> float:
        """Logarithmic width of the interval, relative to a row that states everything."""
        return ASSUMED_WIDTH_FACTOR if self.assumed else 1.0


def job_from_row(row: Row) -> TableJob:
    """Return the jobs that a row can stand for: all combinations of the options that it leaves open.

    Raises UserError if a value is missing or impossible.
    """
    zero = read_count(row, "zero", 0)
    cluster, assumed = read_machine(row)
    tp, pp, cp, ep = (read_count(row, axis, 1) for axis in ("tp", "pp", "cp", "ep"))
    for column in ("gpus", "seq", "global_batch", "tp", "pp"):
        read_number(row, column)
    sequence, ranks, batch = (read_count(row, column) for column in ("seq", "gpus", "global_batch"))
    require(
        ranks % (tp * pp * cp) == 0,
        "gpus",
        ranks,
        problem=f"is not a multiple of tp x pp x cp = {tp * pp * cp}",
        fix="correct gpus, tp, pp or cp",
    )
    dp = ranks // (tp * pp * cp)
    if read_number(row, "dp", dp) != dp:
        assumed.append(f"dp = {dp}, from the other degrees")
    spec, model_shape = model_from_row(row, sequence)
    experts = spec.moe.num_experts if spec.moe else 1
    require(experts % ep == 0, "ep", ep, problem=f"does not divide the {experts} experts", fix="correct ep or experts")
    text = f"{row.get('schedule', '')}; {row.get('facts', '')}"
    precision = row.get("precision", "")
    uses_xla = row.get("gpu_type", "").startswith("TPU")
    domain = max(cluster.fast_link_domain or 1, read_count(row, "gpus_per_node", 8))
    fixed: JobRow = {
        **model_shape,
        **machine_columns(cluster, ranks),
        **trainer_behavior(text, precision, cluster.generation, zero, uses_xla),
        "dp": dp,
        "tp": tp,
        "pp": pp,
        "cp": cp,
        "ep": ep,
        "zero_stage": zero,
        "shard_group_size": _shard_group_size(text, zero, dp * cp, domain),
    }
    trimmed = "1 layer fewer" in text
    choices = [
        choice | stage_columns(choice, trimmed) for choice in _generate_choices(row, fixed, spec.num_layers, batch / dp)
    ]
    open_options = {
        "micro-batch": not row.get("micro_batch", ""),
        "recompute": not row.get("recompute", ""),
        "virtual stages": _leaves_virtual_stages_open(row, fixed),
        "sequence parallelism": not row.get("seq_parallel", "") and tp > 1,
    }
    tokens = sequence * batch

    def recomputed_flops(choice: JobRow) -> float:
        """Return the recomputed FLOPs per token, counted as in `flops_per_token`."""
        is_flash = choice["attention"] >= AttentionKernel.FLASH_1
        method: Recomputation = choice["recompute"]
        return recomputed_flops_per_token(spec, sequence, method, flash=is_flash, sharded=zero >= 3, causal=False)

    return TableJob(
        name=row.get("id", ""),
        trainer=fixed["trainer"],
        choices=choices,
        assumed=assumed + [option for option, is_open in open_options.items() if is_open],
        recomputed_flops=[tokens * recomputed_flops(choice) for choice in choices],
        flops_per_step=flops_per_token(spec, sequence) * tokens,
        peak_flops=fixed["peak_flops"] * (2 if is_low_precision(precision) else 1) * ranks,
        ranks=ranks,
    )


def state_memory(row: Row) -> float | None:
    """Return the model-state memory of a rank, for a row with a parameter count and without activations.

    It covers parameters, gradients and optimizer state, in units of 1e9 bytes, as in such tables (ZeRO, arXiv
    1910.02054, table 1).
    """
    if "activations excluded" not in row.get("facts", "") or not row.get("params_b"):
        return None
    zero = read_number(row, "zero", 0)
    ranks = read_number(row, "dp", 1)
    state = PUBLISHED_MIXED_PRECISION_ADAM
    sizes = ((3, state.parameters), (2, state.gradients), (1, state.optimizer))
    return read_number(row, "params_b") * sum(size / (ranks if zero >= stage else 1) for stage, size in sizes)


def _generate_choices(row: Row, fixed: JobRow, num_layers: int, sequences_per_rank: float) -> Iterator[JobRow]:
    """Yield the jobs that a row can stand for; a trainer that does not state it splits sequences if it is recent."""
    is_recent = fixed["hardware_generation"] > 0 or fixed["attention"] >= AttentionKernel.FLASH_2
    states_sequence_parallelism = bool(row.get("seq_parallel", ""))
    is_sequence_parallel = read_number(row, "seq_parallel", 0) > 0
    fitting = (size for size in MICRO_BATCHES if size <= sequences_per_rank and sequences_per_rank % size == 0)
    micro_batch_sizes = [float(size) for size in fitting] or [1.0]
    if row.get("micro_batch", ""):
        micro_batch_sizes = [read_number(row, "micro_batch")]
    recompute_methods = _possible_recompute_methods(row, fixed)
    virtual_stage_counts = _possible_virtual_stages(row, fixed, num_layers)
    for micro_batch, recompute, virtual_stages in product(micro_batch_sizes, recompute_methods, virtual_stage_counts):
        if not states_sequence_parallelism:
            is_sequence_parallel = is_recent and recompute != "full"
        schedule = _parse_schedule(row.get("schedule", "").lower(), fixed["pp"], virtual_stages)
        yield {
            **fixed,
            "micro_batch": micro_batch,
            "micro_batches": max(1.0, sequences_per_rank / micro_batch),
            "recompute": recompute,
            "virtual_stages": max(virtual_stages, 1) if schedule == "interleaved" else 1,
            "schedule": schedule,
            "sequence_parallel": float(is_sequence_parallel),
        }


def _possible_recompute_methods(row: Row, fixed: JobRow) -> list[Recomputation]:
    """Return the stated method, or none, the trainer's selective one and full recomputation.

    Selective means attention's core in Megatron-LM, and other products in trainers on FSDP. Megatron-Core also accepts
    the names of a block's parts.
    """
    is_fsdp = fixed["zero_stage"] >= 3
    description = row.get("recompute", "").lower()
    if not description:
        recomputes_operations = is_fsdp or fixed["hardware_generation"] > 0
        return ["none", "operations" if recomputes_operations else "attention core", "full"]
    if description == "full":
        return ["full"]
    names_block_parts = not description.startswith("none") and any(
        part in description for part in ("norm", "act", "mlp", "moe")
    )
    if description.startswith("selective-op") or (description == "selective" and is_fsdp) or names_block_parts:
        return ["operations"]
    return ["attention core" if description == "selective" else "none"]


def _leaves_virtual_stages_open(row: Row, fixed: JobRow) -> bool:
    is_interleaved = "interleaved" in row.get("schedule", "").lower() and fixed["pp"] > 1
    return is_interleaved and read_count(row, "vpp", 0) == 0


def _possible_virtual_stages(row: Row, fixed: JobRow, num_layers: int) -> list[int]:
    """Return the stated number of virtual stages, or those that divide the blocks of a rank evenly."""
    stated = read_count(row, "vpp", 0)
    if not _leaves_virtual_stages_open(row, fixed):
        return [stated]
    if num_layers % fixed["pp"] > 0:
        return [1, 2, 3, 4]
    return [count for count in divisors(max(num_layers // fixed["pp"], 1)) if count <= 8]


def _parse_schedule(text: str, pp: int, virtual_stages: int) -> Schedule:
    if pp == 1:
        return "none"
    keywords: dict[str, Schedule] = {
        "zb-1p": "zb-h1",
        "zb-2p": "zb-h2",
        "zb-v": "zb-v",
        "dualpipe": "zb-v",
        "gpipe": "gpipe",
    }
    default_schedule: Schedule = "interleaved" if virtual_stages > 1 else "1f1b"
    return next((schedule for keyword, schedule in keywords.items() if keyword in text), default_schedule)


def _shard_group_size(text: str, zero: int, ranks: float, domain: int) -> float:
    """Return the ranks over which ZeRO shards: all, a stated group, or with HSDP those of a node."""
    if zero == 0:
        return 1.0
    if stated := re.search(r"group (?:size=|of )(\d+)", text):
        return float(stated.group(1))
    return min(float(domain), ranks) if "hsdp" in text.lower() else ranks
