"""Export to DeepSpeed: the JSON of deepspeed.initialize.

Its keys are those of deepspeed/runtime/config.py of the release in `common.RELEASES`, and of the modules that it uses.
JSON has no comments, so the notes list what the program must do itself.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial

from phalanx.plan.export.common import (
    NO_MUON,
    NO_SERVERS,
    ExportedConfig,
    ExportJob,
    SupportedOption,
    Table,
    check_export_supported,
    common_notes,
    keeps_in_addition,
    unsupported_error,
)

unsupported = partial(unsupported_error, "deepspeed")
REDUCE_BUCKET_SIZE = 500_000_000
"""Default of `reduce_bucket_size`, in elements (deepspeed/runtime/zero/config.py)."""
ZERO_STAGES = {"ddp": 0, "zero1": 1, "zero2": 2, "zero3": 3}

SUPPORTED = (
    SupportedOption("training.precision", ("fp32",), 'use "bf16" or "fp32"'),
    SupportedOption("optimizer.name", fix='use "adamw"', fixes=NO_MUON),
    SupportedOption("optimizer.lr_schedule", ("linear", "none"), 'use "cosine"'),
    SupportedOption(
        "layout.data_parallel", ZERO_STAGES, 'use "zero3"', {"hsdp": 'use "zero3": its MiCS was removed', **NO_SERVERS}
    ),
    SupportedOption("layout.cp_method", ("ulysses",), 'use "ulysses"'),
    SupportedOption("layout.schedule", fix='use "1f1b"'),
    SupportedOption("layout.schedule_file", fix="remove it"),
    SupportedOption("layout.activation_checkpointing", ("selective", "full", "offload"), 'use "none"'),
    SupportedOption("layout.offload", ("cpu", "nvme"), 'use "cpu"'),
    SupportedOption("layout.gradient_compression", ("bf16",), "remove it"),
)
"""Options besides those of the model and the loss, which the program creates."""


def deepspeed(job: ExportJob) -> ExportedConfig:
    """Return the DeepSpeed configuration of a run.

    Raises UserError if DeepSpeed cannot express the run.
    """
    check_export_supported(job, "deepspeed", SUPPORTED, describes_model=False)  # its program creates the model
    _check_layout_supported(job)
    run = job.run
    sizes = job.dims
    table: Table = {
        "train_batch_size": job.batch.global_batch_size,
        "train_micro_batch_size_per_gpu": job.batch.micro_batch_size,
        "gradient_accumulation_steps": job.batch.gradient_accumulation_steps,
        "zero_optimization": _build_zero_table(job),
        "bf16": {"enabled": run.training.precision == "bf16"},
        "gradient_clipping": run.optimizer.max_grad_norm,
        **({"communication_data_type": "bf16"} if run.layout.gradient_compression == "bf16" else {}),
        **({"tensor_parallel": {"autotp_size": sizes.tp}} if sizes.tp > 1 else {}),
        **({"sequence_parallel_size": sizes.cp} if sizes.cp > 1 else {}),
        "optimizer": {
            "type": "AdamW",
            "params": {
                "lr": job.learning_rate,
                "betas": list(run.optimizer.betas),
                "eps": run.optimizer.eps,
                "weight_decay": run.optimizer.weight_decay,
            },
        },
        "scheduler": _build_scheduler_table(job),
    }
    memory = keeps_in_addition("deepspeed", *_describe_additional_memory(job))
    notes = [memory, *_describe_program_duties(job), *common_notes(job, "deepspeed")]
    return ExportedConfig(json.dumps(table, indent=2) + "\n", notes)


def _describe_additional_memory(job: ExportJob) -> Iterator[str]:
    """Yield what a rank of DeepSpeed keeps and one of Phalanx does not (runtime/zero/stage_1_and_2.py, stage3.py)."""
    stage = ZERO_STAGES[job.layout.data_parallel]
    if stage:
        yield f"buckets of {REDUCE_BUCKET_SIZE:,} gradients"
    if stage in (1, 2) and job.run.training.precision == "bf16":
        yield "an fp32 copy of the gradients of a rank's share"
    yield "what the program's model saves for its backward pass"


def _check_layout_supported(job: ExportJob) -> None:
    layout = job.layout
    sizes = job.dims
    stage = ZERO_STAGES[layout.data_parallel]
    if sizes.pp > 1 and stage > 1:
        reason = "its pipelines support only ZeRO stages 0 and 1"
        raise unsupported("layout.data_parallel", layout.data_parallel, 'use "ddp" or "zero1"', reason)
    if sizes.tp > 1 and stage > 2:
        reason = "its tensor parallelism (AutoTP) supports only ZeRO stages up to 2"
        raise unsupported("layout.data_parallel", layout.data_parallel, 'use "zero2"', reason)
    if sizes.tp > 1 and sizes.pp > 1:
        reason = "AutoTP does not support pipelines"
        raise unsupported("layout.tp", sizes.tp, "use layout.pp = 1", reason)
    if sizes.tp > 1 and layout.sequence_parallel:
        reason = "AutoTP does not shard the tokens"
        raise unsupported("layout.sequence_parallel", True, "set it to false", reason)
    if sizes.cp > 1 and layout.cp_method == "ring":
        raise unsupported(
            "layout.cp_method", "ring", 'use "ulysses"', "its context parallelism exchanges tokens for heads"
        )
    if job.run.model.moe and stage > 2:
        reason = "its experts support only ZeRO stages up to 2"
        raise unsupported("layout.data_parallel", layout.data_parallel, 'use "zero2"', reason)
    if layout.offload == "nvme" and stage < 3:
        reason = "its offload to files requires ZeRO stage 3"
        raise unsupported("layout.offload", "nvme", 'use "cpu", or layout.data_parallel = "zero3"', reason)


def _build_zero_table(job: ExportJob) -> Table:
    layout = job.layout
    offload: Table = {"device": layout.offload}
    if layout.offload == "nvme":
        offload |= {"nvme_path": layout.offload_directory}
    table: Table = {"stage": ZERO_STAGES[layout.data_parallel]}
    # Its pipelines do not support it (deepspeed/runtime/engine.py).
    if job.dims.pp == 1 and layout.data_parallel != "ddp":
        table["overlap_comm"] = True
    if layout.offload != "none":
        table["offload_optimizer"] = offload
    if layout.offload != "none" and layout.data_parallel == "zero3":
        table["offload_param"] = {"device": "cpu"}
    return table


def _build_scheduler_table(job: ExportJob) -> Table:
    spec = job.run.optimizer
    steps = job.run.training.steps
    warmup: Table = {"warmup_num_steps": max(1, job.warmup_steps), "warmup_type": "linear"}
    if spec.lr_schedule == "cosine":
        ratios = {"total_num_steps": steps, "warmup_min_ratio": 0.0, "cos_min_ratio": spec.min_lr_ratio}
        return {"type": "WarmupCosineLR", "params": warmup | ratios}
    warmup |= {"warmup_min_lr": 0.0, "warmup_max_lr": job.learning_rate}
    if spec.lr_schedule == "linear":
        return {"type": "WarmupDecayLR", "params": {**warmup, "total_num_steps": steps}}
    return {"type": "WarmupLR", "params": warmup}


def _describe_program_duties(job: ExportJob) -> list[str]:
    run = job.run
    layout = job.layout
    sizes = job.dims
    spec = job.run.model
    shape = (
        f"{spec.num_layers} layers, width {spec.hidden_size}, "
        f"{spec.num_heads} heads of {spec.head_dim} ({spec.num_kv_heads} key/value)"
    )
    if spec.layers is not None:
        shape += f" (but kinds of layers {spec.layers}, see model.kinds)"
    notes = [
        f"The program creates the model: {shape}, inner width {spec.ffn_hidden_size}, "
        f"{spec.vocab_size} rows of embedding; sequences of {run.training.seq_len} tokens, {run.training.steps} steps.",
        "Weight decay also applies to vectors, unless the program defines parameter groups.",
    ]
    if sizes.pp > 1:
        layers = "/".join(str(len(stage)) for stage in job.stages)
        notes.append(
            f"The program creates the pipeline: PipelineModule(layers, num_stages={sizes.pp}), here {layers} layers "
            "per stage; its schedule is 1F1B."
        )
    if sizes.tp > 1:
        notes.append("AutoTP provides tensor parallelism for the Hugging Face models that it supports.")
    if sizes.cp > 1:
        notes.append("The program registers Ulysses attention (deepspeed.runtime.sequence_parallel.ulysses_sp).")
    if spec.moe:
        notes.append(
            f"The program creates the experts: deepspeed.moe.layer.MoE with num_experts={spec.moe.num_experts}, "
            f"k={spec.moe.top_k}, ep_size={sizes.ep}."
        )
    if layout.offload == "nvme" and layout.data_parallel == "zero3":
        notes.append("Parameters are in CPU memory, and optimizer state is in files, as in Phalanx.")
    if layout.activation_checkpointing == "offload":
        notes.append(
            'The program recomputes (layout.activation_checkpointing = "offload"): deepspeed.checkpointing.checkpoint '
            "after deepspeed.checkpointing.configure(mpu, checkpoint_in_cpu=True)."
        )
    elif layout.activation_checkpointing != "none":
        notes.append(
            f'The program recomputes (layout.activation_checkpointing = "{layout.activation_checkpointing}"): '
            "deepspeed.checkpointing.checkpoint."
        )
    if run.optimizer.lr_schedule == "linear" and run.optimizer.min_lr_ratio:
        notes.append("The learning rate decays to 0, not to optimizer.min_lr_ratio.")
    return notes
