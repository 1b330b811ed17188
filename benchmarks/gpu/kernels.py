"""Compare kernels of a training step on the GPU with fp64 on the CPU: outputs and gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu.harness import Table, median_milliseconds, real_or_dry, relative_error
from phalanx.data.packing import IGNORE_INDEX
from phalanx.model.attention import attend, document_mask
from phalanx.model.moe import grouped_linear
from phalanx.model.rotary import apply_rotary, rotary_table
from phalanx.parallel.cross_entropy import compiled_kernels, in_place_cross_entropy
from phalanx.parallel.dtensor_shards import rows_per_rank
from phalanx.parallel.tensor.tensor_parallel import TensorParallelGroup
from phalanx.spec.model import RopeSpec
from phalanx.testing.rank_pool import rank_pool

TITLE = "Kernels on a GPU compared with fp64 on the CPU"
COLUMNS = (
    "kernel",
    "dtype",
    "error of outputs",
    "error of gradients",
    "limit",
    "within limit",
    "ms, forward and backward",
)
NOTES = """
Inputs are first rounded to the dtype. Errors are the largest difference, relative to the largest value of each tensor.
The reference of grouped products is a loop over the experts. The reference of attention computes the full score matrix.
Vocabulary-parallel cross entropy runs on two ranks that share the GPU; its time is not measured.
"""
LIMITS = {torch.bfloat16: 2e-2, torch.float32: 1e-4}
BF16, FP32 = torch.bfloat16, torch.float32
WIDTH, FFN = real_or_dry((2048, 1024), (64, 32))
EXPERT_ROWS = {
    "odd, empty and one row": [129, 0, 1, 511, 0, 63, 1, 319],
    "empty at both ends": [0, 0, 513, 255, 257, 0, 0, 0],
    "all to one expert": [0, 0, 0, 1023, 0, 0, 0, 0],
}
ATTENTION_TOKENS = real_or_dry((2048, 2112), (128, 192))
"""Row lengths. 2112 % 128 is 64, for which cuDNN's backward pass with a mask can return NaN (pytorch issue 196678)."""
HEADS, KV_HEADS, HEAD_DIM = 8, 2, 128
MEAN_DOCUMENT = 300
WINDOW = real_or_dry(200, 50)
CROSS_ENTROPY_SHAPE = real_or_dry((512, 128256), (64, 1024))
Call = Callable[..., Tensor]


def measure(table: Table) -> None:
    """Compare each kernel."""
    torch.backends.cuda.matmul.allow_tf32 = False
    for dtype in (BF16, FP32):
        for name, rows in EXPERT_ROWS.items():
            compare(table, f"grouped product, {name}", dtype, *grouped_product(rows))
    for dtype in (BF16, FP32):
        compare(table, "rms_norm", dtype, rms_norm, rms_norm, [random(2048, WIDTH), random(WIDTH)])
        compare(table, "rms_norm of heads", dtype, rms_norm, rms_norm, [random(512, HEADS, 128), random(128)])
        compare(table, "rotary", dtype, rotary, rotary, [random(2, 1024, HEADS, HEAD_DIM)])
        ours = partial(total_cross_entropy, in_place_cross_entropy)
        logits = [5 * random(*CROSS_ENTROPY_SHAPE)]
        compare(table, "cross entropy", dtype, ours, ours, logits)
        compiled = partial(total_cross_entropy, partial(in_place_cross_entropy, kernels=compiled_kernels()))
        compare(table, "cross entropy, compiled", dtype, compiled, ours, logits)
        table.measure(f"cross entropy by vocabulary, {short(dtype)}", partial(vocabulary_parallel, table, dtype))
    for tokens in ATTENTION_TOKENS:
        inputs = [random(2, tokens, heads, HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)]
        starts = document_starts(2, tokens, MEAN_DOCUMENT)
        whole = torch.zeros_like(starts)
        causal, documents = (partial(all_scores, document_mask(x)) for x in (whole, starts))
        for name, dtype, mask, reference in (
            ("causal", BF16, None, causal),
            ("documents", BF16, document_bounds(starts), documents),
            ("one document a row", BF16, document_bounds(whole), causal),
            ("documents by a mask", BF16, document_mask(starts), documents),
            ("documents by a mask", FP32, document_mask(starts), documents),
        ):
            ours = partial(attend_with_mask, mask if mask is None else mask.cuda())
            compare(table, f"attention, {name}, T {tokens}", dtype, ours, reference, inputs)
        for dtype in (BF16, FP32):  # flash kernels in 16 bits, FlexAttention in fp32
            mask = (document_bounds(starts) if dtype == BF16 else starts).cuda()
            for window, sinks in ((WINDOW, []), (None, [random(HEADS)]), (WINDOW, [random(HEADS)])):
                name = f"window {window}, {'sinks' if sinks else 'no sinks'}, T {tokens}"
                reference = partial(all_scores, within_window(document_mask(starts), window))
                compare(
                    table,
                    f"attention, {name}",
                    dtype,
                    partial(attend_with_mask, mask, window=window),
                    reference,
                    inputs + sinks,
                )


def compare(table: Table, name: str, dtype: torch.dtype, ours: Call, reference: Call, inputs: Sequence[Tensor]) -> None:
    """Add the row of a kernel: `ours` on the GPU in `dtype`, and `reference` on the CPU in fp64, with equal inputs."""

    def row() -> list[object]:
        rounded = [x.to(dtype) for x in inputs]
        expected, expected_grads, output_grad = gradients(reference, [x.double() for x in rounded], None)
        on_device = [x.cuda() for x in rounded]
        out, grads, _ = gradients(ours, on_device, output_grad)
        errors = relative_error([out], [expected]), relative_error(grads, expected_grads)
        milliseconds = median_milliseconds(partial(gradients, ours, on_device, output_grad.cuda()))
        return [*judge(table, name, dtype, *errors), f"{milliseconds:.2f}"]

    table.measure(name, row)


def judge(table: Table, name: str, dtype: torch.dtype, error: float, grad_error: float) -> list[object]:
    """Return the cells of a row's errors."""
    is_right = table.check(name, error < LIMITS[dtype] and grad_error < LIMITS[dtype])
    return [short(dtype), f"{error:.1e}", f"{grad_error:.1e}", f"{LIMITS[dtype]:g}", is_right]


def gradients(call: Call, inputs: Sequence[Tensor], output_grad: Tensor | None) -> tuple[Tensor, list[Tensor], Tensor]:
    """Return the output, the gradients of the inputs, and the gradient of the output, which is random if None."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = call(*leaves)
    if output_grad is None:
        output_grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(BF16).double()
    return out.detach(), list(torch.autograd.grad(out, leaves, output_grad.to(out))), output_grad


def random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def short(dtype: torch.dtype) -> str:
    return "bf16" if dtype == BF16 else "fp32"


def grouped_product(rows: list[int]) -> tuple[Call, Call, list[Tensor]]:
    """Return the grouped product, a plain loop over experts, and inputs for both."""
    offsets = torch.tensor(rows).cumsum(0)
    offsets_on_device = offsets.cuda()

    def loop(x_ND: Tensor, weight_EFD: Tensor) -> Tensor:
        return torch.cat([part @ weight.T for part, weight in zip(x_ND.split(rows), weight_EFD, strict=True)])

    def ours(x_ND: Tensor, weight_EFD: Tensor) -> Tensor:
        return grouped_linear(x_ND, weight_EFD, offsets_on_device)

    return ours, loop, [random(sum(rows), WIDTH), random(len(rows), FFN, WIDTH)]


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, 1e-5)


def rotary(x_BTHK: Tensor) -> Tensor:
    """Apply rotary embeddings at late positions of a long context, with the frequencies of Llama 3."""
    positions = torch.arange(x_BTHK.shape[1], device=x_BTHK.device) + 130_000
    rope = RopeSpec(theta=500_000.0, scaling="llama3", factor=8.0)
    exact = FP32 if x_BTHK.dtype != torch.float64 else torch.float64
    return apply_rotary(x_BTHK, rotary_table(rope, x_BTHK.shape[-1], positions, exact))


def total_cross_entropy(loss: Call, logits_NV: Tensor) -> Tensor:
    """Compute the loss of a copy, which it overwrites."""
    return loss(logits_NV[None] * 1, targets(*logits_NV.shape)[None].to(logits_NV.device), IGNORE_INDEX)


def targets(count: int, vocabulary: int) -> Tensor:
    """Return random targets, some of them ignored."""
    chosen = torch.randint(vocabulary, (count,), generator=torch.Generator().manual_seed(2))
    return chosen.where(torch.arange(count) % 7 != 3, IGNORE_INDEX)


def vocabulary_parallel(table: Table, dtype: torch.dtype) -> list[object]:
    """Compare the loss of two ranks, each with the logits of half the vocabulary."""
    rounded = (5 * random(*CROSS_ENTROPY_SHAPE)).to(dtype)
    ours = partial(total_cross_entropy, in_place_cross_entropy)
    expected, (expected_grad,), _ = gradients(ours, [rounded.double()], torch.ones((), dtype=torch.float64))
    ranks = rank_pool(2, "cuda").run(shard_of_cross_entropy, dtype, timeout=60.0)
    error = relative_error([loss for loss, _ in ranks], [expected] * len(ranks))
    grad_error = relative_error([torch.cat([grad for _, grad in ranks], dim=1)], [expected_grad])
    return judge(table, "cross entropy by vocabulary", dtype, error, grad_error)


def shard_of_cross_entropy(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the loss, and the gradient of this rank's logits, on the CPU."""
    count, vocabulary = CROSS_ENTROPY_SHAPE
    group = TensorParallelGroup(dist.group.WORLD, False, vocabulary, None)  # type: ignore[arg-type]
    logits = (5 * random(count, vocabulary)).to(dtype).split(rows_per_rank(vocabulary, 2), dim=1)[group.rank]
    leaf = logits.cuda().requires_grad_()
    loss = in_place_cross_entropy(leaf[None] * 1, targets(count, vocabulary)[None].cuda(), IGNORE_INDEX, tp=group)
    loss.backward()
    assert leaf.grad is not None
    return loss.detach().cpu(), leaf.grad.cpu()


def attend_with_mask(
    mask: Tensor | None, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None, window: int | None = None
) -> Tensor:
    """Compute attention as a block calls it."""
    return attend(q, k, v, mask, window=window, sinks_H=sinks)


def within_window(mask: Tensor, window: int | None) -> Tensor:
    """Return a mask without the keys beyond a window."""
    return mask if window is None else mask & torch.ones_like(mask).triu(1 - window)


def all_scores(mask: Tensor, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
    """Compute attention with the full score matrix."""
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], dim=2) for x in (k, v))
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~mask, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks[None, :, None, None].expand(*scores.shape[:3], 1)], -1)
    return (scores.softmax(-1)[..., : v.shape[2]] @ v).transpose(1, 2)


def document_starts(batch: int, tokens: int, mean: float) -> Tensor:
    """Return where in its row each token's document begins, int64 [B, T], for random documents."""
    dice = torch.Generator().manual_seed(tokens)
    is_first = torch.rand(batch, tokens, generator=dice) < 1 / mean
    is_first[:, 0] = True
    return (torch.arange(tokens) * is_first).cummax(dim=1).values


def document_bounds(starts_BT: Tensor) -> Tensor:
    """Return where documents begin in the batch's tokens, and the number of these, int32 [N + 1], on the CPU."""
    is_first = (starts_BT == torch.arange(starts_BT.shape[1])).flatten()
    return torch.cat([is_first.nonzero().flatten(), torch.tensor([starts_BT.numel()])]).int()
