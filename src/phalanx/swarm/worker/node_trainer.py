"""Trainer of a node on each of its ranks: built from the shared weights, for the experts that the node trains."""

from __future__ import annotations

from dataclasses import replace

import torch

from phalanx.swarm.tensor_files import TensorFile
from phalanx.swarm.worker.exchange import RoundExchange
from phalanx.swarm.worker.replica import GradientCapture
from phalanx.train.trainer import Trainer
from phalanx.train.training_data import TrainingData


def build_node_trainer(exchange: RoundExchange, corpus: TrainingData, device: torch.device) -> Trainer:
    """Build the trainer of this rank. It captures gradients in place of a step if the coordinator steps (ddp)."""
    run = exchange.run
    # The coordinator clips the mean gradient instead.
    if exchange.swarm.sends_gradients:
        run = run.replace(optimizer=run.optimizer.replace(max_grad_norm=0.0))
    with TensorFile(exchange.base) as base:

        def read_weight(name: str, shape: torch.Size) -> torch.Tensor:
            return base.read_tensor(name)

        corpus = replace(corpus, weights=read_weight)
        trainer = Trainer(run, corpus, exchange.directory, device, trained_experts=exchange.trained_experts)
    if exchange.swarm.sends_gradients:
        trainer.optimizers = [GradientCapture(trainer, exchange.local_weights)]
    return trainer
