"""Descriptions of custom components, and the layouts that support them."""

from __future__ import annotations

import pickle
import tomllib
from collections.abc import Iterator
from typing import Any, get_args

import pytest
from pydantic import BaseModel

from phalanx.spec.components import COMPONENT_FIELDS, ComponentSpec, named_components
from phalanx.spec.errors import UserError
from phalanx.spec.files.load import run_from_table
from phalanx.spec.files.write import to_toml
from phalanx.spec.run import RunSpec

PARTS: dict[str, Any] = {
    "model": {"preset": "tiny", "implementation": {"class": "a:Network", "width": 3}},
    "training": {"loss": "a:loss"},
    "optimizer": {"implementation": "a:Optimizer", "lr_function": "a:schedule"},
    "data": {"dataset": "a:Dataset"},
    "callbacks": {"mine": "a:Callback"},
}

MOE = {"num_experts": 2, "top_k": 1, "expert_ffn_size": 8}


def test_components_survive_run_file() -> None:
    run = run_from_table(PARTS)
    assert run_from_table(tomllib.loads(to_toml(run))) == run
    assert {field: component.name for field, component in named_components(run)} == {
        "model.implementation": "Network",
        "training.loss": "loss",
        "optimizer.implementation": "Optimizer",
        "optimizer.lr_function": "schedule",
        "data.dataset": "Dataset",
        "callbacks.mine": "Callback",
    }
    assert run.model.implementation is not None
    assert run.model.implementation.arguments == {"width": 3}


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"layout": {"tp": 2}}, "layout.tp = 2 is for Phalanx's own transformer only"),
        ({"layout": {"activation_checkpointing": "full"}}, "layout.activation_checkpointing = 'full' is for"),
        ({"layout": {"activation_checkpointing": "auto"}}, "layout.activation_checkpointing = 'auto' is for"),
        ({"model": {**PARTS["model"], "moe": MOE}}, "model.moe is for"),
        ({"training": {"precision": "fp8"}}, "training.precision = 'fp8' is for Phalanx's own transformer only"),
        ({"model": {"preset": "tiny"}, "training": {"loss": "a:f"}, "layout": {"tp": 2}}, "splits the logits"),
        (
            {"swarm": {"method": "diloco", "every": 1}},
            "model.implementation = 'a:Network' is not supported in a swarm",
        ),
        (
            {"data": {"dataset": "a:Dataset", "streaming": True}},
            "data.streaming = True cannot be combined with data.dataset",
        ),
    ],
)
def test_components_are_refused_where_they_cannot_work(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        run_from_table({"model": PARTS["model"], **changes})


def component_fields(spec: type[BaseModel], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the path of each field of a description that may hold a component."""
    for name, field in spec.model_fields.items():
        for kind in (field.annotation, *get_args(field.annotation)):
            if kind is ComponentSpec:
                yield (*path, name)
            elif isinstance(kind, type) and issubclass(kind, BaseModel):
                yield from component_fields(kind, (*path, name))


def test_loader_of_run_files_knows_every_field_of_a_component() -> None:
    assert set(component_fields(RunSpec)) == {*COMPONENT_FIELDS, ("callbacks",)}


def test_untrusted_component_stays_untrusted_in_copies() -> None:
    table = {**PARTS, "training": {"loss": {"class": "a:loss", "named_in": "/theirs/run.toml"}}}
    run = run_from_table(table)
    reread = run_from_table(tomllib.loads(to_toml(run)))
    for copy in (run, run.replace(name="mine"), reread, pickle.loads(pickle.dumps(run))):
        loss = copy.training.loss
        assert loss is not None
        assert (loss.named_in, loss.arguments) == ("/theirs/run.toml", {})
