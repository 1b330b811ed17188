"""Held-out losses of a checkpoint, by source, in any layout."""

from __future__ import annotations

import torch

from phalanx.parallel.comm.objects import rank_and_world_size
from phalanx.runs.create import read_run_directory
from phalanx.runs.metrics import MetricsRecord
from phalanx.spec.errors import UserError
from phalanx.spec.layout import Layout
from phalanx.spec.phases import source_shares
from phalanx.spec.recovery import RecoverySpec
from phalanx.train.checkpoint.load_in_ranks import inference_run
from phalanx.train.checkpoint.load_model import TrainedWeights
from phalanx.train.checkpoint.state import load_checkpoint
from phalanx.train.training_data import open_training_data


def check_held_out(found: TrainedWeights) -> None:
    """Raise UserError for a run without held-out losses of a text, or with a network of its own."""
    problem = ""
    if found.checkpoint is None:
        problem = "is a swarm, which has no held-out text"
    elif found.run.model.implementation is not None:
        problem = "has a network of its own, which is evaluated while it trains only"
    elif found.run.preference is not None:
        problem = "was trained on preferences, which are evaluated while it trains only"
    if problem:
        fix = "name --tasks, or see phalanx report"
        raise UserError("RUN_DIR", str(found.directory), problem, fix)


def evaluate_held_out(found: TrainedWeights, layout: Layout | None, device: torch.device) -> MetricsRecord:
    """Return the evaluation of a checkpoint as its training recorded it, under a layout; None: in this process.

    A collective: every rank must call it. Raises UserError as `inference_run` does."""
    from phalanx.train.trainer import Trainer

    check_held_out(found)
    assert found.checkpoint is not None
    run = inference_run(found, layout or Layout(), rank_and_world_size()[1]).replace(recovery=RecoverySpec())
    started, prepared = read_run_directory(found.directory, trust=True)
    trainer = Trainer(run, open_training_data(run, prepared, fresh=False), found.directory, device)
    trainer.source_shares = source_shares(started)
    load_checkpoint(found.checkpoint, trainer.strategy, [])
    return trainer.evaluate()
