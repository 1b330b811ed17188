"""Mamba-2 (arXiv 2405.21060): linear attention whose state decays by a scalar of each head.

With a step d > 0 and a rate r > 0 of each head, the state of a head becomes S = exp(-r d) S + d B x^T. Its output is
S^T C + D x. In the words of attention, B are keys, C queries and x values. Within a chunk of tokens, the output is
computed like masked attention without a softmax; between chunks by their states (section 6).

Shapes: B batch, T tokens, G groups of R heads, H = G R heads, P values of a head, N keys of a group, c tokens of a
chunk, S taps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.model.dtypes import at_least_fp32
from phalanx.model.mixers.convolution import causal_convolution, causal_convolution_backward
from phalanx.model.norm import GatedRMSNorm
from phalanx.model.part import PartModule
from phalanx.model.products import IDENTITY, ProductLinear, TensorTuple, activated_linear, declared_activation
from phalanx.model.sequence_context import SequenceContext
from phalanx.model.uncounted_products import uncounted_products
from phalanx.spec.model import ModelSpec
from phalanx.spec.parts.mixers.mamba2 import Mamba2 as Mamba2Spec
from phalanx.spec.parts.operations import Part


class Mamba2(PartModule):
    """The recurrence over convolved values, keys and queries, a norm of its output times silu(gate), and a product."""

    log_rate: nn.Parameter
    skip: nn.Parameter
    step_bias: nn.Parameter
    norm: GatedRMSNorm
    out: ProductLinear

    def __init__(self, layer: ModelSpec, part: Part) -> None:
        """Create the mixer of a layer (`spec.layers`) from its declaration."""
        super().__init__(part)
        self.spec = cast(Mamba2Spec, layer.mixer)
        self.activation = IDENTITY if self.spec.has_norm else declared_activation(part)
        self.core = scan

    def sequence_inputs(self, context: SequenceContext) -> tuple[Tensor | None]:
        """Return the starts of documents, [B, T]."""
        return (context.document_starts,)

    def forward(self, x_BTD: Tensor, starts_BT: Tensor | None) -> Tensor:
        """Return the output of the layer, [B, T, D], for a normalized input."""
        gate, values, keys, queries, steps = self.read_input(self.project_in, x_BTD)
        mixed = self.core(
            values.unflatten(-1, (-1, self.spec.head_dim)),
            keys.unflatten(-1, (-1, self.spec.state_size)),
            queries.unflatten(-1, (-1, self.spec.state_size)),
            steps.unsqueeze(-1),
            starts_BT,
            spec=self.spec,
            log_rate_H=self.log_rate,
            skip_H=self.skip,
            step_bias_H=self.step_bias,
            **self.filters(),
        )
        mixed_BTC = mixed.flatten(2)
        if not self.spec.has_norm:
            return activated_linear(self.out, self.activation, gate, self._scale(mixed_BTC))
        return self.out(self._scale(self.norm(mixed_BTC, gate)))

    def _scale(self, x_BTC: Tensor) -> Tensor:
        """Return what the last product reads, times the factor of it."""
        return x_BTC if self.spec.output_scale == 1 else x_BTC * self.spec.output_scale

    def project_in(self, x_BTD: Tensor) -> TensorTuple:
        """Return gates, values, keys, queries and steps, with the heads concatenated."""
        return self.project(x_BTD, "gate", "values", "keys", "queries", "steps")

    def filters(self) -> dict[str, Tensor | None]:
        """Return taps and biases of the convolutions by heads or groups."""
        widths = {"value": self.spec.head_dim, "key": self.spec.state_size, "query": self.spec.state_size}
        filters: dict[str, Tensor | None] = {}
        for name, width in widths.items():
            bias = getattr(self, f"{name}_bias", None)
            filters[f"{name}_taps"] = getattr(self, f"{name}_taps").unflatten(0, (-1, width))
            filters[f"{name}_bias"] = None if bias is None else bias.unflatten(0, (-1, width))
        return filters


@torch.compiler.disable  # type: ignore[untyped-decorator]
def scan(
    values_BTHP: Tensor,
    keys_BTGN: Tensor,
    queries_BTGN: Tensor,
    steps_BTH1: Tensor,
    starts_BT: Tensor | None,
    *,
    spec: Mamba2Spec,
    log_rate_H: Tensor,
    skip_H: Tensor,
    step_bias_H: Tensor,
    **filters: Tensor | None,
) -> Tensor:
    """Return the output of the recurrence, [B, T, H, P].

    `filters` are taps [H, P, S] or [G, N, S], and biases, of the convolutions before it. `starts_BT` are the starts of
    documents in their rows; without them, every row is one document."""
    taps_and_biases = [
        None if (filter := filters[f"{name}_{kind}"]) is None else filter.flatten(0, 1)
        for name in ("value", "key", "query")
        for kind in ("taps", "bias")
    ]
    inputs = values_BTHP, keys_BTGN, queries_BTGN, steps_BTH1.squeeze(-1)
    of_heads = log_rate_H, skip_H, step_bias_H
    with torch.autocast(values_BTHP.device.type, enabled=False):  # states and their products are at least in fp32
        return cast(Tensor, _Scan.apply(spec, starts_BT, *inputs, *of_heads, *taps_and_biases))


class _Scan(torch.autograd.Function):
    """Convolutions and recurrence: keeps the inputs and the state before each chunk, and computes the rest again."""

    @staticmethod
    def forward(
        ctx: Any,
        spec: Mamba2Spec,
        starts_BT: Tensor | None,
        values: Tensor,
        keys: Tensor,
        queries: Tensor,
        steps: Tensor,
        log_rate: Tensor,
        skip: Tensor,
        step_bias: Tensor,
        *filters: Tensor | None,
    ) -> Tensor:
        inputs = values, keys, queries, steps, log_rate, skip, step_bias
        out, states = run_chunks(spec, starts_BT, *inputs, *filters)
        ctx.spec = spec
        ctx.save_for_backward(starts_BT, torch.stack(states[:-1]), *inputs, *filters)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        starts_BT, states, values, keys, queries, steps, log_rate, skip, step_bias, *filters = ctx.saved_tensors
        spec = ctx.spec
        # Each chunk replaces its outputs of the convolution by their gradients.
        convolved = _convolve((values, keys, queries), filters, starts_BT)
        exact_steps = limit_steps(spec, steps, step_bias)
        rate = at_least_fp32(log_rate).exp()
        log_decay = -rate * exact_steps
        exact_skip = at_least_fp32(skip)[:, None]
        grad_steps = torch.empty_like(exact_steps)
        grad_decay = torch.empty_like(exact_steps)
        grad_skip = torch.zeros_like(rate)
        grad_state = _empty_state(values, keys)
        for index, tokens in reversed(list(enumerate(_chunks(spec, values)))):
            chunk = _Chunk.at(tokens, convolved, exact_steps, log_decay, starts_BT)
            grad_out = at_least_fp32(gradient[:, tokens])
            grads, grad_state = retreat(chunk, _by_head(grad_out), states[index], grad_state)
            grad_x = chunk.by_token(grads.values)
            grad_steps[:, tokens] = (grad_x * chunk.inputs).sum(-1)
            grad_decay[:, tokens] = grads.log_decay.unflatten(0, (len(values), -1)).mT
            grad_skip += (grad_out * chunk.inputs).sum((0, 1, 3))
            grad_x = grad_x.mul_(exact_steps[:, tokens, :, None]).addcmul_(grad_out, exact_skip)
            for output, grad in zip(
                convolved, (grad_x, chunk.by_token(grads.keys), chunk.by_token(grads.queries)), strict=True
            ):
                output[:, tokens] = torch.ops.aten.silu_backward(grad, output[:, tokens])
            del chunk, grads, grad_out, grad_x, output, grad
        grad_log_rate = (grad_decay * log_decay).sum((0, 1))
        grad_steps = _limit_steps_backward(spec, grad_steps.sub_(grad_decay.mul_(rate)), steps, step_bias)
        del exact_steps, log_decay, grad_decay
        grad_inputs, grad_filters = _convolve_backward(convolved, (values, keys, queries), filters, starts_BT)
        return (
            *(None, None),
            *grad_inputs,
            grad_steps.to(steps.dtype),
            grad_log_rate.to(log_rate.dtype),
            grad_skip.to(skip.dtype),
            grad_steps.sum((0, 1)).to(step_bias.dtype),
            *grad_filters,
        )


def run_chunks(
    spec: Mamba2Spec,
    starts_BT: Tensor | None,
    values: Tensor,
    keys: Tensor,
    queries: Tensor,
    steps: Tensor,
    log_rate: Tensor,
    skip: Tensor,
    step_bias: Tensor,
    *filters: Tensor | None,
) -> tuple[Tensor, list[Tensor]]:
    """Return the output of the recurrence, [B, T, H, P], and the states before chunks and after the last one.

    A state is [B G, N, R P]. Arguments are those of `scan`, with taps and biases by channels."""
    convolved = _convolve((values, keys, queries), filters, starts_BT)
    exact_steps = limit_steps(spec, steps, step_bias)
    log_decay = -at_least_fp32(log_rate).exp() * exact_steps
    exact_skip = at_least_fp32(skip)[:, None]
    out = torch.empty_like(values)
    states = [_empty_state(values, keys)]
    for tokens in _chunks(spec, values):
        chunk = _Chunk.at(tokens, convolved, exact_steps, log_decay, starts_BT)
        weighed, state = advance(chunk, states[-1])
        states.append(state)
        out[:, tokens] = chunk.by_token(weighed).addcmul_(chunk.inputs, exact_skip)
    return out, states


class _Chunk(NamedTuple):
    """A chunk of tokens: its values times steps, and by how much the state decays until each token."""

    inputs: Tensor
    """Values, [B, c, H, P]."""
    values: Tensor
    """Values times steps, [B H, c, P]."""
    keys: Tensor
    """[B G, c, N]."""
    queries: Tensor
    """[B G, c, N]."""
    log_decay: Tensor
    """Logarithm of the decay from the start of the chunk to each token, that of the token included, [B H, c]."""
    hidden: Tensor
    """Pairs of a query and a later key, or of two documents, [c, c] or [B H, c, c]."""
    sees_state: Tensor | None
    """1 for tokens whose document started before the chunk, else 0, [B H, c]; None if all have."""
    is_in_last: Tensor | None
    """1 for tokens of the document of the last token, else 0, [B H, c]; None if all are."""

    @classmethod
    def at(
        cls, tokens: slice, convolved: list[Tensor], steps: Tensor, log_decay: Tensor, starts_BT: Tensor | None
    ) -> _Chunk:
        """Return a chunk at some tokens, from outputs of the convolutions and from steps and logarithms of decays."""
        inputs, keys, queries = (F.silu(output[:, tokens]) for output in convolved)
        by_head = log_decay[:, tokens].mT.flatten(0, 1).cumsum(1)
        count, heads = inputs.shape[1:3]
        hidden = torch.ones(count, count, dtype=torch.bool, device=inputs.device).triu_(1)
        sees_state = is_in_last = None
        if starts_BT is not None:
            starts = starts_BT[:, tokens].repeat_interleave(heads, 0) - tokens.start
            hidden = hidden | (torch.arange(count, device=starts.device) < starts[..., None])
            sees_state = (starts < 0).to(by_head.dtype)
            is_in_last = 1 - hidden[:, -1].to(by_head.dtype)
        return cls(
            inputs,
            _by_head(inputs * steps[:, tokens, :, None]),
            _by_head(keys),
            _by_head(queries),
            by_head,
            hidden,
            sees_state,
            is_in_last,
        )

    def by_token(self, x: Tensor) -> Tensor:
        """Return numbers of heads or groups, [B H, c, K], as [B, c, H, K]."""
        return x.unflatten(0, (len(self.inputs), -1)).transpose(1, 2)

    @property
    def scores(self) -> Tensor:
        """Products of queries and keys, [B G, c, c]."""
        return self.queries @ self.keys.mT

    @property
    def decay(self) -> Tensor:
        """Decay from a key to each query, 0 for keys that it does not see, [B G, R, c, c]."""
        decay = self.log_decay[:, :, None] - self.log_decay[:, None]
        return decay.masked_fill_(self.hidden, -torch.inf).exp_().unflatten(0, (len(self.keys), -1))

    @property
    def decay_from_start(self) -> Tensor:
        """Decay of the state before the chunk until each token, [B H, c]."""
        decay = self.log_decay.exp()
        return decay if self.sees_state is None else decay.mul_(self.sees_state)

    @property
    def decay_to_end(self) -> Tensor:
        """Decay from each token to the end of the chunk, [B H, c]."""
        decay = (self.log_decay[:, -1:] - self.log_decay).exp_()
        return decay if self.is_in_last is None else decay.mul_(self.is_in_last)

    def of_states(self, x: Tensor) -> Tensor:
        """Return numbers of heads, [B H, c, P], as those of states, [B G, c, R P]."""
        return x.unflatten(0, (len(self.keys), -1)).transpose(1, 2).flatten(2)

    def of_heads(self, x: Tensor) -> Tensor:
        """Return numbers of states, [B G, c, R P], as those of heads, [B H, c, P]."""
        return x.unflatten(2, (-1, self.values.shape[2])).transpose(1, 2).flatten(0, 1)

    def decay_state(self, state: Tensor, decay_H: Tensor) -> Tensor:
        """Return a state, [B G, N, R P], times a number of each head, [B H]."""
        by_channel = decay_H.view(len(state), 1, -1, 1)
        return (state.unflatten(2, (by_channel.shape[2], -1)) * by_channel).flatten(2)


def advance(chunk: _Chunk, state: Tensor) -> tuple[Tensor, Tensor]:
    """Return the outputs of a chunk without the skipped values, [B H, c, P], and the state after it.

    A `state` is [B G, N, R P]."""
    weights = chunk.decay.mul_(chunk.scores[:, None]).flatten(0, 1)
    from_start = chunk.decay_from_start
    out = chunk.of_heads(chunk.queries @ state).mul_(from_start[..., None])
    out = out.baddbmm_(weights, chunk.values)
    added = chunk.keys.mT @ chunk.of_states(chunk.values * chunk.decay_to_end[..., None])
    return out, added.add_(chunk.decay_state(state, from_start[:, -1]))


class _ChunkGradients(NamedTuple):
    """Gradients of the values, keys, queries and logarithms of decays of a chunk, in the shapes of `_Chunk`."""

    values: Tensor
    keys: Tensor
    queries: Tensor
    log_decay: Tensor
    """Gradients of each token's own decay."""


def retreat(chunk: _Chunk, grad_out: Tensor, state: Tensor, grad_state: Tensor) -> tuple[_ChunkGradients, Tensor]:
    """Return the gradients of a chunk and of the state before it, from those of its output and of the state after it.

    A pair's decay exp(a_t - a_s) gives the same gradient to a_t as it takes from a_s. The sum over all later tokens is
    the gradient of a token's own decay."""
    groups = len(chunk.keys)
    with uncounted_products():
        scores = chunk.scores
        from_state = chunk.of_heads(chunk.queries @ state)
    decay = chunk.decay
    # Pairs of tokens.
    grad_weights = (grad_out @ chunk.values.mT).unflatten(0, (groups, -1)).mul_(decay)
    grad_values = decay.mul_(scores[:, None]).flatten(0, 1).mT @ grad_out
    del decay
    grad_scores = grad_weights.sum(1)
    grad_queries = grad_scores @ chunk.keys
    grad_keys = grad_scores.mT @ chunk.queries
    grad_pairs = grad_weights.mul_(scores[:, None]).flatten(0, 1)
    grad_log_decay = grad_pairs.sum(2) - grad_pairs.sum(1)
    del grad_weights, grad_pairs
    # The state before the chunk.
    from_start = chunk.decay_from_start
    grad_from_state = grad_out * from_start[..., None]
    grad_log_decay += from_state.mul_(grad_from_state).sum(2)
    grad_from_state = chunk.of_states(grad_from_state)
    grad_queries.baddbmm_(grad_from_state, state.mT)
    # The state after the chunk.
    to_end = chunk.decay_to_end[..., None]
    grad_keys.baddbmm_(chunk.of_states(chunk.values * to_end), grad_state.mT)
    grad_added = chunk.of_heads(chunk.keys @ grad_state).mul_(to_end)
    grad_values += grad_added
    grad_to_end = grad_added.mul_(chunk.values).sum(2)
    grad_log_decay -= grad_to_end
    grad_state = chunk.decay_state(grad_state, from_start[:, -1])
    grad_log_decay[:, -1] += (
        grad_to_end.sum(1) + (grad_state * state).unflatten(2, (len(grad_out) // groups, -1)).sum((1, 3)).flatten()
    )
    grad_state = torch.baddbmm(grad_state, chunk.queries.mT, grad_from_state)
    of_own_decay = grad_log_decay.flip(1).cumsum(1).flip(1)
    return _ChunkGradients(grad_values, grad_keys, grad_queries, of_own_decay), grad_state


def _by_head(x_BcHK: Tensor) -> Tensor:
    """Return numbers of heads or groups as a batch of matrices, [B H, c, K]."""
    return x_BcHK.transpose(1, 2).flatten(0, 1)


def _chunks(spec: Mamba2Spec, values: Tensor) -> list[slice]:
    tokens = values.shape[1]
    return [slice(start, min(start + spec.chunk_size, tokens)) for start in range(0, tokens, spec.chunk_size)]


def _empty_state(values: Tensor, keys: Tensor) -> Tensor:
    """Return a state of zeros, [B G, N, R P]."""
    batch, _, groups, width = keys.shape
    channels = values.shape[2] // groups * values.shape[3]
    return at_least_fp32(values.new_empty(0)).new_zeros(batch * groups, width, channels)


def limit_steps(spec: Mamba2Spec, steps: Tensor, bias: Tensor) -> Tensor:
    """Return the positive steps, [B, T, H]."""
    return F.softplus(at_least_fp32(steps) + bias).clamp_(spec.min_step, spec.max_step)


def _limit_steps_backward(spec: Mamba2Spec, gradient: Tensor, steps: Tensor, bias: Tensor) -> Tensor:
    """Return the gradient of steps before their limits, which may replace `gradient`."""
    raw = at_least_fp32(steps) + bias
    unlimited = F.softplus(raw)
    is_limited = unlimited < spec.min_step
    if spec.max_step is not None:
        is_limited |= unlimited > spec.max_step
    return torch.ops.aten.softplus_backward(gradient.masked_fill_(is_limited, 0), raw, 1, 20)


def _convolve(inputs: TensorTuple, filters: Sequence[Tensor | None], starts_BT: Tensor | None) -> list[Tensor]:
    """Return the convolutions of values, keys and queries, with the taps and the bias of each in `filters`."""
    outputs = []
    for x, taps, bias in zip(inputs, filters[::2], filters[1::2], strict=True):
        assert taps is not None
        out = causal_convolution(at_least_fp32(x).flatten(2), taps, bias, starts_BT)
        outputs.append(out.unflatten(2, x.shape[2:]))
    return outputs


def _convolve_backward(
    gradients: list[Tensor], inputs: TensorTuple, filters: Sequence[Tensor | None], starts_BT: Tensor | None
) -> tuple[TensorTuple, tuple[Tensor | None, ...]]:
    """Return the gradients of the inputs and of the filters. Each of `gradients` is removed from the list."""
    grad_inputs: list[Tensor] = []
    grad_filters: list[Tensor | None] = []
    for x, taps, bias in zip(inputs, filters[::2], filters[1::2], strict=True):
        assert taps is not None
        gradient = gradients.pop(0).flatten(2)
        grad_x, grad_taps = causal_convolution_backward(gradient, x.flatten(2), taps, starts_BT)
        grad_inputs.append(grad_x.to(x.dtype).view(x.shape))
        grad_filters += [grad_taps, None if bias is None else gradient.sum((0, 1)).to(bias.dtype)]
    return tuple(grad_inputs), tuple(grad_filters)
