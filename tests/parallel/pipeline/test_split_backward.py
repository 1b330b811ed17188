"""Backward passes in two halves: gradients equal those of a full backward pass, and those of weights come with the
second half."""

from __future__ import annotations

import copy
import weakref
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from phalanx.model.transformer import Transformer
from phalanx.parallel.cross_entropy import in_place_cross_entropy
from phalanx.parallel.module_tensors import named_parameters
from phalanx.parallel.pipeline.split_backward import DeferredWeightGrads, compute_weight_grads, split_backward
from phalanx.parallel.pipeline.stage_module import StageModule
from phalanx.parallel.tensor.autograd import ColumnParallelLinear
from phalanx.spec.base import parse_table
from phalanx.spec.model import ModelSpec
from tests.helpers.small_runs import DENSE, MOE, Table

MODELS: dict[str, Table] = {
    "dense": DENSE,
    "moe": {**MOE, "hidden_size": 32, "moe": {**MOE["moe"], "expert_ffn_size": 32}},
    "biases": {**DENSE, "qk_norm": "none", "bias": True, "activation": "gelu", "norm": "layernorm"},
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("model", MODELS)
def test_split_backward_gradients_equal_full_backward(model: str, recompute: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    spec = parse_table(ModelSpec, MODELS[model])
    full = Transformer(spec).to(torch.float64 if dtype == torch.float64 else torch.float32)
    for parameter in full.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    halves, deferred_grads = copy.deepcopy(full), DeferredWeightGrads()
    split_backward(halves, deferred_grads)
    if recompute:
        for index, block in enumerate(halves.blocks):
            halves.blocks[index] = checkpoint_wrapper(block)
    tokens = torch.randint(spec.vocab_size, (2, 16))

    def loss(module: Transformer) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            logits, auxiliary = module(tokens)
        return logits.to(torch.promote_types(logits.dtype, torch.float32)).square().sum() + auxiliary

    loss(full).backward()
    for repetition in range(2):  # gradients add up
        with deferred_grads.deferring() as deferred:
            loss(halves).backward()
        if repetition == 0:
            waiting = [name for name, parameter in named_parameters(halves) if parameter.grad is None]
            assert len(waiting) == len(deferred) > 5
        compute_weight_grads(deferred)
        assert not deferred
    loss(halves).backward()  # and whole backward passes still work
    for (name, expected), (_, actual) in zip(named_parameters(full), named_parameters(halves), strict=True):
        assert expected.grad is not None
        assert actual.grad is not None, name
        tolerance = {torch.float64: 1e-12, torch.float32: 1e-4, torch.bfloat16: 0.05}[dtype]
        difference = (3 * expected.grad - actual.grad).norm() / (3 * expected.grad).norm()
        assert difference < tolerance, name


def test_split_backward_defers_only_linear_and_expert_gradients() -> None:
    spec = parse_table(ModelSpec, MOE)
    module, deferred_grads = Transformer(spec), DeferredWeightGrads()
    split_backward(module, deferred_grads)
    with deferred_grads.deferring() as deferred:
        logits, auxiliary = module(torch.randint(spec.vocab_size, (1, 8)))
        (logits.sum() + auxiliary).backward()
    waiting = {name for name, parameter in module.named_parameters() if parameter.grad is None}
    assert waiting
    assert all("norm" not in name and "embedding" not in name for name in waiting)
    compute_weight_grads(deferred)
    assert all(parameter.grad is not None for parameter in module.parameters())


@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("model", MODELS)
def test_first_half_frees_received_activation(model: str, autocast: bool) -> None:
    """The first node of the graph holds the stage's input. No deferred operand, nor the last stage's loss, keeps the
    graph alive."""
    spec = parse_table(ModelSpec, MODELS[model])
    stage, deferred_grads = StageModule(spec, {1: range(spec.num_layers)}, stages=2), DeferredWeightGrads()
    split_backward(stage, deferred_grads)
    received = torch.randn(1, 8, spec.hidden_size, requires_grad=True)
    is_freed = _freed_test(received)
    with deferred_grads.deferring() as deferred:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            logits, auxiliary = stage(received, stage=1)
        targets = torch.zeros(1, 8, dtype=torch.long)
        (in_place_cross_entropy(logits, targets, ignored=-100) + auxiliary).backward()
    del received, logits, auxiliary
    assert len(deferred) > 5
    assert is_freed()


def test_first_half_of_tensor_parallel_product_frees_received_activation() -> None:
    deferred_grads = DeferredWeightGrads()
    tp = SimpleNamespace(
        deferred_grads=deferred_grads, gather_tokens=Tensor.clone, start_reduce_tokens=lambda grad: lambda: grad
    )
    received = torch.randn(4, 8, requires_grad=True)
    weight = torch.nn.Parameter(torch.randn(6, 8))
    is_freed = _freed_test(received)
    with deferred_grads.deferring() as deferred:
        products = ColumnParallelLinear.apply(2 * received, weight, tp, (torch.nn.functional.linear,))
        cast(Any, products)[0].sum().backward()
    del received, products
    assert len(deferred) == 1
    assert is_freed()


def _freed_test(tensor: Tensor) -> Any:
    """Return a function that returns whether the memory of a tensor is freed."""
    reference = tensor.untyped_storage()._weak_ref()
    return lambda: torch.UntypedStorage._expired(reference)


def test_compute_weight_grads_frees_operands_and_gradient_before_next() -> None:
    """The second half holds one gradient, and the operands of products that are not computed yet."""
    alive: list[weakref.ref[Tensor]] = []

    def deferred_gradient(weight: Tensor) -> Any:
        operand = torch.ones(3, requires_grad=True)  # such as a weight that was gathered

        def gradient() -> Tensor:
            assert [reference() for reference in alive] == [None] * len(alive)
            result = 2 * operand
            alive.extend([weakref.ref(operand), weakref.ref(result)])
            assert not result.requires_grad
            return result

        return get_gradient_edge(weight), gradient

    weights = [torch.zeros(3, requires_grad=True) for _ in range(3)]
    compute_weight_grads([deferred_gradient(weight) for weight in weights])
    assert all(weight.grad is not None and weight.grad.tolist() == [2, 2, 2] for weight in weights)
    assert len(alive) == 6
