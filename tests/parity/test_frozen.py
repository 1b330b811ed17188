"""Runs with frozen parameters: losses, gradient norms, and the held-out loss equal those of one process in fp64 to
1e-10 relative, and frozen parameters keep their values."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from phalanx.spec.layout import Layout
from phalanx.spec.run import RunSpec
from phalanx.testing import rank_pool
from tests.helpers.small_runs import DENSE, MOE, make_trainer, small_run, train_and_evaluate, train_until

STEPS = 2
PREFIX = ["embedding.*", "blocks.[01].*"]
"""Blocks before all trained parameters, which have no backward pass."""
SCATTERED = ["blocks.*.attention.w[qo].weight", "blocks.*.mlp.*down*", "*norm.weight", "head.*", "blocks.2.mlp.*"]
TIED = {**DENSE, "num_layers": 4, "tie_embeddings": True}
MODELS = {"dense": {**DENSE, "num_layers": 4}, "moe": {**MOE, "num_layers": 4}, "tied": TIED}
CASES: dict[str, tuple[int, str, list[str], dict[str, Any]]] = {
    "ddp": (2, "moe", PREFIX, {}),
    "zero1": (2, "dense", SCATTERED, {"layout.data_parallel": "zero1", "layout.bucket_mb": 0.01}),
    "zero2": (2, "moe", SCATTERED, {"layout.data_parallel": "zero2"}),
    "zero3": (2, "moe", PREFIX, {"layout.data_parallel": "zero3"}),
    "zero3-sublayers": (2, "dense", SCATTERED, {"layout.data_parallel": "zero3", "layout.fsdp_unit": "sublayer"}),
    "zero3-full": (
        2,
        "dense",
        PREFIX,
        {"layout.data_parallel": "zero3", "layout.activation_checkpointing": "full"},
    ),
    "norms": (1, "dense", SCATTERED, {"layout.activation_checkpointing": "norms"}),
    "server": (3, "dense", SCATTERED, {"layout.data_parallel": "parameter_server", "layout.num_servers": 2}),
    "tp": (2, "moe", SCATTERED, {"layout.tp": 2}),
    "tp-zero3": (4, "dense", PREFIX, {"layout.tp": 2, "layout.data_parallel": "zero3"}),
    "ring": (2, "dense", PREFIX, {"layout.cp": 2}),
    "ep-zero1": (2, "moe", SCATTERED, {"layout.ep": 2, "layout.data_parallel": "zero1"}),
    "1f1b": (2, "dense", PREFIX, {"layout.pp": 2, "layout.micro_batch_size": 1}),
    "zb-h1": (2, "moe", SCATTERED, {"layout.pp": 2, "layout.schedule": "zb-h1", "layout.micro_batch_size": 1}),
    "zb-v-zero3": (
        4,
        "dense",
        SCATTERED,
        {
            "layout.pp": 2,
            "layout.schedule": "zb-v",
            "layout.data_parallel": "zero3",
            "layout.micro_batch_size": 1,
        },
    ),
    "1f1b-tied": (2, "tied", ["embedding.*"], {"layout.pp": 2, "layout.micro_batch_size": 1}),
    "zb-h1-tp": (
        4,
        "dense",
        SCATTERED,
        {"layout.pp": 2, "layout.tp": 2, "layout.schedule": "zb-h1", "layout.micro_batch_size": 1},
    ),
}


@cache
def single_process_trajectory(text: Path, folder: Path, model: str, freeze: tuple[str, ...]) -> Any:
    """Return the trajectory of one process."""
    changes = {"model": MODELS[model], "training.freeze": list(freeze), "training.steps": STEPS}
    return train_and_evaluate(small_run(text, folder, changes))


@pytest.mark.parametrize("case", CASES)
def test_layout_with_frozen_parameters_equals_single_process(
    case: str, documents: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    ranks, model, freeze, layout = CASES[case]
    expected = single_process_trajectory(documents, documents.parent / "frozen", model, tuple(freeze))
    changes = {"model": MODELS[model], "training.freeze": freeze, "training.steps": STEPS, **layout}
    run = small_run(documents, tmp_path, changes)
    results = [train_and_evaluate(run)] if ranks == 1 else rank_pool(ranks).run(train_and_evaluate, run)
    for rank, result in enumerate(results):
        assert result == [pytest.approx(step, rel=1e-10) for step in expected], f"rank {rank}"


def test_frozen_parameters_keep_their_values_and_have_no_state_after_a_resumed_run(
    documents: Path, tmp_path: Path
) -> None:
    changes = {"model": MODELS["dense"], "training.freeze": SCATTERED, "training.steps": 2, "checkpoint": {"every": 1}}
    run = small_run(documents, tmp_path, changes)
    trainer = make_trainer(run)
    initial = {name: value.detach().clone() for name, value in trainer.strategy.stored_parameters.items()}
    train_until(trainer, 1)
    trainer.save()
    trainer.checkpointer.wait()
    resumed = make_trainer(run)
    resumed.resume()
    train_until(resumed, 2)
    frozen = resumed.strategy.frozen_parameters
    assert set(frozen) | set(resumed.strategy.trainable_parameters) == set(initial)
    assert "head.weight" in frozen
    for name, value in resumed.strategy.stored_parameters.items():
        assert value.equal(initial[name]) == (name in frozen), name
    (optimizer,) = resumed.optimizers
    assert len(optimizer.state) == len(resumed.strategy.trainable_parameters)


def test_zero3_keeps_frozen_parameters_in_precision_of_products(documents: Path, tmp_path: Path) -> None:
    """The first loss is that of a run with fp32 copies, which are gathered in bf16. A run in fp32 may resume."""
    changes = {"model": MODELS["dense"], "training.precision": "bf16", "layout.data_parallel": "zero3"}
    unfrozen, run = (
        small_run(documents, tmp_path / name, {**changes, "training.freeze": freeze, "training.steps": 1})
        for name, freeze in (("unfrozen", []), ("frozen", SCATTERED))
    )
    expected, results = (rank_pool(2).run(train_and_save, each) for each in (unfrozen, run))
    assert [loss for loss, _ in results] == [loss for loss, _ in expected]
    assert [dtypes for _, dtypes in results] == 2 * [{"torch.bfloat16"}]
    resumed = make_trainer(run.replace(layout=Layout(), training=run.training.replace(precision="fp32")))
    initial = {name: value.detach().clone() for name, value in resumed.strategy.frozen_parameters.items()}
    resumed.resume()
    for name, value in resumed.strategy.frozen_parameters.items():
        assert value.dtype == torch.float32
        assert value.equal(initial[name].bfloat16().float()), name


def train_and_save(run: RunSpec) -> tuple[float, set[str]]:
    """Return the loss of the last step, and the dtypes of frozen parameters."""
    trainer = make_trainer(run)
    *_, (loss, _) = train_until(trainer, run.training.steps)
    trainer.save()
    trainer.checkpointer.wait()
    return loss, {str(parameter.dtype) for parameter in trainer.strategy.frozen_parameters.values()}
