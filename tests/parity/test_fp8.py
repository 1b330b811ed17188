"""Layouts in float8 (emulated) against one process in float8.

Scales are powers of two, so a row's numbers are rounded alike whatever its scale, unless they are below e4m3's smallest
normal number. Where ranks share the dimension that a product sums over (the second products of tensor parallelism), a
shard's scale may be smaller than the full row's, and such numbers are rounded more finely. Otherwise results
differ as in bf16, by the order of sums."""

from __future__ import annotations

from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from phalanx.model import fp8
from phalanx.model.products import LinearFunction
from phalanx.spec.run import RunSpec
from phalanx.testing import rank_pool
from tests.helpers.small_runs import DENSE, MOE, Table, make_trainer, small_run, train_and_evaluate, train_until

WIDTHS: Table = {"hidden_size": 64, "ffn_hidden_size": 96}
MODELS: dict[str, Table] = {
    "dense": {**DENSE, **WIDTHS},
    "moe": {**MOE, **WIDTHS, "moe": {**MOE["moe"], "expert_ffn_size": 32}},
}
LAYOUTS: dict[str, Table] = {
    "tp2": {"layout.tp": 2},
    "zero1": {"layout.data_parallel": "zero1"},
    "zero3": {"layout.data_parallel": "zero3"},
    "pp2": {"layout.pp": 2, "layout.schedule": "1f1b"},
    "pp2-split-backward": {"layout.pp": 2, "layout.schedule": "zb-h1"},
    "ep2": {"layout.ep": 2},
    "cp2": {"layout.cp": 2},
}
SETTINGS: Table = {"training.precision": "fp8", "training.steps": 5}
PRODUCTS = {"dense": {"fp8_linear": 7}, "moe": {"fp8_linear": 7, "fp8_grouped_linear": 3}}
"""Products of a block: four of attention, three of the MLP or the shared expert, and three of the routed experts."""
LAYOUTS_WITH_ALL_BLOCKS_AND_ROWS = ("tp2", "cp2")
"""Layouts whose ranks compute each block for each micro-batch; others halve the blocks or the micro-batches."""
Calls = Counter[tuple[str, bool]]
"""Number of calls of each function of `model.fp8`, in the forward pass or the backward pass (True)."""


def count_call(calls: Calls, product: LinearFunction, *operands: Tensor) -> Tensor:
    in_backward = torch._C._current_graph_task_id() != -1
    calls[product.__name__, in_backward] += 1
    return product(*operands)


def train_and_count_products(run: RunSpec) -> tuple[list[tuple[float, float]], Calls]:
    calls: Calls = Counter()
    with pytest.MonkeyPatch.context() as patch:
        for product in (fp8.fp8_linear, fp8.fp8_grouped_linear):
            patch.setattr(fp8, product.__name__, partial(count_call, calls, product))
        trainer = make_trainer(run)
    result = train_until(trainer, run.training.steps)
    training_calls = calls.copy()
    evaluation = trainer.evaluate()
    return [*result, (evaluation["held_out_loss"], evaluation["held_out_bits_per_byte"])], training_calls


@pytest.fixture(scope="module")
def reference(documents: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[tuple[float, float]]]:
    out = tmp_path_factory.mktemp("reference")
    return {
        name: train_and_evaluate(small_run(documents, out / name, {"model": model, **SETTINGS}))
        for name, model in MODELS.items()
    }


@pytest.mark.parametrize(
    ("layout", "model"),
    [(layout, model) for layout in LAYOUTS for model in MODELS if layout != "ep2" or model == "moe"],
)
def test_layout_in_fp8_is_close_to_single_process(
    layout: str, model: str, reference: dict[str, Any], documents: Path, tmp_path: Path
) -> None:
    changes = {"model": MODELS[model], "layout.micro_batch_size": 4, **LAYOUTS[layout], **SETTINGS}
    results = rank_pool(2).run(train_and_count_products, small_run(documents, tmp_path, changes))
    blocks_per_step = 4 if layout in LAYOUTS_WITH_ALL_BLOCKS_AND_ROWS else 2  # two blocks, two micro-batches
    for _, calls in results:
        assert calls == {
            (name, in_backward): SETTINGS["training.steps"] * blocks_per_step * count
            for name, count in PRODUCTS[model].items()
            for in_backward in (False, True)
        }
    result = results[0][0]
    expected = reference[model]
    assert result[0][0] == pytest.approx(expected[0][0], rel=5e-4)  # loss and gradient norm of the first step
    assert result[0][1] == pytest.approx(expected[0][1], rel=1e-2)
    assert [loss for loss, _ in result] == pytest.approx([loss for loss, _ in expected], rel=0.01)


def test_training_in_fp8_differs_from_bf16(reference: dict[str, Any], documents: Path, tmp_path: Path) -> None:
    changes = {"model": MODELS["dense"], **SETTINGS, "training.precision": "bf16"}
    in_bf16 = train_and_evaluate(small_run(documents, tmp_path, changes))
    losses, expected = ([loss for loss, _ in result] for result in (reference["dense"], in_bf16))
    assert losses != expected
    assert losses == pytest.approx(expected, rel=0.02)
