"""Columns of a job table for a model and its pipeline stages, and the constants of a machine."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from phalanx.cost.estimate.constants import (
    MemoryConstants,
    TimeConstants,
    interval_constants,
    memory_constants,
    names,
    time_constants,
)
from phalanx.cost.estimate.job_table import PER_KIND, JobRow, JobTable
from phalanx.cost.estimate.prediction_interval import log_half_width
from phalanx.cost.exact.flops import training_flops_per_token
from phalanx.cost.exact.parameters import count_parameters
from phalanx.cost.kinds import Column
from phalanx.spec.activations import NUM_INPUTS
from phalanx.spec.base import did_you_mean, require
from phalanx.spec.cluster import ClusterSpec
from phalanx.spec.formatting import GIB
from phalanx.spec.layers import expert_layers, layer_specs
from phalanx.spec.model import ModelSpec, MoESpec
from phalanx.spec.parts.attended_keys import attended_fraction
from phalanx.spec.parts.block import Block, blocks, mixer_branch
from phalanx.spec.parts.flops import core_flops, linear_flops
from phalanx.spec.parts.model import is_head_trained
from phalanx.spec.pipeline_schedules import V_SCHEDULES


def model_columns(spec: ModelSpec, sequence: int) -> JobRow:
    """Return the columns of a model: its shape and counts."""
    count = count_parameters(spec)
    moe = spec.moe
    return {
        **_layer_columns(spec, sequence),
        "layers": spec.num_blocks,
        "dense_layers": spec.num_blocks - len(expert_layers(spec)),
        "width": spec.hidden_size,
        "norms": sum(len(branch.norms) for block in blocks(spec) for branch in block) / spec.num_blocks,
        "mlp_matrices": NUM_INPUTS[spec.activation] + 1,
        "vocab": spec.vocab_size,
        "predictions": spec.num_logits,
        "tied": float(spec.tie_embeddings),
        "experts": moe.num_experts if moe else 0,
        "top_k": moe.top_k if moe else 0,
        "expert_ffn": moe.expert_ffn_size if moe else 0,
        "shared_ffn": _shared_width(moe, spec) if moe else 0,
        "parameters": count.total - count.carried,
        "trained_share": count.trained / (count.total - count.carried),
        "quantized_share": count.quantized / (count.total - count.carried),
        **_tuning_columns(spec),
        "expert_parameters": count.experts,
        "sequence": sequence,
    }


def _tuning_columns(spec: ModelSpec) -> JobRow:
    """Return the columns of what is frozen, and of adapters."""
    linears = [linear for block in blocks(spec) for branch in block for linear in branch.part.linears]
    flops = {linear.is_trained: 0.0 for linear in linears}
    for linear in linears:
        flops[linear.is_trained] += 0 if linear.adapts else linear_flops(linear)
    # Of each adapter, A reads what the adapted product reads, and B writes what it writes.
    a, b = ([linear for linear in linears if linear.adapts][index::2] for index in (0, 1))
    adapter = spec.tuning.adapter
    magnitude_weights = 0.0
    if adapter and adapter.dora:
        magnitude_weights = sum(read.reads[0].width * written.writes.width for read, written in zip(a, b, strict=True))
    return {
        "weight_gradient_share": flops.get(True, 0.0) / sum(flops.values()),
        "head_gradient_share": float(is_head_trained(spec)),
        "adapter_rank": adapter.rank if adapter else 0,
        "adapted_products": len(a) / spec.num_blocks,
        "adapted_inputs": sum(linear.reads[0].copies * linear.reads[0].width for linear in a) / spec.num_blocks,
        "adapted_outputs": sum(linear.reads[0].copies * linear.writes.width for linear in b) / spec.num_blocks,
        "magnitude_weights": magnitude_weights / spec.num_blocks,
    }


def _shared_width(moe: MoESpec, spec: ModelSpec) -> float:
    """Return the inner width of shared experts and of a dense branch together, the mean over layers with experts."""
    widths = [layer.ffn_hidden_size for layer in layer_specs(spec) if layer.moe]
    return moe.shared_width + (sum(widths) / len(widths) if moe.dense_branch else 0)


def _layer_columns(spec: ModelSpec, sequence: int) -> JobRow:
    """Return the columns that differ between kinds of layers: a tuple for each, or a number if there is one kind.

    Windows are no kind of their own: attention's time is linear in the pairs that they leave."""
    kinds: dict[KernelSizes, list[ModelSpec]] = {}
    for layer, block in zip(layer_specs(spec), blocks(spec), strict=True):
        kinds.setdefault(KernelSizes.of_layer(layer, block, sequence), []).append(layer)
    num_routed = len(expert_layers(spec))
    rows = []
    for sizes, layers in kinds.items():
        routed = sum(layer.moe is not None for layer in layers)
        attention = sum(count_parameters(layer.without_tuning).attention for layer in layers)
        rows.append(
            {
                "kind_share": len(layers) / spec.num_blocks,
                "kind_dense_share": (len(layers) - routed) / max(1, spec.num_blocks - num_routed),
                "kind_routed_share": routed / max(1, num_routed),
                "heads": sizes.heads,
                "kv_heads": sizes.kv_heads,
                "head_dim": sizes.head_dim,
                "value_dim": sizes.value_dim,
                "attention_parameters": attention / len(layers),
                "ffn": sizes.ffn,
                "attended_fraction": attended_fraction(layers, sequence) + sizes.scanned_fraction,
            }
        )
    return {name: rows[0][name] if len(rows) == 1 else tuple(row[name] for row in rows) for name in PER_KIND}


class KernelSizes(NamedTuple):
    """Sizes on which the speed of a layer's kernels depends.

    Another mixer than attention counts as attention with products of its widths, in which queries see as many keys as
    have the FLOPs of its scan, if it has one."""

    heads: float
    kv_heads: float
    head_dim: int
    value_dim: int
    ffn: int
    attends: bool
    scanned_fraction: float = 0.0
    """FLOPs of a scan, as a share of causal attention's with these sizes."""

    @classmethod
    def of_layer(cls, layer: ModelSpec, block: Block, sequence: int) -> KernelSizes:
        """Return the sizes of a layer, which are 0 for a branch that it does not have."""
        names = [branch.part.name for branch in block]
        ffn = layer.ffn_hidden_size if "mlp" in names else 0
        # Its products, and the layer's share of that of the embedding, are those of an MLP of this width.
        ffn += layer.per_layer_input_size or 0
        branch = mixer_branch(block)
        if branch is None:
            return cls(0, 0, layer.head_dim, layer.head_dim, ffn, False)
        mixer = branch.part
        (core,) = mixer.cores
        if layer.attends:
            _, kv_heads, value_heads = (value.cut for value in core.reads)
            assert kv_heads
            assert value_heads
            heads = core.heads
            parallel = sum(core_flops(branch.part, sequence) for branch in block if branch.part.name == "side_mixer")
            fraction = parallel / (2 * heads.width * sequence)
            return cls(heads.units, kv_heads.units, heads.unit, value_heads.unit, ffn, True, fraction)
        num_heads = core.writes.width / layer.head_dim
        num_kv_heads = (sum(value.width for value in core.reads) / layer.head_dim - num_heads) / 2
        fraction = core_flops(mixer, sequence) / (2 * core.writes.width * sequence)
        return cls(num_heads, num_kv_heads, layer.head_dim, layer.head_dim, ffn, False, fraction)


def flops_per_token(spec: ModelSpec, sequence: int) -> float:
    """Return the model FLOPs to train on a token, with every pair of tokens, as most publications count."""
    return training_flops_per_token(spec, sequence, causal=False)


def stage_columns(job: JobRow, trimmed: bool = False) -> JobRow:
    """Return the blocks of a pipeline's first, middle and last rank, as trainers split it; all recompute alike.

    The first and the last stage have fewer blocks if the blocks do not divide evenly, or if embedding and head replace
    a block (`trimmed`). In a V schedule these stages are on one rank. Leading layers have no experts.
    """
    layers = job["layers"]
    dense = job["dense_layers"]
    pp = job["pp"]
    share_rank = job["schedule"] in V_SCHEDULES
    missing_blocks = float(pp > 1 and (trimmed or layers % pp > 0))
    layers_per_stage = (layers + 2 * missing_blocks) / pp
    layers_at_ends = layers_per_stage - (1 + share_rank) * missing_blocks
    leading = max(layers_at_ends - dense, 0.0)
    routed = 0.0 if dense == layers else 1.0
    last_moe_blocks = leading if share_rank or pp == 1 else layers_at_ends
    return {
        "blocks": (layers_at_ends, layers_per_stage, layers_at_ends),
        "moe_blocks": (routed * leading, routed * layers_per_stage, routed * last_moe_blocks),
        "recomputed": (1.0, 1.0, 1.0),
        "mean_recomputed": 1.0,
    }


def time_constants_for(cluster: ClusterSpec) -> TimeConstants:
    """Return the constants of step times: calibrated ones, else those of published runs.

    Raises UserError if a calibrated constant does not exist.
    """
    if cluster.calibration is None:
        return time_constants()
    for name in cluster.calibration.time_constants:
        known_names = names(TimeConstants)
        require(
            name in known_names,
            "cluster.calibration.time_constants",
            name,
            problem="is not a known time constant",
            fix=did_you_mean(name, known_names),
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
