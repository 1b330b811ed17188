"""Partially trained experts (SPES, arXiv 2602.11543, section 3): a replica trains some experts.

Only the trained experts of each layer have gradients and optimizer state. The replica computes with the frozen experts,
which are stored with a configurable number of bits. Routing is unaffected: a token goes to the experts that it chooses.
A frozen expert passes gradients on to its tokens, and has none of its own.

Why: `docs/design/decisions/partial-experts.md`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import cast

import torch
from torch import Tensor, nn

from phalanx.model.moe import Experts, GroupedProduct
from phalanx.model.part import modules_declaring
from phalanx.model.products import IDENTITY, activated_product
from phalanx.model.transformer import Transformer
from phalanx.parallel.dtensor_shards import rows_per_rank
from phalanx.parallel.int8_blocks import dequantize_blocks, quantize_blocks
from phalanx.parallel.module_tensors import named_modules
from phalanx.parallel.protocols import ModelShardingProtocol
from phalanx.spec.parts.operations import Dispatch
from phalanx.spec.swarm import Codec

KINDS = ("gate", "up", "down")
"""Names of stacked matrices; experts without a gate lack the first."""
MAX_CODE = 127
Weights = Callable[[str, torch.Size], Tensor]


@dataclass(frozen=True)
class TrainedExperts:
    """The trained experts of every layer, and the storage format of the frozen ones."""

    experts: tuple[int, ...]
    frozen: Codec = "fp32"


class PartiallyTrainedExperts(Experts):
    """The experts of a layer on this rank, of which some are trained; parameters stack only these."""

    is_trained_mask: Tensor

    def __init__(
        self,
        experts: Experts,
        trained_experts: TrainedExperts,
        local_experts: tuple[int, ...],
        sharding: ModelShardingProtocol | None,
    ) -> None:
        """Create the trained parameters and the frozen buffers of a layer.

        Args:
            experts: Layer with tensors like those of `local_experts`.
            trained_experts: Experts that the replica trains.
            local_experts: Experts on this rank.
            sharding: Shards of the model, if ranks share it.
        """
        nn.Module.__init__(self)
        self.declare(experts.part)
        self.activation = experts.activation
        self.has_biases = False  # a swarm refuses them
        self.defer_or_compute = experts.defer_or_compute
        self.grouped_linear = experts.grouped_linear
        self.experts_on_rank = local_experts
        self.all_trained_experts = trained_experts.experts
        self.model_sharding = sharding
        self.trained_on_rank = tuple(expert for expert in local_experts if expert in trained_experts.experts)
        self.frozen_on_rank = tuple(expert for expert in local_experts if expert not in trained_experts.experts)
        for kind in self.matrices:
            stacked = getattr(experts, kind)
            setattr(self, kind, nn.Parameter(stacked.new_empty(len(self.trained_on_rank), *stacked.shape[1:])))
        self.frozen = nn.ModuleDict(
            {
                kind: FrozenExpertWeights(len(self.frozen_on_rank), getattr(experts, kind), trained_experts.frozen)
                for kind in self.matrices
            }
        )
        self.register_buffer("is_trained_mask", torch.zeros(len(local_experts), dtype=torch.bool), persistent=False)

    def forward(self, x_ND: Tensor, offsets_E: Tensor) -> Tensor:
        """Return the experts' outputs as `Experts.forward`, by the trained and the frozen experts."""
        counts = torch.diff(offsets_E, prepend=offsets_E.new_zeros(1))
        is_trained = self.is_trained_mask.repeat_interleave(counts, output_size=len(x_ND))
        trained_rows = is_trained.nonzero().squeeze(1)
        frozen_rows = (~is_trained).nonzero().squeeze(1)
        if self.trained_on_rank:
            y = super().forward(x_ND[trained_rows], counts[self.is_trained_mask].cumsum(0))
        else:  # no rows, but empty parameters that need gradients
            y = x_ND[trained_rows] + sum(getattr(self, kind).sum() for kind in self.matrices)
        z = (
            self._apply_frozen_experts(x_ND[frozen_rows].to(y.dtype), counts[~self.is_trained_mask].cumsum(0))
            if self.frozen_on_rank
            else y[:0]
        )
        return torch.cat([y, z])[torch.cat([trained_rows, frozen_rows]).argsort()]

    def _apply_frozen_experts(self, x_ND: Tensor, offsets_E: Tensor) -> Tensor:
        *first, down = (
            FrozenProduct(
                linear=self.grouped_linear, weights=cast(FrozenExpertWeights, self.frozen[kind]), offsets=offsets_E
            )
            for kind in self.matrices
        )
        no_weight = x_ND.new_empty(0)  # products have their own
        inner = (activated_product(product, IDENTITY, no_weight, x_ND) for product in first)
        return activated_product(down, self.activation, no_weight, *inner)


class FrozenExpertWeights(nn.Module):
    """Stacked weights that are not trained, in fp32, bf16, or 8-bit blocks."""

    numbers: Tensor
    scale: Tensor

    def __init__(self, count: int, like: Tensor, codec: Codec) -> None:
        super().__init__()
        self.shape = torch.Size((count, *like.shape[1:]))
        self.storage_codec = codec
        if codec == "int8":
            codes, scale = quantize_blocks(like.new_empty(count, self.shape[1:].numel()), MAX_CODE)
            self.register_buffer("numbers", codes, persistent=False)
            self.register_buffer("scale", scale, persistent=False)
        else:
            dtype = torch.bfloat16 if codec == "bf16" else like.dtype
            self.register_buffer("numbers", like.new_empty(self.shape, dtype=dtype), persistent=False)

    @torch.no_grad()
    def set_expert(self, index: int, weight: Tensor) -> None:
        """Store the weight of an expert at `index` of this stack."""
        if self.storage_codec == "int8":
            codes, scale = quantize_blocks(weight.float().flatten(), MAX_CODE)
            self.numbers[index].copy_(codes)
            self.scale[index].copy_(scale)
        else:
            self.numbers[index].copy_(weight)

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """Return the weights in a compute dtype, [experts, O, I]."""
        if self.storage_codec != "int8":
            return self.numbers.to(dtype)
        return dequantize_blocks(self.numbers, self.scale, self.shape[1:].numel()).view(self.shape).to(dtype)


@dataclass(frozen=True, kw_only=True)
class FrozenProduct(GroupedProduct):
    """Product of rows and the frozen weights of their experts.

    The dequantized weights are computed again in the backward pass, not saved."""

    weights: FrozenExpertWeights

    def forward(self, x: Tensor, *_: Tensor | None) -> Tensor:
        """Return the product, [N, O]."""
        return super().forward(x, self.weights.dequantized(x.dtype))

    def input_gradient(self, gradient: Tensor, _: Tensor) -> Tensor:
        """Return the gradient of the rows."""
        return super().input_gradient(gradient, self.weights.dequantized(gradient.dtype))


def assign_experts_to_ranks(trained: Sequence[int], experts: int, ranks: int) -> list[tuple[int, ...]]:
    """Return the experts of each expert-parallel rank.

    A rank has its rows of the stack of trained experts, and fills its remaining slots with frozen experts.

    Args:
        trained: Indices of the trained experts.
        experts: Number of experts of a layer.
        ranks: Number of expert-parallel ranks; divides the number of experts.
    """
    remaining = iter([expert for expert in range(experts) if expert not in trained])
    assignment = []
    first = 0
    for count in rows_per_rank(len(trained), ranks):
        assignment.append(
            tuple(sorted([*trained[first : first + count], *islice(remaining, experts // ranks - count)]))
        )
        first += count
    return assignment


def expert_permutation(experts_per_rank: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Return the position of each expert in rank order, [E + 1]; "no expert" (E) stays last."""
    order = [expert for rank_experts in experts_per_rank for expert in rank_experts]
    return torch.tensor([*order, len(order)], device=device).argsort()


def freeze_experts(
    model: Transformer,
    trained_experts: TrainedExperts,
    local_experts: tuple[int, ...],
    sharding: ModelShardingProtocol | None,
) -> None:
    """Replace the experts of each layer by partially trained experts.

    Args:
        model: Model with this rank's experts.
        trained_experts: Experts that the replica trains.
        local_experts: Experts on this rank.
        sharding: Shards of the model, if ranks share it; its shapes become those of the trained stacks.
    """
    for mixture in modules_declaring(model, Dispatch):
        mixture.experts = PartiallyTrainedExperts(mixture.experts, trained_experts, local_experts, sharding=sharding)
    if sharding is not None:
        for key in (f"{name}.{kind}" for name, layer in partially_trained_layers(model) for kind in layer.matrices):
            sharding.shapes[key] = torch.Size((len(trained_experts.experts), *sharding.shapes[key][1:]))


def set_local_choice_weight(module: nn.Module, ratio: float) -> None:
    """Set the weight of choices of trained experts in the balance loss, so that routers may use them more.

    A `ratio` of 1 restores the usual loss. If all experts are trained, there are no other experts to use less."""
    for mixture in modules_declaring(module, Dispatch):
        if isinstance(mixture.experts, PartiallyTrainedExperts):
            relief = torch.ones_like(mixture.router.load)
            relief[list(mixture.experts.all_trained_experts)] = ratio
            mixture.router.relief = None if ratio == 1 else relief


def select_trained_experts(weights: Weights, trained_experts: TrainedExperts, experts: int) -> Weights:
    """Wrap initial weights to return only the trained experts of a stack.

    Args:
        weights: Full parameters by name and shape.
        trained_experts: Experts that the replica trains.
        experts: Number of experts of a layer, in the full stacks.
    """

    def select_part(name: str, shape: torch.Size) -> Tensor:
        if not name.endswith(tuple(f".experts.{kind}" for kind in KINDS)):
            return weights(name, shape)
        return weights(name, torch.Size((experts, *shape[1:])))[list(trained_experts.experts)]

    return select_part


def init_frozen_experts(module: nn.Module, weights: Weights, experts: int) -> None:
    """Initialize the frozen experts from the full stacks of experts.

    Args:
        weights: Full stacks by name and shape.
        experts: Number of experts of a layer.
    """
    for name, part in partially_trained_layers(module):
        sharding = part.model_sharding
        part.is_trained_mask.copy_(torch.tensor([expert in part.trained_on_rank for expert in part.experts_on_rank]))
        for kind, key in ((kind, f"{name}.{kind}") for kind in part.matrices):
            frozen_weights = cast(FrozenExpertWeights, part.frozen[kind])
            expert_shape = frozen_weights.shape[1:] if sharding is None else sharding.shapes[key][1:]
            stacked = weights(key, torch.Size((experts, *expert_shape)))
            for index, expert in enumerate(part.frozen_on_rank):
                frozen_weights.set_expert(
                    index, stacked[expert] if sharding is None else sharding.expert_shard(key, stacked[expert])
                )


def partially_trained_layers(module: nn.Module) -> Iterator[tuple[str, PartiallyTrainedExperts]]:
    """Yield the partially trained layers and the names of their experts."""
    for name, part in named_modules(module):
        if isinstance(part, PartiallyTrainedExperts):
            yield name, part
