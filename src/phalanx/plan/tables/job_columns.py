"""Columns of a job table for a model, a machine and the behavior of a trainer."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from phalanx.cost.estimate.constants import (
    MemoryConstants,
    TimeConstants,
    interval_constants,
    memory_constants,
    names,
    time_constants,
)
from phalanx.cost.estimate.job_table import JobTable
from phalanx.cost.estimate.prediction_interval import log_half_width
from phalanx.cost.exact.flops import training_flops_per_token
from phalanx.cost.exact.parameters import count_parameters
from phalanx.cost.kinds import AttentionKernel, Column, OffloadTarget, ScheduleKind
from phalanx.spec.base import did_you_mean, require
from phalanx.spec.cluster import ClusterSpec
from phalanx.spec.formatting import GIB
from phalanx.spec.model import ModelSpec

JobRow = dict[str, float]


def model_columns(spec: ModelSpec, sequence: int) -> JobRow:
    """Return the columns of a model: its shape and counts."""
    count = count_parameters(spec)
    moe = spec.moe
    return {
        "layers": spec.num_layers,
        "dense_layers": moe.num_leading_dense_layers if moe else spec.num_layers,
        "width": spec.hidden_size,
        "heads": spec.num_heads,
        "kv_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "value_dim": spec.head_dim,
        "attention_parameters": count.attention / spec.num_layers,
        "ffn": spec.ffn_hidden_size,
        "mlp_matrices": 3 if spec.activation == "swiglu" else 2,
        "vocab": spec.vocab_size,
        "tied": float(spec.tie_embeddings),
        "experts": moe.num_experts if moe else 0,
        "top_k": moe.top_k if moe else 0,
        "expert_ffn": moe.expert_ffn_size if moe else 0,
        "shared_ffn": moe.expert_ffn_size * moe.num_shared_experts if moe else 0,
        "parameters": count.total,
        "expert_parameters": count.experts,
        "sequence": sequence,
    }


def flops_per_token(spec: ModelSpec, sequence: int) -> float:
    """Return the model FLOPs to train on a token, with every pair of tokens, as most publications count."""
    return training_flops_per_token(spec, sequence, causal=False)


def stage_columns(job: JobRow, trimmed: bool = False) -> JobRow:
    """Return the blocks of a pipeline's first, middle and last rank, as trainers split it.

    The first and the last stage have fewer blocks if the blocks do not divide evenly, or if embedding and head replace
    a block (`trimmed`). In a V schedule these stages are on one rank. Leading layers have no experts.
    """
    layers = job["layers"]
    dense = job["dense_layers"]
    pp = job["pp"]
    together = job["schedule"] == ScheduleKind.ZB_V
    fewer = float(pp > 1 and (trimmed or layers % pp > 0))
    layers_per_stage = (layers + 2 * fewer) / pp
    layers_at_ends = layers_per_stage - (1 + together) * fewer
    leading = max(layers_at_ends - dense, 0.0)
    routed = 0.0 if dense == layers else 1.0
    return {
        "first_blocks": layers_at_ends,
        "middle_blocks": layers_per_stage,
        "last_blocks": layers_at_ends,
        "first_moe_blocks": routed * leading,
        "middle_moe_blocks": routed * layers_per_stage,
        "last_moe_blocks": routed * (leading if together or pp == 1 else layers_at_ends),
    }


def time_constants_for(cluster: ClusterSpec) -> TimeConstants:
    """Return the constants of step times: calibrated ones, else those of published runs.

    Raises:
        UserError: If a calibrated constant does not exist.
    """
    if cluster.calibration is None:
        return time_constants()
    for name in cluster.calibration.time_constants:
        known = names(TimeConstants)
        require(
            name in known,
            "cluster.calibration.time_constants",
            name,
            problem="is not a known time constant",
            fix=did_you_mean(name, known),
        )
    return replace(time_constants(), **cluster.calibration.time_constants)


def memory_constants_for(cluster: ClusterSpec) -> MemoryConstants:
    """Return the constants of memory, with those of the machine's calibration.

    Calibration gives the memory of a complete process, so there is nothing else to add. A CPU has no driver context.
    """
    if cluster.calibration is None:
        c = memory_constants()
        return replace(c, context_gib=0.0) if cluster.uses_cpu else c
    process = cluster.calibration.baseline_process_bytes / GIB
    share = cluster.calibration.bytes_per_counted_byte
    return replace(memory_constants(), context_gib=process, workspace_gib=0.0, fragmentation=share)


def interval_half_width(cluster: ClusterSpec, jobs: JobTable) -> Column:
    """Return half of the 80 % interval's width of step times, as a logarithm."""
    width = log_half_width(interval_constants(), jobs)
    return width if cluster.calibration is None else np.full_like(width, cluster.calibration.log_half_width)


def trainer_behaviour(text: str, precision: str, era: int, zero: int, xla: bool = False) -> JobRow:
    """Return the default behavior of a trainer, from its description: schedule name and known facts.

    The defaults are facts of software, not fitted. Megatron-LM and DeepSpeed of the fp16 era do not overlap
    data-parallel communication and fuse softmax. bf16 came with Flash Attention. From Hopper on, Megatron-Core
    overlaps, keeps fp32 gradients, and fuses norms. FSDP gathers during compute. XLA compiles. Trainers that name their
    attention kernel run RMSNorm by operations unless they name its kernel too, and gather the logits (arXiv
    2311.05610's). These and nanotron do not split pipeline messages over tensor-parallel ranks. ZeRO-1 and 2 of
    DeepSpeed and nanotron wait for gathered parameters; Megatron-Core does not have to (overlap_param_gather). All have
    pipelines outermost.

    Args:
        text: Description of the run.
        precision: Precision of the run.
        era: Hardware generation.
        zero: ZeRO stage.
        xla: The trainer compiles with XLA.
    """
    lowered = text.lower()
    sharded = zero >= 3 or "fsdp" in lowered
    named = "attention kernel=" in lowered
    deepspeed = "deepspeed" in lowered
    deepspeed = deepspeed and "megatron-deepspeed" not in lowered
    attention = _attention_kernel(lowered, precision, era, sharded=sharded, deepspeed=deepspeed)
    modern = attention >= AttentionKernel.FLASH_2 and not named and not deepspeed
    disabled = "not overlapped" in lowered or "overlap disabled" in lowered
    overlaps = "overlap" in lowered and not disabled
    hidden = overlaps or ((sharded or era > 0 or modern) and not disabled)
    compiled = "compile" in lowered or xla
    parameters, gradients, state = (4, 4, 8) if sharded else (2, 2, 12)
    if not sharded and precision != "fp16" and (era > 0 or "fp32 grad" in lowered):
        gradients = 6 if deepspeed else 4
    if "grad accumulation in fp32" in lowered:
        gradients = 6
    return {
        "compute_dtype_bytes": 2,
        "attention": attention,
        "low_precision": float(is_low_precision(precision)),
        "parameter_bytes": parameters,
        "gradient_bytes": gradients,
        "gradient_wire_bytes": 2 if sharded or gradients == 2 else 4,
        "grad_reductions_per_step": 1,
        "state_bytes": 16 if deepspeed and not sharded else state,
        "compiled": float(compiled),
        "fused_elementwise": float(
            "rms kernel" in lowered or not (sharded or named or compiled or "nanotron" in lowered)
        ),
        "overlap_grad_reduce": float(hidden),
        "overlap_param_gather": float(not (deepspeed or "nanotron" in lowered)),
        "overlap_tp": float(
            (overlaps and "tp" in lowered) or ("comm overlap" in lowered and overlaps) or "async" in lowered
        ),
        "overlap_tp_with_weight_grads": float(not (named or deepspeed or "nanotron" in lowered)),
        "overlap_ep": float(
            (era == 2 and "overlap disabled" not in lowered)
            or any(keyword in lowered for keyword in ("a2a overlap", "1f1b overlap", "dualpipe"))
        ),
        "ulysses": 0,
        "ring_gradient_bytes": 2,
        "dedup_node_dispatch": float("deepep" in lowered or "hybridep" in lowered),
        "tp_reductions_per_block": 1 if "parallel transformer block" in lowered or "parallel layers" in lowered else 2,
        "deepspeed": float(deepspeed),
        "scatter_gather_p2p": float(not (named or "nanotron" in lowered)),
        "gathers_logits": float(named),
        "optimizer_post_validation": float("zb-" in lowered),
        "pipeline_outermost": 1,
        "offload": OffloadTarget.CPU if "offload=true" in lowered else OffloadTarget.NONE,
    }


def is_low_precision(precision: str) -> bool:
    """Return whether linear layers run in 8 bits or fewer."""
    return "fp8" in precision or "fp4" in precision


def _attention_kernel(description: str, precision: str, era: int, sharded: bool, deepspeed: bool) -> AttentionKernel:
    if "kernel=torch" in description:
        return AttentionKernel.SEPARATE
    if "kernel=fused" in description:
        return AttentionKernel.FUSED
    if "flash_attentionv1" in description:
        return AttentionKernel.FLASH_1
    if "flash" in description or sharded:
        return AttentionKernel.FLASH_2
    if era > 0:
        return AttentionKernel.FLASH_3
    return AttentionKernel.FUSED if precision == "fp16" or deepspeed else AttentionKernel.FLASH_2
