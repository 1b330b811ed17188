"""Mixture of experts: y = sum over the chosen experts of weight x expert(x).

It is dropless unless a capacity is set. Shapes: B batch, T tokens, N = B x T, D width, E experts, k experts per token,
F inner width of an expert.

Why: `docs/design/decisions/balance-loss-per-sequence.md`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.model.dtypes import at_least_fp32
from phalanx.model.host_counts import to_host_lists
from phalanx.model.mlp import MLP
from phalanx.model.nf4 import shape_of_numbers
from phalanx.model.part import PartModule
from phalanx.model.products import (
    IDENTITY,
    Activation,
    DeferOrCompute,
    LinearFunction,
    Product,
    ProductLinear,
    activated_product,
    compute_now,
    declared_activation,
)
from phalanx.spec.model import MoESpec
from phalanx.spec.parts.operations import Part
from phalanx.spec.tuning import ADAPTER_SUFFIXES

Mix = Callable[..., Tensor]
"""Function of a `MoE`, its input, and the weights and choices of its router; returns the layer's output."""


class Router(PartModule):
    """Layer that chooses k of E experts for each token, with an auxiliary loss for unbalanced choices."""

    load: Tensor
    dropped: Tensor
    bias: Tensor
    relief: Tensor | None
    gate: ProductLinear
    norm: nn.Module
    expert_scale: Tensor
    forward_passes = 1
    """Number of forward passes that count a choice: 2 if the router is recomputed in the backward pass."""

    def __init__(self, moe: MoESpec, part: Part) -> None:
        super().__init__(part)
        self.moe = moe
        self.sum_counts: list[Callable[[Tensor], Tensor]] = []
        """Sums of counts over the ranks that share sequences."""
        # Tokens per expert since the last reset.
        self.register_buffer("load", torch.zeros(moe.num_experts), persistent=False)
        # Dropped choices since the last reset.
        self.register_buffer("dropped", torch.zeros(()), persistent=False)
        # Weight of a choice of each expert in the balance loss; None: 1.
        self.register_buffer("relief", None, persistent=False)
        if moe.has_choice_bias:
            self.register_buffer("bias", torch.zeros(moe.num_experts))

    def logits(self, x_BTD: Tensor, stream_BTD: Tensor | None) -> Tensor:
        """Return the logits, [B, T, E], of the experts' input, or of the input of the layer by a norm of its own."""
        if stream_BTD is not None and self.moe.router_norm:
            return at_least_fp32(self.gate(self.norm(stream_BTD))) * x_BTD.shape[-1] ** -0.5
        return at_least_fp32(self.read_input(self.gate, x_BTD))

    def forward(self, x_BTD: Tensor, stream_BTD: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Return weights and indices of the chosen experts, [B, T, k] each, and the auxiliary loss.

        The loss is summed over all tokens, and 0 without gradients. The index of a dropped choice is E, which is not an
        expert."""
        logits = self.logits(x_BTD, stream_BTD)
        score = logits.softmax(-1) if self.moe.router_score == "softmax" else logits.sigmoid()
        chosen = self.choose(score.detach())
        weights = score.gather(-1, chosen)
        if self.moe.normalize_top_k:
            weights = weights / (weights.sum(-1, keepdim=True) + self.moe.weight_eps)
        if self.moe.routed_scale != 1:
            weights = weights * self.moe.routed_scale
        if self.moe.expert_scales:
            weights = weights * at_least_fp32(self.expert_scale)[chosen]
        load_BE = self.tokens_per_expert(chosen, score.dtype) if torch.is_grad_enabled() else None
        dropped = None if self.moe.capacity_factor is None else ~within_capacity(self.moe, chosen)
        if load_BE is not None:
            # Not `+=`, which assigns an attribute: torch.compile then leaves a recomputed block to run eagerly.
            self.load.add_(load_BE.sum(0))
            if dropped is not None:
                self.dropped.add_(dropped.sum())
        if dropped is not None:
            weights, chosen = weights.masked_fill(dropped, 0), chosen.masked_fill(dropped, self.moe.num_experts)
        if load_BE is None:
            return weights, chosen, logits.new_zeros(())
        probs = score if self.moe.router_score == "softmax" else score / score.sum(-1, keepdim=True)
        balance = balance_loss(self.moe, probs, load_BE, self.relief)
        return weights, chosen, balance + z_loss(self.moe, logits)

    def choose(self, score_BTE: Tensor) -> Tensor:
        """Return the indices of the chosen experts, [B, T, k].

        A bias steers the choice, never the weights (arXiv 2408.15664, section 3). Groups of experts limit it
        (DeepSeek-V3, arXiv 2412.19437, section 2.1.2; DeepSeek-V2, arXiv 2405.04434, section 2.2.2)."""
        moe = self.moe
        if moe.has_choice_bias:
            score_BTE = score_BTE + self.bias
        if moe.num_groups > 1:
            by_group = score_BTE.unflatten(-1, (moe.num_groups, -1))
            _, best = by_group.topk(moe.group_scores, dim=-1).values.sum(-1).topk(moe.top_groups, dim=-1)
            is_hidden = torch.ones_like(by_group[..., 0], dtype=torch.bool).scatter_(-1, best, False)
            score_BTE = by_group.masked_fill(is_hidden[..., None], float("-inf")).flatten(-2)
        return score_BTE.topk(moe.top_k, dim=-1).indices

    def tokens_per_expert(self, chosen_BTk: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the number of tokens of each sequence that chose each expert, [B, E]."""
        chosen = chosen_BTk.flatten(1)
        counts = torch.zeros(len(chosen), self.moe.num_experts, dtype=dtype, device=chosen.device)
        counts = counts.scatter_add_(1, chosen, torch.ones_like(chosen, dtype=dtype))
        for sum_over_ranks in self.sum_counts:
            counts = sum_over_ranks(counts)
        return counts

    @torch.no_grad()
    def update_bias(self, apply: bool = True) -> None:
        """Raise the bias of experts below their share of `load`, lower that of the others, and reset `load`.

        `load` must be that of the full global batch (arXiv 2408.15664, algorithm 1). Without `apply`, the load is only
        reset."""
        if apply and self.moe.bias_update_rate:
            self.bias += self.moe.bias_update_rate * torch.sign(self.load.mean() - self.load)
        self.load.zero_()
        self.dropped.zero_()


def within_capacity(moe: MoESpec, chosen_BTk: Tensor) -> Tensor:
    """Return the mask of choices within the capacity of their experts.

    Each expert accepts the first `capacity_factor` x T k / E choices of every sequence."""
    chosen = chosen_BTk.flatten(1)
    by_expert, order = chosen.sort(dim=1, stable=True)
    first = torch.searchsorted(by_expert, torch.arange(moe.num_experts, device=chosen.device).repeat(len(chosen), 1))
    position = torch.arange(chosen.shape[1], device=chosen.device) - first.gather(1, by_expert)
    is_within = position < expert_capacity(moe, chosen.shape[1])
    return torch.empty_like(chosen, dtype=torch.bool).scatter_(1, order, is_within).view_as(chosen_BTk)


def expert_capacity(moe: MoESpec, choices: int) -> int:
    """Return an expert's capacity for the choices of a sequence (Switch, arXiv 2101.03961, eq. 3)."""
    assert moe.capacity_factor is not None
    return math.ceil(moe.capacity_factor * choices / moe.num_experts)


def balance_loss(moe: MoESpec, probs_BTE: Tensor, load_BE: Tensor, relief_E: Tensor | None = None) -> Tensor:
    """Return a E sum_i f_i P_i (Switch Transformer, arXiv 2101.03961, eq. 4), times the number of tokens.

    f_i is the share of choices that went to expert i, P_i the mean router probability: 1 x a per token if balanced.
    With `relief_E`, r_i f_i replaces f_i. If the probabilities are of some tokens only, the result is the part of these
    tokens; `load_BE` counts the choices over full sequences."""
    if moe.balance_loss_scope == "micro_batch":
        probs_BTE, load_BE = probs_BTE.flatten(0, 1)[None], load_BE.sum(0, keepdim=True)
    fraction_BE = load_BE / load_BE.sum(1, keepdim=True)
    fraction_BE = fraction_BE if relief_E is None else fraction_BE * relief_E
    return moe.balance_loss_coef * moe.num_experts * (fraction_BE * probs_BTE.sum(1)).sum()


def z_loss(moe: MoESpec, logits_BTE: Tensor) -> Tensor:
    """Return b (log sum_i exp x_i)^2 (ST-MoE, arXiv 2202.08906, eq. 5), summed over tokens."""
    return moe.z_loss_coef * logits_BTE.logsumexp(-1).square().sum()


class Experts(PartModule):
    """E networks, each applied to a contiguous range of rows."""

    up: Tensor
    down: Tensor
    gate_bias: Tensor
    up_bias: Tensor
    down_bias: Tensor

    def __init__(self, part: Part) -> None:
        super().__init__(part)
        self.has_biases = any(linear.bias for linear in part.linears)
        self.output_bias_share = 1.0
        """1 / tp where tensor-parallel ranks sum their outputs, so that `down_bias` is added once."""
        self.activation = declared_activation(part)
        self.defer_or_compute: DeferOrCompute = compute_now
        """Function of a weight and a function for its gradient, which a pipeline may replace to defer it."""
        self.grouped_linear: LinearFunction = grouped_linear
        """The product of rows and their experts' weights, which a precision may replace."""

    @cached_property
    def adapter_scales(self) -> dict[str, float]:
        """Factors of the adapters, by the matrices that they adapt."""
        return {name: a.scale for name, (a, _) in self.part.adapters.items()}

    @property
    def matrices(self) -> tuple[str, ...]:
        """Names of the stacked matrices; the last one is that of the outputs."""
        return tuple(linear.product_name for linear in self.part.linears if not linear.adapts)

    def forward(self, x_ND: Tensor, offsets_E: Tensor) -> Tensor:
        """Return the output of each row's expert.

        `x_ND` is sorted by expert: the rows from offsets[e - 1] to offsets[e] belong to expert e."""
        # Autocast does not support grouped products.
        if torch.is_autocast_enabled(x_ND.device.type):
            dtype = torch.get_autocast_dtype(x_ND.device.type)
        else:
            dtype = x_ND.dtype
        x_ND = x_ND.to(dtype)
        if self.has_biases:
            expert_N = torch.searchsorted(offsets_E, torch.arange(len(x_ND), device=offsets_E.device), right=True)
        # Each product needs the counts in host memory, so the host waits for them once.
        if not all(supports_grouped_mm(x_ND, weight) for weight in self.parameters() if weight.ndim == 3):
            offsets_E = offsets_E.cpu()
        *first, down = self.matrices
        inner = [self.multiply(name, offsets_E, IDENTITY, x_ND) for name in first]
        if self.has_biases:
            for rows, name in zip(inner, self.matrices, strict=False):
                rows += F.embedding(expert_N, getattr(self, f"{name}_bias").to(dtype))
        out = self.multiply(down, offsets_E, self.activation, *inner)
        if self.has_biases:
            out += F.embedding(expert_N, (self.output_bias_share * self.down_bias).to(dtype))
        return out

    def multiply(self, name: str, offsets_E: Tensor, activation: Activation, *inputs: Tensor) -> Tensor:
        """Return the product of activation(inputs) and a matrix of each row's expert, with that of its adapter."""
        dtype = inputs[0].dtype
        product = GroupedProduct(self.defer_or_compute, self.grouped_linear, offsets=offsets_E)
        weight = getattr(self, name)
        weight = weight.to(dtype) if weight.is_floating_point() else weight
        out = activated_product(product, activation, weight, *inputs)
        if name not in self.adapter_scales:
            return out
        product = replace(product, linear=grouped_linear)
        a, b = (getattr(self, f"{name}{suffix}").to(dtype) for suffix in ADAPTER_SUFFIXES)
        inner = activated_product(product, activation, a, *inputs) * self.adapter_scales[name]
        return out.add_(activated_product(product, IDENTITY, b, inner))


@dataclass(frozen=True, kw_only=True)
class GroupedProduct(Product):
    """Each expert's rows times its transposed weight: x is [N, I], W is [E, O, I]."""

    offsets: Tensor
    """End of each expert's rows; in host memory without a grouped product."""

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return the product with rows sorted by expert, [N, O]."""
        return self.linear(x, weight, self.offsets)

    def input_gradient(self, gradient: Tensor, weight: Tensor) -> Tensor:
        """Return the gradient of the rows."""
        return self.linear(gradient.contiguous(), weight.transpose(1, 2), self.offsets)

    def weight_gradient(self, gradient: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        """Return each expert's gradient rows times its input rows, [E, O, I]."""
        gradient = gradient.contiguous()
        if supports_grouped_mm(x, weight):
            return F.grouped_mm(gradient.T, x, offs=self.offsets.to(x.device, torch.int32))
        sizes = rows_per_expert(self.offsets, len(x))
        return torch.stack([g.T @ rows for g, rows in zip(gradient.split(sizes), x.split(sizes), strict=True)])


def grouped_linear(x_NI: Tensor, weight_EOI: Tensor, offsets_E: Tensor) -> Tensor:
    """Return each expert's rows times its transposed weight: [N, O].

    Rows are sorted by expert; `offsets_E` are the ends of each expert's rows. All dtypes are equal."""
    if supports_grouped_mm(x_NI, weight_EOI):
        return F.grouped_mm(x_NI, weight_EOI.transpose(1, 2), offs=offsets_E.to(x_NI.device, torch.int32))
    sizes = rows_per_expert(offsets_E, len(x_NI))
    return torch.cat([F.linear(rows, w) for rows, w in zip(x_NI.split(sizes), weight_EOI, strict=True)])


def supports_grouped_mm(x: Tensor, weight: Tensor) -> bool:
    """Return whether torch has a grouped matrix product for this dtype and device.

    It supports bf16 on all devices, and fp32 on the CPU unless compiled. Its kernels require rows of a multiple of 16
    bytes."""
    has_fp32 = x.device.type == "cpu" and not torch.compiler.is_compiling()
    dtypes = (torch.bfloat16, torch.float32) if has_fp32 else (torch.bfloat16,)
    shape = weight.shape if weight.is_floating_point() else shape_of_numbers(weight.shape)
    aligned = all(size * x.element_size() % 16 == 0 for size in shape[1:])
    return hasattr(F, "grouped_mm") and x.dtype in dtypes and aligned


def rows_per_expert(offsets_E: Tensor, rows: int) -> list[int]:
    """Return the number of the `rows` of each expert."""
    (sizes,) = to_host_lists(torch.diff(offsets_E, prepend=offsets_E.new_zeros(1))[None], rows)
    return sizes


class MoE(PartModule):
    """Layer that routes tokens to experts, and adds the output of the shared experts."""

    shared_gate: ProductLinear | None
    latent_down: ProductLinear | None
    latent_up: ProductLinear | None

    def __init__(self, moe: MoESpec, part: Part) -> None:
        super().__init__(part.outside_modules())
        self.router = Router(moe, part.within("router"))
        self.experts = Experts(part.within("experts"))
        self.shared = MLP(part.within("shared")) if moe.num_shared_experts else None
        if not moe.shared_gate:
            self.shared_gate = None
        if moe.latent_size is None:
            self.latent_down = self.latent_up = None
        self.mix: Mix = mix_experts
        """Function for the layer's output, which layouts may replace."""

    def forward(self, x_BTD: Tensor, stream_BTD: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the layer's output [B, T, D] and its auxiliary loss summed over tokens.

        `stream_BTD` is the residual stream, of which the input is a norm, for a router with a norm of its own."""
        weights, chosen, auxiliary = self.router(x_BTD, stream_BTD)
        return self.mix(self, x_BTD, weights, chosen), auxiliary

    def to_experts(self, x_BTD: Tensor) -> Tensor:
        """Return what routed experts receive of the layer's input: the tokens, or products of them."""
        return x_BTD if self.latent_down is None else cast(Tensor, self.read_input(self.latent_down, x_BTD))

    def from_experts(self, out: Tensor) -> Tensor:
        """Return the part of the layer's output that comes from routed experts, [B, T, D]."""
        return out if self.latent_up is None else cast(Tensor, self.latent_up(out))

    def apply_shared(self, x_BTD: Tensor) -> Tensor | None:
        """Return the output of the shared experts, [B, T, D]; None if there are none."""
        if self.shared is None:
            return None
        out_BTD = cast(Tensor, self.shared(x_BTD))
        return out_BTD if self.shared_gate is None else self.read_input(self.shared_gate, x_BTD).sigmoid() * out_BTD

    def apply_experts(self, x_BTD: Tensor, weights_BTk: Tensor, chosen_BTk: Tensor) -> Tensor:
        """Return the weighted sum of the chosen experts' outputs for each token, [B, T, D].

        A dropped choice has weight 0 and expert E."""
        moe = self.router.moe
        order, counts_E = sort_by_expert(chosen_BTk, moe.num_experts)
        num_rows = max_expert_rows(moe, chosen_BTk)
        if moe.capacity_factor is not None:
            ((num_rows,),) = to_host_lists(counts_E.sum().view(1, 1), num_rows)
        rows = self.expert_rows(x_BTD, weights_BTk, order[:num_rows])
        return self.combine(self.experts(rows, counts_E.cumsum(0)), order, weights_BTk).view_as(x_BTD)

    def expert_rows(self, x_BTD: Tensor, weights_BTk: Tensor, order: Tensor) -> Tensor:
        """Return the row of each choice for its expert, [choices, D], perhaps times its weight.

        `order` has indices of choices among all B x T x k, such as a part of `sort_by_expert`'s order."""
        rows = x_BTD.flatten(0, 1)[order // weights_BTk.shape[-1]]
        if torch.is_autocast_enabled(rows.device.type):
            rows = rows.to(torch.get_autocast_dtype(rows.device.type))
        if not self.router.moe.weighs_inputs:
            return rows
        return rows * weights_BTk.flatten()[order, None].to(rows.dtype)

    def combine(self, y: Tensor, order: Tensor, weights_BTk: Tensor) -> Tensor:
        """Return the sum of each token's expert outputs, [N, D], times the weights unless these are in the inputs.

        `y` holds the outputs of the first choices in `order`, [rows, D]; dropped choices, which come last, have none.
        `order` lists the N x k choices in the order of `sort_by_expert`."""
        if len(y) < len(order):
            y = torch.cat([y, y.new_zeros(len(order) - len(y), y.shape[1])])
        y_NkD = y[order.argsort()].unflatten(0, (-1, weights_BTk.shape[-1]))
        if self.router.moe.weighs_inputs:
            return y_NkD.sum(1)
        return (y_NkD * weights_BTk.flatten(0, 1)[..., None].to(y.dtype)).sum(1)


def mix_experts(moe: MoE, x_BTD: Tensor, weights_BTk: Tensor, chosen_BTk: Tensor) -> Tensor:
    """Return the weighted sum of a token's experts, plus the output of the shared experts, [B, T, D]."""
    return add_shared(moe, x_BTD, moe.apply_experts(moe.to_experts(x_BTD), weights_BTk, chosen_BTk))


def add_shared(moe: MoE, x_BTD: Tensor, out_BTD: Tensor) -> Tensor:
    """Return the output of a layer from that of its routed experts, which are products of a latent if it has one."""
    out_BTD = moe.from_experts(out_BTD)
    shared_BTD = moe.apply_shared(x_BTD)
    return out_BTD if shared_BTD is None else out_BTD + shared_BTD


def sort_by_expert(chosen_BTk: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Return the order of choices by expert, [N k], and the number of choices of each expert, [E].

    Dropped choices come last."""
    chosen = chosen_BTk.flatten()
    counts = chosen.new_zeros(num_experts + 1).scatter_add_(0, chosen, chosen.new_ones(1).expand(len(chosen)))
    return chosen.argsort(stable=True), counts[:-1]


def max_expert_rows(moe: MoESpec, chosen_BTk: Tensor) -> int:
    """Return the maximum number of rows of all experts: all choices, or those within the capacity."""
    choices = chosen_BTk.numel()
    if moe.capacity_factor is None:
        return choices
    return min(len(chosen_BTk) * moe.num_experts * expert_capacity(moe, choices // len(chosen_BTk)), choices)
