"""Gated DeltaNet (arXiv 2412.06464), as in Qwen3-Next and Qwen3.5.

Shapes: B batch, T tokens, D width, H heads of values, V width of these, K width of keys, S taps. G heads of queries and
keys, each for R heads of values. E decays of a head: 1, or one of each channel of keys if R = 1. N chunks of C tokens
in a segment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.model.dtypes import at_least_fp32
from phalanx.model.mixers.convolution import causal_convolution, causal_convolution_backward
from phalanx.model.mixers.delta_rule import ChannelRule, HeadRule, Inputs, Rule, visible_tokens
from phalanx.model.part import PartModule
from phalanx.model.products import ProductLinear, TensorTuple, activated_linear, declared_activation
from phalanx.model.sequence_context import SequenceContext
from phalanx.model.uncounted_products import uncounted_products
from phalanx.spec.model import ModelSpec
from phalanx.spec.parts.mixers import GatedDelta as GatedDeltaSpec
from phalanx.spec.parts.operations import Part
from phalanx.spec.parts.scan_segments import Segment, scan_segments

NORM_EPS = 1e-6
"""Added to the squared length of queries and keys (`l2norm` of flash-linear-attention)."""


@dataclass(frozen=True)
class Form:
    """A form of the rule."""

    max_update: float = 1.0
    """Factor of the sigmoid that is beta."""
    decay_bound: float | None = None
    """Factor of sigmoid(exp(A_log) (a + dt_bias)), which is then the logarithm of the decay."""


PLAIN = Form()


class GatedDelta(PartModule):
    """The gated delta rule on convolved queries, keys and values; then a norm and a gate of each head."""

    query_taps: nn.Parameter
    key_taps: nn.Parameter
    value_taps: nn.Parameter
    A_log: nn.Parameter
    dt_bias: nn.Parameter
    norm: nn.Module
    out: ProductLinear

    def __init__(self, layer: ModelSpec, part: Part) -> None:
        """Create the mixer of a layer (`spec.layers`) from its declaration."""
        super().__init__(part)
        (core,) = part.cores
        self.head_widths = [value.cut.unit for value in core.reads if value.cut]
        self.gate = declared_activation(part)
        self.core = partial(gated_delta, form=self.form(layer))

    def form(self, layer: ModelSpec) -> Form:
        """Return the form of the rule in a layer."""
        return Form(max_update=2.0 if cast(GatedDeltaSpec, layer.mixer).negative_eigenvalues else 1.0)

    def sequence_inputs(self, context: SequenceContext) -> tuple[Tensor | None]:
        """Return the starts of documents, [B, T]."""
        return (context.document_starts,)

    def forward(self, x_BTD: Tensor, starts_BT: Tensor | None) -> Tensor:
        """Return the output of the layer, [B, T, D], for a normalized input."""
        z, *inputs = self.project_heads(x_BTD)
        heads = [x.unflatten(-1, (-1, width)) for x, width in zip(inputs, self.head_widths, strict=True)]
        key, value, decay = self.head_widths[1:4]
        out_BTHV = self.core(
            *heads,
            starts_BT,
            q_taps_GKS=self.query_taps.unflatten(0, (-1, key)),
            k_taps_GKS=self.key_taps.unflatten(0, (-1, key)),
            v_taps_HVS=self.value_taps.unflatten(0, (-1, value)),
            A_log_H=self.A_log,
            dt_bias_HE=self.dt_bias.unflatten(0, (-1, decay)),
        )
        return activated_linear(self.out, self.gate, z, self.norm(out_BTHV).flatten(2))

    def project_heads(self, x_BTD: Tensor) -> TensorTuple:
        """Return the gate of the output, and the products that the rule reads."""
        return cast(TensorTuple, self.read_input(self.project_in, x_BTD))

    def project_in(self, x_BTD: Tensor) -> TensorTuple:
        """Return the gate of the output, queries, keys, values, and what decays and updates depend on."""
        return self.project(x_BTD, "output_gate", "query", "key", "value", "decay", "update")


@torch.compiler.disable  # type: ignore[untyped-decorator]  # a graph would repeat the operations of all segments
def gated_delta(
    q_BTGK: Tensor,
    k_BTGK: Tensor,
    v_BTHV: Tensor,
    a_BTHE: Tensor,
    b_BTH1: Tensor,
    starts_BT: Tensor | None,
    q_taps_GKS: Tensor,
    k_taps_GKS: Tensor,
    v_taps_HVS: Tensor,
    A_log_H: Tensor,
    dt_bias_HE: Tensor,
    *,
    form: Form = PLAIN,
) -> Tensor:
    """Return the output of the gated delta rule (`delta_rule`), [B, T, H, V].

    Queries, keys and values are those of the products before the convolution and SiLU. The logarithm of the decay is
    -exp(A_log) softplus(a + dt_bias), and beta is sigmoid(b); a form has other limits. `starts_BT` are the starts of
    documents in their rows; without them, every row is one document."""
    taps = (q_taps_GKS, k_taps_GKS, v_taps_HVS)
    inputs = (q_BTGK, k_BTGK, v_BTHV, a_BTHE, b_BTH1)
    return cast(Tensor, _GatedDelta.apply(form, *inputs, *taps, A_log_H, dt_bias_HE, starts_BT))


class _GatedDelta(torch.autograd.Function):
    """The rule, whose backward pass computes all but the arguments and the states before segments again."""

    @staticmethod
    def forward(ctx: Any, form: Form, *arguments: Tensor) -> Tensor:
        ctx.form = form
        out_BTHV, states = run_segments(form, *arguments)
        ctx.save_for_backward(*arguments, *states[1:-1])
        return out_BTHV

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        tensors = _Tensors(*saved[: len(_Tensors._fields)])
        states = [tensors.first_state(), *saved[len(tensors) :]]
        sums = (torch.zeros_like(at_least_fp32(parameter)) for parameter in tensors[5:10])
        grads = _Tensors._make((*(torch.zeros_like(x) for x in tensors[:5]), *sums, None))
        grad_state = torch.zeros_like(states[0])
        for segment in reversed(scan_segments(gradient.shape[1])):
            grad_state = _compute_again(tensors, segment, ctx.form).backward(states.pop(), gradient, grad_state, grads)
        with_dtypes = [grad.to(x.dtype) for grad, x in zip(grads[:-1], tensors[:-1], strict=True)]
        return None, *with_dtypes, None


def run_segments(form: Form, *arguments: Tensor | None) -> tuple[Tensor, list[Tensor]]:
    """Return the output of the rule, [B, T, H, V], and the states before segments and after the last one.

    A state is [B, G, K, R, V]. Arguments are those of `gated_delta`, the starts of documents last."""
    tensors = _Tensors(*cast(Sequence[Tensor], arguments))
    out_BTHV = torch.empty_like(tensors.v)
    states = [tensors.first_state()]
    with torch.autocast(out_BTHV.device.type, enabled=False):
        for segment in scan_segments(out_BTHV.shape[1]):
            out, state = _Segment(tensors, segment, form).rule.forward(states[-1])
            states.append(state)
            out_BTHV[:, segment.start : segment.stop] = _join_chunks(out)
    return out_BTHV, states


def _compute_again(tensors: _Tensors, segment: Segment, form: Form) -> _Segment:
    with uncounted_products():
        return _Segment(tensors, segment, form)


def log_decay(form: Form, step: Tensor, rate: Tensor) -> Tensor:
    """Return the logarithm of the decay, [..., H, E]."""
    if form.decay_bound is None:
        return F.softplus(step) * -rate
    return (step * rate).sigmoid_().mul_(form.decay_bound)


def inverse_length(x: Tensor) -> Tensor:
    """Return 1 / |x| of vectors, [..., 1]."""
    return (x.square().sum(-1, keepdim=True) + NORM_EPS).rsqrt_()


class _Segment:
    """The inputs of the rule for a segment."""

    def __init__(self, tensors: _Tensors, segment: Segment, form: Form) -> None:
        self.segment = segment
        self.form = form
        self.tokens = slice(segment.start, segment.stop)
        self.groups, key_width = tensors.k.shape[2:]
        scales = (key_width**-0.5, 1.0, None)
        self.heads = [
            _Heads(x, taps, tensors.starts, segment, scale)
            for x, taps, scale in zip(tensors[:3], tensors[5:8], scales, strict=True)
        ]
        self.beta = at_least_fp32(tensors.b[:, self.tokens]).sigmoid().mul_(form.max_update)
        self.rate = at_least_fp32(tensors.A_log).exp()[:, None]
        self.step = at_least_fp32(tensors.a[:, self.tokens]) + tensors.dt_bias
        g = log_decay(form, self.step, self.rate)
        q, k, v, beta, g = (self._split(x) for x in (*(each.forward() for each in self.heads), self.beta, g))
        qk = torch.cat((q, k), dim=-2).squeeze(3)
        visible = visible_tokens(segment, tensors.starts)
        self.rule: Rule = (HeadRule if g.shape[-1] == 1 else ChannelRule)(Inputs(qk, v, beta, g), visible)

    def backward(self, state: Tensor, gradient: Tensor, grad_state: Tensor, grads: _Tensors) -> Tensor:
        """Add the gradients of all arguments to `grads`, and return that of the state before the segment."""
        grad_out = self._split(at_least_fp32(gradient[:, self.tokens]))
        inputs, grad_state = self.rule.backward(state, grad_out, grad_state)
        outputs = (*self.rule.inputs.qk.unsqueeze(3).chunk(2, dim=-2), self.rule.inputs.v)
        grad_outputs = (*inputs.qk.unsqueeze(3).chunk(2, dim=-2), inputs.v)
        for heads, out, grad, grad_x, grad_taps in zip(
            self.heads, outputs, grad_outputs, grads[:3], grads[5:8], strict=True
        ):
            heads.backward(_join_chunks(out), _join_chunks(grad), grad_x, grad_taps)
        grad_g = _join_chunks(inputs.g)
        grad_a, grad_A_log = self._decay_backward(grad_g)
        grads.a[:, self.tokens] = grad_a
        grads.b[:, self.tokens] = _join_chunks(inputs.beta) * self.beta * (1 - self.beta / self.form.max_update)
        grads.A_log.add_(grad_A_log.sum((0, 1, 3)))
        grads.dt_bias.add_(grad_a.sum((0, 1)))
        return grad_state

    def _decay_backward(self, grad_g: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients of steps and, not summed, of the logarithms of rates."""
        if self.form.decay_bound is None:
            return grad_g * self.step.sigmoid() * -self.rate, grad_g * F.softplus(self.step) * -self.rate
        g = log_decay(self.form, self.step, self.rate)
        grad_a = grad_g * g * (1 - g / self.form.decay_bound) * self.rate
        return grad_a, grad_a * self.step

    def _split(self, x_BLH: Tensor) -> Tensor:
        """Return the heads of the segment's tokens by chunks, [B, N, G, R, C, ...]."""
        heads = x_BLH.unflatten(2, (self.groups, -1)).unflatten(1, (self.segment.chunks, -1))
        return heads.movedim(2, 4).contiguous()


def _join_chunks(x: Tensor) -> Tensor:
    """Return the tokens of all chunks, [B, L, H, ...], of [B, N, G, R, C, ...]."""
    return x.movedim(4, 2).flatten(1, 2).flatten(2, 3)


class _Heads:
    """Queries, keys or values of a segment: SiLU of the convolution. The first two are normalized and scaled."""

    def __init__(
        self, x_BTHK: Tensor, taps_HKS: Tensor, starts_BT: Tensor | None, segment: Segment, scale: float | None
    ) -> None:
        self.num_earlier = min(segment.start, taps_HKS.shape[-1] - 1)
        self.window = slice(segment.start - self.num_earlier, segment.stop)
        """Tokens that the convolution sees."""
        self.starts = None if starts_BT is None else starts_BT[:, self.window] - self.window.start
        self.x_BTHK = x_BTHK
        self.taps = at_least_fp32(taps_HKS).flatten(0, 1)
        self.scale = scale

    def forward(self) -> Tensor:
        """Return the heads, [B, L, H, K]."""
        convolved = causal_convolution(self._seen(), self.taps, None, self.starts)[:, self.num_earlier :]
        self.convolved = convolved.unflatten(2, self.x_BTHK.shape[2:])
        out = F.silu(self.convolved)
        if self.scale is None:
            return out
        self.inverse_length = inverse_length(out)
        return out.mul_(self.inverse_length * self.scale)

    def backward(self, out: Tensor, gradient: Tensor, grad_x_BTHK: Tensor, grad_taps_HKS: Tensor) -> None:
        """Add the gradients of the argument and of the taps, given the heads and their gradient."""
        if self.scale is not None:
            # The gradient of n = x / |x|, less its part along n, divided by |x|.
            along = (gradient * out).sum(-1, keepdim=True) * self.scale**-2
            gradient = (gradient - out * along) * (self.inverse_length * self.scale)
        gradient = torch.ops.aten.silu_backward(gradient, self.convolved).flatten(2)
        gradient = F.pad(gradient, (0, 0, self.num_earlier, 0))
        grad_x, grad_taps = causal_convolution_backward(gradient, self._seen(), self.taps, self.starts)
        grad_x_BTHK[:, self.window] += grad_x.view_as(grad_x_BTHK[:, self.window])
        grad_taps_HKS += grad_taps.view_as(grad_taps_HKS)

    def _seen(self) -> Tensor:
        return at_least_fp32(self.x_BTHK[:, self.window]).flatten(2)


class _Tensors(NamedTuple):
    """Arguments of the rule, or their gradients."""

    q: Tensor
    k: Tensor
    v: Tensor
    a: Tensor
    b: Tensor
    q_taps: Tensor
    k_taps: Tensor
    v_taps: Tensor
    A_log: Tensor
    dt_bias: Tensor
    starts: Tensor | None

    def first_state(self) -> Tensor:
        """Return the state before the first token, [B, G, K, R, V]."""
        batch, _, groups, key_width = self.k.shape
        heads, width = self.v.shape[2:]
        return at_least_fp32(self.v.new_zeros(batch, groups, key_width, heads // groups, width))
