"""Text samples that show what a model has learned."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from phalanx.model.generation import generate
from phalanx.parallel.apply import autocast_context
from phalanx.parallel.comm.objects import broadcast_object
from phalanx.parallel.inference import SharedModel
from phalanx.spec.run import RunSpec

if TYPE_CHECKING:
    from phalanx.train.trainer import Trainer

SAMPLE_TOKENS = 160


def is_sample_due(run: RunSpec, step: int) -> bool:
    """Return whether one of `evaluation.samples` evenly spaced samples is due after this step.

    No sample is due after the last step."""
    samples = run.evaluation.samples
    steps = run.training.steps
    is_due = step * samples // steps > (step - 1) * samples // steps
    return bool(run.evaluation.prompt) and has_whole_texts(run) and is_due and step < steps


def has_whole_texts(run: RunSpec) -> bool:
    """Return whether a rank computes all tokens of a text."""
    return run.layout.cp == 1


def sample_message(step: int, sample: str) -> str:
    """Return a sample as lines for the terminal."""
    return f"sample after step {step}:\n  " + sample.replace("\n", "\n  ")


def generate_sample(trainer: Trainer) -> str:
    """Return the model's continuation of the run's prompt.

    All ranks must call it, because the model may be sharded over them."""
    run = trainer.run
    if not has_whole_texts(run):
        return f"(none: phalanx generate {trainer.directory} --prompt {run.evaluation.prompt!r})"
    # The last rank always runs the model; the first rank, which prints, may not.
    last_rank = trainer.mesh.dims.world_size - 1
    if not trainer.strategy.runs_model:
        return broadcast_object("", src=last_rank)
    tokenizer = trainer.corpus.tokenizer
    prompt = torch.from_numpy(tokenizer.encode_batch([run.evaluation.prompt])[0]).long().to(trainer.device)
    generator = torch.Generator(trainer.device).manual_seed(run.training.seed)
    with trainer.evaluating(), autocast_context(trainer.strategy, run.training.precision, trainer.device):
        limits = {"eos_id": tokenizer.end, "context": trainer.phase.run.training.seq_len, "vocab": tokenizer.vocab}
        model = SharedModel(trainer.strategy) if run.model.implementation is None else trainer.strategy.model
        tokens = generate(model, prompt, SAMPLE_TOKENS, 0.7, 50, generator, **limits)
    return broadcast_object(tokenizer.decode(tokens.tolist()), src=last_rank)
