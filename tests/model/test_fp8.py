"""Products in float8 against fp64: e4m3 has 3 bits of mantissa, so that a cast changes a number by at most 1/16."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from phalanx.model.fp8 import cast_rows, fp8_grouped_linear, fp8_linear, use_fp8_products
from phalanx.model.mlp import MLP
from phalanx.model.moe import Experts, GroupedProduct, grouped_linear
from phalanx.model.products import IDENTITY, Product, ProductLinear, activated_product
from phalanx.model.transformer import Transformer
from phalanx.spec.base import parse_table
from phalanx.spec.model import ModelSpec
from phalanx.spec.parts.block import blocks
from tests.helpers.small_runs import MOE

CAST_ERROR = 2**-4
PRODUCT_ERROR = 2 * CAST_ERROR + CAST_ERROR**2
"""Relative error of a term of a sum whose two operands are cast."""
BF16_ERROR = 2**-8
SUBNORMAL_ERROR = 2**-10 / 224
"""Half a step between e4m3's smallest numbers, relative to a row's maximum, which is scaled to 224 at least."""


def normal(*shape: int, seed: int = 0, spread: float = 1.0) -> Tensor:
    """Return rows of normal numbers whose sizes differ by powers of `spread`."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=generator)
    return (x * spread ** torch.randn(*shape[:-1], 1, generator=generator)).bfloat16()


@pytest.mark.parametrize("value", [448.0, 449.0, 1.75, 1.7500001, 3e38, 1e-35, -5.0])
def test_cast_scales_maximum_to_largest_binade_by_power_of_two(value: float) -> None:
    cast = cast_rows(torch.tensor([[value, value / 3]]))
    assert 224 <= cast.numbers.float().abs().max() <= 448
    assert cast.scales.log2().frac().abs().max() == 0
    restored = cast.restore(torch.float32)
    torch.testing.assert_close(restored, torch.tensor([[value, value / 3]]), rtol=CAST_ERROR, atol=0)
    assert torch.equal(cast.restore(torch.bfloat16).float(), restored)


def test_cast_of_zeros_is_zero() -> None:
    assert torch.equal(cast_rows(torch.zeros(2, 16)).restore(torch.bfloat16), torch.zeros(2, 16).bfloat16())


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_nonfinite_row_stays_nonfinite_and_others_are_unchanged(value: float) -> None:
    rows = torch.ones(2, 16)
    rows[0, 3] = value
    product = fp8_linear(rows, torch.ones(16, 16))
    assert not product[0].isfinite().any()
    assert torch.equal(product[1], torch.full((16,), 16.0))


def assert_within_cast_error(product: Tensor, left: Tensor, right: Tensor, error: float = PRODUCT_ERROR) -> None:
    """Compare with left right^T in fp64; each term may be wrong by `error`, and sums are rounded to bf16."""
    left, right = left.double(), right.double()
    exact, terms = left @ right.mT, left.abs() @ right.abs().mT
    maxima = left.abs().amax(-1, keepdim=True) * right.abs().amax(-1)[..., None, :]
    small = 3 * left.shape[-1] * SUBNORMAL_ERROR * maxima
    limit = (error + 2 * BF16_ERROR) * terms + (small if error else 0)
    assert bool(((product - exact).abs() <= limit).all())
    assert (product - exact).norm() < (0.06 if error else 0.005) * exact.norm()


def test_product_and_gradients_are_within_cast_error_of_fp64() -> None:
    x = normal(4, 24, 64, spread=8).requires_grad_()
    weight = normal(48, 64, seed=1, spread=8).requires_grad_()
    gradient = normal(4, 24, 48, seed=2, spread=8)
    product = activated_product(Product(linear=fp8_linear), IDENTITY, weight, x)
    product.backward(gradient)
    assert x.grad is not None
    assert weight.grad is not None
    rows, columns = x.detach().flatten(0, 1), gradient.flatten(0, 1)
    assert_within_cast_error(product.detach().flatten(0, 1), rows, weight.detach())
    assert_within_cast_error(x.grad.flatten(0, 1), columns, weight.detach().T)
    assert_within_cast_error(weight.grad, columns.T, rows.T, error=0)


def test_grouped_product_equals_product_of_each_expert() -> None:
    x, weight = normal(40, 32, spread=8), normal(3, 48, 32, seed=1, spread=8)
    offsets = torch.tensor([8, 8, 40])
    expected = torch.cat([fp8_linear(x[:8], weight[0]), fp8_linear(x[8:], weight[2])])
    product = GroupedProduct(linear=fp8_grouped_linear, offsets=offsets)
    torch.testing.assert_close(product.forward(x, weight), expected, rtol=BF16_ERROR, atol=1e-3)
    gradient = normal(40, 48, seed=2)
    expected = torch.cat([fp8_linear(gradient[:8], weight[0].T), fp8_linear(gradient[8:], weight[2].T)])
    torch.testing.assert_close(product.input_gradient(gradient, weight), expected, rtol=BF16_ERROR, atol=1e-3)


def test_bias_is_added_to_product() -> None:
    x, weight, bias = normal(8, 32), normal(16, 32, seed=1), normal(16, seed=2)
    expected = fp8_linear(x, weight) + bias
    torch.testing.assert_close(fp8_linear(x, weight, bias), expected, rtol=2 * BF16_ERROR, atol=0.02)


@pytest.mark.parametrize("run", [fp8_linear, fp8_grouped_linear])
def test_operands_have_shapes_and_strides_of_cuda_products(run: Callable[..., Tensor]) -> None:
    """PyTorch checks the arguments of its CUDA products with tensors that have no data, so no GPU is needed."""
    experts = (4,) if run is fp8_grouped_linear else ()
    with FakeTensorMode():
        x = torch.empty(64, 32, device="cuda", dtype=torch.bfloat16)
        weight = torch.empty(*experts, 48, 32, device="cuda", dtype=torch.bfloat16)
        last = [torch.empty(4, device="cuda", dtype=torch.int64)] if experts else []
        product = run(x, weight, *last)
        assert product.shape == (64, 48)
        assert product.dtype == torch.bfloat16
        assert run(product, weight.mT, *last).shape == (64, 32)


def test_only_products_of_blocks_are_in_float8() -> None:
    model = Transformer(parse_table(ModelSpec, MOE))
    use_fp8_products(model)
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, ProductLinear)}
    in_bf16 = {name for name, layer in layers.items() if layer.product.linear is not fp8_linear}
    assert in_bf16 == {"blocks.0.mlp.router.gate", "blocks.1.mlp.router.gate"}
    assert len(layers) > len(in_bf16)
    assert all(part.grouped_linear is fp8_grouped_linear for part in model.modules() if isinstance(part, Experts))


def test_mlp_saves_the_same_tensors_as_in_bf16() -> None:
    spec = parse_table(ModelSpec, {**MOE, "moe": None})

    def saved_bytes(mlp: MLP) -> list[int]:
        saved: list[Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
            mlp(torch.ones(2, 8, spec.hidden_size, dtype=torch.bfloat16, requires_grad=True))
        return sorted(x.untyped_storage().nbytes() for x in {x.data_ptr(): x for x in saved}.values())

    mlp = MLP(blocks(spec)[0][-1].part).bfloat16()
    in_bf16 = saved_bytes(mlp)
    use_fp8_products(mlp)
    assert saved_bytes(mlp) == in_bf16


def test_default_grouped_product_is_in_bf16() -> None:
    spec = parse_table(ModelSpec, MOE)
    assert spec.moe is not None
    assert Experts(blocks(spec)[0][-1].part.within("experts")).grouped_linear is grouped_linear
