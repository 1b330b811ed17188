"""Measure attention kernels: error compared with fp64, and time, for causal rows and for rows of several documents."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from benchmarks.gpu.harness import Table, median_milliseconds, real_or_dry, relative_error, require_on_device
from benchmarks.gpu.kernels import all_scores, document_bounds, document_starts, gradients
from phalanx.model.attention import attend_within_documents, document_mask
from phalanx.parallel.block_attention import attention_with_lse

TITLE = "Attention kernels on a GPU"
COLUMNS = ("kernel", "T", "rows", "error", "within 0.02", "ms, forward and backward", "TFLOP/s, attended pairs")
HEADS, KV_HEADS, HEAD_DIM, TOKENS = 32, 8, 128, real_or_dry(16384, 512)
HEADS_PER_KV = HEADS // KV_HEADS
LENGTHS = real_or_dry((2048, 2112, 8192), (128, 192))
"""Row lengths. 2112 % 128 is 64, for which cuDNN's backward pass with a mask can return NaN (pytorch issue 196678)."""
MEAN_DOCUMENT = 700
LIMIT = 2e-2
NOTES = f"""
{HEADS} query heads and {KV_HEADS} key/value heads of width {HEAD_DIM} in bf16, {TOKENS:,} tokens in rows of T tokens.
The mean length of documents is {MEAN_DOCUMENT} tokens. Errors are those of outputs and gradients of four heads,
compared with fp64 and relative to the largest value. TFLOP/s count only pairs of tokens that attend to each other.
"mask" kernels receive a dense mask, and keys and values that are repeated for each head.
"""
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def measure(table: Table) -> None:
    """Time each kernel on each kind of row."""
    for tokens in LENGTHS:
        for documents in (False, True):
            measure_rows(table, tokens, documents)


def measure_rows(table: Table, tokens: int, documents: bool) -> None:
    """Measure all kernels for rows of one length."""
    batch = max(1, TOKENS // tokens)
    generator = torch.Generator("cuda").manual_seed(tokens)
    q, k, v, grad = (
        torch.randn(batch, tokens, heads, HEAD_DIM, device="cuda", dtype=torch.bfloat16, generator=generator)
        for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)
    )
    starts = document_starts(batch, tokens, MEAN_DOCUMENT) if documents else torch.zeros(batch, tokens).long()
    pairs = (torch.arange(tokens) - starts + 1).sum().item()
    expected = reference(q, k, v, grad, starts.cuda())

    def row(name: str, attend: Attend) -> list[object]:
        if "cuDNN" in name:
            require_on_device("cuDNN")
        out, grads, _ = gradients(attend, [q, k, v], grad)
        error = relative_error(
            [first_heads(x, right) for x, right in zip([out, *grads], expected, strict=True)], expected
        )
        milliseconds = median_milliseconds(partial(gradients, attend, [q, k, v], grad))
        rate = 14 * pairs * HEADS * HEAD_DIM / milliseconds / 1e9
        kind = "documents" if documents else "causal"
        is_right = table.check(f"{name}, {kind}, T {tokens}", error < LIMIT)
        return [f"{tokens:,}", kind, f"{error:.1e}", is_right, f"{milliseconds:.2f}", f"{rate:,.0f}"]

    for name, attend in kernels(starts, documents).items():
        table.measure(name, partial(row, name, attend))


def kernels(starts: Tensor, documents: bool) -> dict[str, Attend]:
    """Return attention of q [B, T, H, K] by kernel."""
    if not documents:
        return {
            "flash": partial(sdpa, SDPBackend.FLASH_ATTENTION, None),
            "cuDNN": partial(sdpa, SDPBackend.CUDNN_ATTENTION, None),
            "ring, one block": ring_block,
        }
    bounds, starts = document_bounds(starts).cuda(), starts.cuda()
    mask = document_mask(starts)

    def sees(b: Tensor, _: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (starts[b, query] == starts[b, key])

    blocks = create_block_mask(sees, len(starts), None, starts.shape[1], starts.shape[1], device="cuda")
    return {
        "efficient, mask": partial(sdpa, SDPBackend.EFFICIENT_ATTENTION, mask),
        "cuDNN, mask": partial(sdpa, SDPBackend.CUDNN_ATTENTION, mask),
        "varlen": partial(varlen, bounds),
        "flex": partial(flex, blocks),
    }


def sdpa(backend: SDPBackend, mask: Tensor | None, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute attention with one of PyTorch's kernels."""
    if mask is not None:
        k, v = (x.repeat_interleave(HEADS_PER_KV, dim=2) for x in (k, v))
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    with sdpa_kernel(backend):
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=q.shape[1] != k.shape[1]
        )
    return out.transpose(1, 2)


def varlen(bounds: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute flash attention of packed documents, as Phalanx calls it."""
    return attend_within_documents(q, k, v, bounds)


compiled_flex = torch.compile(flex_attention)


def flex(blocks: object, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute FlexAttention, compiled for the mask."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return compiled_flex(q, k, v, block_mask=blocks, enable_gqa=True).transpose(1, 2)


def ring_block(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute the diagonal block of ring attention; autograd differentiates its forward pass."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return attention_with_lse(q, k, v, causal=True)[0].transpose(1, 2)


def reference(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, starts: Tensor) -> list[Tensor]:
    """Return output and gradients in fp64 of the first head of keys, and of the heads that use it; of the first row."""
    inputs = [x[:1].double() for x in (q[:, :, :HEADS_PER_KV], k[:, :, :1], v[:, :, :1])]
    attend = partial(all_scores, document_mask(starts[:1]))
    out, grads, _ = gradients(attend, inputs, grad[:1, :, :HEADS_PER_KV])
    return [out, *grads]


def first_heads(x: Tensor, reference: Tensor) -> Tensor:
    """Return the part of `x` that `reference` has; NaN if `x` is not finite anywhere."""
    part = x[:1, :, : reference.shape[2]]
    return part if x.isfinite().all() else torch.full_like(part, float("nan"))
