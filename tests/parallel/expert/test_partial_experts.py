"""Experts of which other nodes train some: losses and gradients equal those of a full model, in every layout, and only
trained experts need gradients and optimizer state."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from phalanx.data.loader import prefetch
from phalanx.data.prepare import prepare
from phalanx.parallel.expert.partial_experts import TrainedExperts, partially_trained_layers, set_local_choice_weight
from phalanx.parallel.module_tensors import optimizer_state_tensors
from phalanx.spec.run import RunSpec
from phalanx.spec.swarm import Codec
from phalanx.testing import rank_pool
from phalanx.train.trainer import Trainer
from phalanx.train.training_data import open_training_data
from tests.helpers.small_runs import MOE, shared_data_cache, small_run

TRAINED_EXPERTS = (1, 2)
STEPS = 4


def build_small_run(folder: Path, changes: dict[str, Any] | None = None) -> RunSpec:
    model = {**MOE, "moe": {**MOE["moe"], "bias_update_rate": 0.0}}
    return small_run(Path(json.__file__).parent, folder, {"model": model, "training.steps": STEPS, **(changes or {})})


def build_trainer(run: RunSpec, own: TrainedExperts | None) -> Trainer:
    assert shared_data_cache()
    corpus = open_training_data(run, prepare(run.data))
    return Trainer(run, corpus, Path(run.output_dir) / run.name, torch.device("cpu"), trained_experts=own)


def compute_loss_and_gradients(run: RunSpec, own: TrainedExperts | None) -> tuple[float, dict[str, Tensor]]:
    """Return the loss of a step, and its mean gradient."""
    trainer = build_trainer(run, own)
    sums = trainer.forward_backward(trainer.micro_batches(trainer.loader.step(0)))
    trainer.strategy.reduce(sums.packed)
    return float(sums.loss), {name: grad.clone() for name, grad in trainer.strategy.gradients().items()}


def test_partial_experts_gradients_equal_full_model_gradients(tmp_path):
    run = build_small_run(tmp_path)
    (loss, expected), (partial_loss, gradients) = (
        compute_loss_and_gradients(run, own) for own in (None, TrainedExperts(TRAINED_EXPERTS))
    )
    assert partial_loss == pytest.approx(loss, rel=1e-12)
    assert set(gradients) == set(expected)
    for name, gradient in gradients.items():
        expected_gradient = expected[name][list(TRAINED_EXPERTS)] if ".experts." in name else expected[name]
        torch.testing.assert_close(gradient, expected_gradient, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_partial_experts_are_bitwise_equal_to_full_model_when_all_trained(tmp_path, recompute):
    run = build_small_run(tmp_path, {"layout.activation_checkpointing": recompute})
    (_, expected), (_, gradients) = (
        compute_loss_and_gradients(run, own) for own in (None, TrainedExperts((0, 1, 2, 3)))
    )
    assert all(torch.equal(gradient, expected[name]) for name, gradient in gradients.items())


def train_and_collect_losses(run: RunSpec, own: TrainedExperts) -> list[float]:
    trainer = build_trainer(run, own)
    batches = prefetch(trainer.loader, 0, STEPS)
    losses = [trainer.train_step(batches)["loss"] for _ in range(STEPS)]
    return [*losses, trainer.evaluate()["held_out_loss"]]


def compute_auxiliary_loss(run: RunSpec, ratio: float) -> tuple[float, dict[str, Tensor]]:
    """Return the auxiliary loss of a step whose local experts have this weight, and the gradients of the routers."""
    trainer = build_trainer(run, TrainedExperts(TRAINED_EXPERTS))
    set_local_choice_weight(trainer.module, ratio)
    sums = trainer.forward_backward(trainer.micro_batches(trainer.loader.step(0)))
    trainer.strategy.reduce(sums.packed)
    gradients = {name: gradient.clone() for name, gradient in trainer.strategy.gradients().items()}
    return float(sums.auxiliary_loss), {name: gradient for name, gradient in gradients.items() if ".router." in name}


@pytest.mark.parametrize("scope", ["sequence", "micro_batch"])
def test_local_choice_weight_balance_loss_matches_formula(tmp_path, scope):
    """The formula is a E sum_i r_i f_i P_i per token, with f_i from the choices of all experts."""
    moe = {
        "num_experts": 4,
        "top_k": 2,
        "expert_ffn_size": 24,
        "z_loss_coef": 0.0,
        "balance_loss_coef": 0.3,
        "balance_loss_scope": scope,
    }
    trainer = build_trainer(build_small_run(tmp_path, {"model": {**MOE, "moe": moe}}), TrainedExperts(TRAINED_EXPERTS))
    set_local_choice_weight(trainer.module, 0.7)
    for router in trainer.routers.values():
        x = torch.randn(3, 16, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        weight = router.gate.weight.detach().clone().requires_grad_()
        share = (x @ weight.T).softmax(-1)
        chosen = torch.zeros_like(share).scatter_(-1, share.topk(2).indices, 1.0)
        dims, mean = ((1,), share.mean(1)) if scope == "sequence" else ((0, 1), share.mean((0, 1)))
        counts = chosen.sum(dims) * torch.tensor([1.0, 0.7, 0.7, 1.0], dtype=torch.float64)
        tokens = 16 if scope == "sequence" else 48
        expected = 0.3 * 4 * tokens * (counts / (2 * tokens) * mean).sum()
        loss = router(x)[2]
        torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
        (gradient,) = torch.autograd.grad(expected, weight)
        torch.testing.assert_close(torch.autograd.grad(loss, router.gate.weight)[0], gradient, rtol=1e-10, atol=1e-14)


def test_local_choice_weight_reset_to_1_is_bitwise_equal_to_default(tmp_path):
    """Other weights than 1 change the auxiliary loss and the gradients of routers."""
    run = build_small_run(tmp_path)
    default, reset = (
        build_trainer(run, TrainedExperts(TRAINED_EXPERTS)),
        build_trainer(run, TrainedExperts(TRAINED_EXPERTS)),
    )
    set_local_choice_weight(reset.module, 0.5)
    set_local_choice_weight(reset.module, 1.0)
    first, second = (trainer.train_step(prefetch(trainer.loader, 0, 1)) for trainer in (default, reset))
    assert (first["loss"], first["auxiliary_loss"]) == (second["loss"], second["auxiliary_loss"])
    for name, parameter in default.strategy.trainable_parameters.items():
        assert torch.equal(parameter, reset.strategy.trainable_parameters[name])
    (loss, gradients), (smaller_loss, reduced_gradients) = (
        compute_auxiliary_loss(run, 1.0),
        compute_auxiliary_loss(run, 0.5),
    )
    assert smaller_loss < loss
    assert all(not torch.allclose(gradients[name], gradient, rtol=1e-3) for name, gradient in reduced_gradients.items())


@pytest.mark.parametrize(
    "layout",
    [
        {"cp": 2},
        {"data_parallel": "zero3"},
        {"pp": 2, "micro_batch_size": 2},
        {"activation_checkpointing": "full"},
        {"tp": 2},
        {"ep": 2},
    ],
    ids=str,
)
def test_local_choice_weight_losses_are_equal_across_layouts(tmp_path, layout):
    changes = {f"layout.{name}": value for name, value in layout.items()}
    single_process = collect_auxiliary_losses(build_small_run(tmp_path))
    for losses in rank_pool(2).run(collect_auxiliary_losses, build_small_run(tmp_path, changes)):
        assert losses == [pytest.approx(expected, rel=1e-9) for expected in single_process]


def collect_auxiliary_losses(run: RunSpec) -> list[float]:
    trainer = build_trainer(run, TrainedExperts(TRAINED_EXPERTS))
    batches, losses = prefetch(trainer.loader, 0, STEPS), []
    for ratio in (0.0, 0.5, 0.75, 1.0):
        set_local_choice_weight(trainer.module, ratio)
        losses.append(trainer.train_step(batches)["auxiliary_loss"])
    return losses


TWO_RANK_LAYOUTS = [
    {},
    {"data_parallel": "zero1"},
    {"data_parallel": "zero2"},
    {"data_parallel": "zero3"},
    {"cp": 2},
    {"cp": 2, "cp_method": "ulysses"},
    {"pp": 2, "micro_batch_size": 2},
    {"pp": 2, "micro_batch_size": 2, "schedule": "zb-h1"},
    {"tp": 2},
    {"tp": 2, "sequence_parallel": False},
    {"ep": 2},
    {"ep": 2, "data_parallel": "zero1"},
    {"ep": 2, "data_parallel": "zero3"},
    {"tp": 2, "ep": 2},
]
FOUR_RANK_LAYOUTS = [
    {"pp": 2, "tp": 2, "micro_batch_size": 2},
    {"pp": 2, "ep": 2, "micro_batch_size": 2},
    {"tp": 4},
    {"cp": 2, "tp": 2},
]


def assert_losses_equal_single_process(folder: Path, size: int, layout: dict[str, Any], own: tuple[int, ...]) -> None:
    """Compare `size` ranks in this layout with one process."""
    changes = {f"layout.{name}": value for name, value in layout.items()}
    single_process = train_and_collect_losses(build_small_run(folder), TrainedExperts(own))
    for losses in rank_pool(size).run(train_and_collect_losses, build_small_run(folder, changes), TrainedExperts(own)):
        assert losses == [pytest.approx(expected, rel=1e-9) for expected in single_process]


@pytest.mark.parametrize("layout", TWO_RANK_LAYOUTS, ids=str)
def test_partial_experts_losses_equal_single_process_on_2_ranks(tmp_path, layout):
    assert_losses_equal_single_process(tmp_path, 2, layout, TRAINED_EXPERTS)


@pytest.mark.parametrize("layout", FOUR_RANK_LAYOUTS, ids=str)
def test_partial_experts_losses_equal_single_process_on_4_ranks(tmp_path, layout):
    assert_losses_equal_single_process(tmp_path, 4, layout, TRAINED_EXPERTS)


@pytest.mark.parametrize("trained_experts", [(3,), (0, 1), (0, 2, 3)], ids=str)
@pytest.mark.parametrize("layout", [{"ep": 2}, {"ep": 4}, {"tp": 2, "ep": 2}], ids=str)
def test_partial_experts_equal_single_process_when_unevenly_assigned(tmp_path, trained_experts, layout):
    """Some ranks train none of their experts, and some all of them."""
    assert_losses_equal_single_process(tmp_path, 4, layout, trained_experts)


@pytest.mark.parametrize("frozen_codec", ["bf16", "int8"])
@pytest.mark.parametrize("layout", [{"tp": 2}, {"ep": 2}], ids=str)
def test_quantized_frozen_experts_match_single_process_under_tp_and_ep(tmp_path, frozen_codec, layout):
    """In bf16 sharding changes no value; int8 has a scale for each block of a rank's part of an expert."""
    changes = {"training.precision": "fp32", **{f"layout.{name}": value for name, value in layout.items()}}
    single_process = train_and_collect_losses(
        build_small_run(tmp_path, {"training.precision": "fp32"}), TrainedExperts(TRAINED_EXPERTS, frozen_codec)
    )
    for losses in rank_pool(2).run(
        train_and_collect_losses, build_small_run(tmp_path, changes), TrainedExperts(TRAINED_EXPERTS, frozen_codec)
    ):
        assert losses == [
            pytest.approx(expected, rel=1e-5 if frozen_codec == "bf16" else 1e-3) for expected in single_process
        ]


@pytest.mark.parametrize(("frozen_codec", "tolerance"), [("fp32", 0.0), ("bf16", 1e-2), ("int8", 2e-2)])
def test_frozen_expert_codec_approximates_fp32_and_sets_element_size(tmp_path, frozen_codec, tolerance):
    run = build_small_run(tmp_path, {"training.precision": "fp32"})
    reference, quantized = (
        build_trainer(run, TrainedExperts(TRAINED_EXPERTS, codec)) for codec in ("fp32", frozen_codec)
    )
    (batch,) = [reference.micro_batches(reference.loader.step(0))[0]]
    with torch.no_grad():
        expected, logits = (trainer.module(batch.tokens)[0] for trainer in (reference, quantized))
    assert float((logits - expected).norm() / expected.norm()) <= tolerance
    element_size = {"fp32": 4, "bf16": 2, "int8": 1}[frozen_codec]
    for _, experts in partially_trained_layers(quantized.module):
        for kind in ("gate", "up", "down"):
            frozen = experts.frozen[kind]
            assert frozen.numbers.element_size() == element_size
            assert frozen.numbers.numel() >= 2 * 24 * 32


@pytest.mark.parametrize("frozen_codec", ["bf16", "int8"])
def test_quantized_frozen_experts_gradient_matches_finite_difference(tmp_path, frozen_codec: Codec):
    """A small step along a random direction of the embedding changes the loss as its gradient predicts."""
    run = build_small_run(tmp_path, {"training.precision": "fp64"})
    trainer = build_trainer(run, TrainedExperts(TRAINED_EXPERTS, frozen_codec))
    micro = trainer.micro_batches(trainer.loader.step(0))[0]

    def loss() -> Tensor:
        return sum(trainer.compute_losses(trainer.module, micro))  # type: ignore[return-value]

    embedding = trainer.module.embedding.weight
    loss().backward()
    direction = torch.randn(embedding.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    slope, step = float((embedding.grad * direction).sum()), 1e-6
    # Without gradients, routers have no losses.
    embedding.data += step * direction
    after = float(loss().detach())
    embedding.data -= 2 * step * direction
    before = float(loss().detach())
    assert (after - before) / (2 * step) == pytest.approx(slope, rel=1e-5)


def test_partial_experts_keep_optimizer_state_for_trained_experts_only(tmp_path):
    run = build_small_run(tmp_path)
    full, part = build_trainer(run, None), build_trainer(run, TrainedExperts(TRAINED_EXPERTS))
    for trainer in (full, part):
        trainer.train_step(prefetch(trainer.loader, 0, 1))
    frozen_elements = 2 * 3 * 2 * 24 * 32  # of two layers three tensors of two experts
    trained, partly_trained = (
        sum(p.numel() for p in trainer.strategy.trainable_parameters.values()) for trainer in (full, part)
    )
    assert trained - partly_trained == frozen_elements
    assert sum(t.numel() for t in optimizer_state_tensors(part.optimizers)) == 2 * partly_trained
    assert not [p for p in part.strategy.trainable_parameters.values() if isinstance(p, DTensor)]
