"""Evaluation of a model on held-out text, over all ranks."""

from __future__ import annotations

import hashlib
import math
import time
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.data.checked_loader import check_ids
from phalanx.data.loader import evaluation_batches
from phalanx.data.packing import IGNORE_INDEX
from phalanx.parallel.data.fsdp import reshard_parameters
from phalanx.runs.metrics import MetricsRecord
from phalanx.spec.formatting import format_perplexity

if TYPE_CHECKING:
    from phalanx.train.trainer import Trainer


@torch.no_grad()
def evaluate(trainer: Trainer) -> MetricsRecord:
    """Return the loss on the held-out text, in nats per token and bits per byte.

    With experts, the record also counts the training tokens that chose each expert between the previous evaluation and
    `ExpertCounts.start_interval`."""
    run = trainer.run
    held_out = trainer.corpus.held_out
    started_at = time.perf_counter()
    trainer.strategy.drain_pending_updates()
    token_bytes = torch.from_numpy(trainer.corpus.tokenizer.token_bytes()).to(trainer.device)
    sums = torch.zeros(3, dtype=torch.float64, device=trainer.device)
    share = (trainer.batch.micro_batch_size, trainer.mesh.dp_rank, trainer.batch.dp_size)
    batches = evaluation_batches(held_out, run.training.seq_len, *share, run.evaluation.tokens, run.data.mask_documents)
    trainer.module.eval()
    for number, batch in enumerate(batches if trainer.strategy.runs_model else ()):
        locate = partial("row {1} of evaluation batch {0}".format, number)
        check_ids(batch, "data.held_out", held_out.prefix, run.model.vocab_size, locate)
        for micro in trainer.micro_batches(batch):
            loss_sum = trainer.strategy.evaluate_micro_batch(micro, trainer.compute_held_out_loss)
            # `targets[is_counted]` would make the host wait for its length.
            is_counted = (micro.targets != IGNORE_INDEX) & trainer.strategy.has_loss
            num_bytes = (token_bytes[micro.targets.where(is_counted, 0)] * is_counted).sum()
            sums += torch.stack([loss_sum.double(), is_counted.sum().double(), num_bytes.double()])
    trainer.module.train()
    reshard_parameters(trainer.module)
    loss, tokens, text_bytes = (float(x) for x in _sum_over_ranks(trainer, sums))
    record: MetricsRecord = {
        "step": trainer.step,
        "held_out_loss": loss / tokens,
        "held_out_bits_per_byte": loss / math.log(2) / text_bytes,
    }
    if trainer.experts.layers:
        record["expert_tokens"] = trainer.experts.intervals[1].long().tolist()
    # The loss depends on the evaluated tokens, and on their division into sequences.
    names = (held_out.fingerprint(), int(tokens), run.training.seq_len, run.data.mask_documents)
    held_out_set = hashlib.blake2b(repr(names).encode(), digest_size=8).hexdigest()
    record |= {"held_out_tokens": int(tokens), "held_out_set": held_out_set}
    return record | {"evaluation_seconds": time.perf_counter() - started_at}


def evaluation_message(evaluation: MetricsRecord) -> str:
    """Return a line about an evaluation."""
    loss = evaluation["held_out_loss"]
    return (
        f"held-out loss (validation) {loss:.4f} nats/token, perplexity {format_perplexity(loss)}, "
        f"{evaluation['held_out_bits_per_byte']:.4f} bits/byte over {evaluation['held_out_tokens']:,} tokens"
    )


def _sum_over_ranks(trainer: Trainer, values: Tensor) -> Tensor:
    if trainer.mesh.loss_group is not None:
        with trainer.strategy.comm_wait.measure():
            dist.all_reduce(values, group=trainer.mesh.loss_group)
    return values
