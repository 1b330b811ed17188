"""The gated delta rule in chunks equals its recurrence, token by token."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.model.mixers.gated_delta import PLAIN, Form, gated_delta
from phalanx.spec.parts.scan_segments import CHUNK, SEGMENT_CHUNKS, scan_segments

BATCH, GROUPS, HEADS, KEY, VALUE, TAPS = 2, 2, 6, 5, 7, 4
LENGTHS = [3, CHUNK, CHUNK + 1, SEGMENT_CHUNKS * CHUNK + 44]


def random_arguments(tokens: int, by_channel: bool = False) -> tuple[list[Tensor], list[Tensor]]:
    """Return inputs and parameters of the rule, with decays of heads or of the channels of their keys."""
    torch.manual_seed(0)
    groups, decays = (HEADS, KEY) if by_channel else (GROUPS, 1)
    heads = [(groups, KEY), (groups, KEY), (HEADS, VALUE)]
    inputs = [torch.randn(BATCH, tokens, *shape) for shape in (*heads, (HEADS, decays), (HEADS, 1))]
    parameters = [*(torch.randn(*shape, TAPS) for shape in heads), torch.randn(HEADS), torch.randn(HEADS, decays)]
    inputs, parameters = ([x.double().requires_grad_() for x in values] for values in (inputs, parameters))
    return inputs, parameters


def random_starts(tokens: int) -> Tensor:
    """Return the starts of documents, some of which are at the bounds of chunks."""
    is_first = torch.rand(BATCH, tokens) < 0.1
    is_first[:, 0] = True
    is_first[0, CHUNK % tokens] = is_first[1, (2 * CHUNK - 1) % tokens] = True
    return torch.where(is_first, torch.arange(tokens), 0).cummax(1).values.int()


def recurrence(inputs: list[Tensor], starts: Tensor | None, parameters: list[Tensor], form: Form) -> Tensor:
    """Return the output of the rule as in transformers' `torch_recurrent_gated_delta_rule` or Kimi Linear's."""
    *taps, A_log, dt_bias = parameters
    q, k, v = (convolve(x, tap, starts) for x, tap in zip(inputs[:3], taps, strict=True))
    q, k = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k))
    q, k = (x.repeat_interleave(HEADS // x.shape[2], 2) for x in (q * KEY**-0.5, k))
    rate, step = A_log.exp()[:, None], inputs[3] + dt_bias
    g = -rate * F.softplus(step) if form.decay_bound is None else form.decay_bound * (rate * step).sigmoid()
    beta = form.max_update * inputs[4].sigmoid()
    state = torch.zeros(BATCH, HEADS, KEY, VALUE, dtype=torch.float64)
    outputs = []
    for t in range(q.shape[1]):
        if starts is not None:
            state = state * (starts[:, t] != t)[:, None, None, None]
        state = state * g[:, t].exp()[..., None]
        error = v[:, t] - torch.einsum("bhkv,bhk->bhv", state, k[:, t])
        state = state + k[:, t, :, :, None] * (beta[:, t] * error)[:, :, None]
        outputs.append(torch.einsum("bhkv,bhk->bhv", state, q[:, t]))
    return torch.stack(outputs, 1)


def convolve(x: Tensor, taps: Tensor, starts: Tensor | None) -> Tensor:
    """Return SiLU of the convolution over tokens of a document."""
    out = torch.zeros_like(x)
    for lag in range(min(TAPS, x.shape[1])):
        visible = torch.arange(x.shape[1] - lag) >= (0 if starts is None else starts[:, lag:])
        seen = x[:, : x.shape[1] - lag] * visible[..., None, None] * taps[..., TAPS - 1 - lag]
        out = out + F.pad(seen, (0, 0, 0, 0, lag, 0))
    return F.silu(out)


def assert_rule_equals_recurrence(
    inputs: Sequence[Tensor],
    starts: Tensor | None,
    parameters: Sequence[Tensor],
    output_tolerance: float,
    gradient_tolerance: float,
    form: Form = PLAIN,
) -> None:
    out = gated_delta(*inputs, starts, *parameters, form=form)
    expected = recurrence(inputs, starts, parameters, form)
    torch.testing.assert_close(out, expected, rtol=0, atol=output_tolerance)
    gradient = torch.randn_like(out)
    ours, theirs = (torch.autograd.grad(each, [*inputs, *parameters], gradient) for each in (out, expected))
    for grad, expected_grad in zip(ours, theirs, strict=True):
        torch.testing.assert_close(grad, expected_grad, rtol=gradient_tolerance, atol=gradient_tolerance)


@pytest.mark.parametrize("by_channel", [False, True], ids=["heads", "channels"])
@pytest.mark.parametrize("masked", [False, True], ids=["whole", "documents"])
@pytest.mark.parametrize("tokens", LENGTHS)
def test_rule_and_its_gradients_equal_the_recurrence(tokens: int, masked: bool, by_channel: bool) -> None:
    inputs, parameters = random_arguments(tokens, by_channel)
    starts = random_starts(tokens) if masked else None
    assert_rule_equals_recurrence(inputs, starts, parameters, output_tolerance=1e-13, gradient_tolerance=1e-11)


@pytest.mark.parametrize("form", [Form(max_update=2.0), Form(decay_bound=-5.0)], ids=["updates", "decays"])
@pytest.mark.parametrize("by_channel", [False, True], ids=["heads", "channels"])
def test_forms_of_the_rule_equal_the_recurrence(by_channel: bool, form: Form) -> None:
    inputs, parameters = random_arguments(CHUNK + 30, by_channel)
    assert_rule_equals_recurrence(
        inputs, random_starts(CHUNK + 30), parameters, output_tolerance=1e-12, gradient_tolerance=1e-10, form=form
    )


@pytest.mark.parametrize("by_channel", [False, True], ids=["heads", "channels"])
def test_strong_and_weak_decays_do_not_overflow(by_channel: bool) -> None:
    """Sums of g over a chunk are down to -20,000 in channels next to those of -0.01, and e^709 overflows."""
    inputs, parameters = random_arguments(150, by_channel)
    with torch.no_grad():
        inputs[3].copy_(torch.where(torch.rand_like(inputs[3]) < 0.5, 20.0, -12.0))
        inputs[3][:, :100, :, 0] = -12.0
        parameters[3].fill_(math.log(16))
        parameters[4].zero_()
    assert_rule_equals_recurrence(inputs, None, parameters, output_tolerance=1e-10, gradient_tolerance=1e-10)


@pytest.mark.parametrize("by_channel", [False, True], ids=["heads", "channels"])
def test_packed_documents_equal_separate_rows(by_channel: bool) -> None:
    inputs, parameters = random_arguments(100, by_channel)
    starts = torch.zeros(BATCH, 100, dtype=torch.int32)
    starts[:, 37:] = 37
    packed = gated_delta(*inputs, starts, *parameters)
    separate = [gated_delta(*(x[:, part] for x in inputs), None, *parameters) for part in (slice(37), slice(37, 100))]
    torch.testing.assert_close(packed, torch.cat(separate, 1), rtol=0, atol=1e-13)


@pytest.mark.parametrize("by_channel", [False, True], ids=["heads", "channels"])
def test_half_precision_keeps_the_state_in_fp32(by_channel: bool) -> None:
    """Inputs in bf16 are exact numbers, so that only the output is rounded."""
    inputs, parameters = random_arguments(300, by_channel)
    rounded = [x.detach().bfloat16() for x in inputs]
    exact = gated_delta(*(x.double() for x in rounded), None, *parameters)
    out = gated_delta(*rounded, None, *(parameter.detach().float() for parameter in parameters))
    with torch.autocast("cpu", torch.bfloat16):
        out_in_autocast = gated_delta(*rounded, None, *(parameter.detach().float() for parameter in parameters))
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, out_in_autocast)
    torch.testing.assert_close(out.double(), exact, rtol=2**-8, atol=1e-5)


def test_segments_cover_a_row_in_order() -> None:
    for tokens in (1, CHUNK - 1, CHUNK, 5 * CHUNK, 9 * CHUNK + 3):
        segments = scan_segments(tokens)
        assert [segment.start for segment in segments] == [0, *(segment.stop for segment in segments[:-1])]
        assert segments[-1].stop == tokens
