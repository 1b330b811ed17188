"""The text of a global batch: the rows of a step of a run, and their documents. No rank is started."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phalanx.data.document_locations import locate_documents
from phalanx.data.loader import TokenLoader
from phalanx.data.mixture_loader import MixtureLoader
from phalanx.data.object_cache import use_object_cache
from phalanx.data.packing import DocumentSpan, token_ids
from phalanx.data.phased_loader import PhasedLoader, open_phases, open_token_files
from phalanx.data.source_checks import parts_of_mixture
from phalanx.data.tokenizer import Tokenizer
from phalanx.runs.checkpoints import CHECKPOINTS_DIR, checkpoints, read_manifest, step_of
from phalanx.runs.create import read_run_directory
from phalanx.runs.events import STARTED, read_events, skipped_steps
from phalanx.spec.base import require
from phalanx.spec.batch import plan_batch
from phalanx.spec.errors import UserError
from phalanx.spec.parallel_dims import parallel_dims
from phalanx.spec.phases import Phase, phases_of
from phalanx.spec.run import DataSpec, RunSpec
from phalanx.train.training_data import TrainingData, open_training_data

SAMPLE_TOKENS = 24
"""Number of tokens of a document that are decoded."""
BATCH_SETTINGS = ("data.", "phase.", "training.seq_len", "training.tokens_per_step", "training.seed")
"""Beginnings of the names of settings that determine the rows of a step."""
Loader = TokenLoader | MixtureLoader | PhasedLoader


@dataclass(frozen=True, kw_only=True)
class RowDocument:
    """A document of a row."""

    document: int
    """Number of the document in the tokens of its source, from 0."""
    location: str | None
    """Its file, with its line or number there; None if the text is not there anymore."""
    first: int
    """Its first token in the row, as a position in the document."""
    tokens: int
    position: int
    """The position of this token in the row."""
    text: str
    """Its first tokens in the row, decoded."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """A row of a global batch."""

    row: int
    source: str | None
    """The source of a mixture."""
    epoch: int
    """How often all text of the source was read before, from 0."""
    documents: list[RowDocument]


def rows_of_step(directory: Path, step: int) -> list[Row]:
    """Return the rows of the global batch of a step, which counts from 1, as in progress and metrics.

    Raises UserError if the run has no such step, or its rows do not follow from the step."""
    run, prepared = read_run_directory(directory)
    steps = run.training.steps
    require(1 <= step <= steps, "--step", step, f"is not a step of the run, which has {steps:,}", f"use 1 to {steps}")
    if run.data.dataset is not None:
        problem = "decides itself which samples a step has"
        raise UserError("data.dataset", run.data.dataset.class_path, problem, "print them in its __getitem__")
    if run.data.streaming:
        problem = "reads text forward only, so that the rows of a step are known while it is trained"
        raise UserError("data.streaming", True, problem, "train a short run with data.streaming = false")
    use_object_cache(run.data)
    corpus = open_training_data(run, prepared, fresh=False)
    sequences = _loader_at(directory, run, corpus, step - 1).sequences(step - 1)
    sources = {id(dataset): number for number, dataset in enumerate(corpus.sources)}
    spans = [loader.document_spans(number) for loader, number in sequences]
    wanted: dict[int, set[int]] = defaultdict(set)
    for (loader, _), row_spans in zip(sequences, spans, strict=True):
        wanted[id(loader.dataset)] |= {span.document for span in row_spans}
    datasets = {id(loader.dataset): loader.dataset for loader, _ in sequences}
    locations = {
        key: locate_documents(_data_of_source(run.data, sources.get(key)), datasets[key], corpus.tokenizer, numbers)
        for key, numbers in wanted.items()
    }
    rows = []
    for row, ((loader, number), row_spans) in enumerate(zip(sequences, spans, strict=True)):
        key = id(loader.dataset)
        name = run.data.source[sources[key]].name if key in sources else None
        documents = [_describe_span(span, loader, locations[key], corpus.tokenizer) for span in row_spans]
        rows.append(Row(row=row, source=name, epoch=number // loader.sequences_per_epoch, documents=documents))
    return rows


def _data_of_source(data: DataSpec, source: int | None) -> DataSpec:
    """Return the data of one source, as that of a run without a mixture."""
    if source is None:
        return data
    return parts_of_mixture(data)[source].replace(held_out=data.held_out, held_out_sets=data.held_out_sets)


def _describe_span(
    span: DocumentSpan, loader: TokenLoader, locations: Mapping[int, str], tokenizer: Tokenizer
) -> RowDocument:
    ids = loader.dataset.document(span.document)[span.first : span.first + min(span.tokens, SAMPLE_TOKENS)]
    return RowDocument(
        document=span.document,
        location=locations.get(span.document),
        first=span.first,
        tokens=span.tokens,
        position=span.position,
        text=tokenizer.decode(token_ids(ids)),
    )


def _loader_at(directory: Path, run: RunSpec, corpus: TrainingData, index: int) -> Loader:
    """Return the loader of all rows, as it was when the run trained step `index` (from 0).

    It begins with the newest checkpoint before the step, or with the run, and repeats the starts and the skipped text
    since. Raises UserError if these starts had other data than the run has now."""
    events = read_events(directory)
    starts = [start for start in _starts_of_steps(events) if start["step"] <= index]
    saved = checkpoints(directory / CHECKPOINTS_DIR, last_step=index)
    base = step_of(saved[0]) if saved else 0
    starts_since = _starts_since(starts, base)
    for start in starts_since:
        _check_same_batches(run, start, index)
    skipped = {step: steps for step, steps in skipped_steps(events).items() if base <= step <= index}
    ranks = {start["step"]: start["ranks"] for start in starts_since[1:]}

    loader = _open_loader(run, corpus, starts_since[0]["ranks"] if starts_since else 1)
    if saved:
        try:
            loader.resume(read_manifest(saved[0])["loader"])
        except (KeyError, TypeError):
            fix = "restore it from a copy, or move the checkpoint away"
            raise UserError("checkpoint", str(saved[0]), "has a damaged position in manifest.json", fix) from None
    for step in sorted(ranks.keys() | skipped.keys()):
        state = loader.state(step)
        if step in ranks:
            loader = _open_loader(run, corpus, ranks[step])
        loader.resume(state)
        loader.skip_steps(skipped.get(step, 0))
    return loader


def _open_loader(run: RunSpec, corpus: TrainingData, ranks: int) -> Loader:
    """Return the loader of all rows in a start on a number of ranks, which may determine the size of steps."""

    def open_phase(phase: Phase) -> TokenLoader | MixtureLoader:
        training = phase.run.training
        sequences = training.tokens_per_step // training.seq_len
        if training.batch_scaling != "keep":
            sequences = plan_batch(phase.run, parallel_dims(run.layout, ranks).dp_size).global_batch_size
        return open_token_files(phase.run, corpus.train, corpus.sources, sequences)

    return open_phases(phases_of(run), open_phase)


def _starts_of_steps(events: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the starts by which a run reached its last step, with the settings of each; later ones replace others."""
    starts: list[dict[str, Any]] = []
    settings: dict[str, Any] | None = None
    for event in events:
        if event["kind"] == STARTED:
            settings = event.get("settings", settings)
            starts = [start for start in starts if start["step"] < event["step"]]
            starts.append({"step": event["step"], "ranks": event["ranks"], "settings": settings})
    return starts


def _starts_since(starts: Sequence[dict[str, Any]], base: int) -> list[dict[str, Any]]:
    """Return the starts that trained steps after `base`: the last one up to it, and the later ones."""
    num_before = sum(start["step"] <= base for start in starts)
    return list(starts[max(0, num_before - 1) :])


def _check_same_batches(run: RunSpec, start: Mapping[str, Any], index: int) -> None:
    """Raise UserError if a start had other settings of data than the run has now. Early versions recorded none."""
    then = start["settings"] or {}
    now = run.settings
    for name in dict.fromkeys([*then, *now] if then else ()):
        if name.startswith(BATCH_SETTINGS) and then.get(name) != now.get(name):
            problem = f"was trained after a start with {name} = {then.get(name)!r}, which is {now.get(name)!r} now"
            fix = "choose a step after the last change, or copy the run directory from before it"
            raise UserError("--step", index + 1, problem, fix)
