"""The data of a run for the trainer: training tokens, held-out tokens, and the tokenizer."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from phalanx.data.bad_records import BAD_RECORDS_FILE
from phalanx.data.checked_loader import CheckedLoader
from phalanx.data.indexed_dataset import IndexedDataset
from phalanx.data.loader import StepLoader
from phalanx.data.phased_loader import open_phases, open_token_files
from phalanx.data.prepare import PreparedData
from phalanx.data.streaming_loader import StreamingLoader
from phalanx.data.tokenizer import Tokenizer, load_tokenizer
from phalanx.model.extend_vocabulary import extend_vocabulary
from phalanx.model.init import DrawnWeights, Weights, with_adapter
from phalanx.model.upcycle import upcycle_weights
from phalanx.parallel.comm.objects import rank_and_world_size
from phalanx.runs.create import run_directory
from phalanx.spec.batch import plan_batch
from phalanx.spec.files.load import load_model_spec
from phalanx.spec.phases import Phase
from phalanx.spec.run import DataSpec, RunSpec
from phalanx.train.components import call_component
from phalanx.train.stateful_dataset import open_user_dataset
from phalanx.train.teacher import teacher_weights


@dataclass(frozen=True)
class TrainingData:
    """The inputs of a trainer besides the run file."""

    train: IndexedDataset | None
    """None if the text is tokenized while training (data.streaming), with data.dataset, and in a mixture."""
    held_out: IndexedDataset
    tokenizer: Tokenizer
    weights: Callable[[str, torch.Size], Tensor] | None = None
    """Initial weights by parameter name; None: they are drawn at random."""
    sources: tuple[IndexedDataset, ...] = ()
    """The sources of a mixture (data.source)."""
    held_out_sources: tuple[IndexedDataset, ...] = ()
    """The texts of `held_out_names`; none with data.held_out."""
    teacher_weights: Weights | None = None
    """Weights of the teacher by parameter name, in a run with distillation."""

    @property
    def num_train_tokens(self) -> int | None:
        """Number of tokens to train on, if they are known before the training."""
        datasets = self.sources or ((self.train,) if self.train else ())
        return sum(dataset.size for dataset in datasets) if datasets else None

    def loader(self, run: RunSpec, sequences: int, rank: int, ranks: int) -> CheckedLoader:
        """Return this rank's loader of global steps of `sequences` sequences, which checks ids and targets."""
        loader_args = (run.training.seq_len, sequences, run.training.seed, rank, ranks)
        checked = partial(CheckedLoader, vocab_size=run.model.vocab_size, checks_targets=run.training.loss is None)
        if run.data.dataset is not None:
            dataset = call_component("data.dataset", run.data.dataset, seq_len=run.training.seq_len)
            loader: StepLoader = open_user_dataset(dataset, run.data.dataset, *loader_args)
            return checked(loader, "data.dataset", run.data.dataset.class_path)
        if self.train is None and not self.sources:
            # All ranks read the same text.
            file = run_directory(run) / BAD_RECORDS_FILE if rank_and_world_size()[0] == 0 else None
            loader = StreamingLoader(run.data, self.tokenizer, *loader_args, bad_records_file=file)
            return checked(loader, "data.train", run.data.train)
        tokens = open_token_files(run, self.train, self.sources, sequences, rank, ranks)
        if self.train is None:
            return checked(tokens, "data.source", [source.name for source in run.data.source])
        return checked(tokens, "data.train", self.train.prefix)

    def phased_loader(self, run_phases: Sequence[Phase], rank: int, ranks: int) -> StepLoader:
        """Return this rank's loader of a run, whose phases may change lengths, batches and the mixture."""

        def open_phase(phase: Phase) -> CheckedLoader:
            return self.loader(phase.run, plan_batch(phase.run, ranks).global_batch_size, rank, ranks)

        return open_phases(run_phases, open_phase)


def held_out_names(data: DataSpec) -> list[str]:
    """Return the names of held-out texts: of data.held_out_sets, or of the sources whose parts they are."""
    return list(data.held_out_sets) or [source.name for source in data.source]


def open_training_data(run: RunSpec, prepared: PreparedData, fresh: bool = True) -> TrainingData:
    """Open prepared data. Unless the run is `fresh`, a checkpoint provides all weights."""
    tokenizer = load_tokenizer(prepared.tokenizer)
    train = IndexedDataset(prepared.train) if prepared.train else None
    weights = initial_weights(run) if fresh else await_checkpoint
    sources, held_out_sources = (
        tuple(IndexedDataset(prefix) for prefix in prefixes)
        for prefixes in (prepared.sources, prepared.held_out_sources)
    )
    return TrainingData(
        train, IndexedDataset(prepared.held_out), tokenizer, weights, sources, held_out_sources, teacher_weights(run)
    )


def await_checkpoint(name: str, shape: torch.Size) -> Tensor:
    """Return NaNs for a parameter until a checkpoint is loaded, so that no value is used by mistake."""
    return torch.full((), math.nan).expand(shape)


def initial_weights(run: RunSpec) -> Callable[[str, torch.Size], Tensor] | None:
    """Return the initial weights, if the run names a Hugging Face model or has adapters.

    A model on the hub is downloaded if it is not yet.

    Raises UserError if the weights are missing, have more tokens than the run's model, or belong to a dense model whose
    MLP does not fit the run's experts."""
    weights = _initial_model(run)
    if run.adapter is None or weights is None or run.model.from_hf is None:
        return weights
    if run.adapter.from_peft is None:
        return with_adapter(weights, DrawnWeights(run.model, run.training.seed))
    from phalanx.model.huggingface.adapter import open_peft_adapter, read_config
    from phalanx.model.huggingface.hub_weights import local_weights

    config = read_config(local_weights(run.model.from_hf))
    return with_adapter(weights, open_peft_adapter(run.adapter.from_peft, run.model, config, weights))


def _initial_model(run: RunSpec) -> Weights | None:
    """Return the initial weights of the model that the run names, without adapters."""
    if run.model.from_hf is None:
        return None
    from phalanx.model.huggingface.checkpoint import open_hf_weights
    from phalanx.model.huggingface.hub_weights import local_weights

    path = local_weights(run.model.from_hf)
    source = load_model_spec(str(path))
    model = run.model.without_tuning
    weights: Weights = open_hf_weights(path, source if model.moe and not source.moe else model)
    weights = extend_vocabulary(weights, source.vocab_size, model.vocab_size)
    return upcycle_weights(model, source, weights, run.training.seed) if model.moe else weights
