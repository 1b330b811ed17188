"""Expert merging of SPES: each expert moves towards the mean of the experts most similar to it, with a decreasing
ratio."""

import pytest
import torch
from torch import Tensor

from phalanx.swarm.aggregation.aggregate import aggregation_config
from phalanx.swarm.aggregation.expert_merging import merge_experts, merge_ratio, nearest_experts
from tests.helpers.local_swarm import tiny_swarm_run


def random_expert_layer(experts: int = 6, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"gate": (experts, 5, 3), "up": (experts, 5, 3), "down": (experts, 3, 5)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def merged_copy(experts: dict[str, Tensor], alpha: float, nearest: int) -> dict[str, Tensor]:
    copies = {name: stacked.clone() for name, stacked in experts.items()}
    merge_experts(copies, alpha, nearest)
    return copies


def reference_merge(experts: dict[str, Tensor], alpha: float, nearest: int) -> dict[str, Tensor]:
    """Merge one expert after the other, as the paper says."""
    merged, count = {name: stacked.clone() for name, stacked in experts.items()}, len(experts["gate"])
    for i in range(count):

        def similarity(j: int, i: int = i) -> float:
            a, b = experts["gate"][i].flatten(), experts["gate"][j].flatten()
            return float(torch.cosine_similarity(a, b, dim=0))

        nearest_indices = sorted((j for j in range(count) if j != i), key=similarity, reverse=True)[:nearest]
        for name, stacked in experts.items():
            merged[name][i] = stacked[i] + alpha * (
                torch.stack([stacked[j] for j in nearest_indices]).mean(0) - stacked[i]
            )
    return merged


@pytest.mark.parametrize(("alpha", "nearest"), [(0.05, 4), (0.1, 2), (1.0, 1), (0.3, 5)])
def test_merge_experts_matches_reference_of_spes_paper(alpha, nearest):
    experts = random_expert_layer()
    expected = reference_merge(experts, alpha, nearest)
    for name, stacked in merged_copy(experts, alpha, nearest).items():
        torch.testing.assert_close(stacked, expected[name], rtol=1e-5, atol=1e-6)


def test_nearest_experts_excludes_self_and_is_limited_to_other_experts():
    near = nearest_experts(random_expert_layer(3)["gate"], 4)
    assert [sorted(row) for row in near.tolist()] == [[1, 2], [0, 2], [0, 1]]


def test_merge_experts_leaves_weights_unchanged_when_alpha_is_zero():
    experts = random_expert_layer()
    assert all(torch.equal(stacked, experts[name]) for name, stacked in merged_copy(experts, 0.0, 4).items())


def test_merge_experts_leaves_identical_experts_unchanged():
    experts = {name: stacked[:1].repeat(6, 1, 1) for name, stacked in random_expert_layer().items()}
    for name, stacked in merged_copy(experts, 0.5, 4).items():
        torch.testing.assert_close(stacked, experts[name])


def test_nearest_experts_never_selects_all_zero_expert():
    experts = random_expert_layer()
    experts["gate"][2] = 0
    assert all(stacked.isfinite().all() for stacked in merged_copy(experts, 0.1, 2).values())
    assert all(2 not in near for expert, near in enumerate(nearest_experts(experts["gate"], 1).tolist()) if expert != 2)


def test_merge_experts_leaves_single_expert_unchanged():
    single_expert = random_expert_layer(1)
    assert torch.equal(merged_copy(single_expert, 0.1, 4)["up"], single_expert["up"])


def test_merge_ratio_decays_linearly_to_zero():
    """alpha(t) = alpha0 (1 - min(t / T, 1))."""
    assert [merge_ratio(step, 0.05, 2000) for step in (0, 500, 1000, 2000, 5000)] == pytest.approx(
        [0.05, 0.0375, 0.025, 0, 0]
    )
    assert merge_ratio(0, 0.05, 0) == 0


def test_merge_experts_allocates_less_than_two_expert_tensors():
    """SPES's own code makes a temporary of E x E x F x D numbers."""
    experts = {name: torch.randn(16, 64, 128) for name in ("gate", "up", "down")}
    size = experts["gate"].nbytes
    with torch.profiler.profile(profile_memory=True) as profile:
        merge_experts(experts, 0.1, 4)
    allocated = peak = 0
    for event in sorted(profile.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            allocated += event.nbytes()
            peak = max(peak, allocated)
    assert size <= peak < 2 * size


def test_aggregation_config_sets_merge_alpha_per_fragment_round(tmp_path):
    """Merging is due every second time that a fragment is exchanged; alpha follows the step of the run."""
    run = tiny_swarm_run(
        tmp_path, {"training.steps": 24}, every=4, fragments=2, merge={"every": 8, "alpha": 0.1, "steps": 48}
    )
    alphas = [aggregation_config(run, number).merge_alpha for number in range(12)]
    steps = [2 * (number + 1) for number in range(12)]
    assert alphas == [merge_ratio(step, 0.1, 48) if step in (6, 8, 14, 16, 22, 24) else 0.0 for step in steps]
