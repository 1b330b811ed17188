"""The data of a run for the trainer: training tokens, held-out tokens, and the tokenizer."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from phalanx.data.checked_loader import CheckedLoader
from phalanx.data.dataset_loader import open_dataset
from phalanx.data.indexed_dataset import IndexedDataset
from phalanx.data.loader import StepLoader, TokenLoader
from phalanx.data.prepare import PreparedData
from phalanx.data.streaming_loader import StreamingLoader
from phalanx.data.tokenizer import Tokenizer, load_tokenizer
from phalanx.model.extend_vocabulary import extend_vocabulary
from phalanx.model.upcycle import upcycle_weights
from phalanx.spec.files.load import load_model_spec
from phalanx.spec.run import RunSpec
from phalanx.train.components import call_component


@dataclass(frozen=True)
class TrainingData:
    """The inputs of a trainer besides the run file."""

    train: IndexedDataset | None
    """None if the text is tokenized while training (data.streaming), or with data.dataset."""
    held_out: IndexedDataset
    tokenizer: Tokenizer
    weights: Callable[[str, torch.Size], Tensor] | None = None
    """Initial weights by parameter name; None: they are drawn at random."""

    def loader(self, run: RunSpec, sequences: int, rank: int, ranks: int) -> CheckedLoader:
        """Return this rank's loader of global steps of `sequences` sequences, which checks ids and targets."""
        loader_args = (run.training.seq_len, sequences, run.training.seed, rank, ranks)
        checked = partial(CheckedLoader, vocab_size=run.model.vocab_size, checks_targets=run.training.loss is None)
        if run.data.dataset is not None:
            dataset = call_component("data.dataset", run.data.dataset, seq_len=run.training.seq_len)
            loader: StepLoader = open_dataset(dataset, run.data.dataset, *loader_args)
            return checked(loader, "data.dataset", run.data.dataset.class_path)
        if self.train is None:
            return checked(StreamingLoader(run.data, self.tokenizer, *loader_args), "data.train", run.data.train)
        loader = TokenLoader(self.train, *loader_args, mask_documents=run.data.mask_documents)
        return checked(loader, "data.train", self.train.prefix)


def open_training_data(run: RunSpec, prepared: PreparedData, fresh: bool = True) -> TrainingData:
    """Open prepared data. Unless the run is `fresh`, a checkpoint provides all weights."""
    tokenizer = load_tokenizer(prepared.tokenizer)
    train = IndexedDataset(prepared.train) if prepared.train else None
    weights = initial_weights(run) if fresh else await_checkpoint
    return TrainingData(train, IndexedDataset(prepared.held_out), tokenizer, weights)


def await_checkpoint(name: str, shape: torch.Size) -> Tensor:
    """Return NaNs for a parameter until a checkpoint is loaded, so that no value is used by mistake."""
    return torch.full((), math.nan).expand(shape)


def initial_weights(run: RunSpec) -> Callable[[str, torch.Size], Tensor] | None:
    """Return the initial weights, if the run names a Hugging Face directory.

    Raises UserError if the weights are missing, have more tokens than the run's model, or belong to a dense model whose
    MLP does not fit the run's experts."""
    if run.model.from_hf is None:
        return None
    from phalanx.model.huggingface.checkpoint import open_hf_weights

    directory = Path(run.model.from_hf).expanduser()
    source = load_model_spec(str(directory))
    weights = open_hf_weights(directory, source if run.model.moe and not source.moe else run.model)
    weights = extend_vocabulary(weights, source.vocab_size, run.model.vocab_size)
    return upcycle_weights(run.model, source, weights, run.training.seed) if run.model.moe else weights
