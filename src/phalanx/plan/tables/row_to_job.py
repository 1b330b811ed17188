"""Conversion of a table row to the jobs that it can stand for, in the columns of published runs.

Only input columns are read (those up to `schedule`, and `facts`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from phalanx.cost.exact.flops import recomputed_flops_per_token
from phalanx.cost.exact.model_state import PUBLISHED_MIXED_PRECISION_ADAM
from phalanx.cost.kinds import ActivationCheckpointing, AttentionKernel, ScheduleKind
from phalanx.plan.tables.cells import read_count, read_number
from phalanx.plan.tables.csv_rows import Row
from phalanx.plan.tables.job_columns import JobRow, flops_per_token, stage_columns
from phalanx.plan.tables.machine_columns import machine_columns
from phalanx.plan.tables.model_guess import model_from_row
from phalanx.plan.tables.row_machine import read_machine
from phalanx.plan.tables.trainer_behavior import is_low_precision, trainer_behavior, trainer_name
from phalanx.spec.base import divisors, require
from phalanx.spec.cluster import ClusterSpec
from phalanx.spec.model import ModelSpec

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


@dataclass(frozen=True, kw_only=True)
class _RunSizes:
    """Numbers of a row that are the same in all jobs that it can stand for."""

    ranks: int
    dp: int
    tp: int
    pp: int
    cp: int
    ep: int
    sequence: int
    batch: int
    """Sequences of a step."""

    @property
    def tokens_per_step(self) -> int:
        return self.sequence * self.batch


def job_from_row(row: Row) -> TableJob:
    """Return the jobs that a row can stand for.

    Raises:
        UserError: If a value is missing or impossible.
    """
    zero_stage = read_count(row, "zero", 0)
    cluster, assumed = read_machine(row)
    sizes = _read_sizes(row)
    if read_number(row, "dp", sizes.dp) != sizes.dp:
        assumed.append(f"dp = {sizes.dp}, from the other degrees")
    spec, model_shape = model_from_row(row, sizes.sequence)
    _check_expert_parallelism(spec, sizes.ep)
    fixed: JobRow = {**model_shape, **_fixed_columns(row, cluster, sizes, zero_stage=zero_stage)}
    choices = _enumerate_choices(row, fixed, spec.num_layers, batch=sizes.batch)
    choices = [choice | stage_columns(choice, trimmed="1 layer fewer" in _description(row)) for choice in choices]
    peak_factor = 2 if is_low_precision(row.get("precision", "")) else 1
    return TableJob(
        name=row.get("id", ""),
        trainer=trainer_name(_description(row), zero_stage),
        choices=choices,
        assumed=assumed + _open_options(row, fixed),
        recomputed_flops=[
            sizes.tokens_per_step * _recomputed_flops(spec, sizes.sequence, choice) for choice in choices
        ],
        flops_per_step=flops_per_token(spec, sizes.sequence) * sizes.tokens_per_step,
        peak_flops=fixed["peak_flops"] * peak_factor * sizes.ranks,
        ranks=sizes.ranks,
    )


def _read_sizes(row: Row) -> _RunSizes:
    tp, pp, cp, ep = (read_count(row, axis, 1) for axis in ("tp", "pp", "cp", "ep"))
    for column in ("gpus", "seq", "global_batch", "tp", "pp"):
        read_number(row, column)
    sequence, ranks, batch = (read_count(row, column) for column in ("seq", "gpus", "global_batch"))
    shared = tp * pp * cp
    require(
        ranks % shared == 0,
        "gpus",
        ranks,
        problem=f"is not a multiple of tp x pp x cp = {shared}",
        fix="correct gpus, tp, pp or cp",
    )
    return _RunSizes(ranks=ranks, dp=ranks // shared, tp=tp, pp=pp, cp=cp, ep=ep, sequence=sequence, batch=batch)


def _check_expert_parallelism(spec: ModelSpec, ep: int) -> None:
    experts = spec.moe.num_experts if spec.moe else 1
    require(experts % ep == 0, "ep", ep, problem=f"does not divide the {experts} experts", fix="correct ep or experts")


def _description(row: Row) -> str:
    """Return what the row says of its trainer: the name of the schedule, and known facts."""
    return f"{row.get('schedule', '')}; {row.get('facts', '')}"


def _fixed_columns(row: Row, cluster: ClusterSpec, sizes: _RunSizes, zero_stage: int) -> JobRow:
    """Return the columns of the machine, the trainer and the layout, which the row does not leave open."""
    text = _description(row)
    uses_xla = row.get("gpu_type", "").startswith("TPU")
    domain = max(cluster.fast_link_domain or 1, read_count(row, "gpus_per_node", 8))
    return {
        **machine_columns(cluster, sizes.ranks),
        **trainer_behavior(text, row.get("precision", ""), cluster.generation, zero=zero_stage, xla=uses_xla),
        "ranks": sizes.ranks,
        "dp": sizes.dp,
        "tp": sizes.tp,
        "pp": sizes.pp,
        "cp": sizes.cp,
        "ep": sizes.ep,
        "zero_stage": zero_stage,
        "shard_group_size": _shard_group_size(text, zero_stage, sizes.dp * sizes.cp, domain=domain),
    }


def state_memory(row: Row) -> float | None:
    """Return the model-state memory of a rank, for a row with a parameter count and without activations.

    It covers parameters, gradients and optimizer state, in units of 1e9 bytes, as in such tables (ZeRO, arXiv
    1910.02054, table 1).
    """
    if "activations excluded" not in row.get("facts", "") or not row.get("params_b"):
        return None
    zero = read_number(row, "zero", 0)
    ranks = read_number(row, "dp", 1)
    bytes_per_parameter = PUBLISHED_MIXED_PRECISION_ADAM
    kinds = (
        (3, bytes_per_parameter.parameters),
        (2, bytes_per_parameter.gradients),
        (1, bytes_per_parameter.optimizer),
    )
    return read_number(row, "params_b") * sum(size / (ranks if zero >= stage else 1) for stage, size in kinds)


def _enumerate_choices(row: Row, fixed: JobRow, num_layers: int, batch: int) -> list[JobRow]:
    """Return the jobs that a row can stand for: all combinations of the options that it leaves open."""
    sequences_per_rank = batch / fixed["dp"]
    micro_batch_sizes = _micro_batch_sizes(row, sequences_per_rank)
    recompute_methods = _recompute_methods(row, fixed)
    virtual_stage_counts = _virtual_stage_counts(row, fixed, num_layers)
    states_sequence_parallelism = bool(row.get("seq_parallel", ""))
    is_sequence_parallel = read_number(row, "seq_parallel", 0) > 0
    choices = []
    for micro_batch in micro_batch_sizes:
        for recompute in recompute_methods:
            if not states_sequence_parallelism:
                is_sequence_parallel = _assumes_sequence_parallelism(fixed, recompute)
            for virtual_stages in virtual_stage_counts:
                schedule = _schedule_kind(row.get("schedule", "").lower(), int(fixed["pp"]), virtual_stages)
                choices.append(
                    {
                        **fixed,
                        "micro_batch": micro_batch,
                        "micro_batches": max(1.0, sequences_per_rank / micro_batch),
                        "recompute": recompute,
                        "virtual_stages": max(virtual_stages, 1) if schedule == ScheduleKind.INTERLEAVED else 1,
                        "schedule": schedule,
                        "sequence_parallel": float(is_sequence_parallel),
                    }
                )
    return choices


def _open_options(row: Row, fixed: JobRow) -> list[str]:
    """Return the names of the options that a row leaves open."""
    is_open = {
        "micro-batch": not row.get("micro_batch", ""),
        "recompute": not row.get("recompute", ""),
        "virtual stages": _leaves_virtual_stages_open(row, fixed),
        "sequence parallelism": not row.get("seq_parallel", "") and fixed["tp"] > 1,
    }
    return [option for option, holds in is_open.items() if holds]


def _micro_batch_sizes(row: Row, sequences_per_rank: float) -> list[float]:
    if row.get("micro_batch", ""):
        return [read_number(row, "micro_batch")]
    tried = [float(size) for size in MICRO_BATCHES if size <= sequences_per_rank and sequences_per_rank % size == 0]
    return tried or [1.0]


def _recompute_methods(row: Row, fixed: JobRow) -> list[ActivationCheckpointing]:
    """Return the stated method, or none, the trainer's selective one and full recomputation."""
    is_fsdp = fixed["zero_stage"] >= 3
    description = row.get("recompute", "").lower()
    if description:
        return [_checkpointing_method(description, is_fsdp)]
    recomputes_operations = is_fsdp or fixed["hardware_generation"] > 0
    selective = ActivationCheckpointing.OPERATIONS if recomputes_operations else ActivationCheckpointing.SELECTIVE
    return [ActivationCheckpointing.NONE, selective, ActivationCheckpointing.FULL]


def _leaves_virtual_stages_open(row: Row, fixed: JobRow) -> bool:
    is_interleaved = "interleaved" in row.get("schedule", "").lower() and fixed["pp"] > 1
    return is_interleaved and read_count(row, "vpp", 0) == 0


def _virtual_stage_counts(row: Row, fixed: JobRow, num_layers: int) -> list[int]:
    """Return the stated number of virtual stages, or those that divide the blocks of a rank evenly."""
    stated = read_count(row, "vpp", 0)
    if not _leaves_virtual_stages_open(row, fixed):
        return [stated]
    pp = int(fixed["pp"])
    if num_layers % pp > 0:
        return [1, 2, 3, 4]
    return [count for count in divisors(max(num_layers // pp, 1)) if count <= 8]


def _assumes_sequence_parallelism(fixed: JobRow, recompute: ActivationCheckpointing) -> bool:
    """Return whether a trainer that does not state it splits sequences: recent ones, without full recomputation."""
    is_recent = fixed["hardware_generation"] > 0 or fixed["attention"] >= AttentionKernel.FLASH_2
    return is_recent and recompute != ActivationCheckpointing.FULL


def _recomputed_flops(spec: ModelSpec, sequence: int, choice: JobRow) -> float:
    """Return the recomputed FLOPs per token, counted as in `flops_per_token`."""
    flash = choice["attention"] >= AttentionKernel.FLASH_1
    sharded = choice["zero_stage"] >= 3
    checkpointing = ActivationCheckpointing(int(choice["recompute"]))
    return recomputed_flops_per_token(spec, sequence, checkpointing, flash=flash, sharded=sharded, causal=False)


def _schedule_kind(schedule: str, pp: int, virtual_stages: int) -> ScheduleKind:
    if pp == 1:
        return ScheduleKind.NONE
    for keyword, order in (
        ("zb-1p", ScheduleKind.ZB_H1),
        ("zb-2p", ScheduleKind.ZB_H2),
        ("zb-v", ScheduleKind.ZB_V),
        ("dualpipe", ScheduleKind.ZB_V),
        ("gpipe", ScheduleKind.GPIPE),
    ):
        if keyword in schedule:
            return order
    return ScheduleKind.INTERLEAVED if virtual_stages > 1 else ScheduleKind.ONE_F_ONE_B


def _checkpointing_method(description: str, sharded: bool) -> ActivationCheckpointing:
    """Return the checkpointing method that a column describes.

    Selective means attention's core in Megatron-LM, and other products in trainers on FSDP. Megatron-Core also accepts
    the names of a block's parts.
    """
    if description == "full":
        return ActivationCheckpointing.FULL
    named = not description.startswith("none") and any(part in description for part in ("norm", "act", "mlp", "moe"))
    if description.startswith("selective-op") or (description == "selective" and sharded) or named:
        return ActivationCheckpointing.OPERATIONS
    return ActivationCheckpointing.SELECTIVE if description == "selective" else ActivationCheckpointing.NONE


def _shard_group_size(text: str, zero: int, ranks: float, domain: int) -> float:
    """Return the ranks over which ZeRO shards: all, a stated group, or with HSDP those of a node."""
    stated = re.search(r"group (?:size=|of )(\d+)", text)
    if zero == 0:
        return 1.0
    if stated:
        return float(stated.group(1))
    return min(float(domain), ranks) if "hsdp" in text.lower() else ranks
