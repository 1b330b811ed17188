"""torchtitan: a TOML file. Its keys are those of torchtitan/config/job_config.py (pytorch/torchtitan, commit 6404b93)
that later versions kept; the newest take Python in place of TOML, with the same names."""

from __future__ import annotations

import tomli_w

from phalanx.plan.export.common import (
    ExportedConfig,
    ExportJob,
    UnsupportedOption,
    check_export_supported,
    check_kv_heads,
    common_notes,
    unsupported_error,
    with_comment_header,
)
from phalanx.schedule.registry import representative_schedule

Table = dict[str, object]

SCHEDULE_FILE_FIX = "write it with `phalanx pipeline show NAME --out FILE` and set layout.schedule_file"
GAPS = (
    UnsupportedOption("layout.data_parallel", ("zero1",), 'use "zero2"'),
    UnsupportedOption("layout.schedule", ("naive", "zb-h1", "zb-h2"), SCHEDULE_FILE_FIX),
    UnsupportedOption("layout.cp_method", ("ulysses",), 'use "ring"'),
    UnsupportedOption("layout.gradient_compression", ("bf16",), "remove it"),
    UnsupportedOption(
        "layout.activation_checkpointing", ("selective",), 'use "none" or "full": its own "selective" keeps attention'
    ),
    UnsupportedOption("layout.offload", ("nvme",), 'use "cpu"'),
    UnsupportedOption("optimizer.name", ("sgd",), 'use "adamw"'),
    UnsupportedOption("model.norm", ("layernorm",)),
    UnsupportedOption("model.activation", ("gelu", "gelu_tanh")),
    UnsupportedOption("model.position_embedding", ("learned",)),
    UnsupportedOption("model.qk_norm", ("full",)),
    UnsupportedOption("model.rope.scaling", ("linear", "llama3"), "use a flavor of torchtitan's own llama3"),
    UnsupportedOption("model.rope.scaling", ("yarn",)),
    UnsupportedOption("model.moe.num_leading_dense_layers", ()),
    UnsupportedOption("model.moe.capacity_factor", (), "remove it"),
)
SCHEDULES = {
    "1f1b": "1F1B",
    "gpipe": "GPipe",
    "interleaved": "Interleaved1F1B",
    "zb-v": "ZBVZeroBubble",
    "dualpipe-v": "DualPipeV",
}
"""Names of torch.distributed.pipelining.schedules.get_schedule_class."""


def torchtitan(job: ExportJob) -> ExportedConfig:
    """Raises UserError for what torchtitan cannot express."""
    run = job.run
    check_export_supported(job, "torchtitan", GAPS)
    check_kv_heads(job, "torchtitan")
    _check(job)
    tables = {
        "model": {"name": "qwen3", "flavor": run.name},
        "training": _training(job),
        "parallelism": _parallelism(job),
        "activation_checkpoint": {"mode": run.layout.activation_checkpointing},
        **({"compile": {"enable": True}} if run.training.compile else {}),
        "optimizer": _optimizer(job),
        "lr_scheduler": _lr_scheduler(job),
    }
    notes = [*_notes(job), *common_notes(job, "torchtitan", "training.compile", "layout.reshard_after_forward")]
    return ExportedConfig(with_comment_header(notes, tomli_w.dumps(tables)), notes)


def _check(job: ExportJob) -> None:
    layout, training, sizes = job.run.layout, job.run.training, job.sizes
    if training.seq_len % (2 * sizes.cp * sizes.tp):
        fix = f"use a multiple of {2 * sizes.cp * sizes.tp}"
        raise unsupported_error("torchtitan", "training.seq_len", training.seq_len, fix, "it needs one of 2 x cp x tp")
    if training.precision == "bf16" and sizes.dp_shard * sizes.cp == 1 < sizes.tp * sizes.pp:
        reason, fix = "its mixed precision is FSDP's", 'use layout.data_parallel = "zero3" on more ranks'
        raise unsupported_error("torchtitan", "training.precision", "bf16", fix, reason)
    if layout.data_parallel == "ddp" and sizes.dp_size > 1 and sizes.pp * sizes.cp * sizes.tp > 1:
        reason = "its DDP goes with no other parallelism"
        raise unsupported_error("torchtitan", "layout.data_parallel", "ddp", 'use "zero2" or "zero3"', reason)
    if sizes.tp > 1 and not layout.sequence_parallel:
        raise unsupported_error("torchtitan", "layout.sequence_parallel", False, "set it to true")
    if sizes.ep > 1 and sizes.ep % (sizes.cp * sizes.tp):
        degree = sizes.cp * sizes.tp
        reason = f"it shares experts between all {degree} context- and tensor-parallel ranks"
        raise unsupported_error("torchtitan", "layout.ep", sizes.ep, f"use a multiple of {degree}", reason)
    if sizes.pp > 1 and job.run.model.tie_embeddings:
        reason = "its pipelines have no tied embeddings"
        raise unsupported_error("torchtitan", "model.tie_embeddings", True, "set it to false", reason)
    rank_of = representative_schedule(layout).rank_of if layout.schedule_file else {}
    if layout.schedule_file and any(rank_of[stage] != stage % layout.pp for stage in range(len(rank_of))):
        reason = "from a file it takes only schedules whose stage s is of rank s mod pp"
        raise unsupported_error(
            "torchtitan", "layout.schedule_file", layout.schedule_file, 'use "zb-v" or "dualpipe-v"', reason
        )


def _training(job: ExportJob) -> Table:
    training, batch = job.run.training, job.batch_plan
    return {
        "local_batch_size": batch.micro_batch_size * (batch.gradient_accumulation_steps if job.sizes.pp > 1 else 1),
        "global_batch_size": batch.global_batch_size,
        "seq_len": training.seq_len,
        "steps": training.steps,
        "max_norm": job.run.optimizer.max_grad_norm or float("inf"),
        "mixed_precision_param": {"bf16": "bfloat16", "fp32": "float32"}[training.precision],
        "mixed_precision_reduce": "float32",
        "enable_cpu_offload": job.run.layout.offload == "cpu",
    }


def _parallelism(job: ExportJob) -> Table:
    layout, sizes = job.run.layout, job.sizes
    keeps_gathered = layout.data_parallel == "zero2" or sizes.pp > 1 or not layout.reshard_after_forward
    return {
        "data_parallel_replicate_degree": sizes.dp_replicate,
        "data_parallel_shard_degree": sizes.dp_shard,
        "fsdp_reshard_after_forward": "never" if keeps_gathered else "always",
        "tensor_parallel_degree": sizes.tp,
        "context_parallel_degree": sizes.cp,
        "context_parallel_rotate_method": "alltoall",
        "expert_parallel_degree": sizes.ep,
        "pipeline_parallel_degree": sizes.pp,
        **(_pipeline(job) if sizes.pp > 1 else {}),
    }


def _pipeline(job: ExportJob) -> Table:
    """The schedule, and the modules of every stage by the names of torchtitan's models."""
    layout = job.run.layout
    parts = [[f"layers.{layer}" for layer in layers] for layers in job.stages]
    parts[0].insert(0, "tok_embeddings")
    parts[-1] += ["norm", "output"]
    file = layout.schedule_file
    return {
        "pipeline_parallel_schedule": "PipelineScheduleMulti" if file else SCHEDULES[layout.schedule],
        **({"pipeline_parallel_schedule_csv": file} if file else {}),
        "pipeline_parallel_microbatch_size": job.batch_plan.micro_batch_size,
        "module_fqns_per_model_part": parts,
    }


def _optimizer(job: ExportJob) -> Table:
    spec = job.run.optimizer
    beta1, beta2 = spec.betas
    numbers = {"lr": job.learning_rate, "beta1": beta1, "beta2": beta2, "eps": spec.eps}
    return {"name": "AdamW", **numbers, "weight_decay": spec.weight_decay}


def _lr_scheduler(job: ExportJob) -> Table:
    spec = job.run.optimizer
    return {
        "warmup_steps": spec.warmup_steps,
        **({"decay_ratio": job.decay_steps / job.run.training.steps} if spec.lr_schedule == "wsd" else {}),
        "decay_type": "cosine" if spec.lr_schedule == "cosine" else "linear",
        "min_lr_factor": 1.0 if spec.lr_schedule == "none" else spec.min_lr_ratio,
    }


def _notes(job: ExportJob) -> list[str]:
    run, layout = job.run, job.run.layout
    notes = [
        f'Models are Python there: add the flavor "{run.name}" to those in torchtitan/models/qwen3/__init__.py:',
        f"    {_model(job)}",
        "Vectors decay as matrices do.",
    ]
    if run.model.moe and (run.model.moe.balance_loss_coef or run.model.moe.z_loss_coef):
        notes.append(
            "Experts have no balancing loss and no z-loss there (model.moe.balance_loss_coef, model.moe.z_loss_coef)."
        )
    if layout.data_parallel == "zero2":
        notes.append("zero2 is FSDP that keeps parameters gathered between the passes, and shards them after.")
    if layout.data_parallel == "ddp" and job.sizes.cp > 1:
        notes.append("Context-parallel ranks share the parameters there (FSDP); in ddp each has them all.")
    return notes


def _model(job: ExportJob) -> str:
    """The model as Python: qwen3, which without the norms of queries and keys is Llama."""
    spec = job.run.model
    values: Table = {
        "dim": spec.hidden_size,
        "n_layers": spec.num_layers,
        "n_heads": spec.num_heads,
        "n_kv_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "hidden_dim": spec.ffn_hidden_size,
        "vocab_size": spec.vocab_size,
        "max_seq_len": max(spec.max_seq_len, job.run.training.seq_len),
        "norm_eps": spec.norm_eps,
        "rope_theta": spec.rope.theta,
        "qk_norm": spec.qk_norm == "head",
        "enable_weight_tying": spec.tie_embeddings,
    }
    shown = ", ".join(f"{name}={value!r}" for name, value in values.items())
    if (moe := spec.moe) is None:
        return f"Qwen3ModelArgs({shown})"
    experts: Table = {
        "num_experts": moe.num_experts,
        "num_shared_experts": moe.num_shared_experts,
        "top_k": moe.top_k,
        "score_func": moe.router_score,
        "route_norm": moe.normalize_top_k,
        "score_before_experts": False,
        "load_balance_coeff": moe.bias_update_rate or None,
    }
    routed = ", ".join(f"{name}={value!r}" for name, value in experts.items())
    return f"Qwen3ModelArgs({shown}, moe_enabled=True, moe_inter_dim={moe.expert_ffn_size}, moe_args=MoEArgs({routed}))"
