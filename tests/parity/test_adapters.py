"""Runs with adapters: losses, gradient norms, and the held-out loss equal those of one process in fp64 to 1e-10
relative."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from phalanx.model.nf4 import dequantize
from phalanx.spec.errors import UserError
from phalanx.spec.run import RunSpec
from phalanx.testing import rank_pool
from tests.helpers.small_runs import (
    DENSE,
    DIALS,
    LATENT,
    MOE,
    Table,
    make_trainer,
    small_run,
    train_and_evaluate,
    train_until,
)

ADAPTER: Table = {"rank": 3, "alpha": 6.0}
SOME: Table = {"rank": 4, "alpha": 8.0, "targets": ["wq", "wo", "mlp.down"], "rslora": True, "dropout": 0.2}
DORA: Table = {"rank": 3, "alpha": 6.0, "dora": True, "dropout": 0.3}
EXPERTS: Table = {**ADAPTER, "targets": ["experts.gate", "experts.up", "experts.down", "router.gate", "wo"]}
NF4: Table = {**ADAPTER, "base_dtype": "nf4"}
MODELS: dict[str, Table] = {
    "dense": {**DENSE, "num_layers": 4},
    "moe": {**MOE, "num_layers": 4},
    "dials": DIALS,
    "latent": LATENT,
    "wide": {**DENSE, "num_layers": 4, "hidden_size": 128, "ffn_hidden_size": 128},
    "wide moe": {**MOE, "num_layers": 4, "hidden_size": 128, "moe": {**MOE["moe"], "expert_ffn_size": 128}},
    "three heads": {**DENSE, "num_layers": 2, "num_heads": 3, "num_kv_heads": 3, "hidden_size": 36},
}
CASES: dict[str, tuple[int, str, Table, Table]] = {
    "ddp": (2, "moe", ADAPTER, {}),
    "zero1": (2, "dense", SOME, {"layout.data_parallel": "zero1", "layout.bucket_mb": 0.01}),
    "zero2": (2, "latent", ADAPTER, {"layout.data_parallel": "zero2"}),
    "zero3": (2, "moe", {**ADAPTER, "train": ["head.*", "*norm.weight"]}, {"layout.data_parallel": "zero3"}),
    "zero3-full": (2, "dense", SOME, {"layout.data_parallel": "zero3", "layout.activation_checkpointing": "full"}),
    "norms": (1, "moe", ADAPTER, {"layout.activation_checkpointing": "norms"}),
    "selective": (1, "dense", ADAPTER, {"layout.activation_checkpointing": "selective"}),
    "server": (2, "dense", ADAPTER, {"layout.data_parallel": "parameter_server"}),
    "tp": (2, "moe", {**ADAPTER, "train": ["head.*", "*router*"]}, {"layout.tp": 2}),
    "tp-latent": (2, "latent", ADAPTER, {"layout.tp": 2}),
    "tp-whole-tokens": (2, "dials", ADAPTER, {"layout.tp": 2, "layout.sequence_parallel": False}),
    "tp-norms": (2, "dense", ADAPTER, {"layout.tp": 2, "layout.activation_checkpointing": "norms"}),
    "tp4-zero1": (4, "dense", SOME, {"layout.tp": 4, "layout.data_parallel": "zero1"}),
    "tp-zero3": (4, "moe", ADAPTER, {"layout.tp": 2, "layout.data_parallel": "zero3"}),
    "gathered": (2, "three heads", ADAPTER, {"layout.tp": 2, "layout.tp_attention": "gathered"}),
    "ring": (2, "dense", SOME, {"layout.cp": 2}),
    "ulysses-tp": (4, "dense", ADAPTER, {"layout.cp": 2, "layout.cp_method": "ulysses", "layout.tp": 2}),
    "ep-zero1": (2, "moe", ADAPTER, {"layout.ep": 2, "layout.data_parallel": "zero1"}),
    "ep-tp-zero3": (4, "moe", ADAPTER, {"layout.ep": 2, "layout.tp": 2, "layout.data_parallel": "zero3"}),
    "1f1b": (2, "dense", ADAPTER, {"layout.pp": 2, "layout.micro_batch_size": 1}),
    "zb-h1": (2, "moe", ADAPTER, {"layout.pp": 2, "layout.schedule": "zb-h1", "layout.micro_batch_size": 1}),
    "zb-v-zero3": (
        4,
        "dense",
        SOME,
        {"layout.pp": 2, "layout.schedule": "zb-v", "layout.data_parallel": "zero3", "layout.micro_batch_size": 1},
    ),
    "zb-h1-tp": (
        4,
        "dense",
        ADAPTER,
        {"layout.pp": 2, "layout.tp": 2, "layout.schedule": "zb-h1", "layout.micro_batch_size": 1},
    ),
    "dora-zero3": (2, "moe", DORA, {"layout.data_parallel": "zero3", "layout.fsdp_unit": "sublayer"}),
    "dora-zero2-selective": (
        2,
        "latent",
        DORA,
        {"layout.data_parallel": "zero2", "layout.activation_checkpointing": "selective"},
    ),
    "dora-tp": (2, "dials", DORA, {"layout.tp": 2}),
    "dora-gathered": (2, "three heads", DORA, {"layout.tp": 2, "layout.tp_attention": "gathered"}),
    "dora-tp-whole-tokens-zero1": (
        4,
        "dials",
        DORA,
        {"layout.tp": 4, "layout.sequence_parallel": False, "layout.data_parallel": "zero1"},
    ),
    "dora-ep-tp-zero3": (4, "moe", DORA, {"layout.ep": 2, "layout.tp": 2, "layout.data_parallel": "zero3"}),
    "dora-ulysses-full": (
        2,
        "latent",
        DORA,
        {"layout.cp": 2, "layout.cp_method": "ulysses", "layout.activation_checkpointing": "full"},
    ),
    "dora-zb-h1-tp": (
        4,
        "moe",
        DORA,
        {"layout.pp": 2, "layout.tp": 2, "layout.schedule": "zb-h1", "layout.micro_batch_size": 1},
    ),
    "experts-zero3": (2, "moe", EXPERTS, {"layout.data_parallel": "zero3"}),
    "experts-tp": (2, "moe", EXPERTS, {"layout.tp": 2, "layout.sequence_parallel": False}),
    "experts-tp-zero1": (4, "latent", EXPERTS, {"layout.tp": 2, "layout.data_parallel": "zero1"}),
    "experts-ep": (2, "moe", EXPERTS, {"layout.ep": 2, "layout.activation_checkpointing": "full"}),
    "experts-ep-tp-zero3": (4, "moe", EXPERTS, {"layout.ep": 2, "layout.tp": 2, "layout.data_parallel": "zero3"}),
    "experts-zb-h1-cp": (
        4,
        "moe",
        EXPERTS,
        {"layout.pp": 2, "layout.cp": 2, "layout.schedule": "zb-h1", "layout.micro_batch_size": 1},
    ),
    "nf4-ddp": (2, "wide moe", NF4, {}),
    "nf4-zero2-full": (
        2,
        "wide",
        NF4,
        {"layout.data_parallel": "zero2", "layout.activation_checkpointing": "full"},
    ),
    "nf4-zero3": (2, "wide moe", {**NF4, "train": ["head.*"]}, {"layout.data_parallel": "zero3"}),
    "nf4-server": (2, "wide", NF4, {"layout.data_parallel": "parameter_server"}),
    "nf4-dora-tp-zero1": (
        4,
        "wide",
        {**NF4, "dora": True, "dropout": 0.2},
        {"layout.tp": 2, "layout.data_parallel": "zero1"},
    ),
    "nf4-experts-ep-tp-zero3": (
        4,
        "wide moe",
        {**EXPERTS, "base_dtype": "nf4"},
        {"layout.ep": 2, "layout.tp": 2, "layout.data_parallel": "zero3"},
    ),
    "nf4-zb-h1-cp": (
        4,
        "wide moe",
        NF4,
        {"layout.pp": 2, "layout.cp": 2, "layout.schedule": "zb-h1", "layout.micro_batch_size": 1},
    ),
    "experts-zb-h1-tp": (
        4,
        "moe",
        EXPERTS,
        {"layout.pp": 2, "layout.tp": 2, "layout.schedule": "zb-h1", "layout.micro_batch_size": 1},
    ),
}
STEPS = 3
"""The first step changes B only, the second one A too."""


@cache
def single_process_trajectory(text: Path, model: str, adapter: tuple[tuple[str, Any], ...]) -> Any:
    """Return the trajectory of one process."""
    changes = {"model": MODELS[model], "adapter": dict(adapter), "training.steps": STEPS}
    return train_and_evaluate(small_run(text, text.parent / "adapters", changes))


@pytest.mark.parametrize("case", CASES)
def test_layout_with_adapters_equals_single_process(case: str, documents: Path, tmp_path: Path) -> None:
    ranks, model, adapter, layout = CASES[case]
    key = tuple((name, tuple(value) if isinstance(value, list) else value) for name, value in adapter.items())
    expected = single_process_trajectory(documents, model, key)
    changes = {"model": MODELS[model], "adapter": adapter, "training.steps": STEPS, **layout}
    run = small_run(documents, tmp_path, changes)
    results = [train_and_evaluate(run)] if ranks == 1 else rank_pool(ranks).run(train_and_evaluate, run)
    for rank, result in enumerate(results):
        assert result == [pytest.approx(step, rel=1e-10) for step in expected], f"rank {rank}"


@pytest.mark.parametrize("dora", [False, True])
def test_quantized_matrices_are_those_of_their_numbers(dora: bool, documents: Path, tmp_path: Path) -> None:
    changes: Table = {"model": MODELS["wide moe"], "adapter": {**NF4, "dora": dora}, "training.steps": STEPS}
    run = small_run(documents, tmp_path, changes)
    assert run.adapter
    quantized = make_trainer(run)
    other = make_trainer(run.replace(name="other", adapter=run.adapter.replace(base_dtype=None)))
    for name, parameter in other.strategy.stored_parameters.items():
        own = quantized.strategy.stored_parameters[name].detach()
        parameter.data.copy_(own if own.is_floating_point() else dequantize(own, torch.float64))
    assert train_until(quantized, STEPS) == [pytest.approx(step, rel=1e-10) for step in train_until(other, STEPS)]
    for name, parameter in quantized.strategy.trainable_parameters.items():
        torch.testing.assert_close(parameter, other.strategy.trainable_parameters[name], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("model", "adapter"), [("dense", ADAPTER), ("wide moe", NF4)])
def test_run_resumes_in_another_layout_with_its_adapters_and_refuses_others(
    model: str, adapter: Table, documents: Path, tmp_path: Path
) -> None:
    changes: Table = {"model": MODELS[model], "adapter": adapter, "training.steps": 3, "checkpoint": {"every": 1}}
    run = small_run(documents, tmp_path, changes)
    expected = train_until(make_trainer(run.replace(name="straight")), 3)
    first = make_trainer(run)
    train_until(first, 1)
    first.save()
    first.checkpointer.wait()
    sharded = run.replace(layout={"data_parallel": "zero3", "tp": 2})
    for records in rank_pool(4).run(resume_and_train, sharded):
        assert records == [pytest.approx(step, rel=1e-10) for step in expected[1:]]
    other = run.replace(adapter={**adapter, "alpha": 7.0})
    with pytest.raises(UserError, match=r"adapter.alpha = 7.0 differs from the checkpoint's value 6.0"):
        make_trainer(other).resume()


def resume_and_train(run: RunSpec) -> list[tuple[float, float]]:
    """Resume a run, and return the losses and norms of its remaining steps."""
    trainer = make_trainer(run)
    trainer.resume()
    return train_until(trainer, 3)
