"""Phalanx with the complete step of its own trainer, including its logs."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch

from benchmarks.peers.rank import Step
from benchmarks.shapes import STEPS, Shape
from phalanx.data.indexed_dataset import IndexedDataset
from phalanx.data.loader import prefetch
from phalanx.data.tokenizer import byte_tokenizer
from phalanx.train.loggers import open_loggers
from phalanx.train.trainer import Trainer
from phalanx.train.training_data import TrainingData


def build(shape: Shape, layout: str, dataset: IndexedDataset) -> Step:
    run = shape.run(layout)
    kept = tempfile.TemporaryDirectory(prefix="phalanx-overhead-")
    directory = Path(kept.name)
    corpus = TrainingData(dataset, dataset, byte_tokenizer())
    trainer = Trainer(run, corpus, directory, torch.device("cpu"), peak_flops=1e11)
    batches = prefetch(trainer.loader, 0, STEPS)
    logs = open_loggers(directory, 0) if trainer.is_main else []

    def step(_: object = kept) -> float:  # keeps the directory until the function is deleted
        record = trainer.train_step(batches)
        for log in logs:
            log.write(record)
        return float(record["loss"])

    return step
