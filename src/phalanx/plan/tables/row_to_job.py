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
from phalanx.plan.tables.trainer_behaviour import is_low_precision, trainer_behaviour
from phalanx.spec.base import did_you_mean, divisors, require
from phalanx.spec.cluster import ClusterSpec
from phalanx.spec.errors import UserError
from phalanx.spec.files.load import load_machine, preset_names
from phalanx.spec.model import ModelSpec

MICRO_BATCHES = (1, 2, 4, 8, 16)
"""Micro-batch sizes that a trainer would try."""
NETWORK_BYTES_PER_SECOND = (25e9, 50e9, 50e9)
"""Network bandwidth per device by generation, if neither the row nor the preset states it.

200 or 400 Gb/s, as in DGX A100, H100 and B200.
"""
ASSUMED_WIDTH_FACTOR = 1.3
"""Factor on the logarithmic width of the interval if a row requires assumptions."""


@dataclass(frozen=True)
class TableJob:
    """One row: the jobs that it can stand for, and the basis of its figures."""

    name: str
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
    """Return the jobs that a row can stand for.

    Raises:
        UserError: If a value is missing or impossible.
    """
    zero = read_count(row, "zero", 0)
    precision = row.get("precision", "")
    cluster, assumed = _read_machine(row)
    tp, pp, cp, ep = (read_count(row, axis, 1) for axis in ("tp", "pp", "cp", "ep"))
    for column in ("gpus", "seq", "global_batch", "tp", "pp"):
        read_number(row, column)
    sequence, ranks, batch = (read_count(row, column) for column in ("seq", "gpus", "global_batch"))
    dp = ranks // (tp * pp * cp)
    shared = tp * pp * cp
    require(
        ranks % shared == 0,
        "gpus",
        ranks,
        problem=f"is not a multiple of tp x pp x cp = {shared}",
        fix="correct gpus, tp, pp or cp",
    )
    if read_number(row, "dp", dp) != dp:
        assumed.append(f"dp = {dp}, from the other degrees")
    spec, shape = model_from_row(row, sequence)
    experts = spec.moe.num_experts if spec.moe else 1
    require(experts % ep == 0, "ep", ep, problem=f"does not divide the {experts} experts", fix="correct ep or experts")
    text = f"{row.get('schedule', '')}; {row.get('facts', '')}"
    chip = row.get("gpu_type", "")
    node = read_count(row, "gpus_per_node", 8)
    fixed: JobRow = {
        **shape,
        **machine_columns(cluster, ranks),
        **trainer_behaviour(text, precision, cluster.generation, zero=zero, xla=chip.startswith("TPU")),
        "ranks": ranks,
        "dp": dp,
        "tp": tp,
        "pp": pp,
        "cp": cp,
        "ep": ep,
        "zero_stage": zero,
        "shard_group_size": _shard_group_size(text, zero, dp * cp, domain=max(cluster.fast_link_domain or 1, node)),
    }
    choices, open_ones = _enumerate_choices(row, fixed, spec.num_layers, batch=batch)
    choices = [choice | stage_columns(choice, trimmed="1 layer fewer" in text) for choice in choices]
    tokens = sequence * batch
    recomputed_flops = [tokens * _recomputed_flops(spec, sequence, choice) for choice in choices]
    flops = flops_per_token(spec, sequence) * tokens
    peak = fixed["peak_flops"] * (2 if is_low_precision(precision) else 1)
    return TableJob(
        row.get("id", ""),
        choices,
        assumed + open_ones,
        recomputed_flops=recomputed_flops,
        flops_per_step=flops,
        peak_flops=peak * ranks,
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
    bytes_per_parameter = PUBLISHED_MIXED_PRECISION_ADAM
    kinds = (
        (3, bytes_per_parameter.parameters),
        (2, bytes_per_parameter.gradients),
        (1, bytes_per_parameter.optimizer),
    )
    return read_number(row, "params_b") * sum(size / (ranks if zero >= stage else 1) for stage, size in kinds)


def _enumerate_choices(row: Row, fixed: JobRow, layers: int, batch: int) -> tuple[list[JobRow], list[str]]:
    assumed = []
    share = batch / fixed["dp"]
    stated = row.get("micro_batch", "")
    tried = [float(b) for b in MICRO_BATCHES if b <= share and share % b == 0]
    micro_batches = [read_number(row, "micro_batch")] if stated else tried
    micro_batches = micro_batches or [1.0]
    if not stated:
        assumed.append("micro-batch")
    description = row.get("recompute", "").lower()
    sharded = fixed["zero_stage"] >= 3
    partly = (
        ActivationCheckpointing.OPERATIONS
        if sharded or fixed["hardware_generation"] > 0
        else ActivationCheckpointing.SELECTIVE
    )
    recompute_kinds = (
        [_checkpointing_method(description, sharded)]
        if description
        else [ActivationCheckpointing.NONE, partly, ActivationCheckpointing.FULL]
    )
    if not description:
        assumed.append("recompute")
    schedule = row.get("schedule", "").lower()
    pp = int(fixed["pp"])
    chunks = [read_count(row, "vpp", 0)]
    if chunks == [0] and "interleaved" in schedule and pp > 1:
        chunks = [v for v in divisors(max(layers // pp, 1)) if v <= 8] if layers % pp == 0 else [1, 2, 3, 4]
        assumed.append("virtual stages")
    parallel = row.get("seq_parallel", "")
    sequence_parallel = read_number(row, "seq_parallel", 0) > 0
    if not parallel and fixed["tp"] > 1:
        assumed.append("sequence parallelism")
    choices = []
    for micro_batch in micro_batches:
        for recompute in recompute_kinds:
            for v in chunks:
                order = _schedule_kind(schedule, pp, v)
                modern = (
                    fixed["hardware_generation"] > 0 or fixed["attention"] >= AttentionKernel.FLASH_2
                ) and recompute != ActivationCheckpointing.FULL
                choices.append(
                    {
                        **fixed,
                        "micro_batch": micro_batch,
                        "micro_batches": max(1.0, share / micro_batch),
                        "recompute": recompute,
                        "virtual_stages": max(v, 1) if order == ScheduleKind.INTERLEAVED else 1,
                        "schedule": order,
                        "sequence_parallel": float(sequence_parallel if parallel else modern),
                    }
                )
    return choices, assumed


def _recomputed_flops(spec: ModelSpec, sequence: int, choice: JobRow) -> float:
    """Return the recomputed FLOPs per token, counted as in `flops_per_token`."""
    flash = choice["attention"] >= AttentionKernel.FLASH_1
    sharded = choice["zero_stage"] >= 3
    checkpointing = ActivationCheckpointing(int(choice["recompute"]))
    return recomputed_flops_per_token(spec, sequence, checkpointing, flash=flash, sharded=sharded, causal=False)


def _schedule_kind(schedule: str, pp: int, virtual: int) -> ScheduleKind:
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
    return ScheduleKind.INTERLEAVED if virtual > 1 else ScheduleKind.ONE_F_ONE_B


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


def _read_machine(row: Row) -> tuple[ClusterSpec, list[str]]:
    """Return the machine of a row, and the assumptions about it."""
    preset, assumed = _find_preset(row.get("gpu_type", ""))
    cluster = load_machine(preset)
    changes: dict[str, float] = {}
    node = read_count(row, "gpus_per_node", 8)
    joined = cluster.fast_link_domain or node
    if joined < 8 and not row.get("intra_bw"):  # single devices and pairs stay separate, unless a row states its links
        node = min(joined, node)
    changes["fast_link_domain"] = joined if joined > 8 else node
    for column, field in (("intra_bw", "link_bytes_per_second"), ("inter_bw", "network_bytes_per_second")):
        if row.get(column):
            changes[field] = read_number(row, column) * 1e9
    if not row.get("inter_bw") and read_number(row, "gpus", 1) > changes["fast_link_domain"]:
        assumed.append("network")
        changes.setdefault(
            "network_bytes_per_second", cluster.network_bytes_per_second or NETWORK_BYTES_PER_SECOND[cluster.generation]
        )
    return cluster.model_copy(update=changes), assumed


def _find_preset(chip: str) -> tuple[str, list[str]]:
    """Return the preset that a device's name stands for, and the assumptions.

    It is the preset that has the most words of the name, in any order. A100-80GB-PCIe is a100-pcie, V100-SXM2-32GB is
    v100-32gb, and an MI250X is one of its halves, as ROCm counts.
    """
    tokens = re.findall(r"[a-z0-9]+", chip.lower())
    halved = ["gcd"] if "mi250x" in tokens and "gcd" not in tokens else []
    known = preset_names("machines")
    meant = [preset for preset in known if {*preset.split("-")} <= {*tokens, *halved}]
    if not meant:
        fix = did_you_mean("-".join(tokens), known, "list the known devices with `phalanx info --list`")
        raise UserError("gpu_type", chip, "is not a known device", fix=fix)
    preset = max(meant, key=lambda name: name.count("-"))
    assumed = ["gpus counts GCDs; an MI250X has two"] if halved else []
    if "pcie" in tokens and (load_machine(preset).fast_link_domain or 0) > 2:
        assumed.append(f"links of {preset}")
    return preset, assumed
