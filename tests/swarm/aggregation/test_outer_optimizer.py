"""The outer optimizer is torch's SGD on pseudo-gradients."""

import pytest
import torch

from phalanx.swarm.aggregation.outer_optimizer import OuterSGD


@pytest.mark.parametrize(("learning_rate", "momentum"), [(0.7, 0.9), (1.0, 0.5), (0.3, 0.0)])
def test_outer_sgd_matches_torch_sgd(learning_rate, momentum):
    generator = torch.Generator().manual_seed(0)
    theta = torch.nn.Parameter(torch.randn(20, generator=generator))
    reference = torch.optim.SGD([theta], lr=learning_rate, momentum=momentum, nesterov=momentum > 0)
    base, velocity, outer = theta.detach().clone(), None, OuterSGD(learning_rate, momentum)
    for _ in range(5):
        mean = torch.randn(20, generator=generator)
        theta.grad = base - mean
        reference.step()
        base, velocity = outer.step(base, mean, velocity)
        torch.testing.assert_close(base, theta.detach())


def test_outer_sgd_returns_mean_unchanged_with_unit_lr_and_no_momentum():
    base, mean = torch.randn(9), torch.randn(9)
    new, velocity = OuterSGD().step(base, mean, None)
    assert new is mean
    assert velocity is None
