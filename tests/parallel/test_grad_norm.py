"""The norm of the full gradient, and clipping by it. tests/parity compares them over ranks with one process."""

from __future__ import annotations

import pytest
import torch

from phalanx.parallel.grad_norm import clip_coefficient, global_grad_norm, scale_gradients


def test_clip_coefficient_scales_gradients_to_max_norm() -> None:
    gradients = [torch.tensor([3.0, 0.0]), torch.tensor([4.0])]
    norm = global_grad_norm(gradients)
    assert norm == 5
    scale_gradients(gradients, clip_coefficient(norm, 10.0))
    assert global_grad_norm(gradients) == 5
    scale_gradients(gradients, clip_coefficient(norm, 1.0))
    assert global_grad_norm(gradients) == pytest.approx(1.0, rel=1e-5)


def test_global_grad_norm_of_bf16_gradients_is_computed_in_fp32() -> None:
    gradients = [torch.full((1001,), 1.0, dtype=torch.bfloat16)]
    norm = global_grad_norm(gradients)
    assert norm.dtype == torch.float32
    assert norm == pytest.approx(1001**0.5, rel=1e-6)
    scale_gradients(gradients, clip_coefficient(norm, 1.0))
    assert gradients[0].dtype == torch.bfloat16
    assert global_grad_norm(gradients) == pytest.approx(1.0, rel=2**-8)


def test_clip_coefficient_is_1_when_max_norm_is_0() -> None:
    assert clip_coefficient(torch.tensor(1e9), 0.0) == 1


def test_global_grad_norm_of_no_gradients_is_0() -> None:
    assert global_grad_norm([]) == 0
