"""Attention kernels: error against fp64, and time, for causal rows and for rows of several documents."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.attention.varlen import varlen_attn

from benchmarks.gpu.timing import median_milliseconds
from phalanx.model.attention import document_mask
from phalanx.parallel.context_parallel import attention_with_lse

TITLE = "Attention kernels on a GPU"
HEADS, KV_HEADS, HEAD_DIM, TOKENS = 32, 8, 128, 16384
HEADS_PER_KV = HEADS // KV_HEADS
LENGTHS = (2048, 2112, 8192)
"""Of rows. 2112 % 128 is 64, where cuDNN's backward pass with a mask is known to give NaN (pytorch issue 196678)."""
MEAN_DOCUMENT = 700
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Row:
    """A row of the table."""

    tokens: int
    documents: bool
    kernel: str
    error: float | None
    """Largest difference of outputs and gradients from fp64, relative to the largest value; NaN if there is one."""
    milliseconds: float
    flops: float
    """Of forward and backward pass over what the mask lets through."""

    def line(self) -> str:
        error = "-" if self.error is None else f"{self.error:.1e}"
        what = "documents" if self.documents else "causal"
        rate = self.flops / self.milliseconds / 1e9
        return f"| {self.tokens:,} | {what} | {self.kernel} | {error} | {self.milliseconds:.2f} | {rate:,.0f} |"


def measure() -> str:
    """Time each kernel on each kind of row; returns the page's text."""
    rows = [row for tokens in LENGTHS for documents in (False, True) for row in measure_rows(tokens, documents)]
    table = "\n".join(
        [
            "| T | rows | kernel | error | ms, forward and backward | TFLOP/s that count |",
            "|---:|---|---|---:|---:|---:|",
            *(row.line() for row in rows),
        ]
    )
    return f"""{table}

{HEADS} heads, {KV_HEADS} of keys and values, width {HEAD_DIM}, bf16, {TOKENS:,} tokens in rows of T; documents of
{MEAN_DOCUMENT} tokens in the mean. Errors are those of four heads against fp64, of outputs and gradients, relative to
the largest value. Operations that count are those of pairs that see each other. "mask" kernels are given a dense mask,
and keys and values repeated for each head."""


def measure_rows(tokens: int, documents: bool) -> list[Row]:
    """All kernels for rows of one length."""
    batch = max(1, TOKENS // tokens)
    generator = torch.Generator("cuda").manual_seed(tokens)
    q, k, v, grad = (
        torch.randn(batch, tokens, heads, HEAD_DIM, device="cuda", dtype=torch.bfloat16, generator=generator)
        for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)
    )
    starts = document_starts(batch, tokens) if documents else torch.zeros(batch, tokens, dtype=torch.int64)
    pairs = (torch.arange(tokens) - starts + 1).sum().item()
    expected = reference(q, k, v, grad, starts.cuda())
    rows = []
    for name, attend in kernels(starts.cuda(), documents).items():
        try:
            error = relative_error(gradients(attend, q, k, v, grad), expected)
            milliseconds = median_milliseconds(partial(gradients, attend, q, k, v, grad))
        except RuntimeError as problem:
            print(f"{name}, T {tokens}: {str(problem).splitlines()[0]}")
            continue
        rows.append(Row(tokens, documents, name, error, milliseconds, 14 * pairs * HEADS * HEAD_DIM))
    return rows


def document_starts(batch: int, tokens: int) -> Tensor:
    """Where in its row each token's document begins, int64 [B, T]."""
    dice = torch.Generator().manual_seed(tokens)
    is_first = torch.rand(batch, tokens, generator=dice) < 1 / MEAN_DOCUMENT
    is_first[:, 0] = True
    return (torch.arange(tokens) * is_first).cummax(dim=1).values


def kernels(starts: Tensor, documents: bool) -> dict[str, Attend]:
    """Attention of q [B, T, H, K] by each kernel."""
    if not documents:
        return {
            "flash": partial(sdpa, SDPBackend.FLASH_ATTENTION, None),
            "cuDNN": partial(sdpa, SDPBackend.CUDNN_ATTENTION, None),
            "ring, one block": ring_block,
        }
    mask = document_mask(starts)
    tokens, row = starts.shape[1], starts + torch.arange(len(starts), device="cuda")[:, None] * starts.shape[1]

    def sees(b: Tensor, _: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (starts[b, query] == starts[b, key])

    blocks = create_block_mask(sees, len(starts), None, tokens, tokens, device="cuda")
    ends = torch.cat([row.unique(), row.new_tensor([row.numel()])])
    longest = int(ends.diff().max())
    return {
        "efficient, mask": partial(sdpa, SDPBackend.EFFICIENT_ATTENTION, mask),
        "cuDNN, mask": partial(sdpa, SDPBackend.CUDNN_ATTENTION, mask),
        "varlen": partial(varlen, ends.int(), longest),
        "flex": partial(flex, blocks),
    }


def sdpa(backend: SDPBackend, mask: Tensor | None, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """PyTorch's attention by one of its kernels."""
    if mask is not None:
        k, v = (x.repeat_interleave(HEADS_PER_KV, dim=2) for x in (k, v))
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    with sdpa_kernel(backend):
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=q.shape[1] != k.shape[1]
        )
    return out.transpose(1, 2)


def varlen(ends: Tensor, longest: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Flash attention of documents one after the other."""
    packed = (x.flatten(0, 1) for x in (q, k, v))
    return varlen_attn(*packed, ends, ends, longest, longest, window_size=(-1, 0)).view_as(q)


compiled_flex = torch.compile(flex_attention)


def flex(blocks: object, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """FlexAttention, compiled for the mask."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return compiled_flex(q, k, v, block_mask=blocks, enable_gqa=True).transpose(1, 2)


def ring_block(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """What ring attention does with one block of keys, on the diagonal; its forward pass by autograd."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return attention_with_lse(q, k, v, True, None)[0].transpose(1, 2)


def gradients(attend: Attend, q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> list[Tensor]:
    """The output, and the gradients of q, k and v."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = attend(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def reference(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, starts: Tensor) -> list[Tensor]:
    """The same in fp64 of the first head of keys, and of the heads that use it; of the first row."""
    q, k, v, grad = (
        x[:1].double() for x in (q[:, :, :HEADS_PER_KV], k[:, :, :1], v[:, :, :1], grad[:, :, :HEADS_PER_KV])
    )
    mask = document_mask(starts[:1])

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        scores = (q @ k.mT * HEAD_DIM**-0.5).masked_fill(~mask, float("-inf"))
        return (scores.softmax(-1) @ v).transpose(1, 2)

    return gradients(attend, q, k, v, grad)


def relative_error(got: list[Tensor], expected: list[Tensor]) -> float:
    """The largest difference, relative to the largest value of each tensor."""
    errors = [
        (a[: len(b), :, : b.shape[2]].double() - b).abs().max() / b.abs().max()
        for a, b in zip(got, expected, strict=True)
    ]
    return float(torch.stack(errors).max()) if all(x.isfinite().all() for x in got) else float("nan")
