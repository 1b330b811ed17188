"""Export to nanotron: a YAML file.

Its keys are the dataclasses of nanotron/config of the release in `common.RELEASES`.
"""

from __future__ import annotations

from functools import partial

from phalanx.plan.export.common import (
    ACTIVATION_OUTPUTS,
    LLAMA_WITH_ADAMW,
    NO_SERVERS,
    ExportedConfig,
    ExportJob,
    SupportedOption,
    Table,
    check_export_supported,
    check_kv_heads,
    common_notes,
    format_yaml,
    keeps_in_addition,
    unsupported_error,
)

unsupported = partial(unsupported_error, "nanotron")
ROPE_THETA = 10_000.0
PP_ENGINES = {"1f1b": "1f1b", "gpipe": "afab"}

SUPPORTED = (
    SupportedOption("training.precision", fix='use "bf16"'),
    *LLAMA_WITH_ADAMW,
    SupportedOption("model.qk_norm"),
    SupportedOption("model.rope.scaling"),
    SupportedOption("layout.data_parallel", ("ddp", "zero1"), 'use "ddp" or "zero1"', NO_SERVERS),
    SupportedOption("layout.cp", fix="use layout.cp = 1"),
    SupportedOption("layout.cp_method", fix="use layout.cp = 1"),
    SupportedOption("layout.schedule", PP_ENGINES, 'use "1f1b" or "gpipe"'),
    SupportedOption("layout.schedule_file", fix="remove it"),
    SupportedOption("layout.offload", fix="remove it"),
    SupportedOption("layout.gradient_compression", fix="remove it"),
    SupportedOption("layout.activation_checkpointing", fix='use "none"'),
)


def nanotron(job: ExportJob) -> ExportedConfig:
    """Return the nanotron configuration of a run.

    Raises UserError if nanotron cannot express the run.
    """
    run = job.run
    if run.model.moe:
        raise unsupported("model.moe", None, "use another model", "its Llama has no experts")
    if run.model.head_dim * run.model.num_heads != run.model.hidden_size:
        fix = f"use {run.model.hidden_size // run.model.num_heads}"
        raise unsupported("model.head_dim", run.model.head_dim, fix, "its head width is hidden_size / num_heads")
    if run.model.rope.theta != ROPE_THETA:
        reason = f"its Llama always uses {ROPE_THETA:g}"
        fix = f"set it to {ROPE_THETA:g}, or use another model"
        raise unsupported("model.rope.theta", run.model.rope.theta, fix, reason)
    check_export_supported(job, "nanotron", SUPPORTED)
    check_kv_heads(job, "nanotron")
    checkpoint_interval = run.checkpoint.every
    interval = 500 if checkpoint_interval == "auto" else checkpoint_interval or run.training.steps
    tables: Table = {
        "general": {"project": "phalanx", "run": run.name, "seed": run.training.seed},
        "parallelism": _build_parallelism_table(job),
        "model": _build_model_table(job),
        "tokens": {
            "sequence_length": run.training.seq_len,
            "train_steps": run.training.steps,
            "micro_batch_size": job.batch.micro_batch_size,
            "batch_accumulation_per_replica": job.batch.gradient_accumulation_steps,
        },
        "optimizer": _build_optimizer_table(job),
        "checkpoints": {"checkpoints_path": f"{run.output_dir}/{run.name}", "checkpoint_interval": interval},
        "tokenizer": {"tokenizer_name_or_path": None},
        "data": {"dataset": None, "seed": run.training.seed},
    }
    gradients = "fp32 gradients of all parameters of a rank, in addition to bf16 ones (optim/gradient_accumulator.py)"
    memory = keeps_in_addition("nanotron", gradients, ACTIVATION_OUTPUTS, "logits of the loss in fp32")
    notes = [memory, *common_notes(job, "nanotron", "layout.bucket_mb")]
    notes.append("dataset: null trains on synthetic tokens. Weight decay also applies to vectors.")
    if job.dims.pp > 1:
        layers = "/".join(str(len(stage)) for stage in job.stages)
        notes.append(f"nanotron splits the pipeline itself; here stages have {layers} layers.")
    return ExportedConfig("\n".join(format_yaml(tables)) + "\n", notes)


def _build_parallelism_table(job: ExportJob) -> Table:
    layout = job.layout
    sizes = job.dims
    uses_sequence_parallel = sizes.tp > 1 and layout.sequence_parallel
    return {
        "dp": sizes.dp_size,
        "pp": sizes.pp,
        "tp": sizes.tp,
        "pp_engine": PP_ENGINES[layout.schedule],
        "tp_mode": "REDUCE_SCATTER" if uses_sequence_parallel else "ALL_REDUCE",
        "tp_linear_async_communication": uses_sequence_parallel,
    }


def _build_model_table(job: ExportJob) -> Table:
    spec = job.run.model
    config = {
        "is_llama_config": True,
        "hidden_act": "silu",
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.ffn_hidden_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "vocab_size": spec.vocab_size,
        "max_position_embeddings": max(spec.max_seq_len, job.run.training.seq_len),
        "rms_norm_eps": spec.norm_eps,
        "tie_word_embeddings": spec.tie_embeddings,
    }
    return {
        "model_config": config,
        "init_method": {"std": round(job.init_std, 6)},
        "dtype": "bfloat16",
        "ddp_bucket_cap_mb": round(job.layout.bucket_mb),
    }


def _build_optimizer_table(job: ExportJob) -> Table:
    spec = job.run.optimizer
    steps = job.run.training.steps
    beta1, beta2 = spec.betas
    return {
        "zero_stage": 1 if job.layout.data_parallel == "zero1" else 0,
        "weight_decay": spec.weight_decay,
        "clip_grad": spec.max_grad_norm or None,
        "accumulate_grad_in_fp32": True,
        "adam_beta1": beta1,
        "adam_beta2": beta2,
        "adam_eps": spec.eps,
        "torch_adam_is_fused": True,
        "learning_rate_scheduler": {
            "learning_rate": job.learning_rate,
            "lr_warmup_steps": job.warmup_steps,
            "lr_warmup_style": "linear",
            "lr_decay_style": "cosine" if spec.lr_schedule == "cosine" else "linear",
            "lr_decay_steps": job.decay_steps,
            "lr_decay_starting_step": steps - job.decay_steps,
            "min_decay_lr": job.min_learning_rate,
        },
    }
