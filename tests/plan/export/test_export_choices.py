"""Exporters reject unknown values of each choice (a `Literal`, or a component) of a run."""

from __future__ import annotations

import dataclasses

import pytest

from phalanx.plan.export.common import TRAINER_SPECIFIC, ExportJob, Trainer
from phalanx.plan.export.export import WRITERS
from phalanx.spec.base import Spec
from phalanx.spec.errors import UserError
from phalanx.spec.layout import Layout
from phalanx.spec.model import ModelSpec
from phalanx.spec.run import OptimizerSpec, TrainingSpec
from tests.helpers.choices import choice_fields, with_unknown_value
from tests.plan.export.test_export import EXPERTS, SMALL, make_run

SECTIONS: dict[str, type[Spec]] = {
    "model": ModelSpec,
    "layout": Layout,
    "optimizer": OptimizerSpec,
    "training": TrainingSpec,
}
CHOICES = [field for section, spec_class in SECTIONS.items() for field in choice_fields(spec_class, section)]
CHECKED_ELSEWHERE = {"deepspeed": ("model.", "training.loss"), "automodel": ("model.",)}
"""Fields that DeepSpeed's configuration does not have, because the user's program creates the model and the loss, and
those of a config.json (tests/spec/families/test_config_json.py)."""
REFUSING_EXPORTERS = [
    (trainer, field)
    for trainer in WRITERS
    for field in CHOICES
    # A note says that an option of `TRAINER_SPECIFIC` is omitted.
    if field not in TRAINER_SPECIFIC and not field.startswith(CHECKED_ELSEWHERE.get(trainer, ()))
]


class WiderModelSpec(ModelSpec):
    """A ModelSpec of a later version."""

    logit_softcap: float | None = None


@pytest.mark.parametrize("trainer", [trainer for trainer in WRITERS if trainer != "deepspeed"])
def test_export_refuses_a_field_of_the_model_that_the_exporter_does_not_name(trainer: Trainer) -> None:
    run = make_run(SMALL)
    job = ExportJob(run, 16)
    model = WiderModelSpec(**run.model.__dict__)
    WRITERS[trainer](dataclasses.replace(job, run=run.model_copy(update={"model": model})))
    wider_run = run.model_copy(update={"model": model.replace(logit_softcap=30.0)})
    with pytest.raises(UserError, match=r"model\.logit_softcap = 30\.0 cannot be written for"):
        WRITERS[trainer](dataclasses.replace(job, run=wider_run))


def test_choices_include_nested_tables() -> None:
    assert {"layout.schedule", "model.activation", "model.rope.scaling", "model.moe.router_score"} <= set(CHOICES)


@pytest.mark.parametrize(("trainer", "field"), REFUSING_EXPORTERS)
def test_export_refuses_a_value_that_the_exporter_does_not_name(trainer: Trainer, field: str) -> None:
    run = make_run(EXPERTS if ".moe." in field else SMALL)
    job = ExportJob(run, 16)
    with pytest.raises(UserError, match="cannot be written for") as error:
        WRITERS[trainer](dataclasses.replace(job, run=with_unknown_value(run, field)))
    assert f"{field}.".startswith(f"{error.value.field.removesuffix('.kind')}.")
