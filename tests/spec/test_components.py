"""Descriptions of the user's own components, and the layouts that allow them."""

from __future__ import annotations

import tomllib
from typing import Any

import pytest

from phalanx.spec.components import named_components
from phalanx.spec.errors import UserError
from phalanx.spec.files.load import run_from_table
from phalanx.spec.files.write import to_toml

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
        ({"layout": {"tp": 2}}, "layout.tp = 2: is for Phalanx's own transformer only"),
        ({"layout": {"activation_checkpointing": "full"}}, "layout.activation_checkpointing = 'full': is for"),
        ({"layout": {"activation_checkpointing": "auto"}}, "layout.activation_checkpointing = 'auto': is for"),
        ({"model": {**PARTS["model"], "moe": MOE}}, "model.moe: is for"),
        ({"training": {"precision": "fp8"}}, "training.precision = 'fp8': is for Phalanx's own transformer only"),
        ({"model": {"preset": "tiny"}, "training": {"loss": "a:f"}, "layout": {"tp": 2}}, "splits the logits"),
        (
            {"swarm": {"method": "diloco", "every": 1}},
            "model.implementation = 'a:Network': is not supported in a swarm",
        ),
        (
            {"data": {"dataset": "a:Dataset", "streaming": True}},
            "data.streaming = True: cannot be combined with data.dataset",
        ),
    ],
)
def test_components_are_refused_where_they_cannot_work(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        run_from_table({"model": PARTS["model"], **changes})
