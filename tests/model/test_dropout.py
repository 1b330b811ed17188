"""Dropout of adapters: what is dropped, and outputs and gradients against the formula."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from phalanx.model.dropout import Dropout, dropping, product_key, token_keys
from phalanx.model.products import Adapter, ProductLinear, activated_linear, make_activation

ROWS, TOKENS, WIDTH = 4, 256, 128
POSITIONS = np.arange(TOKENS)


def is_dropped(rate: float = 0.25, name: str = "blocks.0.attention.wq", step: int = 3) -> Tensor:
    """Return which numbers of a step are dropped, [B, T, I]."""
    with dropping(torch.from_numpy(token_keys(0, step, np.arange(ROWS), POSITIONS))):
        drop = Dropout(rate, product_key(name)).of_tokens(torch.empty(ROWS, TOKENS, WIDTH))
    assert drop is not None
    kept = drop(torch.ones(ROWS, TOKENS, WIDTH))
    assert kept.unique().tolist() == pytest.approx([0, 1 / (1 - rate)])
    return kept == 0


@pytest.mark.parametrize("rate", [0.05, 0.5])
def test_numbers_are_dropped_independently_with_the_given_probability(rate: float) -> None:
    mask = is_dropped(rate)
    for axes in ((0, 1, 2), (0, 1), (1, 2), (2,)):
        shares = mask.double().mean(axes)
        deviation = (rate * (1 - rate) * shares.numel() / mask.numel()) ** 0.5
        assert (shares - rate).abs().max() < 5 * deviation
    assert not np.array_equal(*(token_keys(*key, np.arange(2), POSITIONS) for key in ((0, 1), (1, 0))))
    others = [mask.roll(1, 2), mask.roll(1, 1), mask.roll(1, 0), is_dropped(rate, step=4), is_dropped(rate, "other")]
    for other in others:
        both = (mask & other).double().mean().item()
        assert both == pytest.approx(rate**2, abs=5 * (rate**2 / mask.numel()) ** 0.5)


def test_ranks_with_parts_of_tokens_and_columns_drop_the_same() -> None:
    keys = torch.from_numpy(token_keys(7, 0, np.arange(ROWS), POSITIONS))
    x = torch.rand(ROWS, TOKENS, WIDTH)
    with dropping(keys):
        whole = Dropout(0.3, 5).of_tokens(x)(x)  # type: ignore[misc]
        half = x[:, TOKENS // 2 :, 32:]
        part = Dropout(0.3, 5, first_column=32, rank=1).of_tokens(half)(half)  # type: ignore[misc]
    assert torch.equal(part, whole[:, TOKENS // 2 :, 32:])
    some = token_keys(7, 0, np.array([2]), POSITIONS[10:20])
    assert np.array_equal(some, keys[2:3, 10:20].numpy())


@pytest.mark.parametrize("activation", ["identity", "swiglu"])
def test_output_and_gradients_equal_the_formula(activation: str) -> None:
    torch.manual_seed(0)
    layer, a, b = (ProductLinear(*sizes, bias=False).double() for sizes in ((WIDTH, 8), (WIDTH, 2), (2, 8)))
    layer.adapter = Adapter(a, b, 1.5, dropout=Dropout(0.25, product_key("blocks.0.attention.wq")))
    inputs = [torch.randn(ROWS, TOKENS, WIDTH, dtype=torch.float64, requires_grad=True) for _ in range(2)]

    with dropping(torch.from_numpy(token_keys(0, 3, np.arange(ROWS), POSITIONS))):
        output = (
            layer(inputs[0])
            if activation == "identity"
            else activated_linear(layer, make_activation("swiglu"), *inputs)
        )
    x = inputs[0] if activation == "identity" else torch.nn.functional.silu(inputs[0]) * inputs[1]
    dropped = x.masked_fill(is_dropped(), 0) / 0.75
    expected = x @ layer.weight.T + 1.5 * dropped @ a.weight.T @ b.weight.T
    torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)
    trained = [a.weight, b.weight, *inputs[: 1 if activation == "identity" else 2]]
    gradients = [torch.autograd.grad(y.square().sum(), trained, retain_graph=True) for y in (output, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-10, atol=1e-10)


def test_nothing_is_dropped_outside_of_training() -> None:
    assert Dropout(0.9).of_tokens(torch.ones(1, 2, 3)) is None
