"""Compiled parts of a transformer, compared with eager ones. The compiler generates no kernels here."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from phalanx.model import chunks
from phalanx.model.compilation import compile_blocks
from phalanx.model.part import modules_declaring
from phalanx.model.products import ACTIVATIONS, compiled_activation, make_activation
from phalanx.model.rotary import apply_rotary
from phalanx.spec.activations import NUM_INPUTS, XIELU_PARAMETERS
from phalanx.spec.parts.operations import AttentionCore
from tests.helpers.random_models import build_model

MOE = {"num_experts": 4, "top_k": 2, "expert_ffn_size": 24}
LATENT_ATTENTION = {"kind": "latent_attention", "latent_rank": 16, "rope_dim": 4, "value_dim": 8}
ARGUMENTS = {"clamped_swiglu": (1.7, 0.8), "limited_swiglu": (0.5,)}


@pytest.fixture(autouse=True)
def without_kernels():
    compiler = torch.compile
    compiled_activation.cache_clear()
    with mock.patch.object(torch, "compile", lambda part, **_: compiler(part, backend="aot_eager")):
        yield
    compiled_activation.cache_clear()


def activation_inputs(name: str, rows: int) -> list[torch.Tensor]:
    """Return random inputs; gates of heads have one number for each head of two."""
    widths = [4, 8] if name.startswith("head_") else [8] * NUM_INPUTS.get(name, 2)
    trained = [torch.tensor([number]) for number in (XIELU_PARAMETERS.values() if name == "xielu" else ())]
    return [torch.randn(rows, width, dtype=torch.float64) for width in widths] + trained


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_gradients_of_activation_are_its_slopes(name: str) -> None:
    """The change of the output along a direction, by central differences, is that of the gradients."""
    activation = make_activation(name, *ARGUMENTS.get(name, ()))
    inputs = [x.double() for x in activation_inputs(name, 5)]
    gradient = torch.randn(5, 8, dtype=torch.float64)
    directions = [torch.randn_like(x) for x in inputs]
    ends = [
        activation.forward(*(x + sign * 1e-6 * along for x, along in zip(inputs, directions, strict=True)))
        for sign in (1, -1)
    ]
    change = ((ends[0] - ends[1]) / 2e-6 * gradient).sum()
    _, vjp = activation.forward_and_vjp(*inputs)
    gradients = vjp(gradient.clone())
    slopes = [(grad * along).sum() for grad, along in zip(gradients, directions, strict=True)]
    torch.testing.assert_close(torch.stack(slopes).sum(), change, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("tokens", [[3, 5]])
def test_compiled_activation_equals_eager(name: str, tokens: list[int]) -> None:
    activation = make_activation(name, *ARGUMENTS.get(name, ()))
    for rows in tokens:
        inputs = activation_inputs(name, rows)
        gradient = torch.randn(rows, 8, dtype=torch.float64)
        expected, expected_gradients = activation.forward_and_vjp(*inputs)
        output, gradients = compiled_activation(activation).forward_and_vjp(*inputs)
        torch.testing.assert_close(output, expected)
        torch.testing.assert_close(gradients(gradient.clone()), expected_gradients(gradient.clone()))


def test_xielu_has_the_gradients_of_autograd() -> None:
    """Chunks have one row."""
    x = torch.randn(5, 8, dtype=torch.float64, requires_grad=True)
    numbers = [torch.tensor([number], dtype=torch.float64, requires_grad=True) for number in (0.4, -0.7)]
    a, b = F.softplus(numbers[0]), F.softplus(numbers[1]) + 0.5
    expected = torch.where(x > 0, a * x.square(), b * (x.exp() - 1 - x)) + x / 2
    gradient = torch.randn(5, 8, dtype=torch.float64)
    expected_gradients = torch.autograd.grad(expected, (x, *numbers), gradient)
    with torch.no_grad(), mock.patch.object(chunks, "CPU_CHUNK_ELEMENTS", 8):
        output, vjp = make_activation("xielu").forward_and_vjp(x, *numbers)
        torch.testing.assert_close(output, expected)
        torch.testing.assert_close(vjp(gradient.clone()), expected_gradients)


@pytest.mark.parametrize("rows", [1, 5])
def test_clamped_swiglu_has_the_gradients_of_autograd(rows: int) -> None:
    """Limits are values, too: there gradients pass, as in torch.clamp. Chunks have one row."""
    alpha, limit = ARGUMENTS["clamped_swiglu"]
    gate, up = (2 * torch.randn(rows, 8, dtype=torch.float64) for _ in range(2))
    gate[0, :2], up[0, :2] = limit, torch.tensor([limit, -limit])
    gate.requires_grad_()
    up.requires_grad_()
    g, u = gate.clamp(max=limit), up.clamp(-limit, limit)
    expected = (u + 1) * (g * torch.sigmoid(g * alpha))
    gradient = torch.randn(rows, 8, dtype=torch.float64)
    expected_gradients = torch.autograd.grad(expected, (gate, up), gradient)
    with torch.no_grad(), mock.patch.object(chunks, "CPU_CHUNK_ELEMENTS", 8):
        output, vjp = make_activation("clamped_swiglu", alpha, limit).forward_and_vjp(gate, up)
        torch.testing.assert_close(output, expected)
        torch.testing.assert_close(vjp(gradient.clone()), expected_gradients)


def loss_and_gradients(model, tokens):
    logits, auxiliary = model(tokens)
    (logits.square().sum() + auxiliary).backward()
    return [logits, *(parameter.grad for parameter in model.parameters())]


@pytest.mark.parametrize("whole", [True, False], ids=["blocks", "elementwise functions"])
@pytest.mark.parametrize(
    "model",
    [
        {},
        {"activation": "gelu"},
        {"moe": MOE},
        {"moe": MOE | {"bias": True}, "activation": "clamped_swiglu"},
        {"num_kv_heads": 4, "head_dim": 12, "mixer": LATENT_ATTENTION},
    ],
    ids=["dense", "gelu", "experts", "experts with biases", "latent attention"],
)
def test_compiled_blocks_equal_eager(model, whole):
    tokens = torch.randint(53, (2, 16))
    expected = loss_and_gradients(build_model(**model), tokens)
    compiled = build_model(**model)
    compile_blocks(compiled.blocks.children(), whole)
    assert whole == all(module.rotate is apply_rotary for module in modules_declaring(compiled, AttentionCore))
    for result, expected_result in zip(loss_and_gradients(compiled, tokens), expected, strict=True):
        torch.testing.assert_close(result, expected_result, rtol=1e-10, atol=1e-10)
