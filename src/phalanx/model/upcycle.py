"""Mixture of experts from a dense model (sparse upcycling, arXiv 2212.05055).

Every expert starts as the dense MLP, and a part of it is reinitialized (Drop-Upcycling, arXiv 2502.19261)."""

from __future__ import annotations

import torch
from torch import Tensor

from phalanx.model.init import DrawnWeights, Part, PartialWeights, Weights, named_generator, part_of_weight
from phalanx.spec.base import require
from phalanx.spec.model import ModelSpec


def upcycle_weights(spec: ModelSpec, source: ModelSpec, weights: Weights, seed: int) -> Weights:
    """Return the initial weights of the mixture `spec` by name, from the `weights` of `source`.

    If `source` is a mixture too, its weights are unchanged. Routers are drawn at random; an untied head starts as the
    embedding that it was tied to. An expert depends on seed, layer and expert index only. Raises UserError if the
    experts do not have the shape of the MLP."""
    moe = spec.moe
    assert moe is not None
    if source.moe is not None:
        fraction = spec.upcycle_reinit_fraction
        problem = "has no effect, because model.from_hf has experts"
        fix = "remove model.upcycle_reinit_fraction, or start from a dense model"
        require(not fraction, "model.upcycle_reinit_fraction", fraction, problem, fix)
        return weights
    width = source.ffn_hidden_size
    source_width = f"(model.ffn_hidden_size = {width} in model.from_hf)"
    problem = f"differs from the width of the MLP that experts are copied from {source_width}"
    fix = f"set model.moe.expert_ffn_size = {width}"
    require(moe.expert_ffn_size == width, "model.moe.expert_ffn_size", moe.expert_ffn_size, problem, fix)
    num_shared = moe.num_shared_experts
    problem = "would add a second copy of the MLP that the other experts are copied from"
    fix = "set model.moe.num_shared_experts = 0, or start from a model with experts"
    require(not num_shared, "model.moe.num_shared_experts", num_shared, problem, fix)

    problem = "is not supported for experts that are initialized from a dense model"
    for field in ("dense_branch", "bias", "router_norm", "expert_scales", "latent_size"):
        value = getattr(moe, field)
        require(not value, f"model.moe.{field}", value, problem, "remove it")

    def upcycled_part(name: str, shape: torch.Size, part: Part) -> Tensor:
        layer, stacked, kind = name.partition(".experts.")
        if stacked:
            # The whole matrix, because its values decide those that are drawn.
            dense = weights(f"{layer}.{kind}.weight", shape[1:])
            experts = range(part[0].start, part[0].stop)
            return replicate_mlp(dense, experts, spec.upcycle_reinit_fraction, seed, layer, kind)[:, *part[1:]]
        if name.endswith(".router.gate.weight"):
            return DrawnWeights(spec, seed).part(name, shape, part)
        own_name = "embedding.weight" if name == "head.weight" and source.tie_embeddings else name
        return part_of_weight(weights, own_name, shape, part)

    return PartialWeights(upcycled_part)


def replicate_mlp(dense: Tensor, experts: range, reinit_fraction: float, seed: int, layer: str, kind: str) -> Tensor:
    """Return a stack of copies of one matrix of an MLP for some experts of a layer, each partly reinitialized.

    In each copy, the same part of the inner units in all matrices of the layer is drawn again. The new values have the
    mean and deviation of the replaced ones (arXiv 2502.19261). `kind` of matrix is gate, up or down."""
    stack = dense.expand(len(experts), *dense.shape).clone()
    for expert, copy in zip(experts, stack, strict=True):
        units_FD = copy.T if kind == "down" else copy
        order = torch.randperm(len(units_FD), generator=named_generator(seed, f"{layer} {expert}"))
        chosen = order[: round(reinit_fraction * len(units_FD))]
        if len(chosen):
            before = units_FD[chosen].float()
            generator = named_generator(seed, f"{layer} {expert} {kind}")
            drawn = torch.empty_like(before).normal_(float(before.mean()), float(before.std()), generator=generator)
            units_FD[chosen] = drawn.to(units_FD.dtype)
    return stack
