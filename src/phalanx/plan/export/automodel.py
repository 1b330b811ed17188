"""Export to NeMo Automodel: a YAML recipe, whose model is the config.json of its family.

Its keys are those of the recipes (nemo_automodel/recipes/llm/train_ft.py) of the release in `common.RELEASES`.
"""

from __future__ import annotations

from functools import partial

from phalanx.plan.export.common import (
    ACTIVATION_OUTPUTS,
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
from phalanx.spec.errors import UserError
from phalanx.spec.families.config_json import hf_config
from phalanx.spec.families.wrappers import wrapped_config
from phalanx.spec.pipeline_schedules import SCHEDULES

unsupported = partial(unsupported_error, "automodel")
DEGREES: dict[str, tuple[str, ...]] = {
    "DeepseekV32ForCausalLM": ("pp", "ep"),
    "DeepseekV3ForCausalLM": ("pp", "ep"),
    "Glm4MoeForCausalLM": ("pp", "ep"),
    "Glm4MoeLiteForCausalLM": ("ep",),
    "GlmMoeDsaForCausalLM": ("pp", "ep"),
    "GptOssForCausalLM": ("ep",),
    "HYV3ForCausalLM": ("pp", "ep"),
    "LlamaForCausalLM": ("tp", "pp"),
    "MiniMaxM2ForCausalLM": ("pp", "ep"),
    "Ministral3ForCausalLM": ("tp", "pp"),
    "Mistral4ForCausalLM": ("tp", "pp", "ep"),
    "NemotronHForCausalLM": ("pp", "ep"),
    "Qwen2ForCausalLM": ("tp", "pp"),
    "Qwen3ForCausalLM": ("tp", "pp"),
    "Qwen3MoeForCausalLM": ("pp", "ep"),
    "Qwen3NextForCausalLM": ("ep",),
    "Qwen3_5ForCausalLM": ("tp", "pp"),
    "Qwen3_5MoeForCausalLM": ("pp", "ep"),
}
"""Degrees besides those of data parallelism that the release's own model of an architecture declares
(`ModelCapabilities`). Other architectures are models of transformers, with data parallelism only."""
LR_DECAY_STYLES = {"cosine": "cosine", "linear": "linear", "wsd": "WSD", "none": "constant"}
TORCH_NAMES = {name: properties.torch_name for name, properties in SCHEDULES.items() if properties.torch_name}
VECTORS = r"norm|ln_|bias|sinks|A_log|\.D$|per_expert_scale|router\.scale"
"""Regular expression of the parameters of transformers' models that are vectors, and have no weight decay."""

SUPPORTED = (
    SupportedOption("training.precision", ("fp32",), 'use "bf16" or "fp32"'),
    SupportedOption("training.loss", fix="remove it"),
    SupportedOption("optimizer.name", fix='use "adamw"'),
    SupportedOption("optimizer.lr_schedule", LR_DECAY_STYLES, 'use "cosine"'),
    SupportedOption("model.mtp", fix="remove it: its models do not train these layers with a weight"),
    SupportedOption("model.moe.capacity_factor", fix="remove it"),
    SupportedOption("model.moe.bias_update_rate", fix="set model.moe.choice_bias instead"),
    SupportedOption("layout.data_parallel", ("zero2", "zero3", "hsdp"), 'use "zero3"', NO_SERVERS),
    SupportedOption("layout.cp", fix="use layout.cp = 1: its attention there needs Transformer Engine"),
    SupportedOption("layout.cp_method", fix="use layout.cp = 1"),
    SupportedOption("layout.schedule", TORCH_NAMES, 'use "1f1b"'),
    SupportedOption("layout.schedule_file", fix="remove it"),
    SupportedOption("layout.gradient_compression", fix="remove it"),
    SupportedOption(
        "layout.activation_checkpointing",
        ("full",),
        'use "none" or "full"',
        {"selective": 'use "full": its own differs'},
    ),
    SupportedOption("layout.offload", ("cpu",), 'use "cpu"'),
)


def automodel(job: ExportJob) -> ExportedConfig:
    """Return the Automodel recipe of a run.

    Raises UserError if Automodel cannot express the run, or no family of Hugging Face models has the model's settings.
    """
    run = job.run
    check_export_supported(job, "automodel", SUPPORTED, describes_model=False)
    try:
        config = wrapped_config(hf_config(run.model))
    except UserError as error:
        reason = "no family of Hugging Face models has it with the other settings"
        raise unsupported(error.field, error.value, error.fix, reason) from None
    (architecture,) = config["architectures"]
    _check_degrees(job, architecture)
    check_kv_heads(job, "automodel")
    training = run.training
    steps_in_batch = job.batch.gradient_accumulation_steps if job.dims.pp > 1 else 1
    tables: Table = {
        "recipe": "TrainFinetuneRecipeForNextTokenPrediction",
        "seed": training.seed,
        "step_scheduler": {
            "global_batch_size": job.batch.global_batch_size,
            "local_batch_size": job.batch.micro_batch_size * steps_in_batch,
            "max_steps": training.steps,
        },
        "model": {
            "_target_": "nemo_automodel.NeMoAutoModelForCausalLM.from_config",
            # Optimizer states and masters are fp32; `mp_policy` has the dtype of the passes.
            "torch_dtype": "float32",
            "config": {
                "_target_": "transformers.AutoConfig.for_model",
                **config,
                "initializer_range": round(job.init_std, 6),
            },
        },
        "distributed": _build_distributed_table(job),
        "loss_fn": {"_target_": "nemo_automodel.components.loss.masked_ce.MaskedCrossEntropy"},
        "optimizer": {
            "_target_": "torch.optim.AdamW",
            "lr": job.learning_rate,
            "betas": list(run.optimizer.betas),
            "eps": run.optimizer.eps,
            "weight_decay": run.optimizer.weight_decay,
            "param_group_overrides": [{"pattern": VECTORS, "wd_mult": 0.0}],
        },
        "lr_scheduler": {
            "lr_decay_style": LR_DECAY_STYLES[run.optimizer.lr_schedule],
            "lr_warmup_steps": job.warmup_steps,
            "lr_decay_steps": training.steps,
            "init_lr": 0.0,
            "min_lr": job.min_learning_rate,
        },
        "clip_grad_norm": {"max_norm": run.optimizer.max_grad_norm or float("inf")},
        "dataset": {
            "_target_": "nemo_automodel.components.datasets.llm.mock_iterable_dataset.MockIterableDatasetConfig",
            "vocab_size": run.model.vocab_size,
            "seq_len": training.seq_len,
        },
    }
    if run.optimizer.lr_schedule == "wsd":
        tables["lr_scheduler"] |= {"wsd_decay_steps": job.decay_steps, "lr_wsd_decay_style": "linear"}
    notes = [
        keeps_in_addition("automodel", ACTIVATION_OUTPUTS, "logits of the loss in fp32"),
        *_describe_differences(job),
    ]
    notes += common_notes(job, "automodel", "layout.reshard_after_forward")
    if architecture not in DEGREES:
        notes.append(f"Automodel trains the {architecture} of transformers: it has none of its own.")
    return ExportedConfig("\n".join(format_yaml(tables)) + "\n", notes)


def _check_degrees(job: ExportJob, architecture: str) -> None:
    """Raise UserError for degrees that the model of an architecture does not have."""
    sizes = job.dims
    for degree in ("tp", "pp", "ep"):
        if getattr(sizes, degree) > 1 and degree not in DEGREES.get(architecture, ()):
            reason = (
                f"its {architecture} supports {' and '.join(DEGREES.get(architecture, ())) or 'none of tp, pp and ep'}"
            )
            raise unsupported(f"layout.{degree}", getattr(sizes, degree), f"use layout.{degree} = 1", reason)
    if job.layout.data_parallel == "ddp" and sizes.tp * sizes.pp * sizes.ep > 1:
        reason = "its DDP has no other kind of parallelism"
        raise unsupported("layout.data_parallel", "ddp", 'use "zero3"', reason)
    if sizes.pp > 1 and job.run.model.tie_embeddings:
        reason = "its pipelines do not support tied embeddings"
        raise unsupported("model.tie_embeddings", True, "set it to false", reason)
    if sizes.pp > 1 and job.batch.gradient_accumulation_steps < sizes.pp:
        fix = "use a smaller layout.micro_batch_size, or larger training.tokens_per_step"
        reason = f"a rank has {job.batch.gradient_accumulation_steps} micro-batches, fewer than stages"
        raise unsupported("layout.pp", sizes.pp, fix, reason)


def _build_distributed_table(job: ExportJob) -> Table:
    layout = job.layout
    sizes = job.dims
    full = layout.activation_checkpointing == "full"
    if layout.data_parallel == "ddp":
        return {"strategy": "ddp", "activation_checkpointing": full}
    dtype = {"bf16": "bfloat16", "fp32": "float32"}[job.run.training.precision]
    table: Table = {
        "strategy": "fsdp2",
        "dp_replicate_size": sizes.dp_replicate,
        "tp_size": sizes.tp,
        "pp_size": sizes.pp,
        "ep_size": sizes.ep,
        "sequence_parallel": sizes.tp > 1 and layout.sequence_parallel,
        "activation_checkpointing": full,
        "reshard_after_forward": layout.data_parallel != "zero2" and sizes.pp == 1 and layout.reshard_after_forward,
        "mp_policy": {
            "_target_": "torch.distributed.fsdp.MixedPrecisionPolicy",
            "param_dtype": dtype,
            "reduce_dtype": "float32",
        },
    }
    if layout.offload == "cpu":
        table["offload_policy"] = {"_target_": "torch.distributed.fsdp.CPUOffloadPolicy"}
    if sizes.pp > 1:
        stages = [[f"model.layers.{layer}" for layer in layers] for layers in job.stages]
        stages[0].insert(0, "model.embed_tokens")
        stages[-1] += ["model.norm", "lm_head"]
        table["pipeline"] = {
            "pp_schedule": TORCH_NAMES[layout.schedule],
            "pp_microbatch_size": job.batch.micro_batch_size,
            # Each stage rotates with tables of its own.
            "module_fqns_per_model_part": [[*modules, "model.rotary_emb"] for modules in stages],
        }
    return table


def _describe_differences(job: ExportJob) -> list[str]:
    run = job.run
    nodes = run.cluster.nodes
    notes = [
        f"Start it by torchrun --nnodes {nodes} --nproc-per-node {job.dims.world_size // nodes} "
        "-m nemo_automodel.cli.app FILE.yaml. MockIterableDataset is random tokens.",
        f"All initial matrices have a standard deviation of {job.init_std:.3g}, also those that Phalanx makes smaller.",
    ]
    if run.model.moe and (run.model.moe.balance_loss_coef or run.model.moe.z_loss_coef):
        notes.append(
            "Experts are balanced as Automodel does for the family: by a loss, a bias, or nothing. It has no z-loss."
        )
    if run.model.moe and run.model.moe.choice_bias:
        notes.append("In Automodel, biases of the choice of experts may change in training.")
    if job.layout.data_parallel == "zero2":
        notes.append("zero2 is FSDP that keeps parameters gathered between the passes, and shards them afterwards.")
    return notes
