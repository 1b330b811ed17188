"""Evaluation of a model on held-out text, over all ranks."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.data.checked_loader import check_ids
from phalanx.data.loader import evaluation_batches
from phalanx.data.packing import IGNORE_INDEX, Batch
from phalanx.runs.metrics import MetricsRecord
from phalanx.train.learner import MicroBatch
from phalanx.train.resumable import ResumableLearner


@torch.no_grad()
def evaluate(learner: ResumableLearner, micro_batches: Callable[[Batch], list[MicroBatch]]) -> MetricsRecord:
    """Return the loss on the held-out text, in nats per token and bits per byte.

    With experts, the record also has the number of training tokens that chose each expert, between the previous
    evaluation and `ExpertCounts.start_interval`."""
    spec = learner.run.evaluation
    started_at = time.perf_counter()
    learner.strategy.drain_pending_updates()
    token_bytes = torch.from_numpy(learner.corpus.tokenizer.token_bytes()).to(learner.device)
    sums = torch.zeros(3, dtype=torch.float64, device=learner.device)
    batches = evaluation_batches(
        learner.corpus.held_out,
        learner.run.training.seq_len,
        learner.batch.micro_batch_size,
        rank=learner.mesh.dp_rank,
        ranks=learner.batch.dp_size,
        limit_tokens=spec.tokens,
        mask_documents=learner.run.data.mask_documents,
    )
    learner.module.eval()
    for number, batch in enumerate(batches if learner.strategy.runs_model else ()):
        check_ids(
            batch,
            "data.held_out",
            learner.corpus.held_out.prefix,
            vocab_size=learner.run.model.vocab_size,
            locate=partial("row {1} of evaluation batch {0}".format, number),
        )
        for micro in micro_batches(batch):
            loss_sum = learner.strategy.evaluate_micro_batch(micro, learner.compute_held_out_loss)
            # Not targets[is_counted]: the host would wait for its length.
            is_counted = (micro.targets != IGNORE_INDEX) & learner.strategy.has_loss
            num_bytes = (token_bytes[micro.targets.where(is_counted, 0)] * is_counted).sum()
            sums += torch.stack([loss_sum.double(), is_counted.sum().double(), num_bytes.double()])
    learner.module.train()
    learner.strategy.reshard_parameters()
    loss, tokens, text_bytes = (float(x) for x in _sum_over_ranks(learner, sums))
    record: MetricsRecord = {
        "step": learner.step,
        "held_out_loss": loss / tokens,
        "held_out_bits_per_byte": loss / math.log(2) / text_bytes,
    }
    if learner.experts.layers:
        record["expert_tokens"] = learner.experts.intervals[1].long().tolist()
    record |= {"held_out_tokens": int(tokens), "held_out_set": _held_out_set(learner, int(tokens))}
    return record | {"evaluation_seconds": time.perf_counter() - started_at}


def _held_out_set(learner: ResumableLearner, tokens: int) -> str:
    """Return an identifier of the evaluated tokens and of their division into sequences, which the loss depends on."""
    run = learner.run
    names = (learner.corpus.held_out.fingerprint(), tokens, run.training.seq_len, run.data.mask_documents)
    return hashlib.blake2b(repr(names).encode(), digest_size=8).hexdigest()


def evaluation_message(evaluation: MetricsRecord) -> str:
    """Return a line about an evaluation."""
    return (
        f"held-out loss {evaluation['held_out_loss']:.4f} nats/token, "
        f"{evaluation['held_out_bits_per_byte']:.4f} bits/byte over {evaluation['held_out_tokens']:,} tokens"
    )


def _sum_over_ranks(learner: ResumableLearner, values: Tensor) -> Tensor:
    if learner.mesh.loss_group is not None:
        with learner.strategy.comm_wait.measure():
            dist.all_reduce(values, group=learner.mesh.loss_group)
    return values
