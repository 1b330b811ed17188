"""Export to Megatron-LM: a shell script that starts its pretrain_gpt.py.

The flags are those of megatron/training/arguments.py of the release in `common.RELEASES`.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from functools import partial
from operator import attrgetter

from phalanx.plan.export.common import (
    ACTIVATION_OUTPUTS,
    LATENT_ATTENTION_FIELDS,
    NO_MUON,
    NO_SERVERS,
    ExportedConfig,
    ExportJob,
    SupportedOption,
    check_export_supported,
    check_kv_heads,
    common_notes,
    keeps_in_addition,
    unsupported_error,
)
from phalanx.spec.layout import Layout
from phalanx.spec.model import ModelSpec, MoESpec, yarn_mscale
from phalanx.spec.parts.mixers import LatentAttention, MixerSpec
from phalanx.spec.parts.mixers.latent_attention import LATENT_NORM_EPS

Flags = dict[str, object]
"""Flags by name, without dashes; True for flags without a value, None for flags to omit."""

unsupported = partial(unsupported_error, "megatron")
FSDP_SHARDING = {"zero2": "optim_grads", "zero3": "optim_grads_params", "hsdp": "optim_grads_params"}
RECOMPUTATION: dict[str, Flags] = {
    "none": {},
    "norms": {"recompute-granularity": "selective", "recompute-modules": "layernorm"},
    "selective": {"recompute-granularity": "selective", "recompute-modules": "core_attn"},
    "full": {"recompute-granularity": "full", "recompute-method": "uniform", "recompute-num-layers": 1},
}
LLAMA3_ROPE = (1.0, 4.0, 8192)
"""Fixed values in Megatron-LM of the other parameters of Llama 3's RoPE scaling."""
YARN_OF_LATENT_ATTENTION = {"original_context": 4096, "beta_fast": 32.0, "beta_slow": 1.0}
"""Fixed values in Megatron-LM of the other parameters of YaRN with latent attention."""
NORMALIZATIONS = {"rmsnorm": "RMSNorm", "layernorm": "LayerNorm"}
OPTIMIZERS = {"adamw": "adam", "sgd": "sgd"}
LR_DECAY_STYLES = {"cosine": "cosine", "linear": "linear", "wsd": "WSD", "none": "constant"}

SUPPORTED = (
    SupportedOption("training.precision", ("fp32",), 'use "bf16" or "fp32"'),
    SupportedOption("training.loss", fix="remove it"),
    SupportedOption("optimizer.name", OPTIMIZERS, 'use "adamw"', NO_MUON),
    SupportedOption("optimizer.lr_schedule", LR_DECAY_STYLES, 'use "cosine"'),
    SupportedOption("model.implementation", fix="remove it, or use another model"),
    SupportedOption("model.norm", NORMALIZATIONS),
    SupportedOption("model.activation", ("swiglu", "gelu", "gelu_tanh")),
    SupportedOption("model.position_embedding", ("rope", "learned")),
    SupportedOption("model.qk_norm", ("head",)),
    SupportedOption("model.attention_bias", ("qkv",)),
    SupportedOption("model.rope.scaling", ("linear", "llama3", "yarn")),
    SupportedOption("model.mixer.kind", ("latent_attention",)),
    SupportedOption("model.moe.router_score", ("softmax", "sigmoid")),
    SupportedOption("model.moe.balance_loss_scope", ("sequence", "micro_batch")),
    SupportedOption("layout.data_parallel", ("ddp", "zero1", *FSDP_SHARDING), 'use "zero1"', NO_SERVERS),
    SupportedOption("layout.cp_method", ("ring", "ulysses"), 'use "ring"'),
    SupportedOption("layout.schedule", ("interleaved",), 'use "1f1b" or "interleaved"'),
    SupportedOption("layout.schedule_file", fix="remove it"),
    SupportedOption("layout.activation_checkpointing", RECOMPUTATION, 'use "full"'),
    SupportedOption("layout.offload", ("cpu",), 'use "cpu" with layout.data_parallel = "zero1"'),
    SupportedOption("layout.gradient_compression", ("bf16",), "remove it"),
)
EXPRESSED = (
    *("model.rope.fraction", "model.moe.routed_scale", "model.moe.num_groups", "model.moe.top_groups"),
    *("model.moe.shared_ffn_size", "model.moe.shared_gate", "model.moe.choice_bias"),
    *(LATENT_ATTENTION_FIELDS - {"model.rope.truncate"}),
    *("model.mtp", "model.mtp.layers", "model.mtp.loss_coef"),
)
"""Fields that Megatron-LM expresses besides those of each export."""


def megatron(job: ExportJob) -> ExportedConfig:
    """Return the Megatron-LM script of a run.

    Raises UserError if Megatron-LM cannot express the run.
    """
    run = job.run
    layout = run.layout
    check_export_supported(job, "megatron", SUPPORTED, EXPRESSED)
    check_kv_heads(job, "megatron")
    if job.dims.cp > 1 and run.training.seq_len % (2 * job.dims.cp):
        fix = f"use a multiple of {2 * job.dims.cp}"
        raise unsupported("training.seq_len", run.training.seq_len, fix, f"with layout.cp = {job.dims.cp}")
    moe = _expert_flags(job, run.model.moe) if run.model.moe else {}
    flags = (
        _model_flags(job)
        | (_latent_attention_flags(job.run.model, job.run.model.mixer) if job.run.model.mixer else _rope_flags(job))
        | moe
        | _model_parallel_flags(job)
        | _data_parallel_flags(job)
        | _batch_flags(job)
        | _optimizer_flags(job)
    )
    notes = [keeps_in_addition("megatron", *_describe_additional_memory(job))]
    notes += common_notes(job, "megatron", *["layout.rank_order"] * bool(flags["use-tp-pp-dp-mapping"]))
    if layout.cp_method == "ulysses" and flags["cp-comm-type"] == "p2p":
        heads = f"model.num_kv_heads / layout.tp = {run.model.num_kv_heads // layout.tp}"
        notes.append(
            "Context-parallel ranks send keys and values in a ring (p2p), so the step time differs from the plan: "
            f"for an all-to-all, {heads} is not a multiple of layout.cp = {layout.cp}."
        )
    if run.model.vocab_size % layout.tp:
        notes.append(f"The embedding is padded to a multiple of {layout.tp} rows.")
    if run.model.moe and run.model.moe.capacity_factor:
        notes.append("Expert capacities apply per micro-batch, not per sequence.")
    if run.model.mixer and run.model.norm_eps != LATENT_NORM_EPS:
        notes.append(f"Norms of latents add {run.model.norm_eps:g} as the other norms do, not {LATENT_NORM_EPS:g}.")
    if layout.activation_checkpointing == "norms":
        notes.append("Norms that Transformer Engine fuses with the next product are not recomputed.")
    if run.cluster.nodes > 1:
        notes.append("torchrun needs --node-rank and --master-addr (or --rdzv-endpoint) on every node.")
    return ExportedConfig(_format_launch_script(job, flags), notes)


def _describe_additional_memory(job: ExportJob) -> Iterator[str]:
    """Yield what a rank of Megatron-LM keeps and one of Phalanx does not (training/theoretical_memory_usage.py)."""
    layout = job.layout
    if job.run.training.precision == "bf16":
        if layout.data_parallel in FSDP_SHARDING:
            yield "a bf16 copy of its shard of the parameters"
        elif layout.data_parallel == "ddp" and layout.gradient_compression == "none":
            yield "a bf16 copy of the parameters (18 bytes of state a parameter)"
        elif layout.data_parallel == "zero1":
            ranks = job.dims.dp_size * job.dims.cp
            yield f"fp32 gradients of all parameters of a rank (6 + 12/{ranks} bytes of state a parameter)"
    yield ACTIVATION_OUTPUTS
    yield "logits of the loss in fp32 (core/tensor_parallel/cross_entropy.py)"


def _format_launch_script(job: ExportJob, flags: Flags) -> str:
    nodes = job.run.cluster.nodes
    start = f"torchrun --nnodes {nodes} --nproc-per-node {job.dims.world_size // nodes} pretrain_gpt.py"
    if max(job.dims.tp, job.dims.cp) > 1 and job.layout.data_parallel not in FSDP_SHARDING:
        start = f"CUDA_DEVICE_MAX_CONNECTIONS=1 {start}"  # arguments.py requires it before Blackwell
    lines = [
        f"--{name}" if value is True else f"--{name} {shlex.quote(str(value))}"
        for name, value in flags.items()
        if value is not None and value is not False
    ]
    return " \\\n    ".join([start, *lines, '"$@"']) + "\n"


def _model_flags(job: ExportJob) -> Flags:
    spec = job.run.model
    sequence = job.run.training.seq_len
    if spec.activation == "gelu_tanh" and not spec.bias:
        reason = "its tanh GELU is fused with a bias"
        raise unsupported("model.activation", spec.activation, 'set model.bias, or use "gelu"', reason)
    if spec.qk_norm == "head" and spec.norm == "layernorm":
        raise unsupported("model.qk_norm", "head", 'use model.norm = "rmsnorm"', "all its norms are of one kind")
    return {
        "num-layers": spec.num_layers,
        "mtp-num-layers": spec.mtp.layers if spec.mtp else None,
        "mtp-loss-scaling-factor": spec.mtp.loss_coef if spec.mtp else None,
        "hidden-size": spec.hidden_size,
        "ffn-hidden-size": spec.ffn_hidden_size,
        "num-attention-heads": spec.num_heads,
        "kv-channels": spec.head_dim,
        "group-query-attention": spec.num_kv_heads != spec.num_heads,
        "num-query-groups": spec.num_kv_heads if spec.num_kv_heads != spec.num_heads else None,
        "qk-layernorm": spec.qk_norm == "head",
        "vocab-size": spec.vocab_size,
        "make-vocab-size-divisible-by": 1,
        "untie-embeddings-and-output-weights": not spec.tie_embeddings,
        "max-position-embeddings": max(spec.max_seq_len, sequence),
        "seq-length": sequence,
        "normalization": NORMALIZATIONS[spec.norm],
        "norm-epsilon": spec.norm_eps,
        "swiglu": spec.activation == "swiglu",
        "no-bias-gelu-fusion": spec.activation == "gelu",
        "disable-bias-linear": not spec.bias,
        "add-qkv-bias": spec.attention_bias == "qkv",
        "attention-dropout": 0.0,
        "hidden-dropout": 0.0,
        "init-method-std": f"{job.init_std:.6g}",
    }


def _rope_flags(job: ExportJob) -> Flags:
    if job.run.model.position_embedding == "learned":
        return {"position-embedding-type": "learned_absolute"}
    rope = job.run.model.rope
    if job.run.model.attention_scale is not None or rope.scaling == "yarn":
        field = "model.attention_scale" if job.run.model.attention_scale is not None else "model.rope.scaling"
        raise unsupported(field, attrgetter(field)(job.run), "remove it", "only latent attention has it there")
    options = {"model.rope.theta": rope.theta}
    if rope.scaling == "linear":
        options["model.rope.factor"] = rope.factor
    for field, value in options.items():
        if value != int(value):
            raise unsupported(field, value, "use an integer", "it accepts only integers")
    numbers = (rope.low_freq_factor, rope.high_freq_factor, rope.original_context)
    if rope.scaling == "llama3" and numbers != LLAMA3_ROPE:
        low, high, context = LLAMA3_ROPE
        fix = f"use low_freq_factor = {low}, high_freq_factor = {high} and original_context = {context}"
        raise unsupported("model.rope.scaling", "llama3", fix, "its other scaling parameters are fixed")
    return {
        "position-embedding-type": "rope",
        "rotary-base": int(rope.theta),
        "rotary-percent": None if rope.fraction == 1 else rope.fraction,
        "rotary-seq-len-interpolation-factor": int(rope.factor) if rope.scaling == "linear" else None,
        "use-rope-scaling": rope.scaling == "llama3",
        "rope-scaling-factor": rope.factor if rope.scaling == "llama3" else None,
    }


def _latent_attention_flags(spec: ModelSpec, mixer: MixerSpec) -> Flags:
    """Return the flags of latent attention (core/transformer/multi_latent_attention.py).

    Its YaRN multiplies queries and keys by m(mscale) / m(mscale_all_dim), and scores by m(mscale_all_dim)^2, where
    m is `yarn_mscale`."""
    assert isinstance(mixer, LatentAttention)
    rope = spec.rope
    if spec.attention_bias != "none":
        raise unsupported("model.attention_bias", spec.attention_bias, 'use "none"', "latents have no biases there")
    if spec.position_embedding != "rope" or rope.scaling not in ("none", "yarn"):
        field = "model.position_embedding" if spec.position_embedding != "rope" else "model.rope.scaling"
        value = spec.position_embedding if spec.position_embedding != "rope" else rope.scaling
        raise unsupported(field, value, 'use "rope", without scaling or with "yarn"', "of latent attention")
    scores = spec.query_scale
    if scores != 1 and rope.scaling == "none":
        reason = "it follows from YaRN there"
        raise unsupported("model.attention_scale", spec.attention_scale, "remove it", reason)
    yarn: Flags = {}
    if rope.scaling == "yarn":
        for field, fixed in YARN_OF_LATENT_ATTENTION.items():
            if getattr(rope, field) != fixed:
                reason = "latent attention has fixed parameters of YaRN"
                raise unsupported(f"model.rope.{field}", getattr(rope, field), f"use {fixed}", reason)
        growth = yarn_mscale(rope.factor) - 1
        if not growth:
            fix = 'set model.rope.scaling = "none"'
            raise unsupported("model.rope.factor", rope.factor, fix, "YaRN extends contexts there")
        factor = rope.attention_factor or yarn_mscale(rope.factor)
        yarn = {
            "rotary-scaling-factor": rope.factor,
            "mscale": round((factor * scores**0.5 - 1) / growth, 9),
            "mscale-all-dim": round((scores**0.5 - 1) / growth, 9),
        }
    return {
        "multi-latent-attention": True,
        "qk-layernorm": True,  # norms of the latents
        "q-lora-rank": mixer.query_rank,
        "kv-lora-rank": mixer.latent_rank,
        "qk-head-dim": spec.head_dim - mixer.rope_dim,
        "qk-pos-emb-head-dim": mixer.rope_dim,
        "v-head-dim": mixer.value_dim,
        "position-embedding-type": "rope",
        "rope-type": "yarn" if yarn else "rope",
        "rotary-base": int(rope.theta),
        **yarn,
    }


def _expert_flags(job: ExportJob, moe: MoESpec) -> Flags:
    spec = job.run.model
    layout = job.layout
    _check_router_supported(moe, layout)
    balancing = "none"
    if moe.balance_loss_coef:
        balancing = "seq_aux_loss" if moe.balance_loss_scope == "sequence" else "aux_loss"
    dense = moe.num_leading_dense_layers
    return {
        "num-experts": moe.num_experts,
        "moe-router-topk": moe.top_k,
        "moe-ffn-hidden-size": moe.expert_ffn_size,
        "moe-shared-expert-intermediate-size": moe.shared_width or None,
        "moe-shared-expert-gate": moe.shared_gate,
        "moe-layer-freq": f"([0]*{dense}+[1]*{spec.num_layers - dense})" if dense else None,
        "moe-router-score-function": moe.router_score,
        "moe-router-pre-softmax": moe.router_score == "softmax" and not moe.normalize_top_k,
        "moe-router-load-balancing-type": balancing,
        "moe-aux-loss-coeff": moe.balance_loss_coef or None,
        "moe-z-loss-coeff": moe.z_loss_coef or None,
        "moe-router-topk-scaling-factor": None if moe.routed_scale == 1 else moe.routed_scale,
        "moe-router-num-groups": moe.num_groups if moe.num_groups > 1 else None,
        "moe-router-group-topk": moe.top_groups if moe.num_groups > 1 else None,
        "moe-router-enable-expert-bias": moe.has_choice_bias,
        "moe-router-bias-update-rate": moe.bias_update_rate or None,
        "moe-expert-capacity-factor": moe.capacity_factor,
        "moe-token-drop-policy": "position" if moe.capacity_factor else None,
        "moe-token-dispatcher-type": "alltoall",
        "moe-grouped-gemm": job.run.training.precision == "bf16",
        "moe-permute-fusion": True,
        "expert-model-parallel-size": layout.ep,
        "expert-tensor-parallel-size": 1 if layout.ep > 1 else layout.tp,
    }


def _check_router_supported(moe: MoESpec, layout: Layout) -> None:
    """Raise UserError for routers that Megatron-LM cannot express.

    With softmax, its router weights sum to one, unless softmax precedes the selection, which a single expert requires.
    With sigmoid they do for more than one expert (core/transformer/moe/moe_utils.py, topk_routing_with_score_function).
    """
    sums_to_one = moe.top_k > 1 and (moe.router_score == "sigmoid" or moe.normalize_top_k)
    if moe.normalize_top_k != sums_to_one:
        reason = f"with top_k = {moe.top_k} and {moe.router_score} it {'always' if sums_to_one else 'never'} normalizes"
        fix = f"set it to {str(sums_to_one).lower()}"
        raise unsupported("model.moe.normalize_top_k", moe.normalize_top_k, fix, reason)
    if moe.has_choice_bias and moe.router_score == "softmax":
        field = "bias_update_rate" if moe.bias_update_rate else "choice_bias"
        fix = 'remove it, or set model.moe.router_score = "sigmoid"'
        raise unsupported(f"model.moe.{field}", getattr(moe, field), fix, "its bias needs sigmoid scores")
    if layout.tp > 1 and not layout.sequence_parallel:
        reason = "experts with tensor parallelism require it"
        raise unsupported("layout.sequence_parallel", False, "set it to true", reason)


def _model_parallel_flags(job: ExportJob) -> Flags:
    layout = job.layout
    sizes = job.dims
    mtp = job.run.model.mtp
    has_equal_stages = mtp is None and len({len(layers) for layers in job.stages}) == 1
    letters = "t" * job.run.model.num_layers + "m" * job.run.model.num_prediction_layers
    pipeline_layout = "|".join(letters[layers.start : layers.stop] for layers in job.stages)
    # core/parallel_state.py: otherwise experts and other parameters need an equal number of data-parallel ranks.
    expert_shards = sizes.ep if sizes.ep > 1 else sizes.tp
    can_reorder_ranks = layout.rank_order == "data_outer" and expert_shards == sizes.tp * sizes.cp
    # Its all-to-all requires different key/value heads on every context-parallel rank, without copies.
    has_enough_heads = job.run.model.num_kv_heads // sizes.tp % sizes.cp == 0
    cp_comm_type = "a2a" if layout.cp_method == "ulysses" and has_enough_heads else "p2p"
    return {
        "tensor-model-parallel-size": sizes.tp,
        "sequence-parallel": sizes.tp > 1 and layout.sequence_parallel,
        "pipeline-model-parallel-size": sizes.pp,
        "num-virtual-stages-per-pipeline-rank": layout.virtual_stages
        if has_equal_stages and layout.virtual_stages > 1
        else None,
        "pipeline-model-parallel-layout": f"E{pipeline_layout}L" if sizes.pp > 1 and not has_equal_stages else None,
        "context-parallel-size": sizes.cp,
        "cp-comm-type": cp_comm_type if sizes.cp > 1 else None,
        "use-tp-pp-dp-mapping": sizes.pp > 1 and sizes.dp_size > 1 and can_reorder_ranks,
        **RECOMPUTATION[layout.activation_checkpointing],
    }


def _data_parallel_flags(job: ExportJob) -> Flags:
    layout = job.layout
    sizes = job.dims
    if layout.offload == "cpu" and layout.data_parallel != "zero1":
        reason = "it offloads only the state of its distributed optimizer"
        raise unsupported("layout.offload", "cpu", 'use layout.data_parallel = "zero1"', reason)
    if layout.data_parallel not in FSDP_SHARDING:
        communicates = sizes.dp_size * sizes.cp > 1
        return {
            "use-distributed-optimizer": layout.data_parallel == "zero1",
            "overlap-grad-reduce": communicates,
            "overlap-param-gather": communicates and layout.data_parallel == "zero1",
            "optimizer-cpu-offload": layout.offload == "cpu",
            "use-precision-aware-optimizer": layout.offload == "cpu",
            "grad-reduce-in-bf16": layout.gradient_compression == "bf16",
        }
    if sizes.pp > 1:
        reason = "its FSDP is documented with tensor, context and expert parallelism, not with pipelines"
        raise unsupported("layout.data_parallel", layout.data_parallel, 'use "ddp" or "zero1"', reason)
    return {
        "use-megatron-fsdp": True,
        "data-parallel-sharding-strategy": FSDP_SHARDING[layout.data_parallel],
        "num-distributed-optimizer-instances": sizes.dp_replicate if layout.data_parallel == "hsdp" else None,
        "use-distributed-optimizer": True,
        "overlap-grad-reduce": True,
        "overlap-param-gather": True,
        "no-gradient-accumulation-fusion": True,
        "ckpt-format": "fsdp_dtensor",
    }


def _batch_flags(job: ExportJob) -> Flags:
    training = job.run.training
    return {
        "micro-batch-size": job.batch.micro_batch_size,
        "global-batch-size": job.batch.global_batch_size,
        "train-iters": training.steps,
        "bf16": training.precision == "bf16",
        "cross-entropy-loss-fusion": True,
        "seed": training.seed,
    }


def _optimizer_flags(job: ExportJob) -> Flags:
    spec = job.run.optimizer
    steps = job.run.training.steps
    beta1, beta2 = spec.betas
    adam = {"adam-beta1": beta1, "adam-beta2": beta2, "adam-eps": spec.eps}
    wsd = {"lr-wsd-decay-style": "linear", "lr-wsd-decay-iters": job.decay_steps}
    return {
        "optimizer": OPTIMIZERS[spec.name],
        **(adam if spec.name == "adamw" else {"sgd-momentum": spec.momentum}),
        "lr": job.learning_rate,
        "min-lr": job.min_learning_rate,
        "lr-decay-style": LR_DECAY_STYLES[spec.lr_schedule],
        **(wsd if spec.lr_schedule == "wsd" else {}),
        "lr-decay-iters": steps,
        "lr-warmup-iters": job.warmup_steps,
        "weight-decay": spec.weight_decay,
        "clip-grad": spec.max_grad_norm,
    }
