"""Muon against a computation by hand, and its orthogonalization against a singular value decomposition."""

from __future__ import annotations

import math

import pytest
import torch

from phalanx.train.optim.muon import Muon, orthogonalize


@pytest.mark.parametrize("shape", [(32, 32), (48, 16), (16, 48), (4, 24, 32)])
def test_orthogonalise_leaves_singular_values_near_one(shape: tuple[int, ...]) -> None:
    matrices = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(orthogonalize(matrices))
    assert values.min() > 0.3  # the quintic's coefficients trade exactness for speed: 0.7 to 1.2 for most
    assert values.max() < 1.3
    left, _, right = torch.linalg.svd(matrices, full_matrices=False)
    assert torch.nn.functional.cosine_similarity(orthogonalize(matrices).flatten(), (left @ right).flatten(), 0) > 0.95


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_orthogonalized_matrix_does_not_depend_on_its_batch(dtype: torch.dtype) -> None:
    """With offload fewer matrices share a batch (bf16 differed on CPUs with AVX512-BF16)."""
    matrices = torch.randn(3, 2, 48, 32, generator=torch.Generator().manual_seed(0)).to(dtype)
    together = orthogonalize(matrices)
    assert together.dtype == dtype
    for index in range(3):
        assert torch.equal(together[index], orthogonalize(matrices[index]))
        assert torch.equal(together[index, :1], orthogonalize(matrices[index, :1]))


def test_muon_step_matches_hand_computation() -> None:
    weight = torch.nn.Parameter(torch.ones(3, 2, dtype=torch.float64))
    weight.grad = torch.tensor([[1.0, 2.0], [0.0, 1.0], [3.0, 0.0]], dtype=torch.float64)
    gradient = weight.grad.clone()
    Muon([weight], lr=0.1, momentum=0.9, weight_decay=0.5).step()
    momentum = 0.1 * gradient
    update = orthogonalize(0.1 * gradient + 0.9 * momentum) * math.sqrt(3 / 2)
    assert torch.allclose(weight, torch.ones(3, 2).double() * (1 - 0.1 * 0.5) - 0.1 * update)
