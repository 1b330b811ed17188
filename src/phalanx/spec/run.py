"""Description of a run: model, data, training, layout and machines, as in one TOML file."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, field_validator, model_validator

from phalanx.spec.base import LocalPath, Spec, StoreFolder, TextSource, require
from phalanx.spec.cluster import ClusterSpec
from phalanx.spec.components import ComponentSpec, check_components
from phalanx.spec.distillation import DistillationSpec, check_distillation
from phalanx.spec.errors import UserError
from phalanx.spec.layers import check_sequence
from phalanx.spec.layout import Layout
from phalanx.spec.learning_rate import default_learning_rate
from phalanx.spec.mixture import RecordKind, SourceSpec, TooLong, check_mixture
from phalanx.spec.model import ModelSpec
from phalanx.spec.parts.model import adaptable_products, model_parameters
from phalanx.spec.parts.operations import GroupedLinear
from phalanx.spec.phases import PhaseSpec, check_phases
from phalanx.spec.precision import Precision
from phalanx.spec.preference import PreferenceSpec, check_preference
from phalanx.spec.recovery import RecoverySpec
from phalanx.spec.swarm import SwarmSpec, check_swarm_run
from phalanx.spec.tuning import (
    AdapterSpec,
    TuningSpec,
    check_adapter,
    check_base_dtype,
    check_freeze,
    check_patterns,
)

END_OF_TEXT = "<|endoftext|>"
"""Token at the end of a document, in every tokenizer file that Phalanx writes."""
BYTES_TOKENIZER = {"type": "bytes"}
"""Content of tokenizer.json for the byte tokenizer."""
BYTES_VOCAB = 257
"""Vocabulary size of the byte tokenizer: ids 0 to 255 are the bytes of UTF-8, 256 ends a document."""


SET_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


class DataSpec(Spec):
    """Text and its tokenization."""

    train: list[TextSource] = ["stdlib"]  # noqa: RUF012
    """Training text: files, directories or glob patterns of text, JSON records (lines or an array, whatever the file's
    name), .parquet, .arrow, .tar (WebDataset) or .mds (MosaicML), also compressed (.gz, .zst, .bz2, .xz);
    `hf:NAME_OR_DIR:CONFIG:SPLIT` for a Hugging Face dataset, whose last two parts may be left out; "stdlib", the source
    of the Python library; or prefixes of Megatron .bin/.idx pairs. Files and pairs may be on this machine, or in object
    stores and on web servers: `s3://`, `gs://`, `az://`, `https://` and `hf://`. Of a directory, all files below it are
    read, except hidden, binary and empty ones, those of `__pycache__`, `site-packages` and `dist-packages`, and those
    that describe others, such as the index of MDS shards."""
    source: list[SourceSpec] = Field([], examples=[[{"name": "code", "path": "texts/code", "weight": 0.7}]])
    """Sources that are mixed by weight, in place of `train`: a table [[data.source]] for each."""
    held_out: list[TextSource] = []  # noqa: RUF012
    """Evaluation text, in the format of `train`. If empty, documents of `train` are held out by file name, and from
    Megatron pairs the end of each."""
    held_out_sets: dict[str, list[TextSource]] = Field({}, examples=[{"wiki": "wiki/*.txt", "code": ["a.py", "b.py"]}])
    """Evaluation text by name, in place of `held_out`. The loss of each set is recorded as well. A set with the name of
    a source has its format, others have that of `data`."""
    held_out_fraction: float = Field(0.05, gt=0, lt=1)
    """Share of documents that are held out if `held_out` is empty."""
    format: RecordKind = "text"
    """Format of the records: "text"; "chat", conversations (messages with role and content, or
    conversations with from and value, and perhaps tools), which `chat_template` renders; "prompt", prompts with
    completions; or "preference", a chosen and a rejected answer to a prompt, for `[preference]`. Only the answers are
    trained on, and no sequence cuts a conversation, or separates two answers."""
    text_key: str | None = None
    """Field with the text in a JSON record or Parquet row; by default "text". With `format = "chat"` the field with the
    messages; by default "messages" or "conversations"."""
    chat_template: LocalPath | None = Field(None, examples=["chatml"])
    """Jinja template that renders conversations: a file, "chatml", or "plain", whose answers end with the end token. By
    default the tokenizer's own."""
    too_long: TooLong = "error"
    """Treatment of conversations of more than `training.seq_len` + 1 tokens, and of pairs with both answers: "error",
    "drop", or "truncate" to their beginning (of a pair, each conversation to half of a sequence). Those without an
    answer in their beginning are dropped."""
    max_bad_records: int = Field(0, ge=0)
    """Broken records of each source that are skipped and listed: lines that are not valid JSON, records without text,
    text that is not UTF-8, damaged ends of files. One more is an error with file and line."""
    tokenizer: LocalPath = "bpe"
    """Tokenizer: "bpe" trains one on the text; "bytes"; the path of a Hugging Face tokenizer.json; or the name of a
    model on the hub, such as "org/name" or "org/name@revision"."""
    end_token: str | None = Field(None, min_length=1, examples=["<|endoftext|>"])
    """Token of a tokenizer.json that ends a document. By default the `eos_token` of the files next to it, else a known
    one such as <|endoftext|>."""
    tokenizer_vocab: int = Field(2048, ge=BYTES_VOCAB)
    """Vocabulary size of the BPE that `tokenizer = "bpe"` trains."""
    streaming: bool = False
    """Tokenize during training instead of once before it. Every rank then reads all of the text."""
    cache: LocalPath = "~/.cache/phalanx"
    """Directory of the tokenized text, and of local copies of objects (s3:// and other URLs)."""
    cache_max_bytes: int = Field(100_000_000_000, gt=0)
    """Maximum size of the local copies of objects. Those used least recently are removed first."""
    mask_documents: bool = True
    """Mask attention between documents packed into one sequence."""
    dataset: ComponentSpec | None = Field(None, examples=["my_data:Sequences"])
    """Import path of a map-style or iterable dataset of token sequences to train on; called with `seq_len`. Targets of
    -100 are ignored. `train` then provides only the tokenizer's and the held-out text."""

    @model_validator(mode="after")
    def _require_tokenizer_of_end_token(self) -> Self:
        problem = f"has no effect with data.tokenizer = {self.tokenizer!r}, which has its own"
        is_used = self.end_token is None or self.tokenizer not in ("bpe", "bytes")
        require(is_used, "end_token", self.end_token, problem, fix="remove it")
        return self

    @property
    def has_held_out_text(self) -> bool:
        """True if evaluation text is given, so that none of the training text is held out."""
        return bool(self.held_out or self.held_out_sets)

    @property
    def writes_train_tokens(self) -> bool:
        """True if the training text is tokenized into files before training."""
        return not self.streaming and self.dataset is None

    @field_validator("train", "held_out", mode="before")
    @classmethod
    def _accept_one_source(cls, value: object) -> object:
        return [value] if isinstance(value, str) else value

    @field_validator("held_out_sets", mode="before")
    @classmethod
    def _accept_one_source_of_each_set(cls, value: object) -> object:
        if not isinstance(value, dict):
            return value
        for name, sources in value.items():
            require(bool(sources), name, sources, "is empty", "name its text, or remove the set")
            require(SET_NAME.fullmatch(name) is not None, name, sources, "is not a name of letters, digits, ., _ and -")
        return {name: [sources] if isinstance(sources, str) else sources for name, sources in value.items()}

    @field_validator("source", mode="before")
    @classmethod
    def _require_tables(cls, value: object) -> object:
        fix = "write [[data.source]], with two brackets, above each source"
        require(not isinstance(value, dict), "", None, "is a single table", fix)
        return value

    @model_validator(mode="before")
    @classmethod
    def _replace_train_by_sources(cls, table: object) -> object:
        """Leave `train` empty in a mixture, instead of its default."""
        if not isinstance(table, dict) or not table.get("source"):
            return table
        fix = "make it a table [[data.source]] as well, or remove one of the two"
        require(not table.get("train"), "train", table.get("train"), "cannot be combined with data.source", fix)
        return {**table, "train": []}

    @model_validator(mode="after")
    def _check_sources(self) -> DataSpec:
        check_mixture(self.source)
        if self.held_out_sets and self.held_out:
            problem = "cannot be combined with data.held_out_sets"
            raise UserError("held_out", self.held_out, problem, "make it a set, or remove one of the two")
        if self.source and self.streaming:
            fix = "set data.streaming = false: each source is then tokenized once, and cached"
            raise UserError("streaming", True, "cannot be combined with data.source", fix)
        if self.source and self.dataset is not None:
            problem = "cannot be combined with data.source"
            raise UserError("dataset", self.dataset.class_path, problem, "remove one of the two")
        if self.streaming and self.format != "text":
            fix = "set data.streaming = false: conversations are then tokenized once, and cached"
            raise UserError("streaming", True, f"cannot be combined with data.format = {self.format!r}", fix)
        formats = {source.format or self.format for source in self.source} | {self.format}
        problem = "has no effect without conversations"
        fix = 'set data.format = "chat", or remove it'
        require(formats != {"text"} or not self.chat_template, "chat_template", self.chat_template, problem, fix)
        return self


UNDECIDED_STEPS = 2**31 - 1
"""Value of `training.steps` for a run with `training.seconds`, until its first steps determine the number of steps."""


class TrainingSpec(Spec):
    """Training length, batch size and arithmetic.

    Example:
        >>> phalanx.TrainingSpec(steps=200, seq_len=512, tokens_per_step=8192).precision
        'bf16'
    """

    steps: int = Field(1000, gt=0)
    """Optimizer updates."""
    seconds: float | None = Field(None, gt=0, examples=[200])
    """Seconds of training without evaluation and checkpoints, in place of `steps`. The first steps determine the number
    of steps and the learning rate of each from the measured speed; run.toml of the run directory records it."""
    epochs: float | None = Field(None, gt=0, examples=[3])
    """How often the run reads its text, in place of `steps`: of a mixture, the source that it reads most often. The
    number of steps is known when the text is tokenized; run.toml of the run directory records it."""
    seq_len: int = Field(256, gt=1)
    """Tokens in a sequence (T)."""
    tokens_per_step: int = Field(16_384, gt=0)
    """Tokens in one optimizer update over all ranks. It determines micro-batch and accumulation."""
    batch_scaling: Literal["keep", "linear", "sqrt"] = "keep"
    """Effect of a number of data-parallel ranks other than `base_dp_size`. keep: the same tokens per step; accumulation
    changes. linear (arXiv 1706.02677) and sqrt (arXiv 1404.5997): the same tokens per rank; learning rates are
    multiplied by the ratio of ranks or its square root. A run that resumes with other ranks warms up to its new rates.
    """
    base_dp_size: int | None = Field(None, gt=0, examples=[8])
    """Data-parallel ranks for which `tokens_per_step` and the learning rates are set (linear and sqrt)."""
    precision: Precision = "bf16"
    """Arithmetic. bf16 computes in bf16 and trains fp32 parameters with fp32 optimizer state; fp8 is bf16 with the
    matrix products of blocks in float8, on GPUs of compute capability 9.0 or above (a CPU emulates it); fp64 is for
    proofs; "auto" selects bf16 or fp32 with a short measurement."""
    auto_precision: bool = False
    """Select the precision with a measurement, as `precision = "auto"` requests."""
    seed: int = Field(1234, ge=0)
    """Seed of the initial weights and the order of the text. The same seed gives the same run in every layout."""
    compile: bool | None = Field(None, examples=[False])
    """Compile blocks with torch.compile, and the loss on GPUs. By default on GPUs, unless the network is the user's.
    Where ranks communicate inside a block, or its backward pass is split, only its elementwise functions are compiled.
    """
    deterministic: bool = False
    """Use only kernels with bitwise reproducible results, so that a restarted run on GPUs gives the same result to the
    bit. Slower on GPUs. CPUs are reproducible anyway."""
    max_nonfinite_steps: int = Field(5, gt=0)
    """Stop after this number of consecutive steps with a non-finite gradient. Each such step is skipped and counted."""
    collective_timeout_seconds: float = Field(600, gt=0)
    """Timeout of a collective in seconds, after which the run stops."""
    replica_check_interval: int = Field(0, ge=0)
    """Steps between bitwise comparisons of the state that ranks must have in common, to find silent corruption. 0
    disables them."""
    freeze: tuple[str, ...] = Field((), strict=False, examples=[["embedding.*", "blocks.[0-3].*"]])
    """Names of parameters that are not trained, with the wildcards `*`, `?` and `[...]`. They have neither gradients
    nor optimizer state. Blocks before all trained parameters have no backward pass, except in a pipeline."""
    loss: ComponentSpec | None = Field(None, examples=["my_loss:smoothed"])
    """Import path of a loss function in place of cross-entropy: called with logits [B, T, V], targets [B, T] and the
    target to ignore, it returns the sum over targets. Evaluations use cross-entropy."""

    @model_validator(mode="before")
    @classmethod
    def _leave_steps_undecided(cls, table: object) -> object:
        """Allow an undecided number of steps if the time or the number of epochs is given."""
        if not isinstance(table, dict):
            return table
        lengths = [name for name in ("seconds", "epochs") if table.get(name) is not None]
        if not lengths:
            return table
        steps = table.get("steps", UNDECIDED_STEPS)
        others = [f"training.steps = {steps}"] if steps != UNDECIDED_STEPS else []
        others += [f"training.{name} = {table[name]}" for name in lengths[1:]]
        if others:
            problem = f"cannot be combined with {others[0]}"
            fix = f"remove one of them; on the command line: --set training.steps= or --set training.{lengths[0]}="
            raise UserError(lengths[0], table[lengths[0]], problem, fix)
        return {**table, "steps": UNDECIDED_STEPS}

    @property
    def has_decided_steps(self) -> bool:
        """True if the number of steps of the run is known."""
        return self.seconds is None and self.epochs is None

    @property
    def length_field(self) -> tuple[str, float]:
        """The name and the value of the field that determines the length of the run."""
        lengths = {"training.seconds": self.seconds, "training.epochs": self.epochs, "training.steps": self.steps}
        return next((name, value) for name, value in lengths.items() if value is not None)

    @property
    def steps_text(self) -> str:
        """Number of steps as text; a phrase if it is undecided."""
        if self.has_decided_steps:
            return str(self.steps)
        name, value = self.length_field
        return f"an undecided number ({name} = {value:g})"


class OptimizerSpec(Spec):
    """Optimizer and learning-rate schedule."""

    name: Literal["adamw", "sgd", "muon"] = "adamw"
    """Optimizer. muon uses Muon for the matrices inside blocks and AdamW for the other parameters."""
    implementation: ComponentSpec | None = Field(None, examples=["torch.optim:RMSprop"])
    """Import path of a `torch.optim.Optimizer` in place of `name`, "package.module:Class" or a table with `class` and
    its arguments; called with parameter groups and `lr`. `name` then describes the size of its state to the planner."""
    learning_rate: float = Field(3e-3, gt=0)
    """Peak learning rate (AdamW and SGD; with muon, of the parameters that AdamW trains). The default is that of a
    published run of about this size, 0.003 for small models; with `model.from_hf` 2e-5 (fine-tuning of Llama 2, arXiv
    2307.09288). `--print-config` names the source."""
    muon_learning_rate: float = Field(0.02, gt=0)
    """Peak learning rate of Muon's matrices. With `model.from_hf`, training requires it to be set."""
    weight_decay: float = Field(0.1, ge=0)
    """Decoupled weight decay of matrices; vectors are not decayed."""
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.95)
    """Decay rates of AdamW's running means of gradients and of their squares."""
    eps: float = Field(1e-8, gt=0)
    """Added to the denominator of AdamW's update."""
    momentum: float = Field(0.95, ge=0, lt=1)
    """Momentum of SGD and Muon."""
    max_grad_norm: float = Field(1.0, ge=0)
    """Maximum norm of the full gradient; 0 does not clip."""
    warmup_steps: int = Field(50, ge=0)
    """Steps in which the learning rate rises linearly to its peak. If a run file omits it, at most half of all steps.
    """
    lr_schedule: Literal["cosine", "linear", "wsd", "none"] = "cosine"
    """Schedule after warm-up: cosine or linear to the end, or warm-up, stable, decay (wsd, arXiv 2404.06395)."""
    lr_function: ComponentSpec | None = Field(None, examples=["my_schedule:staircase"])
    """Import path of a function in place of `lr_schedule`: called with the step (from 0) and the number of steps, it
    returns the learning rate as a share of the peak."""
    lr_decay_fraction: float = Field(0.2, gt=0, le=1)
    """Share of the steps in which wsd decays; at most the steps after warm-up."""
    min_lr_ratio: float = Field(0.1, ge=0, le=1)
    """Learning rate at the end as a share of the peak."""

    def warmup_within(self, steps: int) -> int:
        """Return the warm-up steps of a run of `steps` steps: half of them if `warmup_steps` leaves none."""
        return self.warmup_steps if self.warmup_steps < steps else steps // 2


class EvaluationSpec(Spec):
    """Frequency and size of held-out evaluations."""

    every: int = Field(0, ge=0)
    """Steps between evaluations; 0 evaluates at the end only."""
    tokens: int = Field(0, ge=0)
    """Held-out tokens per evaluation, from the start; 0 uses all. A mixture divides them by its shares."""
    stop_after: int = Field(0, ge=0)
    """End the run after this number of evaluations in a row without a new lowest held-out loss (validation loss); 0
    never does. The best weights stay in a checkpoint with `checkpoint.keep.best`."""
    prompt: str = ""
    """Prompt from which a sample is generated at the end, if given."""
    samples: int = Field(1, gt=0)
    """Samples from the prompt: the last at the end, the earlier ones at even intervals."""


def _keep_table(value: Any) -> Any:
    """Return the table of `checkpoint.keep`; a number is its short form, and the only one until 2026-11-28."""
    return {"last": value} if type(value) is int else value


class KeepSpec(Spec):
    """Checkpoints that outlive the next save; `keep = 3` is short for `keep = { last = 3 }`."""

    last: int = Field(2, gt=0)
    """Number of newest checkpoints."""
    every: int = Field(0, ge=0)
    """Also keep the checkpoints of each multiple of this number of steps; 0 keeps none of them."""
    best: int = Field(0, ge=0)
    """Also keep this number of checkpoints with the lowest held-out loss (validation loss)."""


class CheckpointSpec(Spec):
    """Frequency of checkpoints, from which `--resume` continues the run."""

    every: Annotated[int, Field(ge=0)] | Literal["auto"] = 500
    """Steps between checkpoints, in addition to the last one; 0 saves only at the end or when stopped. "auto" uses the
    interval of the best goodput (Daly, Future Generation Computer Systems 22, 2006), from the cost of a save to
    training (wait and slowdown) and the failure rate of the run: cluster.failures_per_device_hour, and from the second
    failure on the observed rate. The first save is early, to measure its cost."""
    keep: Annotated[KeepSpec, BeforeValidator(_keep_table, int | KeepSpec)] = KeepSpec()
    """Checkpoints to keep, or the number of the newest ones."""
    directory: StoreFolder | None = Field(None, examples=["s3://bucket/checkpoints"])
    """Folder in an object store (`s3://`, `gs://` or `az://`) for checkpoints, below which each run has a folder of its
    name. A checkpoint is written to the run directory, and then uploaded while training continues; the run directory
    keeps the shards of the newest only. By default, all checkpoints remain in the run directory."""
    upload_timeout_seconds: float = Field(600, gt=0)
    """Seconds for which a run waits at its end for uploads."""


class MetricsSpec(Spec):
    """Metrics that are recorded at each step, and their destination."""

    every: int = Field(1, gt=0)
    """Steps between lines of metrics.jsonl."""
    per_rank_records: bool = True
    """Record compute and wait times of each step on every rank, for `phalanx report`."""
    gradient_noise_every: int = Field(0, ge=0)
    """Steps between measurements of the gradient noise scale, the batch in tokens from which more of them bring little
    (critical batch size, arXiv 1812.06162). Each takes as long as the passes of a step. 0 disables them."""
    allocation_history: bool = False
    """Record allocations on a GPU with their Python stacks, and write them to failures/ if its memory runs out, for
    https://pytorch.org/memory_viz. Costs about 2 µs per allocation, and up to 100 MB of host memory."""
    wandb: str | None = Field(None, examples=["phalanx"])
    """Project in Weights & Biases for the metrics (`pip install '.[wandb]'` in a clone)."""
    wandb_entity: str | None = Field(None, examples=["my-team"])
    """User or team that owns the project. By default that of WANDB_ENTITY or of the login."""
    wandb_group: str | None = Field(None, examples=["sweep-1"])
    """Group of runs that W&B shows together. By default that of WANDB_RUN_GROUP."""
    wandb_tags: tuple[str, ...] = Field((), examples=[["baseline", "h100"]])
    """Tags of the run in W&B. By default those of WANDB_TAGS."""

    @model_validator(mode="after")
    def _check_wandb(self) -> MetricsSpec:
        for field in ("wandb_entity", "wandb_group", "wandb_tags"):
            value = getattr(self, field)
            if value and self.wandb is None:
                problem = "has no effect without a project in Weights & Biases"
                raise UserError(field, value, problem, f"set metrics.wandb, or remove metrics.{field}")
        return self


class RunSpec(Spec):
    """A run. Every field has a default except the model's shape, which a preset provides.

    Example:
        >>> run = phalanx.RunSpec(model=phalanx.load_model_spec("llama3-8b"), cluster=phalanx.load_machine("h100"))
        >>> run.replace(name="long").training.steps, run.model.num_layers
        (1000, 32)
    """

    name: str = Field("run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Name of the run directory."""
    output_dir: LocalPath = "runs"
    """Directory that contains the run directories."""
    model: ModelSpec
    """Model."""
    data: DataSpec = DataSpec()
    """Training data."""
    training: TrainingSpec = TrainingSpec()
    """Training length and arithmetic."""
    adapter: AdapterSpec | None = None
    """Adapters that are trained in place of the model; without this table the model is."""
    phase: list[PhaseSpec] = Field([], examples=[[{"from_share": 0.8, "lr_schedule": "linear", "min_lr_ratio": 0.0}]])
    """Parts of the run with other settings, in order: a table [[phase]] for each."""
    preference: PreferenceSpec | None = None
    """Training on preferences (DPO) in place of the next token, with `data.format = "preference"`."""
    distillation: DistillationSpec | None = None
    """Training on the probabilities of a teacher besides the text."""
    optimizer: OptimizerSpec = OptimizerSpec()
    """Optimizer."""
    layout: Layout = Layout()
    """Parallel layout; with `layout = "auto"` the planner selects it."""
    auto_layout: bool = False
    """Let the planner select the layout, as `layout = "auto"` requests."""
    cluster: ClusterSpec = ClusterSpec()
    """Machines."""
    evaluation: EvaluationSpec = EvaluationSpec()
    """Held-out evaluations."""
    checkpoint: CheckpointSpec = CheckpointSpec()
    """Checkpoints."""
    recovery: RecoverySpec = RecoverySpec()
    """Recovery from failures."""
    metrics: MetricsSpec = MetricsSpec()
    """Recorded metrics."""
    callbacks: dict[str, ComponentSpec] = Field({}, examples=[{"stop_early": "my_callbacks:StopEarly"}])
    """Callbacks of the training loop, by name: "package.module:Class" of a subclass of `phalanx.Callback`, or a table
    with `class` and its arguments."""
    swarm: SwarmSpec | None = None
    """Training on nodes joined by slow links (`phalanx swarm`)."""

    @property
    def model_name(self) -> str:
        """The preset or Hugging Face directory that the model comes from, or else the name of the run if it is set."""
        return self.model.source_name or (self.name if "name" in self.model_fields_set else "model")

    def on_device(self, device: str) -> RunSpec:
        """Return this run with `cluster.device` set, because "auto" does not name the device in use."""
        return self.replace(cluster=self.cluster.replace(device=device))

    @property
    def compiles(self) -> bool:
        """True if `training.compile` is set, or left open and the devices are GPUs."""
        by_default = self.cluster.uses_cuda and self.model.implementation is None
        return by_default if self.training.compile is None else self.training.compile

    @property
    def settings(self) -> dict[str, Any]:
        """Fields that may explain a difference between runs, by dotted name, such as "layout.pp".

        Names, places and machines are left out, and so is what is not set or not decided yet.
        """
        table = self.model_dump(mode="json", exclude_none=True, exclude={"name", "output_dir", "cluster"})
        table["data"]["source"] = {source.pop("name"): source for source in table["data"]["source"]}
        table["phase"] = {str(number): phase for number, phase in enumerate(table["phase"])}
        left_out = {
            "auto_layout",
            "training.auto_precision",
            "training.seconds",
            "training.epochs",
            "layout.auto_checkpointing",
            "data.cache",
            "data.cache_max_bytes",
        }
        if not self.training.has_decided_steps:
            left_out.add("training.steps")
        return {name: value for name, value in _flatten(table) if name not in left_out}

    @model_validator(mode="after")
    def _complete_and_check(self) -> RunSpec:
        optimizer = self.optimizer
        if "learning_rate" not in optimizer.model_fields_set:
            optimizer = optimizer.replace(learning_rate=default_learning_rate(self.model)[0])
            # The field remains unset, so that its origin is known.
            optimizer.model_fields_set.discard("learning_rate")
            object.__setattr__(self, "optimizer", optimizer)  # the class is frozen
        training = self.training
        tuning = TuningSpec(freeze=training.freeze, adapter=self.adapter)
        if tuning != self.model.tuning:
            object.__setattr__(self, "model", self.model.model_copy(update={"tuning": tuning}))
        _check_tuning(self)
        if training.tokens_per_step % training.seq_len:
            nearest_multiple = max(1, round(training.tokens_per_step / training.seq_len)) * training.seq_len
            problem = f"is not a multiple of training.seq_len ({training.seq_len})"
            raise UserError("training.tokens_per_step", training.tokens_per_step, problem, f"use {nearest_multiple}")
        check_sequence(self.model, "training.seq_len", training.seq_len)
        if self.layout.max_staleness is not None:
            problem = "cannot be combined with layout.max_staleness, because ranks are at different steps"
            max_rollbacks = self.recovery.max_rollbacks
            if max_rollbacks:
                raise UserError("recovery.max_rollbacks", max_rollbacks, problem, "set recovery.max_rollbacks = 0")
            if training.seconds is not None:
                raise UserError("training.seconds", training.seconds, problem, "set training.steps instead")
        if training.replica_check_interval and self.layout.data_parallel == "parameter_server":
            problem = 'cannot be combined with layout.data_parallel = "parameter_server", which has no replicas'
            fix = "set training.replica_check_interval = 0"
            raise UserError("training.replica_check_interval", training.replica_check_interval, problem, fix)
        limited = next((number for number, source in enumerate(self.data.source) if source.epochs is not None), None)
        if limited is not None and training.seconds is not None:
            problem = "cannot be checked before a run with training.seconds, whose number of steps is not known yet"
            fix = "set training.steps instead, or remove the limit"
            raise UserError(f"data.source[{limited}].epochs", self.data.source[limited].epochs, problem, fix)
        for field, is_set in (("streaming", self.data.streaming), ("dataset", self.data.dataset is not None)):
            if training.epochs is not None and is_set:
                problem = f"cannot be combined with data.{field}, whose text is not counted before the training"
                raise UserError("training.epochs", training.epochs, problem, "set training.steps instead")
        stop_after = self.evaluation.stop_after
        problem = "counts evaluations during the run, but the run is evaluated at its end only"
        fix = "set evaluation.every to a number of steps, or evaluation.stop_after = 0"
        require(not stop_after or self.evaluation.every > 0, "evaluation.stop_after", stop_after, problem, fix)
        _check_kept_checkpoints(self.checkpoint, self.evaluation.every)
        if self.metrics.gradient_noise_every:
            _check_gradient_noise(self)
        check_components(self)
        if self.swarm is not None:
            check_swarm_run(self, self.swarm)
        check_phases(self)
        check_preference(self)
        check_distillation(self)
        return self


def _check_tuning(run: RunSpec) -> None:
    """Raise UserError if parameters cannot be frozen, or a pattern or target is wrong."""
    freeze = run.training.freeze
    adapter = run.adapter
    if not freeze and adapter is None:
        return
    field, value = ("training.freeze", list(freeze)) if freeze else ("adapter.rank", adapter and adapter.rank)
    unsupported = (
        (run.swarm is not None, "a swarm"),
        (run.model.implementation is not None, "model.implementation: the network sets requires_grad itself"),
    )
    for is_set, what in unsupported:
        problem = f"is not supported with {what}"
        require(not is_set, field, value, problem, f"remove {field.partition('.')[0] if adapter else field}")
    names = list(model_parameters(run.model))
    if adapter is not None:
        problem = "needs the model that it adapts"
        is_complete = adapter.from_peft is None or run.model.from_hf is not None
        require(is_complete, "adapter.from_peft", adapter.from_peft, problem, "set model.from_hf")
        products = adaptable_products(run.model)
        of_experts = [name for name, linear in products.items() if isinstance(linear, GroupedLinear)]
        problem = (
            f"is more than the width of the model, {run.model.hidden_size:,}, so that A and B are no low-rank factors"
        )
        require(adapter.rank <= run.model.hidden_size, "adapter.rank", adapter.rank, problem, "use a rank such as 16")
        check_adapter(adapter, list(products), of_experts)
        check_patterns("adapter.train", adapter.train, names)
        check_base_dtype(adapter, model_parameters(run.model))
    check_freeze(freeze, names)
    if all(run.model.tuning.freezes(name) for name in names):
        problem = "matches all parameters that the run would train"
        raise UserError("training.freeze", list(freeze), problem, "remove some of the patterns")


def _flatten(table: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of a nested table with their dotted names, without the files that name components."""
    for name, value in table.items():
        if isinstance(value, dict):
            yield from _flatten(value, f"{prefix}{name}.")
        elif name != "named_in":
            yield f"{prefix}{name}", value


def _check_kept_checkpoints(checkpoint: CheckpointSpec, evaluation_every: int) -> None:
    """Raise UserError if no checkpoint may be at a step that is to be kept, or none has a held-out loss."""
    keep = checkpoint.keep
    every = checkpoint.every
    if every == "auto" or every == 0:
        for field, value in (("every", keep.every), ("best", keep.best)):
            problem = f"needs checkpoints at known steps, but checkpoint.every is {every!r}"
            require(not value, f"checkpoint.keep.{field}", value, problem, "set checkpoint.every to a number of steps")
        return
    if keep.every % every:
        problem = f"is not a multiple of checkpoint.every ({every})"
        nearest_multiple = max(1, round(keep.every / every)) * every
        raise UserError("checkpoint.keep.every", keep.every, problem, f"use {nearest_multiple}")
    if keep.best and (not evaluation_every or every % evaluation_every):
        interval = f"every {evaluation_every} steps" if evaluation_every else "at its end only"
        problem = "needs the held-out loss (validation loss) of each checkpoint, but the run is evaluated " + interval
        fix = f"set evaluation.every = {every}, as checkpoint.every, or a divisor of it"
        raise UserError("checkpoint.keep.best", keep.best, problem, fix)


def _check_gradient_noise(run: RunSpec) -> None:
    """Raise UserError if gradients of a part of a step's rows are not defined, or the step cannot be divided."""
    field = "metrics.gradient_noise_every"
    every = run.metrics.gradient_noise_every
    fix = f"set {field} = 0"
    if run.training.tokens_per_step == run.training.seq_len:
        problem = "compares gradients of two batches, but a step has one sequence"
        raise UserError(field, every, problem, f"increase training.tokens_per_step, or {fix}")
    unsupported = (
        (run.model.moe is not None, "model.moe, whose balance loss counts all tokens"),
        (run.layout.data_parallel == "parameter_server", 'layout.data_parallel = "parameter_server"'),
        (run.layout.gradient_compression == "powersgd", 'layout.gradient_compression = "powersgd", which has a state'),
        (run.swarm is not None, "a swarm"),
    )
    for is_set, what in unsupported:
        require(not is_set, field, every, f"is not supported with {what}", fix)


def require_settings_of_weights(run: RunSpec) -> None:
    """Raise UserError if pretrained weights would be trained with a new tokenizer, or with Muon's rate for new weights.

    Planning needs neither.
    """
    if run.model.from_hf is None:
        return
    optimizer = run.optimizer
    if optimizer.name == "muon" and "muon_learning_rate" not in optimizer.model_fields_set:
        problem = "is a rate for new weights, not for those of model.from_hf"
        fix = "set optimizer.muon_learning_rate"
        raise UserError("optimizer.muon_learning_rate", optimizer.muon_learning_rate, problem, fix)
    if run.data.tokenizer == "bpe":
        problem = "would train a new tokenizer, but the weights of model.from_hf require their own"
        fix = "set data.tokenizer to the tokenizer.json of these weights"
        raise UserError("data.tokenizer", run.data.tokenizer, problem, fix)
