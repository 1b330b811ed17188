"""Evaluation of a model on held-out text, over all ranks."""

from __future__ import annotations

import hashlib
import math
import time
from fractions import Fraction
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.data.checked_loader import check_ids
from phalanx.data.indexed_dataset import IndexedDataset
from phalanx.data.loader import evaluation_batches
from phalanx.data.packing import IGNORE_INDEX
from phalanx.data.source_checks import long_held_out
from phalanx.runs.metrics import MetricsRecord, losses_by_source
from phalanx.spec.formatting import format_perplexity
from phalanx.train.training_data import held_out_names

if TYPE_CHECKING:
    from phalanx.train.trainer import Trainer


def evaluate(trainer: Trainer) -> MetricsRecord:
    """Return the loss on the held-out text, in nats per token and bits per byte, or that of held-out pairs.

    With experts, the record also counts the training tokens that chose each expert between the previous evaluation and
    `ExpertCounts.start_interval`."""
    if trainer.run.preference is not None:
        return _evaluate_pairs(trainer)
    run = trainer.phase.run
    held_out = trainer.corpus.held_out
    started_at = time.perf_counter()
    token_bytes = torch.from_numpy(trainer.corpus.tokenizer.token_bytes()).to(trainer.device)
    held_out_sets = _held_out_sets(trainer)
    sums = torch.zeros(len(held_out_sets), 3, dtype=torch.float64, device=trainer.device)
    share = (trainer.batch.micro_batch_size, trainer.mesh.dp_rank, trainer.batch.dp_size)
    with trainer.evaluating():
        for set_sums, (dataset, limit), too_long in zip(sums, held_out_sets, long_held_out(run.data), strict=True):
            batches = evaluation_batches(
                dataset, run.training.seq_len, *share, limit, run.data.mask_documents, too_long
            )
            for number, batch in enumerate(batches if trainer.strategy.runs_model else ()):
                locate = partial("row {1} of evaluation batch {0}".format, number)
                check_ids(batch, "data.held_out", dataset.prefix, run.model.vocab_size, locate)
                for micro in trainer.micro_batches(batch):
                    loss_sum = trainer.strategy.evaluate_micro_batch(micro, trainer.compute_held_out_loss)
                    # `targets[is_counted]` would make the host wait for its length.
                    is_counted = (micro.targets != IGNORE_INDEX) & trainer.strategy.has_loss
                    num_bytes = (token_bytes[micro.targets.where(is_counted, 0)] * is_counted).sum()
                    set_sums += torch.stack([loss_sum.double(), is_counted.sum().double(), num_bytes.double()])
    sums = _sum_over_ranks(trainer, sums).cpu()
    loss, tokens, text_bytes = sums.sum(dim=0).tolist()
    record: MetricsRecord = {
        "step": trainer.step,
        "held_out_loss": loss / tokens,
        "held_out_bits_per_byte": loss / math.log(2) / text_bytes,
    }
    if trainer.corpus.held_out_sources:
        for name, (set_loss, set_tokens, _) in zip(held_out_names(run.data), sums.tolist(), strict=True):
            record[f"held_out_loss/{name}"] = set_loss / set_tokens
    if trainer.experts.layers:
        record["expert_tokens"] = trainer.experts.intervals[1].long().tolist()
    # The loss depends on the evaluated tokens, and on their division into sequences.
    names = (held_out.fingerprint(), int(tokens), run.training.seq_len, run.data.mask_documents)
    tokens_of_sets = sums[:, 1].tolist() if len(held_out_sets) > 1 else ""
    held_out_set = hashlib.blake2b(f"{names}{tokens_of_sets}".encode(), digest_size=8).hexdigest()
    record |= {"held_out_tokens": int(tokens), "held_out_set": held_out_set}
    return record | {"evaluation_seconds": time.perf_counter() - started_at}


def _evaluate_pairs(trainer: Trainer) -> MetricsRecord:
    """Return the mean loss of held-out pairs, the share of correct ones, and the mean difference of rewards."""
    run = trainer.phase.run
    dataset = trainer.corpus.held_out
    started_at = time.perf_counter()
    trainer.prepare_reference()
    assert trainer.reference is not None
    sums = torch.zeros(5, dtype=torch.float64, device=trainer.device)
    share = (trainer.batch.micro_batch_size, trainer.mesh.dp_rank, trainer.batch.dp_size)
    limit = run.evaluation.tokens
    with trainer.evaluating():
        for batch in evaluation_batches(dataset, run.training.seq_len, *share, limit, too_long=run.data.too_long):
            for micro in trainer.micro_batches(batch, trainer.reference.held_out):
                trainer.strategy.evaluate_micro_batch(micro, trainer.compute_losses)
                if micro.pairs is not None and micro.pairs.results:
                    sums[:4] += micro.pairs.results[0]
                    sums[4] += (micro.targets != IGNORE_INDEX).sum()
    pairs, correct, margins, loss, tokens = _sum_over_ranks(trainer, sums).tolist()
    record: MetricsRecord = {
        "step": trainer.step,
        "held_out_loss": loss / pairs,
        "held_out_pair_accuracy": correct / pairs,
        "held_out_reward_margin": margins / pairs,
        "held_out_pairs": round(pairs),
    }
    if trainer.experts.layers:
        record["expert_tokens"] = trainer.experts.intervals[1].long().tolist()
    names = (dataset.fingerprint(), round(pairs), run.training.seq_len, run.data.too_long)
    held_out_set = hashlib.blake2b(f"{names}".encode(), digest_size=8).hexdigest()
    record |= {"held_out_tokens": round(tokens), "held_out_set": held_out_set}
    return record | {"evaluation_seconds": time.perf_counter() - started_at}


def _held_out_sets(trainer: Trainer) -> list[tuple[IndexedDataset, int]]:
    """Return each held-out text with the limit of its tokens, 0 for none.

    Named sets share the limit equally, the held-out parts of a mixture like the sources the tokens of the run."""
    limit = trainer.run.evaluation.tokens
    parts = trainer.corpus.held_out_sources
    if not parts:
        return [(trainer.corpus.held_out, limit)]
    sets = trainer.run.data.held_out_sets
    shares = [Fraction(1, len(sets))] * len(sets) if sets else trainer.source_shares
    limits = [max(1, round(limit * share)) if limit else 0 for share in shares]
    return list(zip(parts, limits, strict=True))


def evaluation_message(evaluation: MetricsRecord) -> str:
    """Return a line about an evaluation."""
    loss = evaluation["held_out_loss"]
    if "held_out_pairs" in evaluation:
        return (
            f"held-out loss (validation) {loss:.4f}, accuracy {evaluation['held_out_pair_accuracy']:.1%}, "
            f"reward margin {evaluation['held_out_reward_margin']:.4f} over {evaluation['held_out_pairs']:,} pairs"
        )
    parts = ", ".join(f"{name} {value:.4f}" for name, value in losses_by_source(evaluation, "held_out_loss").items())
    return (
        f"held-out loss (validation) {loss:.4f} nats/token, perplexity {format_perplexity(loss)}, "
        f"{evaluation['held_out_bits_per_byte']:.4f} bits/byte over {evaluation['held_out_tokens']:,} tokens"
        f"{f' ({parts})' if parts else ''}"
    )


def _sum_over_ranks(trainer: Trainer, values: Tensor) -> Tensor:
    if trainer.mesh.loss_group is not None:
        with trainer.strategy.comm_wait.measure():
            dist.all_reduce(values, group=trainer.mesh.loss_group)
    return values
