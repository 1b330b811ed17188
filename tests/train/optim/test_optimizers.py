"""Optimizers and learning rates against their formulas."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from phalanx.model.transformer import Transformer
from phalanx.spec.files.load import load_model_spec
from phalanx.spec.run import OptimizerSpec
from phalanx.train.optim.optimizers import build_optimizers, learning_rate_factor, set_learning_rate


def learning_rate_factors(steps: int, **fields: object) -> list[float]:
    spec = OptimizerSpec(**fields)  # type: ignore[arg-type]
    return [learning_rate_factor(spec, step, steps) for step in range(steps)]


def test_learning_rate_warmup_rises_linearly_to_peak() -> None:
    assert learning_rate_factors(100, warmup_steps=4)[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]


def test_cosine_schedule_matches_formula() -> None:
    values = learning_rate_factors(1000, warmup_steps=0, lr_schedule="cosine", min_lr_ratio=0.1)
    assert values[500] == pytest.approx(0.55)
    assert values[250] == pytest.approx(0.1 + 0.9 * (1 + math.cos(math.pi / 4)) / 2)
    assert values[-1] == pytest.approx(0.1, abs=1e-4)


def test_linear_schedule_decays_evenly() -> None:
    assert learning_rate_factors(10, warmup_steps=0, lr_schedule="linear", min_lr_ratio=0.0) == pytest.approx(
        [1 - n / 10 for n in range(10)]
    )


def test_wsd_schedule_is_constant_then_decays_linearly() -> None:
    values = learning_rate_factors(100, warmup_steps=10, lr_schedule="wsd", lr_decay_fraction=0.2, min_lr_ratio=0.0)
    assert values[10:81] == [1.0] * 71
    assert values[80:] == pytest.approx([1 - n / 20 for n in range(20)])


def test_none_schedule_stays_at_peak_after_warmup() -> None:
    assert learning_rate_factors(50, warmup_steps=5, lr_schedule="none")[5:] == [1.0] * 45


@given(
    st.sampled_from(["cosine", "linear", "wsd", "none"]),
    st.integers(2, 500),
    st.floats(0, 1),
    st.floats(0.01, 1),
    st.data(),
)
def test_learning_rate_factor_stays_between_minimum_and_peak(
    decay: str, steps: int, min_lr_ratio: float, lr_decay_fraction: float, data: st.DataObject
) -> None:
    warmup = data.draw(st.integers(0, steps - 1))
    values = learning_rate_factors(
        steps, warmup_steps=warmup, lr_schedule=decay, min_lr_ratio=min_lr_ratio, lr_decay_fraction=lr_decay_fraction
    )
    after = values[warmup:]
    assert all(min_lr_ratio - 1e-9 <= value <= 1 for value in after)
    assert all(a >= b - 1e-12 for a, b in itertools.pairwise(after))


@given(st.integers(2, 500), st.floats(0, 1), st.floats(1e-6, 1), st.data())
def test_wsd_schedule_never_decays_faster_than_its_slope(
    steps: int, min_lr_ratio: float, lr_decay_fraction: float, data: st.DataObject
) -> None:
    """The rate does not jump where warm-up leaves fewer steps than the decay asks for."""
    warmup = data.draw(st.integers(0, steps - 1))
    fields = {
        "warmup_steps": warmup,
        "lr_schedule": "wsd",
        "min_lr_ratio": min_lr_ratio,
        "lr_decay_fraction": lr_decay_fraction,
    }
    spec = OptimizerSpec(**fields)  # type: ignore[arg-type]
    values = [learning_rate_factor(spec, step, steps) for step in range(max(0, warmup - 1), steps + 1)]
    slope = (1 - min_lr_ratio) / min(lr_decay_fraction * steps, steps - warmup)
    assert all(before - after <= slope + 1e-9 for before, after in itertools.pairwise(values))
    assert values[-1] == pytest.approx(min_lr_ratio)


def test_build_optimizers_assigns_block_matrices_to_muon_and_rest_to_adamw() -> None:
    module = Transformer(load_model_spec("tiny"))
    muon, adamw = build_optimizers(OptimizerSpec(name="muon"), dict(module.named_parameters()))
    names = {id(p): name for name, p in module.named_parameters()}
    hidden = {names[id(p)] for group in muon.param_groups for p in group["params"]}
    assert hidden == {name for name, p in module.named_parameters() if "blocks" in name and p.ndim == 2}
    decays = {names[id(p)]: group["weight_decay"] for group in adamw.param_groups for p in group["params"]}
    assert decays.keys() == {name for name, _ in module.named_parameters()} - hidden
    assert decays["embedding.weight"] == 0.1
    assert decays["norm.weight"] == 0.0


def test_biases_of_experts_have_no_weight_decay_and_are_not_trained_by_muon() -> None:
    moe = {"num_experts": 4, "top_k": 2, "expert_ffn_size": 16, "bias": True}
    with torch.device("meta"):
        parameters = dict(Transformer(load_model_spec("tiny").replace(moe=moe)).named_parameters())
    biases = {id(p) for name, p in parameters.items() if name.endswith("_bias")}
    _, adamw = build_optimizers(OptimizerSpec(name="muon"), parameters)
    decays = {id(p): group["weight_decay"] for group in adamw.param_groups for p in group["params"]}
    assert biases
    assert {decays[bias] for bias in biases} == {0.0}


def test_set_learning_rate_scales_each_optimizer_from_its_peak() -> None:
    optimizers = build_optimizers(
        OptimizerSpec(name="muon"), dict(Transformer(load_model_spec("tiny")).named_parameters())
    )
    for ratio in (0.5, 0.25, 1.0):
        set_learning_rate(optimizers, ratio)
        assert [optimizer.param_groups[0]["lr"] for optimizer in optimizers] == [0.02 * ratio, 3e-3 * ratio]


def test_warmup_that_would_leave_no_step_takes_half_of_the_run() -> None:
    factors = learning_rate_factors(8, warmup_steps=2000, lr_schedule="none")
    assert factors == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0, 1.0]
