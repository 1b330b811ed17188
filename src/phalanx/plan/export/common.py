"""Inputs, results, notes and errors that all exports of trainer configurations share."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from typing import Any, Literal

from phalanx.program.pipeline_split import layers_per_stage
from phalanx.spec.attention_backend import has_window, smallest_window
from phalanx.spec.base import walk_fields
from phalanx.spec.errors import UserError
from phalanx.spec.learning_rate import describe_learning_rate
from phalanx.spec.resolved_run import ResolvedRun
from phalanx.spec.run import RunSpec
from phalanx.spec.small_run_defaults import unset_choices

Table = dict[str, Any]
Trainer = Literal["megatron", "torchtitan", "automodel", "deepspeed", "nanotron"]
TRAINER_NAMES: dict[Trainer, str] = {
    "megatron": "Megatron-LM",
    "torchtitan": "torchtitan",
    "automodel": "NeMo Automodel",
    "deepspeed": "DeepSpeed",
    "nanotron": "nanotron",
}
RELEASES: dict[Trainer, str] = {
    "megatron": "megatron-core 0.19.2",
    "torchtitan": "torchtitan 0.3.0",
    "automodel": "nemo-automodel 0.7.0",
    "deepspeed": "deepspeed 0.19.8",
    "nanotron": "nanotron 0.4",
}
"""Package and version on PyPI whose names an export uses, and whose parser `make test-exports` runs."""


@dataclass(frozen=True)
class ExportedConfig:
    """Configuration for another trainer."""

    text: str
    """Contents of the file; `export` adds the notes as comments."""
    notes: list[str]
    """Approximations, omissions, and settings elsewhere."""


@dataclass(frozen=True)
class ExportJob(ResolvedRun):
    """Run on a number of ranks, with the quantities of configuration files."""

    @cached_property
    def stages(self) -> list[range]:
        """Layers of every pipeline stage, in order; one stage without a pipeline."""
        return layers_per_stage(self.run) if self.layout.pp > 1 else [range(self.run.model.num_blocks)]

    @property
    def learning_rate(self) -> float:
        """Peak learning rate, scaled as the run requires."""
        return self.run.optimizer.learning_rate * self.batch.learning_rate_scale

    @property
    def min_learning_rate(self) -> float:
        """Final learning rate."""
        spec = self.run.optimizer
        return float(f"{self.learning_rate * (1.0 if spec.lr_schedule == 'none' else spec.min_lr_ratio):.12g}")

    @property
    def warmup_steps(self) -> int:
        """Steps in which the learning rate increases."""
        return self.run.optimizer.warmup_within(self.run.training.steps)

    @property
    def decay_steps(self) -> int:
        """Last steps, in which the learning rate decreases (wsd: `lr_decay_fraction` of all)."""
        training = self.run.training
        optimizer = self.run.optimizer
        remaining = training.steps - self.warmup_steps
        if optimizer.lr_schedule == "wsd":
            return min(round(optimizer.lr_decay_fraction * training.steps), remaining)
        return remaining

    @property
    def init_std(self) -> float:
        """Standard deviation of initial matrices, as in `model.init`."""
        return math.sqrt(2 / (5 * self.run.model.hidden_size))


@dataclass(frozen=True)
class SupportedOption:
    """Values of a field that a trainer can express. Any other value is refused, also one that a later version adds."""

    field: str
    values: Collection[object] = ()
    """Supported values; the default is always supported."""
    fix: str = "use another model"
    """Alternative to every other value that is not in `fixes`."""
    fixes: Mapping[str, str] | None = None
    """Alternatives to some values."""


NO_MUON = {"muon": 'use "adamw": no other Muon computes the same updates'}
NO_SERVERS = {"parameter_server": 'use "zero1" or another strategy'}
SUPPORTED_EVERYWHERE = (
    SupportedOption("training.seconds", fix="set training.steps instead"),
    SupportedOption("training.epochs", fix="set training.steps instead"),
    SupportedOption("preference", fix="train it with Phalanx: this file describes training on the next token"),
    SupportedOption("distillation", fix="train it with Phalanx: this file describes training on the next token"),
    SupportedOption("phase", fix="export each phase as a run of its own"),
    SupportedOption("adapter", fix="remove it, or set up the adapters there"),
    SupportedOption("training.freeze", fix="remove it, or freeze the parameters there"),
    SupportedOption("optimizer.implementation", fix="remove it"),
    SupportedOption("optimizer.lr_function", fix="remove it: optimizer.lr_schedule then applies"),
    # In `ExportJob.learning_rate`.
    SupportedOption("training.batch_scaling", ("linear", "sqrt"), 'use "keep"'),
    # Expressed, or in a note of `common_notes`.
    SupportedOption("layout.rank_order", ("pipeline_outer",), 'use "data_outer"'),
    SupportedOption("layout.tp_attention", fix="use a tensor-parallel degree that divides the heads"),
    SupportedOption("layout.recomputed_blocks", fix="remove it: all blocks then recompute activations"),
)
"""Options that either all trainers support or none of them does."""
EXPRESSED_MODEL_FIELDS = frozenset(
    f"model.{field}"
    for field in (
        *("preset", "from_hf", "upcycle_reinit_fraction", "vocab_size", "hidden_size", "num_layers", "num_heads"),
        *("num_kv_heads", "head_dim", "ffn_hidden_size", "max_seq_len", "sliding_window", "full_attention_layers"),
        *("norm_eps", "rope", "rope.theta", "rope.factor", "rope.original_context", "rope.low_freq_factor"),
        *("rope.high_freq_factor", "rope.beta_fast", "rope.beta_slow", "bias", "tie_embeddings"),
        *("moe", "moe.num_experts", "moe.top_k", "moe.expert_ffn_size", "moe.num_shared_experts"),
        *("moe.num_leading_dense_layers", "moe.normalize_top_k", "moe.balance_loss_coef", "moe.z_loss_coef"),
        *("moe.capacity_factor", "moe.bias_update_rate"),
    )
)
"""Fields of the model that each export of a model expresses, checks itself, or does not need with the options that it
supports. Any other field is refused unless an option names it, also one that a later version adds."""
LATENT_ATTENTION_FIELDS = frozenset(
    (
        *("model.mixer", "model.mixer.latent_rank", "model.mixer.query_rank", "model.mixer.rope_dim"),
        *("model.mixer.value_dim", "model.attention_scale", "model.rope.attention_factor", "model.rope.truncate"),
    )
)
"""Fields of latent attention and its YaRN, for exports that express it."""
LLAMA_WITH_ADAMW = (
    SupportedOption("training.loss", fix="remove it"),
    SupportedOption("optimizer.name", fix='use "adamw"', fixes=NO_MUON),
    SupportedOption("optimizer.lr_schedule", ("linear", "wsd", "none"), 'use "cosine"'),
    SupportedOption("model.implementation", fix="remove it, or use another model"),
    SupportedOption("model.norm"),
    SupportedOption("model.activation"),
    SupportedOption("model.position_embedding"),
)
"""Options of trainers whose configuration names a size of Llama, trained with AdamW."""
TRAINER_SPECIFIC = (
    "layout.bucket_mb",
    "layout.first_bucket_mb",
    "layout.ddp_static_graph",
    "layout.ddp_find_unused_parameters",
    "layout.fsdp_unit",
    "layout.fsdp_prefetch",
    "layout.reshard_after_forward",
    "training.compile",
)
"""Options that do not affect results, and that each trainer implements differently."""


def check_export_supported(
    job: ExportJob,
    trainer: Trainer,
    supported: Sequence[SupportedOption],
    expressed: Collection[str] = (),
    describes_model: bool = True,
) -> None:
    """Raise UserError for the first value that a trainer cannot express.

    Fields of the layout are checked last, since another layout may not need them. `supported` has each choice of a
    run that `SUPPORTED_EVERYWHERE` leaves to the trainer; `expressed` are fields that it expresses with any value.
    Without `describes_model`, fields of the model are checked elsewhere.
    """
    window = smallest_window(job.run.model)
    if describes_model and has_window(job.run.model, job.run.training.seq_len):
        fix = f"use training.seq_len = {window} or less, or another model"
        raise unsupported_error(trainer, "model.sliding_window", window, fix)
    options = [*SUPPORTED_EVERYWHERE, *supported]
    if describes_model:
        named = EXPRESSED_MODEL_FIELDS | {option.field for option in options} | set(expressed)
        fields = (field for field, _, _ in walk_fields(job.run.model, "model."))
        options += [SupportedOption(field) for field in fields if field not in named]
    for option in sorted(options, key=lambda option: option.field.startswith("layout.")):
        value, default = _read_value_and_default(job.run, option.field)
        if value != default and value not in option.values:
            raise unsupported_error(trainer, option.field, value, fix=(option.fixes or {}).get(str(value), option.fix))


def unsupported_error(trainer: Trainer, field: str, value: object, fix: str, reason: str = "") -> UserError:
    """Return the error for a value that a trainer cannot express."""
    shown_value = value if isinstance(value, bool | int | float | str) else None
    problem = f"cannot be written for {TRAINER_NAMES[trainer]}" + (f": {reason}" if reason else "")
    return UserError(field, shown_value, problem, fix=fix)


ACTIVATION_OUTPUTS = "the output of each activation function, which Phalanx computes again"


def keeps_in_addition(trainer: Trainer, *tensors: str) -> str:
    """Return a note on tensors that a trainer keeps and Phalanx does not, because the layout fits Phalanx's memory."""
    return (
        f"{TRAINER_NAMES[trainer]} keeps in addition to what Phalanx does: {'; '.join(tensors)}. "
        "Whether this layout fits is therefore open: start with a few steps."
    )


def common_notes(job: ExportJob, trainer: Trainer, *expressed: str) -> list[str]:
    """Return notes on missing settings, unchosen defaults, and options that the trainer replaces.

    `expressed` are the options that the export expresses.
    """
    notes = [
        f"Data and tokenizer are not included: configure them in {TRAINER_NAMES[trainer]}.",
        *_describe_defaults(job.run, trainer),
    ]
    if job.run.data.mask_documents and "data.mask_documents" not in expressed:
        notes.append("Documents packed into one sequence are not hidden from each other (data.mask_documents = true).")
    for field in TRAINER_SPECIFIC:
        value, default = _read_value_and_default(job.run, field)
        if value != default and field not in expressed:
            notes.append(f"{field} = {value} is omitted: {TRAINER_NAMES[trainer]} has its own settings.")
    has_different_rank_order = job.dims.pp > 1 and job.dims.dp_size > 1 and job.layout.rank_order == "data_outer"
    if has_different_rank_order and "layout.rank_order" not in expressed:
        notes.append(f"In {TRAINER_NAMES[trainer]}, data-parallel ranks are closer to each other than pipeline ranks.")
    return notes


def _describe_defaults(run: RunSpec, trainer: Trainer) -> list[str]:
    """Return notes on options that every training must choose, and that the run file leaves open.

    Trainers have no defaults for them, or others for other models.
    """
    notes = []
    if "learning_rate" not in run.optimizer.model_fields_set:
        notes.append(f"{describe_learning_rate(run)}.")
    fields_in_export = ["training.steps", "optimizer.warmup_steps"] + ["checkpoint.every"] * (trainer == "nanotron")
    for field, value in unset_choices(run).items():
        if field in fields_in_export:
            notes.append(f"{field} = {value}: a default of Phalanx, not of this model; set your own.")
    return notes


def check_kv_heads(job: ExportJob, trainer: Trainer) -> None:
    """Raise UserError if tensor-parallel ranks would have copies of key/value heads."""
    heads = job.run.model.num_kv_heads
    tp = job.dims.tp
    if heads % tp:
        fix = "reduce it to a divisor of the key/value heads"
        raise unsupported_error(trainer, "layout.tp", tp, fix, f"it does not divide model.num_kv_heads ({heads})")


def with_comment_header(exported: ExportedConfig, trainer: Trainer) -> ExportedConfig:
    """Return an export with its version, and its notes as comments if the format has comments."""
    version = f"For {RELEASES[trainer]}."
    notes = [version, *exported.notes]
    if trainer == "deepspeed":
        # JSON has no comments; DeepSpeed ignores unknown keys.
        return ExportedConfig(exported.text.replace("{", f'{{"_comment": "{version}",', 1), notes)
    return ExportedConfig("".join(f"# {note}\n" for note in notes) + exported.text, notes)


def _read_value_and_default(run: RunSpec, path: str) -> tuple[object, object]:
    """Return the value of "field" or "table.field" in a run, and its default; None for both without such a table."""
    *tables, field = path.split(".")
    table = reduce(getattr, tables[:-1], run)
    owner = getattr(table, tables[-1]) if tables else table
    if owner is None:
        return None, None
    return getattr(owner, field), type(owner).model_fields[field].default


def format_yaml(table: Mapping[str, object], indent: str = "") -> Iterator[str]:
    """Yield lines of YAML: tables as blocks, everything else as JSON, which is valid YAML."""
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield f"{indent}{key}:"
            yield from format_yaml(value, f"{indent}  ")
        else:
            text = ".inf" if value == math.inf else json.dumps(value)
            # YAML 1.1 requires a decimal point in numbers with an exponent.
            if isinstance(value, float) and "e" in text and "." not in text:
                text = text.replace("e", ".0e")
            yield f"{indent}{key}: {text}"
