"""The norm of the whole gradient, and clipping by it. Over ranks both are held to one process by tests/parity."""

from __future__ import annotations

import pytest
import torch

from phalanx.parallel.gradient import clip, global_norm


def test_norm_and_clip() -> None:
    parameters = [torch.nn.Parameter(torch.zeros(size)) for size in (2, 1, 1)]
    parameters[0].grad, parameters[1].grad = torch.tensor([3.0, 0.0]), torch.tensor([4.0])
    norm = global_norm(parameters)
    assert norm == 5
    clip(parameters, norm, 10.0)
    assert global_norm(parameters) == 5
    clip(parameters, norm, 1.0)
    assert global_norm(parameters) == pytest.approx(1.0, rel=1e-5)


def test_no_gradient_has_norm_0() -> None:
    assert global_norm([torch.nn.Parameter(torch.zeros(2))]) == 0
