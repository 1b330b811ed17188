"""Stages are split by cost: published counts, the weight of the head, and the best of all splits."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.cost.exact.flops import training_flops_per_token
from phalanx.program.pipeline_split import balance_stages, layer_flops
from phalanx.spec.errors import UserError
from phalanx.spec.files.load import load_model_spec


@pytest.mark.parametrize(("layers", "stages", "layers_per_stage"), [(48, 4, 12), (12, 4, 3)])
def test_balance_stages_splits_equal_layers_evenly(layers: int, stages: int, layers_per_stage: int) -> None:
    assert balance_stages([0.0, *[1.0] * layers, 0.0], stages) == [layers_per_stage] * stages


@pytest.mark.parametrize("model", ["llama3-8b", "gpt2-124m", "mixtral-8x7b", "spes-7b"])
def test_layer_flops_sum_to_training_flops(model: str) -> None:
    spec = load_model_spec(model)
    parts = layer_flops(spec, 2048)
    assert len(parts) == spec.num_layers + 2
    assert sum(parts) == pytest.approx(training_flops_per_token(spec, 2048) + 2 * spec.hidden_size, rel=1e-12)


def test_balance_stages_gives_fewer_blocks_to_lm_head_stage() -> None:
    spec = load_model_spec("llama3-8b")  # its head costs as much as 2 blocks
    assert balance_stages(layer_flops(spec, 2048), 4) == [8, 9, 9, 6]


def test_balance_stages_rejects_more_stages_than_layers() -> None:
    with pytest.raises(UserError, match=r"stages = 3 are too many for a model of 2 layers"):
        balance_stages([0, 1, 1, 0], 3)


@given(st.lists(st.integers(1, 9), min_size=3, max_size=10), st.integers(1, 5))
def test_balance_stages_matches_brute_force_optimum(costs: list[int], stages: int) -> None:
    layers = len(costs) - 2
    stages = min(stages, layers)

    def sums(ends: tuple[int, ...]) -> list[int]:
        layer_costs = [costs[0] + costs[1], *costs[2:-2], costs[-2] + costs[-1]] if layers > 1 else [sum(costs)]
        return [sum(layer_costs[a:b]) for a, b in zip((0, *ends), (*ends, layers), strict=True)]

    split = balance_stages(costs, stages)
    assert sum(split) == layers
    assert min(split) >= 1
    ends = tuple(sum(split[: i + 1]) for i in range(stages - 1))
    splits = [sums(split_ends) for split_ends in combinations(range(1, layers), stages - 1)]
    key = lambda stage: (max(stage), sum(cost**2 for cost in stage))  # noqa: E731
    assert key(sums(ends)) == min(map(key, splits))
