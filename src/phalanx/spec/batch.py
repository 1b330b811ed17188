"""Plan of a global batch: sequences per rank, micro-batches, and the scale of the learning rate."""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.spec.base import divisors
from phalanx.spec.errors import UserError
from phalanx.spec.run import RunSpec

MICRO_BATCH_TOKENS = 16_384
"""Maximum tokens of a default micro-batch: enough to keep a device busy."""
LOGITS_BYTES = 2**31
"""Maximum bytes of a default micro-batch's logits, in fp32 if the loss needs all of them, else in 16 bits.

Chunks of the loss need less, but models with large vocabularies are large, and their blocks need the memory."""
MIN_MICRO_BATCHES_PER_STAGE = 4
"""Default minimum of micro-batches per step for each pipeline rank. With it, 1F1B is idle for a fifth of the step."""
STRATEGIES_WITH_UNEVEN_BATCHES = ("ddp", "zero1", "parameter_server")
"""Data-parallel strategies whose ranks may run different numbers of forward passes."""


@dataclass(frozen=True, kw_only=True)
class BatchPlan:
    """Division of one optimizer update: sequences = micro_batch x dp x accumulation."""

    global_batch_size: int
    """Sequences in one optimizer update, over all ranks."""
    dp_size: int
    """Ranks that read different data."""
    micro_batch_size: int
    """Maximum number of sequences per rank in one forward pass."""
    gradient_accumulation_steps: int
    """Maximum number of forward passes per rank in one optimizer update."""
    learning_rate_scale: float = 1.0
    """Factor applied to all learning rates."""

    @property
    def has_equal_micro_batches(self) -> bool:
        """True if every rank has the same number of full micro-batches."""
        return self.global_batch_size % (self.dp_size * self.micro_batch_size) == 0


def needs_all_logits(run: RunSpec) -> bool:
    """Return whether the loss needs all logits of a micro-batch, as that of a user's loss or network does."""
    return run.training.loss is not None or run.model.implementation is not None


def plan_batch(run: RunSpec, dp: int) -> BatchPlan:
    """Divide the tokens of a step among `dp` ranks: global batch = micro-batch x ranks x accumulation.

    Ranks that reduce gradients once per step may have uneven shares. Raises UserError if the batch cannot be divided,
    or the layout does not support the division.
    """
    training = run.training
    sequences = training.tokens_per_step // training.seq_len
    base_dp = training.base_dp_size or dp
    has_scaling = training.batch_scaling != "keep"
    if has_scaling != (training.base_dp_size is not None):
        relation = "is required" if has_scaling else "cannot be combined"
        problem = f'{relation} with training.batch_scaling = "{training.batch_scaling}"'
        fix = "set both training.base_dp_size and training.batch_scaling (linear or sqrt), or neither"
        raise UserError("training.base_dp_size", training.base_dp_size, problem, fix)
    if training.base_dp_size is not None and sequences % base_dp:
        problem = f"does not divide the {sequences} sequences of a step"
        fix = f"use one of {', '.join(map(str, divisors(sequences)))}"
        raise UserError("training.base_dp_size", base_dp, problem, fix)
    if training.base_dp_size is not None:
        sequences = sequences // base_dp * dp
    nearest_tokens = max(1, round(sequences / dp)) * dp * training.seq_len
    if sequences % dp and (run.layout.data_parallel not in STRATEGIES_WITH_UNEVEN_BATCHES or sequences < dp):
        problem = f"is {sequences} sequences of {training.seq_len} tokens, which {dp} data-parallel ranks cannot divide"
        fix = f"use training.tokens_per_step = {nearest_tokens}"
        raise UserError("training.tokens_per_step", training.tokens_per_step, problem, fix)
    sequences_per_rank = -(-sequences // dp)
    micro_batch = _choose_micro_batch(run, sequences_per_rank, dp, is_even=sequences % dp == 0)
    ratio = {"keep": 1.0, "linear": dp / base_dp, "sqrt": (dp / base_dp) ** 0.5}[training.batch_scaling]
    return BatchPlan(
        global_batch_size=sequences,
        dp_size=dp,
        micro_batch_size=micro_batch,
        gradient_accumulation_steps=-(-sequences_per_rank // micro_batch),
        learning_rate_scale=ratio,
    )


def _choose_micro_batch(run: RunSpec, sequences_per_rank: int, dp: int, is_even: bool) -> int:
    """Return the micro-batch size in sequences: the layout's, or the maximum by default."""
    training = run.training
    logit_bytes = 4 if needs_all_logits(run) else 2
    micro_batch_tokens = min(MICRO_BATCH_TOKENS, LOGITS_BYTES // (logit_bytes * run.model.vocab_size))
    max_micro_batch = max(1, micro_batch_tokens // training.seq_len)
    if run.layout.pp > 1:  # a pipeline needs several micro-batches per rank to stay busy
        stage_share = sequences_per_rank // (MIN_MICRO_BATCHES_PER_STAGE * run.layout.pp)
        max_micro_batch = max(1, min(max_micro_batch, stage_share))
    allowed = divisors(sequences_per_rank) if is_even else list(range(1, sequences_per_rank + 1))
    micro_batch = run.layout.micro_batch_size or max((n for n in allowed if n <= max_micro_batch), default=1)
    if micro_batch not in allowed:
        problem = f"does not divide the {sequences_per_rank} sequences of a rank in a step"
        raise UserError("layout.micro_batch_size", micro_batch, problem, f"use one of {', '.join(map(str, allowed))}")
    if run.layout.ddp_static_graph and dp * run.layout.cp != 1 and micro_batch != sequences_per_rank:
        accumulation = f"gradient accumulation ({sequences_per_rank // micro_batch} micro-batches)"
        problem = f"cannot be combined with {accumulation}, which fails in PyTorch (issue 143580)"
        fix = f"remove it, or set layout.micro_batch_size = {sequences_per_rank}"
        raise UserError("layout.ddp_static_graph", True, problem, fix)
    return micro_batch
