"""Compiled parts of a transformer, compared with eager ones. The compiler generates no kernels here."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from phalanx.model.compilation import compile_blocks
from phalanx.model.products import ACTIVATIONS, compiled_activation
from phalanx.spec.activations import GATED_OUTPUT, NUM_INPUTS
from tests.helpers.random_models import build_model

MOE = {"num_experts": 4, "top_k": 2, "expert_ffn_size": 24}


@pytest.fixture(autouse=True)
def without_kernels():
    compiler = torch.compile
    compiled_activation.cache_clear()
    with mock.patch.object(torch, "compile", lambda part, **_: compiler(part, backend="aot_eager")):
        yield
    compiled_activation.cache_clear()


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("tokens", [[3, 5]])
def test_compiled_activation_equals_eager(name: str, tokens: list[int]) -> None:
    activation = ACTIVATIONS[name]
    count = 2 if name == GATED_OUTPUT else NUM_INPUTS[name]
    for rows in tokens:
        inputs = [torch.randn(rows, 8, dtype=torch.float64) for _ in range(count)]
        gradient = torch.randn(rows, 8, dtype=torch.float64)
        expected, expected_gradients = activation.forward_and_vjp(*inputs)
        output, gradients = compiled_activation(activation).forward_and_vjp(*inputs)
        torch.testing.assert_close(output, expected)
        torch.testing.assert_close(gradients(gradient.clone()), expected_gradients(gradient.clone()))


def loss_and_gradients(model, tokens):
    logits, auxiliary = model(tokens)
    (logits.square().sum() + auxiliary).backward()
    return [logits, *(parameter.grad for parameter in model.parameters())]


@pytest.mark.parametrize("whole", [True, False], ids=["blocks", "elementwise functions"])
@pytest.mark.parametrize("model", [{}, {"activation": "gelu"}, {"moe": MOE}], ids=["dense", "gelu", "experts"])
def test_compiled_blocks_equal_eager(model, whole):
    tokens = torch.randint(53, (2, 16))
    expected = loss_and_gradients(build_model(**model), tokens)
    compiled = build_model(**model)
    compile_blocks(compiled.blocks.children(), whole)
    for result, expected_result in zip(loss_and_gradients(compiled, tokens), expected, strict=True):
        torch.testing.assert_close(result, expected_result, rtol=1e-10, atol=1e-10)
