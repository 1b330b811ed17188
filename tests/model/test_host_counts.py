"""Token counts that the host reads once, even where a block is recomputed."""

from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from phalanx.model import host_counts
from phalanx.model.host_counts import checkpoint_with_saved_counts, read_counts, to_host_lists


class CountingBlock(nn.Module):
    """A block that scales its rows by the number of positive values in each of two groups of columns, as the host reads
    it."""

    def forward(self, x: Tensor) -> Tensor:
        for half in (x[:, :3], x[:, 3:]):
            ((count,),) = to_host_lists((half.detach() > 0).sum().view(1, 1), half.numel())
            x = count * x.sin()
        return x


@pytest.fixture
def micro_batches() -> list[Tensor]:
    return list(torch.randn(3, 4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0)))


@pytest.mark.parametrize("backward_order", [(0, 1, 2), (2, 0, 1), (1, 0, 1, 2)], ids=str)
def test_recomputation_takes_counts_of_its_own_forward_pass(micro_batches, backward_order):
    """Other micro-batches come in between, and the backward pass of one may come in two parts."""
    block = CountingBlock()

    def gradients(call):
        inputs = [x.clone().requires_grad_() for x in micro_batches]
        outputs = [call(x).square().sum() for x in inputs]
        for index in backward_order:
            outputs[index].backward(retain_graph=True)
        return torch.stack([x.grad for x in inputs])

    with patch.object(host_counts, "read_counts", side_effect=read_counts) as read:
        recomputed = gradients(lambda x: checkpoint_with_saved_counts(block, x))
        assert read.call_count == 2 * len(micro_batches)
    assert torch.equal(recomputed, gradients(block))


def test_counts_are_read_again_in_each_forward_pass_without_gradients(micro_batches):
    with torch.no_grad():
        outputs = [checkpoint_with_saved_counts(CountingBlock(), x) for x in micro_batches]
    assert all(torch.equal(y, CountingBlock()(x)) for x, y in zip(micro_batches, outputs, strict=True))
