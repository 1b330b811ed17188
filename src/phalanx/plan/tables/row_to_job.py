"""A table of runs, one a row, in the columns of published runs: each row as a job, with what it leaves open.

Only input columns are read (those up to `schedule`, and `facts`)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from phalanx.cost.estimate.job_table import ActivationCheckpointing, AttentionKernel, ScheduleKind
from phalanx.cost.exact.flops import recomputed_flops_per_token
from phalanx.cost.exact.parameters import count_parameters
from phalanx.cost.exact.rank_memory import PUBLISHED_MIXED_PRECISION_ADAM
from phalanx.plan.tables.csv_rows import Row
from phalanx.plan.tables.job_columns import (
    JobRow,
    flops_per_token,
    is_low_precision,
    machine_columns,
    model_columns,
    stage_columns,
    trainer_behaviour,
)
from phalanx.spec.base import did_you_mean, divisors, parse_table, require
from phalanx.spec.cluster import ClusterSpec
from phalanx.spec.errors import UserError
from phalanx.spec.files.load import load_machine, preset_names
from phalanx.spec.model import ModelSpec

MICRO_BATCHES = (1, 2, 4, 8, 16)
"""Those that a trainer would try."""
MOST = 1e12
"""Of any number in a row."""
MOST_LAYERS = 10_000
ASSUMED_IS_WIDER = 1.3
"""Times as wide, on a logarithmic scale, as an interval is where something had to be assumed."""


@dataclass(frozen=True)
class MLAShape:
    """Multi-head latent attention and fine experts of DeepSeek's models (arXiv 2412.19437, section 4.2)."""

    expert_ffn: int
    shared_experts: int
    first_dense: int
    ffn: int
    heads: int = 128
    query_rank: int = 1536
    key_rank: int = 512
    head: int = 128
    rotary: int = 64

    def attention_parameters(self, width: int) -> int:
        """Of one layer: down- and up-projections of queries, of keys and values, and the output."""
        queries = self.query_rank * (width + self.heads * (self.head + self.rotary))
        keys = width * (self.key_rank + self.rotary) + self.key_rank * self.heads * 2 * self.head
        return queries + keys + self.heads * self.head * width


LATENT = {
    "deepseek-v3": MLAShape(2048, 1, 3, 18432),
    "deepseekv3": MLAShape(2048, 1, 1, 18432),
    "deepseekv2": MLAShape(1536, 2, 1, 12288),
    "kimi-k2": MLAShape(2048, 1, 1, 18432, heads=64),
}
"""Models whose attention no column describes, by how their names begin (a truncated one has one dense layer)."""
HEAD_DIM = {"qwen3": 128, "gpt-oss": 64}
"""Heads that are not width / heads wide."""
SHARED_FFN = {"qwen2-57b": 20480}


@dataclass(frozen=True)
class TableJob:
    """One row: the jobs that it may mean, for what it leaves open, and what it counts by."""

    name: str
    choices: list[JobRow]
    assumed: list[str]
    recomputed_flops: list[float]
    """Of a step, by each of `choices`, beside `flops_per_step`."""
    flops_per_step: float
    peak_flops: float
    """Of all devices, at the precision of training."""
    ranks: float

    @property
    def width(self) -> float:
        """Times as wide, on a logarithmic scale, as the interval of a row that states everything."""
        return ASSUMED_IS_WIDER if self.assumed else 1.0


def job_from_row(row: Row) -> TableJob:
    """The jobs that a row may mean.

    Raises UserError for what is missing or cannot be.
    """
    zero, precision = _count(row, "zero", 0), row.get("precision", "")
    cluster, assumed = _machine(row)
    tp, pp, cp, ep = (_count(row, axis, 1) for axis in ("tp", "pp", "cp", "ep"))
    for column in ("gpus", "seq", "global_batch", "tp", "pp"):
        _number(row, column)
    sequence, ranks, batch = (_count(row, column) for column in ("seq", "gpus", "global_batch"))
    dp, shared = ranks // (tp * pp * cp), tp * pp * cp
    require(ranks % shared == 0, "gpus", ranks, f"is no multiple of tp x pp x cp = {shared}", "correct one of them")
    if _number(row, "dp", dp) != dp:
        assumed.append(f"dp = {dp}, which the other degrees leave")
    spec, shape = _model(row, sequence)
    experts = spec.moe.num_experts if spec.moe else 1
    require(experts % ep == 0, "ep", ep, f"does not divide the {experts} experts", "correct one of them")
    text = f"{row.get('schedule', '')}; {row.get('facts', '')}"
    chip, node = row.get("gpu_type", ""), _count(row, "gpus_per_node", 8)
    fixed: JobRow = {
        **shape,
        **machine_columns(cluster),
        **trainer_behaviour(text, precision, cluster.generation, zero, xla=chip.startswith("TPU")),
        "ranks": ranks,
        "dp": dp,
        "tp": tp,
        "pp": pp,
        "cp": cp,
        "ep": ep,
        "zero_stage": zero,
        "shard_group_size": _shard(text, zero, dp * cp, max(cluster.fast_link_domain or 1, node)),
    }
    choices, open_ones = _choices(row, fixed, spec.num_layers, batch)
    choices = [choice | stage_columns(choice, trimmed="1 layer fewer" in text) for choice in choices]
    tokens = sequence * batch
    again = [tokens * _recomputed_flops(spec, sequence, choice) for choice in choices]
    flops = flops_per_token(spec, sequence) * tokens
    peak = fixed["peak_flops"] * (2 if is_low_precision(precision) else 1)
    return TableJob(row.get("id", ""), choices, assumed + open_ones, again, flops, peak * ranks, ranks)


def state_memory(row: Row) -> float | None:
    """What a rank keeps of parameters, gradients and optimizer state, of a row that states a number of parameters and
    excludes activations: in units of 1e9 bytes, as such tables have it (ZeRO, arXiv 1910.02054, table 1)."""
    if "activations excluded" not in row.get("facts", "") or not row.get("params_b"):
        return None
    zero, ranks, each = _number(row, "zero", 0), _number(row, "dp", 1), PUBLISHED_MIXED_PRECISION_ADAM
    kinds = ((3, each.parameters), (2, each.gradients), (1, each.optimizer))
    return _number(row, "params_b") * sum(size / (ranks if zero >= stage else 1) for stage, size in kinds)


def _choices(row: Row, fixed: JobRow, layers: int, batch: int) -> tuple[list[JobRow], list[str]]:
    assumed = []
    share = batch / fixed["dp"]
    stated = row.get("micro_batch", "")
    tried = [float(b) for b in MICRO_BATCHES if b <= share and share % b == 0]
    micro_batches = [_number(row, "micro_batch")] if stated else tried
    micro_batches = micro_batches or [1.0]
    if not stated:
        assumed.append("micro-batch")
    said = row.get("recompute", "").lower()
    sharded = fixed["zero_stage"] >= 3
    partly = (
        ActivationCheckpointing.OPERATIONS
        if sharded or fixed["hardware_generation"] > 0
        else ActivationCheckpointing.SELECTIVE
    )
    again = (
        [_recompute(said, sharded)] if said else [ActivationCheckpointing.NONE, partly, ActivationCheckpointing.FULL]
    )
    if not said:
        assumed.append("recompute")
    schedule, pp = row.get("schedule", "").lower(), int(fixed["pp"])
    chunks = [_count(row, "vpp", 0)]
    if chunks == [0] and "interleaved" in schedule and pp > 1:
        chunks = [v for v in divisors(max(layers // pp, 1)) if v <= 8] if layers % pp == 0 else [1, 2, 3, 4]
        assumed.append("virtual stages")
    parallel = row.get("seq_parallel", "")
    shares = _number(row, "seq_parallel", 0) > 0
    if not parallel and fixed["tp"] > 1:
        assumed.append("sequence parallelism")
    found = []
    for micro_batch in micro_batches:
        for recompute in again:
            for v in chunks:
                order = _order(schedule, pp, v)
                modern = (
                    fixed["hardware_generation"] > 0 or fixed["attention"] >= AttentionKernel.FLASH_2
                ) and recompute != ActivationCheckpointing.FULL
                found.append(
                    {
                        **fixed,
                        "micro_batch": micro_batch,
                        "micro_batches": max(1.0, share / micro_batch),
                        "recompute": recompute,
                        "virtual_stages": max(v, 1) if order == ScheduleKind.INTERLEAVED else 1,
                        "schedule": order,
                        "sequence_parallel": float(shares if parallel else modern),
                    }
                )
    return found, assumed


def _recomputed_flops(spec: ModelSpec, sequence: int, choice: JobRow) -> float:
    """On a token, counted as `flops_per_token` counts."""
    flash, sharded = choice["attention"] >= AttentionKernel.FLASH_1, choice["zero_stage"] >= 3
    again = ActivationCheckpointing(int(choice["recompute"]))
    return recomputed_flops_per_token(spec, sequence, again, flash=flash, sharded=sharded, causal=False)


def _order(schedule: str, pp: int, virtual: int) -> ScheduleKind:
    if pp == 1:
        return ScheduleKind.NONE
    for word, order in (
        ("zb-1p", ScheduleKind.ZB_H1),
        ("zb-2p", ScheduleKind.ZB_H2),
        ("zb-v", ScheduleKind.ZB_V),
        ("dualpipe", ScheduleKind.ZB_V),
        ("gpipe", ScheduleKind.GPIPE),
    ):
        if word in schedule:
            return order
    return ScheduleKind.INTERLEAVED if virtual > 1 else ScheduleKind.ONE_F_ONE_B


def _recompute(said: str, sharded: bool) -> ActivationCheckpointing:
    """What a column says; selective means attention's core in Megatron-LM, and in trainers on FSDP other products.
    Megatron-Core also takes the names of a block's parts."""
    if said == "full":
        return ActivationCheckpointing.FULL
    named = not said.startswith("none") and any(part in said for part in ("norm", "act", "mlp", "moe"))
    if said.startswith("selective-op") or (said == "selective" and sharded) or named:
        return ActivationCheckpointing.OPERATIONS
    return ActivationCheckpointing.SELECTIVE if said == "selective" else ActivationCheckpointing.NONE


def _shard(text: str, zero: int, ranks: float, domain: int) -> float:
    """Ranks that share what is sharded: all, those of a stated group, or with HSDP those of a node."""
    stated = re.search(r"group (?:size=|of )(\d+)", text)
    if zero == 0:
        return 1.0
    if stated:
        return float(stated.group(1))
    return min(float(domain), ranks) if "hsdp" in text.lower() else ranks


def _machine(row: Row) -> tuple[ClusterSpec, list[str]]:
    """The machine of a row, and what was assumed of it."""
    preset, assumed = _preset(row.get("gpu_type", ""))
    cluster = load_machine(preset)
    changes: dict[str, float] = {}
    node = _count(row, "gpus_per_node", 8)
    joined = cluster.fast_link_domain or node
    if joined < 8 and not row.get("intra_bw"):  # single devices and pairs stay so, unless a row states its links
        node = min(joined, node)
    changes["fast_link_domain"] = joined if joined > 8 else node
    for column, field in (("intra_bw", "link_bytes_per_second"), ("inter_bw", "network_bytes_per_second")):
        if row.get(column):
            changes[field] = _number(row, column) * 1e9
    if not row.get("inter_bw") and _number(row, "gpus", 1) > changes["fast_link_domain"]:
        assumed.append("network")
    return cluster.model_copy(update=changes), assumed


def _preset(chip: str) -> tuple[str, list[str]]:
    """The preset that a device's name means, and what that assumes: the one with most of the name's words, in whatever
    order. A100-80GB-PCIe is a100-pcie, V100-SXM2-32GB v100-32gb, and an MI250X one of its halves, as ROCm counts."""
    words = re.findall(r"[a-z0-9]+", chip.lower())
    halved = ["gcd"] if "mi250x" in words and "gcd" not in words else []
    known = preset_names("machines")
    meant = [preset for preset in known if {*preset.split("-")} <= {*words, *halved}]
    if not meant:
        fix = did_you_mean("-".join(words), known, "`phalanx info --list` shows those that are")
        raise UserError("gpu_type", chip, "is not a known device", fix)
    preset = max(meant, key=lambda name: name.count("-"))
    assumed = ["gpus are GCDs, of which an MI250X has two"] if halved else []
    if "pcie" in words and (load_machine(preset).fast_link_domain or 0) > 2:
        assumed.append(f"links of {preset}")
    return preset, assumed


def _model(row: Row, sequence: int) -> tuple[ModelSpec, JobRow]:
    """The model of a row as Phalanx describes it, and its columns."""
    name = row.get("model", "").lower()
    latent = next((shape for start, shape in LATENT.items() if name.startswith(start)), None)
    width, layers, heads = (_count(row, column) for column in ("hidden", "layers", "heads"))
    require(layers <= MOST_LAYERS, "layers", layers, f"is more than {MOST_LAYERS:,}", "correct it")
    experts, ffn = _count(row, "experts", 0), _count(row, "ffn")
    common: dict[str, Any] = {
        "hidden_size": width,
        "num_layers": layers,
        "num_heads": heads,
        "num_kv_heads": _count(row, "kv_heads", heads),
        "vocab_size": _count(row, "vocab"),
        "max_seq_len": sequence,
        "position_embedding": "learned",
        "head_dim": next((dim for start, dim in HEAD_DIM.items() if name.startswith(start)), max(width // heads, 1)),
    }
    if not experts:
        spec = _nearest(common, ffn, _number(row, "params_b", 0) * 1e9, "llama" in name)
        return spec, model_columns(spec, sequence)
    moe: dict[str, Any] = {"num_experts": experts, "top_k": _count(row, "topk"), "expert_ffn_size": ffn}
    if latent:
        moe |= {
            "num_shared_experts": latent.shared_experts,
            "num_leading_dense_layers": latent.first_dense,
            "expert_ffn_size": latent.expert_ffn,
        }
        common |= {"num_heads": latent.heads, "num_kv_heads": latent.heads, "head_dim": latent.head + latent.rotary}
    spec = parse_table(ModelSpec, {**common, "ffn_hidden_size": latent.ffn if latent else ffn, "moe": moe})
    columns = model_columns(spec, sequence)
    columns["shared_ffn"] += next((ffn for start, ffn in SHARED_FFN.items() if name.startswith(start)), 0)
    if latent:
        attention = latent.attention_parameters(width)
        columns["parameters"] += layers * (attention - columns["attention_parameters"])
        columns |= {"attention_parameters": attention, "value_dim": latent.head}
    return spec, columns


def _nearest(common: dict[str, Any], ffn: int, stated: float, gated: bool) -> ModelSpec:
    """A dense model with the kind of MLP, and tied or not, that explains its stated parameters best."""
    specs = [
        parse_table(ModelSpec, {**common, "ffn_hidden_size": ffn, "activation": activation, "tie_embeddings": tied})
        for activation in ("swiglu", "gelu")
        for tied in (False, True)
    ]
    if not stated:
        return specs[0 if gated else 3]
    return min(specs, key=lambda spec: abs(count_parameters(spec).total - stated))


def _count(row: Row, column: str, default: int | None = None) -> int:
    """Raises UserError for what is no whole number."""
    value = _number(row, column, default)
    require(value == int(value), column, row.get(column), "is not a whole number", "correct it")
    return int(value)


def _number(row: Row, column: str, default: float | None = None) -> float:
    """Raises UserError for a column that is empty, and needed, or no number."""
    text = (row.get(column) or "").strip()
    if not text and default is not None:
        return default
    try:
        value = float(text)
    except ValueError:
        problem = "is not a number" if text else "is needed, and empty"
        raise UserError(column, text or None, problem, "fill it in") from None
    if value == 0 and default is not None:
        return 0.0 if column == "zero" else default
    if not 0 < value <= MOST:
        raise UserError(column, text, f"must be above 0 and at most {MOST:.0e}", "correct it")
    return value
