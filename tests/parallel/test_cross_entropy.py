"""The loss that overwrites its logits by their gradient, compared with PyTorch's in fp64."""

import pytest
import torch
import torch.nn.functional as F

from phalanx.model.transformer import cap_logits
from phalanx.parallel import cross_entropy
from phalanx.parallel.cross_entropy import (
    EAGER,
    Kernels,
    LossScale,
    LossTerms,
    in_place_cross_entropy,
    log_sum_exp_in_one_pass,
    replace_by_gradient_in_one_pass,
)
from phalanx.testing import rank_pool

IGNORED = -100
COMPILABLE = Kernels(log_sum_exp_in_one_pass, replace_by_gradient_in_one_pass)


def logits_and_targets(vocab, dtype):
    torch.manual_seed(vocab)
    targets = torch.randint(vocab, (3, 7))
    targets[0, :2] = targets[2, 6] = IGNORED
    return 4 * torch.randn(3, 7, vocab, dtype=dtype), targets


def exact_loss(logits, targets, scale, softcap=None):
    leaf = logits.double().requires_grad_()
    loss = F.cross_entropy(
        cap_logits(leaf, softcap).flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum"
    )
    (scale * loss).backward()
    return loss, leaf.grad


@pytest.mark.parametrize("chunk_logits", [1, 100, 2**20], ids=["row", "rows", "whole"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [1, 33, 50])
def test_in_place_cross_entropy_equals_fp64(vocab, dtype, chunk_logits, monkeypatch):
    monkeypatch.setattr(cross_entropy, "loss_chunk_rows", lambda columns, on_cuda: max(1, chunk_logits // columns))
    logits, targets = logits_and_targets(vocab, dtype)
    expected, expected_grad = exact_loss(logits, targets, scale=0.25)
    leaf = logits.requires_grad_()
    loss = in_place_cross_entropy(leaf * 1, targets, IGNORED)
    (0.25 * loss).backward()
    tolerance = 8 * torch.finfo(dtype).eps
    assert loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(loss.double(), expected, rtol=1e-6 if dtype != torch.float64 else 1e-14, atol=1e-6)
    torch.testing.assert_close(leaf.grad.double(), expected_grad, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("kernels", [EAGER, COMPILABLE], ids=["eager", "compilable"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_in_place_cross_entropy_of_capped_logits_equals_fp64(dtype, kernels):
    logits, targets = logits_and_targets(50, dtype)
    expected, expected_grad = exact_loss(logits, targets, 0.25, softcap=3.0)
    leaf = logits.detach().clone().requires_grad_()
    loss = in_place_cross_entropy(leaf * 1, targets, IGNORED, kernels=kernels, softcap=3.0)
    (0.25 * loss).backward()
    tolerance = 8 * torch.finfo(dtype).eps
    torch.testing.assert_close(loss.double(), expected, rtol=tolerance / 8, atol=1e-6)
    torch.testing.assert_close(leaf.grad.double(), expected_grad, rtol=tolerance, atol=tolerance)
    with torch.no_grad():
        evaluated = in_place_cross_entropy(logits.clone(), targets, IGNORED, kernels=kernels, softcap=3.0)
    assert evaluated == loss


def test_logits_without_gradient_are_not_overwritten():
    logits, targets = logits_and_targets(50, torch.float32)
    before = logits.clone()
    expected, _ = exact_loss(logits, targets, scale=1)
    torch.testing.assert_close(in_place_cross_entropy(logits, targets, IGNORED).double(), expected)
    assert torch.equal(logits, before)


def test_rows_without_counted_target_have_no_gradient_and_no_loss():
    logits = torch.randn(1, 4, 9, requires_grad=True)
    targets = torch.full((1, 4), 3)  # an index of the vocabulary may be the ignored one
    loss = in_place_cross_entropy(logits * 1, targets, 3)
    loss.backward()
    assert loss == 0
    assert not logits.grad.any()


def loss_of_columns(cases):
    """Return the loss and this rank's columns of the gradient, for each vocabulary, dtype and cap."""
    import torch.distributed as dist

    from phalanx.parallel.pipeline.split_backward import DeferredWeightGrads
    from phalanx.parallel.tensor.tensor_parallel import TensorParallelGroup

    results = []
    for vocab, dtype, softcap in cases:
        logits, targets = logits_and_targets(vocab, dtype)
        tp = TensorParallelGroup(dist.group.WORLD, False, vocab, DeferredWeightGrads())
        columns = logits.tensor_split([-(-vocab // 2)], dim=2)[tp.rank].clone().requires_grad_()
        loss = in_place_cross_entropy(columns * 1, targets, IGNORED, tp=tp, softcap=softcap)
        loss.backward()
        results.append((loss.item(), columns.grad))
    return results


def test_cross_entropy_of_columns_on_two_ranks_equals_fp64():
    cases = [
        (vocab, dtype, cap) for vocab in (50, 33) for dtype in (torch.float64, torch.float32) for cap in (None, 3.0)
    ]
    for (vocab, dtype, softcap), *parts in zip(cases, *rank_pool(2).run(loss_of_columns, cases), strict=True):
        logits, targets = logits_and_targets(vocab, dtype)
        expected, expected_grad = exact_loss(logits, targets, scale=1, softcap=softcap)
        tolerance = 8 * torch.finfo(dtype).eps
        for loss, _ in parts:
            assert loss == pytest.approx(expected.item(), rel=tolerance)
        grad = torch.cat([grad for _, grad in parts], dim=2)
        torch.testing.assert_close(grad.double(), expected_grad, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_known_gradient_of_the_loss_is_not_multiplied(scale, monkeypatch):
    logits, targets = logits_and_targets(50, torch.float64)
    _, expected_grad = exact_loss(logits, targets, scale)
    leaf = logits.requires_grad_()
    loss_scale = LossScale(scale)
    loss = in_place_cross_entropy(leaf * 1, targets, IGNORED, scale=loss_scale) + torch.zeros(())
    monkeypatch.setattr(torch.Tensor, "mul_", None)  # would fail
    loss_scale.run_backward(loss)
    torch.testing.assert_close(leaf.grad, expected_grad)


@pytest.mark.parametrize("factor", [0.0, 1.0, 3.0])
def test_gradient_other_than_the_expected_is_multiplied(factor):
    logits, targets = logits_and_targets(50, torch.float64)
    _, expected_grad = exact_loss(logits, targets, 3 * factor)
    leaf = logits.requires_grad_()
    scale = LossScale(3.0)
    loss = 3 * in_place_cross_entropy(leaf * 1, targets, IGNORED, scale=scale)
    LossScale(factor).run_backward(loss)
    torch.testing.assert_close(leaf.grad, expected_grad)
    # The same scale, but the loss is multiplied in between.
    leaf.grad = None
    scale.run_backward(3 * in_place_cross_entropy(leaf * 1, targets, IGNORED, scale=scale))
    torch.testing.assert_close(leaf.grad, exact_loss(logits.detach(), targets, 9)[1])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_kernels_to_compile_equal_the_others(dtype):
    logits, targets = logits_and_targets(50, dtype)
    losses, gradients = [], []
    scale = LossScale(0.5)
    for loss_kernels in (EAGER, COMPILABLE):
        leaf = logits.clone().requires_grad_()
        loss = in_place_cross_entropy(leaf * 1, targets, IGNORED, kernels=loss_kernels, scale=scale)
        scale.run_backward(loss)
        losses.append(loss.detach())
        gradients.append(leaf.grad)
    torch.testing.assert_close(*losses)
    torch.testing.assert_close(*gradients)


def test_losses_and_gradients_of_tokens_have_their_weights(monkeypatch):
    monkeypatch.setattr(cross_entropy, "loss_chunk_rows", lambda columns, on_cuda: 2)
    logits, targets = logits_and_targets(33, torch.float64)
    weights = torch.rand(21, dtype=torch.float64)
    groups = torch.arange(21) % 2
    exact = logits.clone().requires_grad_()
    losses = weights * F.cross_entropy(exact.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="none")
    losses.sum().backward()
    leaf = logits.requires_grad_()
    terms = LossTerms(groups, torch.zeros(2, dtype=torch.float64), weights)
    loss = in_place_cross_entropy(leaf * 1, targets, IGNORED, terms)
    loss.backward()
    torch.testing.assert_close(loss, losses.sum())
    torch.testing.assert_close(leaf.grad, exact.grad)
    torch.testing.assert_close(terms.sums, torch.stack([losses[::2].sum(), losses[1::2].sum()]))
