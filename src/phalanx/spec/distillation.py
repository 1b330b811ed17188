"""Distillation from a teacher: the table [distillation] of a run file, and what it cannot be combined with."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from phalanx.spec.base import LocalPath, Spec, refuse_together

if TYPE_CHECKING:
    from phalanx.spec.run import RunSpec


class DistillationSpec(Spec):
    """Training on the probabilities of a teacher besides the text (knowledge distillation, arXiv 1503.02531).

    With temperature T and weight w, the loss of a token is (1 - w) times its cross entropy, plus w T^2 times the
    divergence KL(teacher || student) of the probabilities of logits / T."""

    teacher: LocalPath = Field(examples=["runs/teacher"])
    """Run directory, or directory of a Hugging Face model with safetensors, whose vocabulary and tokenizer are those of
    the run."""
    step: int | None = Field(None, ge=0)
    """Step of the teacher's checkpoint, by default the newest one when the run starts; a resumed run keeps it."""
    temperature: float = Field(1.0, gt=0)
    """Divisor of the logits of both: higher ones give unlikely tokens more weight."""
    weight: float = Field(0.5, gt=0, le=1)
    """Share of the divergence in the loss. With 1, the text is only what the teacher is asked about."""


def check_distillation(run: RunSpec) -> None:
    """Raise UserError for settings that distillation does not support."""
    if run.distillation is None:
        return
    unsupported = (
        ("preference", run.preference is not None, "trains on pairs with a loss of its own", "remove one of the two"),
        ("training.loss", run.training.loss is not None, "replaces the same loss", "remove one of the two"),
        (
            "model.implementation",
            run.model.implementation is not None,
            "has layers that are not planned",
            "use Phalanx's transformer",
        ),
        ("model.mtp", run.model.mtp is not None, "predicts tokens that the teacher does not", "remove model.mtp"),
        (
            "layout.data_parallel",
            run.layout.data_parallel == "parameter_server",
            "is not supported for parameter servers",
            "use another strategy, such as ddp or zero1",
        ),
        ("swarm", run.swarm is not None, "has nodes without a teacher", "remove it"),
    )
    refuse_together("distillation", unsupported)
