"""Experts that others train (SPES, arXiv 2602.11543, section 3): of each layer this replica trains its own, with
gradients and optimizer state; it computes with the others as they are, and these rest in as few bits as one likes.

Routing knows nothing of it: a token goes to the experts that it chooses. An expert that is frozen passes gradients on
to its tokens, and has none."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.model.moe import Experts, MoE, grouped_linear
from phalanx.model.transformer import Transformer
from phalanx.parallel.dtensor_shards import rows_per_rank
from phalanx.parallel.int8_blocks import dequantize_blocks, quantize_blocks
from phalanx.parallel.module_tensors import named_modules
from phalanx.parallel.strategy import ModelShardingProtocol
from phalanx.spec.swarm import Codec

KINDS = ("gate", "up", "down")
TOP = 127
Weights = Callable[[str, torch.Size], Tensor]


@dataclass(frozen=True)
class TrainedExperts:
    """Which experts of every layer are trained here, and how the others rest."""

    experts: tuple[int, ...]
    frozen: Codec = "fp32"


class PartiallyTrainedExperts(Experts):
    """Those of a layer's experts that are here, of which some are trained: parameters stack these alone."""

    is_trained_mask: Tensor

    def __init__(
        self, whole: Experts, own: TrainedExperts, here: tuple[int, ...], shared: ModelShardingProtocol | None
    ) -> None:
        """`whole` has tensors like those of the experts that are `here`; `shared`, where ranks share the model."""
        nn.Module.__init__(self)
        self.here, self.of_all, self.shared = here, own.experts, shared
        self.own = tuple(expert for expert in here if expert in own.experts)
        self.others = tuple(expert for expert in here if expert not in own.experts)
        for kind in KINDS:
            stacked = getattr(whole, kind)
            setattr(self, kind, nn.Parameter(stacked.new_empty(len(self.own), *stacked.shape[1:])))
        self.frozen = nn.ModuleDict(
            {kind: FrozenExpertWeights(len(self.others), getattr(whole, kind), own.frozen) for kind in KINDS}
        )
        self.register_buffer("is_trained_mask", torch.zeros(len(here), dtype=torch.bool), persistent=False)

    def forward(self, x_ND: Tensor, ends_E: Tensor) -> Tensor:
        """See Experts.forward: rows of its own experts go through these, the rest through the others."""
        counts = torch.diff(ends_E, prepend=ends_E.new_zeros(1))
        here = self.is_trained_mask.repeat_interleave(counts, output_size=len(x_ND))
        own, others = here.nonzero().squeeze(1), (~here).nonzero().squeeze(1)
        if self.own:
            y = super().forward(x_ND[own], counts[self.is_trained_mask].cumsum(0))
        else:  # no rows; but parameters, if empty, that gradients are asked of
            y = x_ND[own] + self.gate.sum() + self.up.sum() + self.down.sum()
        z = (
            self._through_frozen(x_ND[others].to(y.dtype), counts[~self.is_trained_mask].cumsum(0))
            if self.others
            else y[:0]
        )
        return torch.cat([y, z])[torch.cat([own, others]).argsort()]

    def _through_frozen(self, x_ND: Tensor, ends: Tensor) -> Tensor:
        gate, up, down = (cast(FrozenExpertWeights, self.frozen[kind]) for kind in KINDS)
        hidden = F.silu(_FrozenGroupedLinear.apply(x_ND, gate, ends)) * _FrozenGroupedLinear.apply(x_ND, up, ends)
        return cast(Tensor, _FrozenGroupedLinear.apply(hidden, down, ends))


class FrozenExpertWeights(nn.Module):
    """Stacked weights that nothing is learned of, in fp32, bf16, or blocks of 8 bits."""

    numbers: Tensor
    scale: Tensor

    def __init__(self, count: int, like: Tensor, rest: Codec) -> None:
        super().__init__()
        self.shape, self.rest = torch.Size((count, *like.shape[1:])), rest
        if rest == "int8":
            codes, scale = quantize_blocks(like.new_empty(count, self.shape[1:].numel()), TOP)
            self.register_buffer("numbers", codes, persistent=False)
            self.register_buffer("scale", scale, persistent=False)
        else:
            dtype = torch.bfloat16 if rest == "bf16" else like.dtype
            self.register_buffer("numbers", like.new_empty(self.shape, dtype=dtype), persistent=False)

    @torch.no_grad()
    def set_expert(self, place: int, weight: Tensor) -> None:
        """Take the weight of an expert, the `place`-th that rests here."""
        if self.rest == "int8":
            codes, scale = quantize_blocks(weight.float().flatten(), TOP)
            self.numbers[place].copy_(codes)
            self.scale[place].copy_(scale)
        else:
            self.numbers[place].copy_(weight)

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """[experts, O, I], to compute with."""
        if self.rest != "int8":
            return self.numbers.to(dtype)
        return dequantize_blocks(self.numbers, self.scale, self.shape[1:].numel()).view(self.shape).to(dtype)


class _FrozenGroupedLinear(torch.autograd.Function):
    """Rows times the weights of their experts. What these are made of is kept for the backward pass, not the weights as
    they are computed with: those are made again."""

    @staticmethod
    def forward(ctx: Any, x_NI: Tensor, resting: FrozenExpertWeights, ends: Tensor) -> Tensor:
        ctx.resting = resting
        ctx.save_for_backward(ends)
        return grouped_linear(x_NI, resting.dequantized(x_NI.dtype), ends)

    @staticmethod
    def backward(ctx: Any, gradient_NO: Tensor) -> tuple[Tensor, None, None]:
        (ends,) = ctx.saved_tensors
        weight = ctx.resting.dequantized(gradient_NO.dtype)
        return grouped_linear(gradient_NO.contiguous(), weight.transpose(1, 2).contiguous(), ends), None, None


def assign_experts_to_ranks(own: Sequence[int], experts: int, ranks: int) -> list[tuple[int, ...]]:
    """Which experts each of the ranks that have different ones has: of those that are trained its rows of their stack,
    and as many others as it has room for."""
    others = iter([expert for expert in range(experts) if expert not in own])
    found, first = [], 0
    for count in rows_per_rank(len(own), ranks):
        found.append(tuple(sorted([*own[first : first + count], *islice(others, experts // ranks - count)])))
        first += count
    return found


def expert_permutation(here: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """[E + 1]: where each expert stands if those of the first rank come first, and so on; no expert (E) stays last."""
    order = [expert for of_rank in here for expert in of_rank]
    return torch.tensor([*order, len(order)], device=device).argsort()


def freeze_experts(
    model: Transformer, own: TrainedExperts, here: tuple[int, ...], shared: ModelShardingProtocol | None
) -> None:
    """Leave of each layer's experts that are here parameters for its own alone."""
    for part in model.modules():
        if isinstance(part, MoE):
            part.experts = PartiallyTrainedExperts(part.experts, own, here, shared)
    if shared is not None:
        for key in (f"{name}.{kind}" for name, _ in partially_trained_layers(model) for kind in KINDS):
            shared.shapes[key] = torch.Size((len(own.experts), *shared.shapes[key][1:]))


def set_local_choice_weight(module: nn.Module, ratio: float) -> None:
    """Let choices of experts that are trained here count for `ratio` in the balance loss from now on, so that a router
    may use them more; 1 is as without. Where all are trained here, there are no others to be used less."""
    for part in module.modules():
        if isinstance(part, MoE) and isinstance(part.experts, PartiallyTrainedExperts):
            relief = torch.ones_like(part.router.load)
            relief[list(part.experts.of_all)] = ratio
            part.router.relief = None if ratio == 1 else relief


def select_trained_experts(weights: Weights, own: TrainedExperts, experts: int) -> Weights:
    """What `weights` gives, of stacked experts the part that is trained here."""

    def part(name: str, shape: torch.Size) -> Tensor:
        if not name.endswith(tuple(f".experts.{kind}" for kind in KINDS)):
            return weights(name, shape)
        return weights(name, torch.Size((experts, *shape[1:])))[list(own.experts)]

    return part


def init_frozen_experts(module: nn.Module, weights: Weights, experts: int) -> None:
    """Give what rests its values, from those of whole stacks of experts by name."""
    for name, part in partially_trained_layers(module):
        shared = part.shared
        part.is_trained_mask.copy_(torch.tensor([expert in part.own for expert in part.here]))
        for kind, key in ((kind, f"{name}.{kind}") for kind in KINDS):
            resting = cast(FrozenExpertWeights, part.frozen[kind])
            of_one = resting.shape[1:] if shared is None else shared.shapes[key][1:]
            whole = weights(key, torch.Size((experts, *of_one)))
            for place, expert in enumerate(part.others):
                resting.set_expert(place, whole[expert] if shared is None else shared.expert_shard(key, whole[expert]))


def partially_trained_layers(module: nn.Module) -> Iterator[tuple[str, PartiallyTrainedExperts]]:
    """The layers of which some experts are trained here, by the name of their experts."""
    for name, part in named_modules(module):
        if isinstance(part, PartiallyTrainedExperts):
            yield name, part
