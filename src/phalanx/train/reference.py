"""Log-probabilities of answers by the reference of a run on preferences, which is the run with its initial weights.

They are computed once, before the first step, by the run's own layout: all ranks share the pairs as in an evaluation.
No second model is in memory then, nor computes anything in a step. The file in the run directory serves every restart.

Why: `docs/design/decisions/preference-pairs.md`."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.data.indexed_dataset import IndexedDataset
from phalanx.data.loader import evaluation_batches
from phalanx.parallel.comm.objects import broadcast_from_rank0
from phalanx.runs.reference_log_probs import (
    ReferenceIdentity,
    ReferenceLogProbs,
    lost_reference,
    read_reference,
    write_reference,
)

if TYPE_CHECKING:
    from phalanx.train.learner import MicroBatch
    from phalanx.train.trainer import Trainer


def open_reference(trainer: Trainer) -> ReferenceLogProbs:
    """Read the log-probabilities of a run's pairs, or compute and write them before its first step (a collective).

    Raises UserError if a run that resumes has other pairs, or has lost the file."""
    identity = reference_identity(trainer)
    found = broadcast_from_rank0(partial(read_reference, trainer.directory))
    if found is not None and trainer.step > 0:
        # The weights that the run started from may be gone; those of the file are its reference.
        identity = ReferenceIdentity(identity.train, identity.held_out, found[0].weights)
    if found is not None and found[0] == identity:
        return found[1]
    if trainer.step > 0:
        problem = "is missing or damaged" if found is None else "has been computed for other pairs"
        raise lost_reference(trainer.directory, problem)
    started_at = time.perf_counter()
    assert trainer.corpus.train is not None
    datasets = trainer.corpus.train, trainer.corpus.held_out
    values = ReferenceLogProbs(*(answer_log_probs(trainer, dataset) for dataset in datasets))

    def write() -> None:
        trainer.directory.mkdir(parents=True, exist_ok=True)
        write_reference(trainer.directory, identity, values)

    # An error of rank 0, such as a full disk, is one of all ranks.
    broadcast_from_rank0(write)
    if trainer.is_main:
        num_pairs = sum(len(dataset) // 2 for dataset in datasets)
        seconds = time.perf_counter() - started_at
        trainer.progress.log(f"reference: log-probabilities of {num_pairs:,} pairs in {seconds:.1f} s")
    return values


def reference_identity(trainer: Trainer) -> ReferenceIdentity:
    """Return what determines the log-probabilities of a run's pairs."""
    run = trainer.run
    assert trainer.corpus.train is not None
    # The length of sequences determines which answers are truncated or left out.
    length = "" if run.data.too_long == "error" else f" {run.data.too_long} {run.training.seq_len}"
    train, held_out = (f"{each.fingerprint()}{length}" for each in (trainer.corpus.train, trainer.corpus.held_out))
    adapter = None if run.adapter is None else run.adapter.model_dump(mode="json")
    weights = json.dumps([run.model.model_dump(mode="json"), adapter, run.training.seed, run.training.precision])
    return ReferenceIdentity(train, held_out, hashlib.blake2b(weights.encode(), digest_size=8).hexdigest())


def answer_log_probs(trainer: Trainer, dataset: IndexedDataset) -> np.ndarray:
    """Return the log-probability of each document's answer by the current weights, fp64 [documents] (a collective)."""
    run = trainer.run
    totals = torch.zeros(len(dataset), dtype=torch.float64, device=trainer.device)

    def add_sums(model: Callable[..., Any], micro: MicroBatch) -> tuple[Tensor, Tensor]:
        sums, auxiliary = trainer.answer_log_probs(model, micro)
        assert micro.pairs is not None
        totals.index_add_(0, micro.pairs.documents, sums)
        return auxiliary.new_zeros(()), auxiliary

    share = (trainer.batch.micro_batch_size, trainer.mesh.dp_rank, trainer.batch.dp_size)
    with trainer.evaluating():
        for batch in evaluation_batches(dataset, run.training.seq_len, *share, too_long=run.data.too_long):
            for micro in trainer.micro_batches(batch):
                trainer.strategy.evaluate_micro_batch(micro, add_sums)
    if trainer.mesh.loss_group is not None:
        with trainer.strategy.comm_wait.measure():
            dist.all_reduce(totals, group=trainer.mesh.loss_group)
    return totals.cpu().numpy()
