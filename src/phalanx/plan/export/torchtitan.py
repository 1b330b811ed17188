"""Export to torchtitan: a Python module with a config function.

`-m torchtitan.train --module FILE --config run` calls it. Its names are those of the release in `common.RELEASES`,
which no longer reads TOML.
"""

from __future__ import annotations

import ast
from functools import partial
from textwrap import indent

from phalanx.plan.export.common import (
    ACTIVATION_OUTPUTS,
    LATENT_ATTENTION_FIELDS,
    LLAMA_WITH_ADAMW,
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
from phalanx.plan.export.torchtitan_model import (
    BIAS_UPDATE_RATE,
    PythonSource,
    bias_update_rate,
    model_family,
    model_source,
    python_call,
)
from phalanx.schedule.registry import representative_schedule
from phalanx.spec.model import ModelSpec
from phalanx.spec.pipeline_schedules import SCHEDULES, V_SCHEDULES, quote_names

SCHEDULE_FILE_FIX = "save it with `phalanx pipeline show NAME --out FILE` and set layout.schedule_file"
unsupported = partial(unsupported_error, "torchtitan")
TORCH_NAMES = {name: properties.torch_name for name, properties in SCHEDULES.items() if properties.torch_name}
PRECISIONS = {"bf16": "bfloat16", "fp32": "float32"}
CHECKPOINTING_FIXES = {
    "selective": 'use "none" or "full": its own "selective" saves attention',
    "norms": 'use "none"',
    "offload": 'use "full"',
}

SUPPORTED = (
    SupportedOption("training.precision", PRECISIONS, 'use "bf16" or "fp32"'),
    *LLAMA_WITH_ADAMW,
    SupportedOption("model.qk_norm", ("head",)),
    SupportedOption("model.rope.scaling", ("llama3", "yarn")),
    SupportedOption("model.mixer.kind", ("latent_attention",)),
    SupportedOption("model.moe.router_score", ("softmax", "sigmoid")),
    # It has no balance loss: `_describe_differences`.
    SupportedOption("model.moe.balance_loss_scope", ("sequence", "micro_batch")),
    SupportedOption("model.moe.capacity_factor", fix="remove it"),
    SupportedOption("layout.data_parallel", ("zero2", "zero3", "hsdp"), 'use "zero2"', NO_SERVERS),
    SupportedOption("layout.schedule", TORCH_NAMES, SCHEDULE_FILE_FIX),
    SupportedOption("layout.cp_method", fix='use "ring"'),
    SupportedOption("layout.gradient_compression", fix="remove it"),
    SupportedOption("layout.activation_checkpointing", ("full",), 'use "none" or "full"', CHECKPOINTING_FIXES),
    SupportedOption("layout.offload", ("cpu",), 'use "cpu"'),
)
ROUTER_FIELDS = {
    *("model.moe.routed_scale", "model.moe.num_groups", "model.moe.top_groups", "model.moe.choice_bias"),
    "model.moe.shared_ffn_size",
}
IMPORTS = """\
from functools import partial

import torch.nn as nn
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer, ParamGroupConfig
from torchtitan.config import CompileConfig, DebugConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed.activation_checkpoint import FullAC
from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader
from torchtitan.trainer import Trainer
"""


def torchtitan(job: ExportJob) -> ExportedConfig:
    """Return the torchtitan module of a run.

    Raises UserError if torchtitan cannot express the run.
    """
    check_export_supported(job, "torchtitan", SUPPORTED, LATENT_ATTENTION_FIELDS | ROUTER_FIELDS)
    check_kv_heads(job, "torchtitan")
    _check_run_supported(job)
    notes = [
        keeps_in_addition("torchtitan", ACTIVATION_OUTPUTS, "a chunk of the loss's logits in fp32"),
        *_describe_differences(job),
        *common_notes(job, "torchtitan", "data.mask_documents", "training.compile", "layout.reshard_after_forward"),
    ]
    body = indent(f"return {_build_trainer_config(job)!r}", "    ")
    source = f"{IMPORTS}{model_source(job)}\n\ndef run() -> Trainer.Config:\n    spec = model_spec()\n{body}\n"
    return ExportedConfig(_remove_unused_imports(source), notes)


def _remove_unused_imports(source: str) -> str:
    """Return Python source whose `from` imports, one on a line, have only names that the source uses."""
    used = {node.id for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Name)}
    lines = []
    for line in source.splitlines():
        module, is_import, names = line.partition(" import ")
        if not (is_import and module.startswith("from ")):
            lines.append(line)
        elif used_names_in_line := [name for name in names.split(", ") if name in used]:
            lines.append(f"{module} import {', '.join(used_names_in_line)}")
    return "\n".join([*lines, ""])


def _check_run_supported(job: ExportJob) -> None:
    layout = job.layout
    training = job.run.training
    sizes = job.dims
    multiple = (sizes.tp if layout.sequence_parallel else 1) * (2 * sizes.cp if sizes.cp > 1 else 1)
    if training.seq_len % multiple:
        fix = f"use a multiple of {multiple}"
        reason = f"with layout.tp = {sizes.tp} and layout.cp = {sizes.cp}"
        raise unsupported("training.seq_len", training.seq_len, fix, reason)
    sharing_ranks = sizes.dp_shard * sizes.cp * sizes.tp
    if sharing_ranks % sizes.ep:
        reason = f"experts are distributed over the {sharing_ranks} ranks that shard the other parameters"
        raise unsupported("layout.ep", sizes.ep, 'use layout.data_parallel = "zero3", or a divisor', reason)
    if sizes.pp > 1 and job.run.model.tie_embeddings:
        reason = "its pipelines do not support tied embeddings"
        raise unsupported("model.tie_embeddings", True, "set it to false", reason)
    _check_scores_supported(job.run.model)
    if job.run.model.rope.scaling == "llama3" and model_family(job.run.model).name == "qwen3":
        reason = "its models with experts or query/key norms do not support it"
        raise unsupported("model.rope.scaling", "llama3", "use another model", reason)
    rank_of = representative_schedule(layout).rank_of if layout.schedule_file else {}
    if layout.schedule_file and any(rank_of[stage] != stage % layout.pp for stage in range(len(rank_of))):
        reason = "from a file it accepts only schedules with stage s on rank s mod pp"
        raise unsupported("layout.schedule_file", layout.schedule_file, f"use {quote_names(V_SCHEDULES)}", reason)


def _check_scores_supported(spec: ModelSpec) -> None:
    """Raise UserError for factors of scores other than those that follow from YaRN of latent attention."""
    yarn = spec.rope.scaling == "yarn"
    if yarn and not (spec.mixer and spec.rope.attention_factor == 1 and spec.rope.factor > 1):
        fix = "use another model, or latent attention with model.rope.attention_factor = 1"
        raise unsupported("model.rope.scaling", "yarn", fix, "only scores of latent attention have a factor there")
    if spec.query_scale != 1 and not yarn:
        raise unsupported("model.attention_scale", spec.attention_scale, "remove it", "it follows from YaRN there")
    if spec.position_embedding == "rope" and spec.mixer and spec.rope.scaling not in ("none", "yarn"):
        raise unsupported("model.rope.scaling", spec.rope.scaling, 'use "none" or "yarn"', "of latent attention")


def _build_trainer_config(job: ExportJob) -> PythonSource:
    run = job.run
    batch = job.batch
    optimizer = run.optimizer
    runs_pipeline = job.dims.pp > 1
    vocabulary = python_call("CrossEntropyLoss.Config", global_vocab_size=run.model.vocab_size)
    training = python_call(
        "TrainingConfig",
        local_batch_size=batch.micro_batch_size * (batch.gradient_accumulation_steps if runs_pipeline else 1),
        global_batch_size=batch.global_batch_size,
        seq_len=run.training.seq_len,
        steps=run.training.steps,
        max_norm=optimizer.max_grad_norm or PythonSource('float("inf")'),
        mixed_precision_param=PRECISIONS[run.training.precision],
        mixed_precision_reduce="float32",
        enable_cpu_offload=run.layout.offload == "cpu",
        # torchtitan rejects CUDA graphs with these two, but enables them by default.
        disable_cuda_graphs=runs_pipeline or job.dims.ep > 1,
    )
    lr_scheduler = python_call(
        "LRSchedulersContainer.Config",
        warmup_steps=job.warmup_steps,
        decay_ratio=job.decay_steps / run.training.steps if optimizer.lr_schedule == "wsd" else None,
        decay_type="cosine" if optimizer.lr_schedule == "cosine" else "linear",
        min_lr_factor=1.0 if optimizer.lr_schedule == "none" else optimizer.min_lr_ratio,
    )
    recomputes_blocks = run.layout.activation_checkpointing == "full"
    return python_call(
        "Trainer.Config",
        model_spec=PythonSource("spec"),
        loss=python_call("ChunkedLossWrapper.Config", loss_fn=vocabulary),
        dataloader=python_call("HuggingFaceTextDataLoader.Config"),
        training=training,
        parallelism=_build_parallelism_config(job),
        activation_checkpoint=python_call("FullAC.Config") if recomputes_blocks else None,
        compile=python_call("CompileConfig", enable=run.compiles),
        optimizer=_build_optimizer_config(job),
        lr_scheduler=lr_scheduler,
        debug=python_call("DebugConfig", seed=run.training.seed),
    )


def _build_parallelism_config(job: ExportJob) -> PythonSource:
    layout = job.layout
    sizes = job.dims
    keeps_gathered = layout.data_parallel == "zero2" or sizes.pp > 1 or not layout.reshard_after_forward
    pipeline: dict[str, object] = {}
    if sizes.pp > 1:
        # The modules of every stage, by the names of torchtitan's models.
        stage_modules = [[f"layers.{layer}" for layer in layers] for layers in job.stages]
        stage_modules[0].insert(0, "tok_embeddings")
        stage_modules[-1] += ["norm", "lm_head"]
        schedule_file = layout.schedule_file
        pipeline = {
            "pipeline_parallel_schedule": "PipelineScheduleMulti" if schedule_file else TORCH_NAMES[layout.schedule],
            **({"pipeline_parallel_schedule_csv": schedule_file} if schedule_file else {}),
            "pipeline_parallel_microbatch_size": job.batch.micro_batch_size,
            "module_fqns_per_model_part": stage_modules,
        }
    return python_call(
        "ParallelismConfig",
        data_parallel_replicate_degree=sizes.dp_replicate,
        data_parallel_shard_degree=sizes.dp_shard,
        fsdp_reshard_after_forward="never" if keeps_gathered else "always",
        tensor_parallel_degree=sizes.tp,
        enable_sequence_parallel=layout.sequence_parallel,
        context_parallel_degree=sizes.cp,
        expert_parallel_degree=sizes.ep,
        pipeline_parallel_degree=sizes.pp,
        **pipeline,
    )


def _build_optimizer_config(job: ExportJob) -> PythonSource:
    """Return AdamW with weight decay for matrices, and without for vectors, which are all in norms."""
    spec = job.run.optimizer

    def group(pattern: str, weight_decay: float) -> PythonSource:
        numbers = {"lr": job.learning_rate, "betas": spec.betas, "eps": spec.eps, "weight_decay": weight_decay}
        return python_call("ParamGroupConfig", pattern=pattern, optimizer_name="AdamW", optimizer_kwargs=numbers)

    return python_call("OptimizersContainer.Config", param_groups=[group("norm", 0.0), group(".*", spec.weight_decay)])


def _describe_differences(job: ExportJob) -> list[str]:
    run = job.run
    layout = job.layout
    sizes = job.dims
    nodes = run.cluster.nodes
    notes = [
        "Save this as phalanx_run.py. Start it from its folder: "
        f"torchrun --nnodes {nodes} --nproc-per-node {sizes.world_size // nodes} -m torchtitan.train "
        "--module phalanx_run --config run --dataloader.dataset DATA --hf_assets_path TOKENIZER"
    ]
    notes.append("This configuration requires PyTorch 2.14: on 2.13 torchtitan fails after its first step.")
    if not run.data.mask_documents:
        notes.append("In torchtitan, documents packed into one sequence are hidden from each other.")
    if run.model.moe and (run.model.moe.balance_loss_coef or run.model.moe.z_loss_coef):
        notes.append(
            "In torchtitan, experts have no balance loss and no z-loss (model.moe.balance_loss_coef and z_loss_coef)."
        )
    if run.model.moe and bias_update_rate(run.model.moe) != run.model.moe.bias_update_rate:
        notes.append(f"In torchtitan, biases of experts always change in training: by {BIAS_UPDATE_RATE:g} a step.")
    if run.model.moe and run.training.precision == "fp32":
        notes.append("In torchtitan, experts compute in bf16.")
    if layout.data_parallel == "zero2":
        notes.append("zero2 is FSDP that keeps parameters gathered between the passes, and shards them afterwards.")
    if sizes.cp > 1:
        notes.append(
            "In torchtitan, context-parallel ranks all-gather keys and values instead of sending them in a ring."
        )
    if layout.data_parallel == "ddp" and sizes.cp > 1:
        notes.append(
            "In torchtitan, context-parallel ranks shard the parameters (FSDP); with ddp each rank has all parameters."
        )
    return notes
