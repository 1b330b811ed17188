"""Two halves of a backward pass are the whole: the same gradients, those of the weights only after the second."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from phalanx.model.transformer import Transformer
from phalanx.parallel.module_tensors import named_parameters
from phalanx.parallel.pipeline.split_backward import DeferredWeightGrads, compute_weight_grads, split_backward
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
    whole = Transformer(spec).to(torch.float64 if dtype == torch.float64 else torch.float32)
    for parameter in whole.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    halves, later = copy.deepcopy(whole), DeferredWeightGrads()
    split_backward(halves, later)
    if recompute:
        for index, block in enumerate(halves.blocks):
            halves.blocks[index] = checkpoint_wrapper(block)
    tokens = torch.randint(spec.vocab_size, (2, 16))

    def loss(module: Transformer) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            logits, auxiliary = module(tokens)
        return logits.to(torch.promote_types(logits.dtype, torch.float32)).square().sum() + auxiliary

    loss(whole).backward()
    for turn in range(2):  # gradients add up
        with later.deferring() as put_off:
            loss(halves).backward()
        if turn == 0:
            waiting = [name for name, parameter in named_parameters(halves) if parameter.grad is None]
            assert len(waiting) == len(put_off) > 5
        compute_weight_grads(put_off)
        assert not put_off
    loss(halves).backward()  # and whole backward passes still work
    for (name, one), (_, other) in zip(named_parameters(whole), named_parameters(halves), strict=True):
        assert one.grad is not None
        assert other.grad is not None, name
        tolerance = {torch.float64: 1e-12, torch.float32: 1e-4, torch.bfloat16: 0.05}[dtype]
        difference = (3 * one.grad - other.grad).norm() / (3 * one.grad).norm()
        assert difference < tolerance, name


def test_split_backward_defers_only_linear_and_expert_gradients() -> None:
    spec = parse_table(ModelSpec, MOE)
    module, later = Transformer(spec), DeferredWeightGrads()
    split_backward(module, later)
    with later.deferring() as put_off:
        logits, auxiliary = module(torch.randint(spec.vocab_size, (1, 8)))
        (logits.sum() + auxiliary).backward()
    waiting = {name for name, parameter in module.named_parameters() if parameter.grad is None}
    assert waiting
    assert all("norm" not in name and "embedding" not in name for name in waiting)
    compute_weight_grads(put_off)
    assert all(parameter.grad is not None for parameter in module.parameters())
