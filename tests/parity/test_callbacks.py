"""The callback of examples/stop_early.py in every layout of the covering set, across a restart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from phalanx.spec.run import RunSpec
from phalanx.testing import rank_pool
from phalanx.train.callbacks.callback import Callback, build_callbacks
from phalanx.train.create_run import create_run
from tests.helpers.small_runs import find_examples, make_trainer, small_run, train_to_end
from tests.parity.covering_set import run_changes, world_size
from tests.parity.test_covering_set import LAYOUTS, layout_id

PATIENCE = 3
STOPPED_STEP = 3
LAST_STEP = 1 + PATIENCE + 1
"""The first evaluation is the best. `PATIENCE` more are not better, and the run ends after the next step."""
CHANGES: dict[str, Any] = {
    "training.steps": 50,
    "optimizer.muon_learning_rate": 1e-30,
    "optimizer.learning_rate": 1e-30,  # added to a weight, it rounds to nothing: no loss is better than the first
    "evaluation": {"every": 1, "tokens": 128},
    "callbacks": {"stop_early": {"class": "stop_early:StopEarly", "patience": PATIENCE}},
}


class StopBefore(Callback):
    """Stops the run like a signal on the last rank, so that all ranks save after a step and stop."""

    def on_step_end(self, trainer: Any, record: Any) -> None:
        if trainer.step == STOPPED_STEP - 1 and trainer.mesh.rank == trainer.mesh.dims.world_size - 1:
            trainer.stop_requested = True


def train_until_stopped_early(run: RunSpec) -> tuple[int, int]:
    """Train, stop, resume; return the last step of both starts."""
    find_examples()
    first, second = make_trainer(run), make_trainer(run)
    train_to_end(first, user_callbacks={**build_callbacks(run.callbacks), "callbacks.stop": StopBefore()})
    second.resume()
    train_to_end(second, user_callbacks=build_callbacks(run.callbacks))
    return first.step, second.step


def check_layout(choices: dict[str, str], documents: Path, folder: Path) -> None:
    find_examples()
    ranks = world_size(choices)
    changes = {**run_changes(choices), **CHANGES}
    if "moe" in changes.get("model", {}):  # biases of routers do not follow the learning rate
        changes["model"] = {**changes["model"], "moe": {**changes["model"]["moe"], "bias_update_rate": 0.0}}
    run = small_run(documents, folder, changes)
    create_run(run, ranks, resume=False)
    assert rank_pool(ranks).run(train_until_stopped_early, run) == [(STOPPED_STEP, LAST_STEP)] * ranks


@pytest.mark.parametrize(
    "choices",
    [
        pytest.param(next(choices for choices in LAYOUTS if choices["data"] == data), id=data)
        for data in ("zero1", "zero3", "parameter_server")
    ],
)
def test_stop_early_example_works_across_restart(choices: dict[str, str], documents: Path, tmp_path: Path) -> None:
    check_layout(choices, documents, tmp_path)


@pytest.mark.parametrize("choices", [pytest.param(choices, id=layout_id(choices)) for choices in LAYOUTS])
def test_stop_early_example_works_in_every_layout(choices: dict[str, str], documents: Path, tmp_path: Path) -> None:
    check_layout(choices, documents, tmp_path)
