"""The chunked loss, which never has all logits in memory, compared with the loss of all logits."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.parallel.cross_entropy import (
    EAGER,
    UNSCALED,
    Kernels,
    LossScale,
    LossTerms,
    in_place_cross_entropy,
    log_sum_exp_in_one_pass,
    replace_by_gradient_in_one_pass,
)
from phalanx.parallel.linear_cross_entropy import ChunkedLoss, HeadGradients
from phalanx.spec import chunks
from phalanx.spec.chunks import logits_chunk_rows
from phalanx.testing import rank_pool

IGNORED = -100
VOCAB, WIDTH = 50, 8
COMPILABLE = Kernels(log_sum_exp_in_one_pass, replace_by_gradient_in_one_pass)
CHUNKS = pytest.mark.parametrize("rows", [1, 2, 5, 20], ids="rows-{}".format)


def limit_chunks(patch: pytest.MonkeyPatch, rows: int, columns: int, itemsize: int) -> None:
    patch.setattr(chunks, "LOGITS_CHUNK_BYTES", rows * columns * itemsize)


def head_inputs(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    targets = torch.randint(VOCAB, (3, 7))
    targets[0, :2] = targets[2, 6] = IGNORED
    return torch.randn(3, 7, WIDTH, dtype=dtype), torch.randn(VOCAB, WIDTH, dtype=dtype), targets


def whole_loss(x: Tensor, weight: Tensor, targets: Tensor, scale: float) -> list[Tensor]:
    """Return the loss of all logits, and the gradients of both operands."""
    x, weight = (tensor.detach().clone().requires_grad_() for tensor in (x, weight))
    loss_scale = LossScale(scale)
    loss = in_place_cross_entropy(F.linear(x, weight), targets, IGNORED, scale=loss_scale)
    loss_scale.run_backward(loss)
    return [loss.detach(), x.grad, weight.grad]  # type: ignore[list-item]


def chunked_loss(
    x: Tensor, weight: Tensor, targets: Tensor, scale: LossScale, expected_scale: LossScale = UNSCALED, **options: Any
) -> list[Tensor]:
    """Return what `whole_loss` does, in chunks."""
    x, weight = (tensor.detach().clone().requires_grad_() for tensor in (x, weight))
    loss = ChunkedLoss(columns=VOCAB, itemsize=x.itemsize, scale=expected_scale, **options)
    head = loss(targets, IGNORED)
    assert head is not None
    result = head(x, weight)
    scale.run_backward(result)
    return [result.detach(), x.grad, weight.grad]  # type: ignore[list-item]


@pytest.mark.parametrize("kernels", [EAGER, COMPILABLE], ids=["eager", "compilable"])
@pytest.mark.parametrize("is_expected", [True, False], ids=["expected-scale", "other-scale"])
@CHUNKS
def test_chunked_loss_equals_whole_loss_in_fp64(
    rows: int, is_expected: bool, kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit_chunks(monkeypatch, rows, VOCAB, itemsize=8)
    x, weight, targets = head_inputs(torch.float64)
    expected = whole_loss(x, weight, targets, 3.0)
    scale = LossScale(3.0)
    expected_scale = scale if is_expected else UNSCALED
    results = chunked_loss(x, weight, targets, scale, expected_scale=expected_scale, kernels=kernels)
    for result, exact in zip(results, expected, strict=True):
        torch.testing.assert_close(result, exact, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("rows", [None, 2], ids=["whole", "chunks"])
def test_losses_of_groups_add_up_to_the_loss(rows: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, targets = head_inputs(torch.float64)
    group_of_token = torch.tensor([0, 2, 1]).repeat_interleave(7)
    groups = LossTerms(group_of_token, torch.zeros(3, dtype=torch.float64))
    if rows is None:
        total = in_place_cross_entropy(F.linear(x, weight), targets, IGNORED, groups)
    else:
        limit_chunks(monkeypatch, rows, VOCAB, itemsize=8)
        head = ChunkedLoss(columns=VOCAB, itemsize=8)(targets, IGNORED, groups)
        assert head is not None
        total = head(x, weight)
    token_losses = F.cross_entropy(F.linear(x, weight).flatten(0, 1), targets.flatten(), reduction="none")
    expected = torch.stack([token_losses[group_of_token == group].sum() for group in range(3)])
    torch.testing.assert_close(groups.sums, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(total, expected.sum(), rtol=1e-12, atol=1e-12)


@CHUNKS
def test_chunked_loss_in_bf16_is_as_exact_as_whole_loss(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """More than eight chunks are summed in fp32."""
    limit_chunks(monkeypatch, rows, VOCAB, itemsize=2)
    x, weight, targets = head_inputs(torch.bfloat16)
    exact = whole_loss(x.double(), weight.double(), targets, 1.0)
    unchunked = whole_loss(x, weight, targets, 1.0)
    for result, other, exact_result in zip(chunked_loss(x, weight, targets, UNSCALED), unchunked, exact, strict=True):
        assert result.dtype == other.dtype
        errors = [
            float((computed.double() - exact_result).norm() / exact_result.norm()) for computed in (result, other)
        ]
        assert errors[0] <= 1.2 * errors[1] + 1e-6


@CHUNKS
def test_autocast_accumulates_matrix_gradient_in_fp32(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    limit_chunks(monkeypatch, rows, VOCAB, itemsize=2)
    monkeypatch.setattr("phalanx.parallel.linear_cross_entropy.loss_chunk_rows", lambda width, on_cuda: 7)
    x, weight, targets = head_inputs(torch.float32)
    half = [tensor.bfloat16() for tensor in (x, weight)]
    exact = whole_loss(*(tensor.double() for tensor in half), targets, 1.0)
    unchunked = whole_loss(*half, targets, 1.0)
    leaves = [tensor.clone().requires_grad_() for tensor in (x, weight)]
    head = ChunkedLoss(columns=VOCAB, itemsize=2)(targets, IGNORED)
    assert head is not None
    with torch.autocast("cpu", torch.bfloat16):
        loss = head(*leaves)
    UNSCALED.run_backward(loss)
    for result, other, exact_result in zip(
        [loss.detach(), *(leaf.grad for leaf in leaves)], unchunked, exact, strict=True
    ):
        assert result is not None
        assert result.dtype == torch.float32
        errors = [
            float((computed.double() - exact_result).norm() / exact_result.norm()) for computed in (result, other)
        ]
        assert errors[0] <= 1.2 * errors[1] + 1e-6


def test_loss_without_gradients_equals_whole_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    limit_chunks(monkeypatch, 5, VOCAB, itemsize=8)
    x, weight, targets = head_inputs(torch.float64)
    head = ChunkedLoss(columns=VOCAB, itemsize=8)(targets, IGNORED)
    assert head is not None
    loss = head(x, weight)
    assert not loss.requires_grad
    torch.testing.assert_close(loss, whole_loss(x, weight, targets, 1.0)[0], rtol=1e-12, atol=0)


def test_evaluation_of_a_trained_head_computes_no_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    limit_chunks(monkeypatch, 5, VOCAB, itemsize=8)
    monkeypatch.setattr(HeadGradients, "add_chunk", None)
    x, weight, targets = head_inputs(torch.float64)
    with torch.no_grad():
        head = ChunkedLoss(columns=VOCAB, itemsize=8)(targets, IGNORED)
        assert head is not None
        loss = head(x, torch.nn.Parameter(weight))
    torch.testing.assert_close(loss, whole_loss(x, weight, targets, 1.0)[0], rtol=1e-12, atol=0)


def test_frozen_matrix_gets_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    limit_chunks(monkeypatch, 5, VOCAB, itemsize=8)
    x, weight, targets = head_inputs(torch.float64)
    head = ChunkedLoss(columns=VOCAB, itemsize=8)(targets, IGNORED)
    assert head is not None
    head(x.requires_grad_(), weight).backward()
    torch.testing.assert_close(x.grad, whole_loss(x, weight, targets, 1.0)[1], rtol=1e-12, atol=1e-12)
    assert weight.grad is None


def test_logits_that_fit_are_not_chunked() -> None:
    assert ChunkedLoss(columns=VOCAB, itemsize=2)(torch.zeros(4, 16, dtype=torch.long), IGNORED) is None


@pytest.mark.parametrize(("tokens", "limit", "expected"), [(10, 100, 10), (10, 4, 4), (9, 4, 3), (7, 1, 1), (5, 0, 1)])
def test_logits_chunk_rows_divides_tokens_evenly(
    tokens: int, limit: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit_chunks(monkeypatch, limit, 10, itemsize=4)
    assert logits_chunk_rows(tokens, 10, 4) == expected


def losses_of_ranks(cases: list[tuple[int, bool]]) -> list[list[Tensor]]:
    """Return the loss and this rank's gradients, for each number of rows of a chunk, with and without sequence
    parallelism."""
    import torch.distributed as dist

    from phalanx.parallel.pipeline.split_backward import DeferredWeightGrads
    from phalanx.parallel.tensor.tensor_parallel import TensorParallelGroup

    results = []
    for rows, sequence in cases:
        x, weight, targets = head_inputs(torch.float64)
        x, targets = x[:, :6], targets[:, :6]
        tp = TensorParallelGroup(dist.group.WORLD, sequence, VOCAB - 1, DeferredWeightGrads())
        columns = VOCAB // 2
        local = weight[: VOCAB - 1].split(columns)[tp.rank].clone().requires_grad_()
        leaf = (x.chunk(2, dim=1)[tp.rank] if sequence else x).clone().requires_grad_()
        with pytest.MonkeyPatch.context() as patch:
            limit_chunks(patch, rows, columns, itemsize=8)
            head = ChunkedLoss(columns=columns, itemsize=8, tp=tp)(targets.clamp(max=VOCAB - 2), IGNORED)
        assert head is not None
        loss = head(leaf, local)
        UNSCALED.run_backward(loss)
        results.append([loss.detach(), leaf.grad, local.grad])
    return results  # type: ignore[return-value]


def test_chunked_loss_of_columns_on_two_ranks_equals_whole_loss() -> None:
    """The vocabulary is odd: the second rank has a column less."""
    cases = [(rows, sequence) for rows in (1, 5, 17) for sequence in (False, True)]
    x, weight, targets = head_inputs(torch.float64)
    expected = whole_loss(x[:, :6], weight[: VOCAB - 1], targets[:, :6].clamp(max=VOCAB - 2), 1.0)
    for (_, sequence), *parts in zip(cases, *rank_pool(2).run(losses_of_ranks, cases), strict=True):
        for loss, grad, _ in parts:
            torch.testing.assert_close(loss, expected[0], rtol=1e-12, atol=0)
            if not sequence:
                torch.testing.assert_close(grad, expected[1], rtol=1e-12, atol=1e-12)
        if sequence:
            torch.testing.assert_close(
                torch.cat([grad for _, grad, _ in parts], 1), expected[1], rtol=1e-12, atol=1e-12
            )
        torch.testing.assert_close(torch.cat([grad for *_, grad in parts]), expected[2], rtol=1e-12, atol=1e-12)
