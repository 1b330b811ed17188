"""The gradient of a matrix that embedding and head share is autograd's, and needs two tensors of its size."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.model.tied_weight import TiedWeight
from phalanx.train.profiling.memory_meter import MemoryMeter

VOCABULARY, WIDTH = 4096, 128


def loss(tokens: Tensor, embedding_VD: Tensor, head_VD: Tensor) -> Tensor:
    x_TD = torch.tanh(F.embedding(tokens, embedding_VD))
    return F.cross_entropy(F.linear(x_TD, head_VD), tokens, reduction="sum")


def tied_loss(tokens: Tensor, weight: Tensor) -> Tensor:
    tied = TiedWeight(weight)
    return loss(tokens, tied.of_embedding(), tied.of_head())


@pytest.fixture
def weight() -> Tensor:
    return torch.randn(VOCABULARY, WIDTH, dtype=torch.float64, requires_grad=True)


def test_gradient_equals_that_of_autograd(weight: Tensor) -> None:
    """Two passes may be part of one graph, which may run twice."""
    batches = torch.randint(VOCABULARY, (2, 16))
    (expected,) = torch.autograd.grad(torch.stack([loss(tokens, weight, weight) for tokens in batches]).sum(), weight)
    total = torch.stack([tied_loss(tokens, weight) for tokens in batches]).sum()
    for _ in range(2):
        (gradient,) = torch.autograd.grad(total, weight, retain_graph=True)
        torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-12)


def test_backward_pass_needs_two_gradients(weight: Tensor) -> None:
    """Autograd needs three where something else might read the first, as in each step that is measured."""
    tokens = torch.randint(VOCABULARY, (2,))

    def peak_in_tables(loss_of: Callable[[Tensor], Tensor]) -> float:
        weight.grad = None
        with MemoryMeter(known=lambda: {"parameters": [weight]}) as meter:
            torch.autograd.backward(loss_of(weight))
        return float(meter.peak_total / weight.nbytes - 1)

    assert peak_in_tables(lambda weight: tied_loss(tokens, weight)) == pytest.approx(2, abs=0.2)
    assert peak_in_tables(lambda weight: loss(tokens, weight, weight)) == pytest.approx(3, abs=0.2)
