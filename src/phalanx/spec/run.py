"""A run: model, data, training, layout and machines, as one TOML file describes them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from phalanx.spec.base import Spec, require
from phalanx.spec.cluster import ClusterSpec
from phalanx.spec.layout import Layout
from phalanx.spec.model import ModelSpec
from phalanx.spec.recovery import RecoverySpec
from phalanx.spec.swarm import SwarmSpec, check_swarm_run

END_OF_TEXT = "<|endoftext|>"
"""Token that ends a document, in every tokenizer file that Phalanx writes."""
BYTES_TOKENIZER = {"type": "bytes"}
"""Content of tokenizer.json for the byte tokenizer."""
BYTES_VOCAB = 257
"""Vocabulary size of the byte tokenizer: ids 0 to 255 are the bytes of UTF-8, 256 ends a document."""


class DataSpec(Spec):
    """Text, and how it becomes tokens."""

    train: list[str] = ["stdlib"]  # noqa: RUF012
    """Text to learn from: files, directories or glob patterns of text, JSON records (lines or an array, whatever the
    file's name) or .parquet, also compressed (.gz, .zst, .bz2, .xz); `hf:NAME_OR_DIR` for a Hugging Face dataset;
    "stdlib", the Python library's own source; or prefixes of Megatron .bin/.idx pairs."""
    held_out: list[str] = []  # noqa: RUF012
    """Text to evaluate on, written like `train`. Empty: documents are held out of `train` by the names of their files,
    and of pairs the end of each."""
    held_out_fraction: float = Field(0.05, gt=0, lt=1)
    """Share of documents held out where `held_out` is empty."""
    text_key: str = "text"
    """Field of a JSON record or Parquet row that holds the text."""
    tokenizer: str = "bpe"
    """"bpe" trains one on the text; "bytes"; or the path of a Hugging Face tokenizer.json."""
    tokenizer_vocab: int = Field(2048, ge=BYTES_VOCAB)
    """Vocabulary of the BPE that `tokenizer = "bpe"` trains."""
    streaming: bool = False
    """Tokenize while training instead of once before it. Every rank then reads all the text."""
    cache: str = "~/.cache/phalanx"
    """Where tokenized text is kept."""
    mask_documents: bool = True
    """Whether documents packed into one sequence are hidden from each other."""


UNDECIDED_STEPS = 2**31 - 1
"""`training.steps` of a run with `training.seconds`, until its first steps have shown how many fit."""


class TrainingSpec(Spec):
    """How long, on how many tokens at a time, and in which arithmetic."""

    steps: int = Field(1000, gt=0)
    """Optimizer updates."""
    seconds: float | None = Field(None, gt=0, examples=[200])
    """In place of `steps`: seconds of training, without evaluation and checkpoints. After the first steps their number,
    and with it the learning rate of each, follows from the measured speed; run.toml of the run directory keeps it."""
    seq_len: int = Field(256, gt=1)
    """Tokens in a sequence (T)."""
    tokens_per_step: int = Field(16_384, gt=0)
    """Tokens in one optimizer update over all ranks. Micro-batch and accumulation follow from it."""
    batch_scaling: Literal["keep", "linear", "sqrt"] = "keep"
    """What other ranks than `base_dp_size` change: keep takes the same tokens per step, and accumulation changes;
    linear (arXiv 1706.02677) and sqrt (arXiv 1404.5997) take the same tokens per rank, and learning rates are
    multiplied by the ratio of ranks or by its root. A run that returns with other ranks warms up to its new rates."""
    base_dp_size: int | None = Field(None, gt=0, examples=[8])
    """The data-parallel ranks that `tokens_per_step` and the learning rates are meant for (linear and sqrt)."""
    precision: Literal["bf16", "fp32", "fp64"] = "bf16"
    """bf16 computes in bf16 over fp32 parameters, gradients and optimizer state; fp64 is for proofs; "auto" leaves the
    choice of bf16 or fp32 to a short measurement."""
    auto_precision: bool = False
    """Whether a measurement is to choose the precision: what `precision = "auto"` sets."""
    seed: int = Field(1234, ge=0)
    """Decides initial weights and the order of the text: the same seed gives the same run in every layout."""
    compile: bool = False
    """Compile each block with torch.compile."""
    deterministic: bool = False
    """Use only kernels that give the same bits each time, so that a restarted run on GPUs learns what it would have
    learned, to the bit; slower there. CPUs give the same bits anyway."""
    max_nonfinite_steps: int = Field(5, gt=0)
    """Stop after this many steps in a row whose gradient is not finite; each such step is skipped and counted."""
    collective_timeout_seconds: float = Field(600, gt=0)
    """How long a collective may take before the run stops."""
    replica_check_interval: int = Field(0, ge=0)
    """Steps between comparisons of what ranks must hold alike, bit by bit, to find silent corruption; 0 never."""

    @model_validator(mode="before")
    @classmethod
    def _leave_steps_undecided(cls, table: object) -> object:
        """Let the number of steps be undecided where the time is given."""
        if not isinstance(table, dict) or table.get("seconds") is None:
            return table
        steps = table.get("steps", UNDECIDED_STEPS)
        require(
            steps == UNDECIDED_STEPS,
            "seconds",
            table["seconds"],
            problem=f"cannot be combined with training.steps = {steps}",
            fix="remove one of them; on the command line: --set training.steps= or --set training.seconds=",
        )
        return {**table, "steps": UNDECIDED_STEPS}

    @property
    def has_decided_steps(self) -> bool:
        """Return whether it is known how many steps the run has."""
        return self.seconds is None

    @property
    def steps_text(self) -> str:
        """The number of steps, in words where it is not decided."""
        return str(self.steps) if self.has_decided_steps else f"as many as fit into {self.seconds:g} s"


class OptimizerSpec(Spec):
    """The optimizer, and its learning rate over the steps."""

    name: Literal["adamw", "sgd", "muon"] = "adamw"
    """muon uses Muon for the matrices inside blocks and AdamW for the rest."""
    learning_rate: float = Field(3e-3, gt=0)
    """Peak learning rate (AdamW and SGD; with muon, that of the parameters AdamW trains)."""
    muon_learning_rate: float = Field(0.02, gt=0)
    """Peak learning rate of Muon's matrices."""
    weight_decay: float = Field(0.1, ge=0)
    """Decoupled decay of matrices; vectors are not decayed."""
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.95)
    """How much AdamW keeps of its running means of gradients and of their squares."""
    eps: float = Field(1e-8, gt=0)
    """Added to the denominator of AdamW's update."""
    momentum: float = Field(0.95, ge=0, lt=1)
    """Momentum of SGD and Muon."""
    max_grad_norm: float = Field(1.0, ge=0)
    """Largest norm of the whole gradient; 0 does not clip."""
    warmup_steps: int = Field(50, ge=0)
    """Steps in which the learning rate rises linearly to its peak; of a run file without it at most half of all."""
    lr_schedule: Literal["cosine", "linear", "wsd", "none"] = "cosine"
    """After warm-up: cosine or linear to the end, or warm-up, stable, decay (wsd, arXiv 2404.06395)."""
    lr_decay_fraction: float = Field(0.2, gt=0, le=1)
    """Share of the steps in which wsd decays; never more than warm-up leaves."""
    min_lr_ratio: float = Field(0.1, ge=0, le=1)
    """Learning rate at the end as a share of the peak."""

    def warmup_within(self, steps: int) -> int:
        """Return the steps of warm-up of a run of so many: half of them, where `warmup_steps` would leave none."""
        return self.warmup_steps if self.warmup_steps < steps else steps // 2


class EvaluationSpec(Spec):
    """When the held-out loss is measured, and on how much text."""

    every: int = Field(0, ge=0)
    """Steps between evaluations; 0 evaluates at the end only."""
    tokens: int = Field(0, ge=0)
    """Held-out tokens per evaluation, from the start; 0 takes all."""
    prompt: str = ""
    """If given, a sample is generated from it at the end."""
    samples: int = Field(1, gt=0)
    """Samples from the prompt: the last at the end, those before it at even distances."""


class CheckpointSpec(Spec):
    """How often the run is saved, so that `--resume` can continue it."""

    every: Annotated[int, Field(ge=0)] | Literal["auto"] = 500
    """Steps between checkpoints, beside the one at the end; 0 saves at the end (or when stopped) only. "auto" takes the
    interval of the best goodput (Daly, Future Generation Computer Systems 22, 2006), by what a save costs training
    (which waits for it, and is slow behind it) and how often the run fails: as cluster.failures_per_device_hour has it,
    and from its second failure on as it has failed so far. The first save is soon, to see what it costs."""
    keep: int = Field(2, gt=0)
    """Newest complete checkpoints to keep."""


class MetricsSpec(Spec):
    """What is written down of each step, and where."""

    every: int = Field(1, gt=0)
    """Steps between lines of metrics.jsonl."""
    per_rank_records: bool = True
    """Whether every rank notes each step: how long it computed and waited, for `phalanx report`."""
    wandb: str | None = Field(None, examples=["phalanx"])
    """Project to log to in Weights & Biases (`pip install 'phalanx[wandb]'`)."""


class RunSpec(Spec):
    """Everything that defines a run. Every field has a default but the model's shape, which a preset gives."""

    name: str = Field("run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Name of the run directory."""
    output_dir: str = "runs"
    """Directory in which run directories are made."""
    model: ModelSpec
    """What is trained."""
    data: DataSpec = DataSpec()
    """What it learns from."""
    training: TrainingSpec = TrainingSpec()
    """How long, and in which arithmetic."""
    optimizer: OptimizerSpec = OptimizerSpec()
    """How weights follow gradients."""
    layout: Layout = Layout()
    """How the work is laid over ranks; `layout = "auto"` leaves it to the planner."""
    auto_layout: bool = False
    """Whether the planner is to choose the layout: what `layout = "auto"` sets."""
    cluster: ClusterSpec = ClusterSpec()
    """What it runs on."""
    evaluation: EvaluationSpec = EvaluationSpec()
    """When the held-out loss is measured."""
    checkpoint: CheckpointSpec = CheckpointSpec()
    """How often the run is saved."""
    recovery: RecoverySpec = RecoverySpec()
    """What becomes of it when it breaks."""
    metrics: MetricsSpec = MetricsSpec()
    """What is written down."""
    swarm: SwarmSpec | None = None
    """How nodes joined by slow links learn it (`phalanx swarm`)."""

    def on_device(self, device: str) -> RunSpec:
        """Return this run with `cluster.device` set: "auto" does not say which device it uses."""
        return self.model_copy(update={"cluster": self.cluster.model_copy(update={"device": device})})

    @model_validator(mode="after")
    def _check(self) -> RunSpec:
        training = self.training
        nearest_multiple = max(1, round(training.tokens_per_step / training.seq_len)) * training.seq_len
        require(
            training.tokens_per_step % training.seq_len == 0,
            "training.tokens_per_step",
            training.tokens_per_step,
            problem=f"is not a multiple of training.seq_len ({training.seq_len})",
            fix=f"use {nearest_multiple}",
        )
        if self.model.position_embedding == "learned":
            require(
                training.seq_len <= self.model.max_seq_len,
                "training.seq_len",
                training.seq_len,
                problem=f"is longer than the model's learned positions (model.max_seq_len = {self.model.max_seq_len})",
                fix=f"use at most {self.model.max_seq_len}",
            )
        require(
            not self.recovery.max_rollbacks or self.layout.max_staleness is None,
            "recovery.max_rollbacks",
            self.recovery.max_rollbacks,
            problem="needs ranks that are at the same step, and workers of layout.max_staleness are not",
            fix="set it to 0",
        )
        require(
            training.has_decided_steps or self.layout.max_staleness is None,
            "training.seconds",
            training.seconds,
            problem="needs ranks that are at the same step, and workers of layout.max_staleness are not",
            fix="set training.steps in its place",
        )
        require(
            not training.replica_check_interval or self.layout.data_parallel != "parameter_server",
            "training.replica_check_interval",
            training.replica_check_interval,
            problem=(
                'has nothing to compare with layout.data_parallel = "parameter_server": '
                "servers own what workers only borrow"
            ),
            fix="set it to 0",
        )
        if self.swarm is not None:
            check_swarm_run(self, self.swarm)
        return self


def require_tokenizer_of_weights(run: RunSpec) -> None:
    """Raise UserError if a tokenizer would be trained for pretrained weights. Planning needs no tokenizer."""
    require(
        run.model.from_hf is None or run.data.tokenizer != "bpe",
        "data.tokenizer",
        run.data.tokenizer,
        problem="would train a tokenizer, and the weights of model.from_hf have one already",
        fix="give the path of the tokenizer.json that belongs to the weights",
    )
