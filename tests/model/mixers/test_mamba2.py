"""The chunked scan of Mamba-2 equals its recurrence, token by token."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402
from torch import Tensor  # noqa: E402

from phalanx.model.mixers.mamba2 import scan  # noqa: E402
from phalanx.spec.parts.mixers.mamba2 import Mamba2  # noqa: E402

BATCH, HEADS, HEAD_DIM, STATE, TAPS = 2, 4, 8, 4, 4
STARTS = ((0, 3, 4, 12, 16), (0, 1, 9))
"""First tokens of the documents of each row: in a chunk, at its first and at its last token."""


def random_inputs(spec: Mamba2, tokens: int, bias: bool) -> tuple[list[Tensor], dict[str, Any]]:
    """Return the inputs of a scan, and its parameters by name."""
    generator = torch.Generator().manual_seed(tokens)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator).requires_grad_()

    heads, groups = (HEADS, HEAD_DIM), (spec.num_groups, STATE)
    inputs = [random(BATCH, tokens, *shape) for shape in (heads, groups, groups, (HEADS, 1))]
    parameters: dict[str, Any] = {name: random(HEADS) for name in ("log_rate_H", "skip_H", "step_bias_H")}
    for name, shape in (("value", heads), ("key", groups), ("query", groups)):
        parameters[f"{name}_taps"] = random(*shape, TAPS)
        parameters[f"{name}_bias"] = random(*shape) if bias else None
    return inputs, parameters


def document_starts(tokens: int) -> Tensor:
    """Return the first token of the document of each token, [BATCH, tokens]."""
    rows = [[max(start for start in starts if start <= token) for token in range(tokens)] for starts in STARTS]
    return torch.tensor(rows, dtype=torch.int32)


def recurrence(inputs: list[Tensor], starts: Tensor, spec: Mamba2, **parameters: Any) -> Tensor:
    """Return the outputs of Mamba-2, one token after another (arXiv 2405.21060, equation 2)."""
    *convolved, steps = inputs
    tokens = steps.shape[1]
    x, keys, queries = (
        convolution(x, starts, parameters[f"{name}_taps"], parameters[f"{name}_bias"])
        for name, x in zip(("value", "key", "query"), convolved, strict=True)
    )
    keys, queries = (each.repeat_interleave(HEADS // spec.num_groups, 2) for each in (keys, queries))
    steps = F.softplus(steps.squeeze(-1) + parameters["step_bias_H"]).clamp(spec.min_step, spec.max_step)
    state = x.new_zeros(BATCH, HEADS, HEAD_DIM, STATE)
    outputs = []
    for token in range(tokens):
        decay = (-parameters["log_rate_H"].exp() * steps[:, token]).exp() * (starts[:, token] < token)[:, None]
        added = steps[:, token, :, None, None] * x[:, token, :, :, None] * keys[:, token, :, None]
        state = decay[..., None, None] * state + added
        outputs.append((state * queries[:, token, :, None]).sum(-1) + parameters["skip_H"][:, None] * x[:, token])
    return torch.stack(outputs, 1)


def convolution(x: Tensor, starts: Tensor, taps: Tensor, bias: Tensor | None) -> Tensor:
    """Return silu of the convolution of each channel within documents."""
    outputs = []
    for token in range(x.shape[1]):
        seen = range(max(0, token - TAPS + 1), token + 1)
        terms = [
            x[:, other] * taps[..., TAPS - 1 - token + other] * (starts[:, token] <= other)[:, None, None]
            for other in seen
        ]
        outputs.append(sum(terms) + (0 if bias is None else bias))
    return F.silu(torch.stack(outputs, 1))


@pytest.mark.parametrize("is_masked", [False, True], ids=["whole", "documents"])
@pytest.mark.parametrize(("groups", "tokens", "bias"), [(1, 21, True), (2, 16, False), (4, 5, True)])
def test_scan_and_its_gradients_equal_the_recurrence(groups: int, tokens: int, bias: bool, is_masked: bool) -> None:
    sizes = {"num_heads": HEADS, "head_dim": HEAD_DIM, "state_size": STATE, "num_groups": groups, "chunk_size": 8}
    spec = Mamba2(kind="mamba2", min_step=0.3, max_step=1.2, **sizes)
    inputs, parameters = random_inputs(spec, tokens, bias)
    starts = document_starts(tokens) if is_masked else torch.zeros(BATCH, tokens, dtype=torch.int32)
    ours = scan(*inputs, starts if is_masked else None, spec=spec, **parameters)
    expected = recurrence(inputs, starts, spec, **parameters)
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-12)
    trained = [*inputs, *(parameter for parameter in parameters.values() if parameter is not None)]
    gradient = torch.randn_like(expected)
    torch.testing.assert_close(
        torch.autograd.grad(ours, trained, gradient),
        torch.autograd.grad(expected, trained, gradient),
        rtol=0,
        atol=1e-11,
    )


def test_packed_documents_equal_separate_ones() -> None:
    spec = Mamba2(kind="mamba2", num_heads=HEADS, head_dim=HEAD_DIM, state_size=STATE, chunk_size=8)
    inputs, parameters = random_inputs(spec, 20, bias=True)
    packed = scan(*inputs, document_starts(20), spec=spec, **parameters)
    for row, starts in enumerate(STARTS):
        for start, end in zip(starts, (*starts[1:], 20), strict=True):
            document = [x[row : row + 1, start:end] for x in inputs]
            alone = scan(*document, None, spec=spec, **parameters)
            torch.testing.assert_close(packed[row : row + 1, start:end], alone, rtol=0, atol=1e-12)
