"""Matrix products and attention at the shapes that one rank of a run computes: which they are, and how long they take.

Shapes: B batch, T tokens, H heads, K head width; a product is of m rows with n outputs and k inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.bench.timing import time_calls
from phalanx.cost.exact.flops import lm_head_shape, tokens_through_parameter
from phalanx.cost.exact.parameter_shapes import Shape, strip_block_index
from phalanx.cost.exact.pipeline_split import layers_per_rank
from phalanx.cost.exact.rank_tensors import RankTensors, rank_tensors
from phalanx.spec.run import RunSpec, plan_batch

TORCH_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}
Row = dict[str, Any]


@dataclass(frozen=True)
class MatmulShape:
    """A linear layer on one micro-batch: [m, k] times [k, n]; of experts, `batch` of them at once."""

    batch: int
    m: int
    n: int
    k: int

    @property
    def flops(self) -> int:
        """Of the forward pass, and of each of the two products of the backward pass."""
        return 2 * self.batch * self.m * self.n * self.k


@dataclass(frozen=True)
class AttentionShape:
    """Attention's own two products: queries of a rank with keys of all, or in a ring with those of one step."""

    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    head_dim: int
    causal: bool
    masked: bool
    """Documents do not see each other, which takes a mask of every pair."""

    @property
    def flops(self) -> int:
        """Of the forward pass: 4 B H T T K, of causal attention half of it (arXiv 2204.02311, appendix B). Of the
        backward pass twice as many."""
        pairs = self.queries * self.keys // (2 if self.causal and not self.masked else 1)
        return 4 * self.batch * self.heads * pairs * self.head_dim


# -- which -------------------------------------------------------------------------------------------------------------


def matmul_shapes(run: RunSpec, world_size: int) -> dict[MatmulShape, tuple[tuple[str, ...], int]]:
    """The products of a rank's forward pass on one micro-batch: which layers they are, and how often one rank does
    them, at the place of the pipeline that does most. Experts are balanced, shares those of the rank with the largest.

    Raises UserError if the layout cannot run on so many ranks.
    """
    tokens = plan_batch(run, world_size).micro_batch_size * run.training.seq_len / run.layout.cp
    found: dict[MatmulShape, tuple[tuple[str, ...], int]] = {}
    for place, held in enumerate(rank_tensors(run, world_size)):
        here: dict[MatmulShape, list[str]] = {}
        for name, shape in _weights(run, held, place):
            here.setdefault(_product(run, name, shape, tokens), []).append(_layer(name))
        for product, names in here.items():
            known, count = found.get(product, ((), 0))
            found[product] = tuple(dict.fromkeys((*known, *names))), max(count, len(names))
    return found


def _weights(run: RunSpec, held: RankTensors, place: int) -> list[tuple[str, Shape]]:
    """What multiplies at one place of the pipeline: matrices in blocks, and the head, which may be the embedding."""
    found = [(name, shape) for name, shape in held.all.items() if name.startswith("blocks.") and len(shape) > 1]
    head = lm_head_shape(run, held, place)
    return found if head is None else [*found, ("head.weight", head)]


def _product(run: RunSpec, name: str, shape: Shape, tokens: float) -> MatmulShape:
    rows = int(tokens_through_parameter(name, run, tokens))
    if len(shape) == 3:
        experts, n, k = shape
        return MatmulShape(experts, max(1, rows // experts), n, k)
    return MatmulShape(1, rows, *shape)


def _layer(name: str) -> str:
    """A parameter's name without what all have: "wq", "experts.gate"."""
    inner = strip_block_index(name).removeprefix("blocks.").removesuffix(".weight")
    return inner.removeprefix("attention.").removeprefix("mlp.")


def attention_shapes(run: RunSpec, world_size: int) -> dict[AttentionShape, int]:
    """Attention's parts in a rank's forward pass on one micro-batch, and how often one rank does them. A ring's first
    step is causal; at the others half of the pairs are seen.

    Raises UserError if the layout cannot run on so many ranks.
    """
    spec, layout, tokens = run.model, run.layout, run.training.seq_len
    layers = max(map(len, layers_per_rank(run))) if layout.pp > 1 else spec.num_layers
    heads, kv_heads = (max(1, -(-count // layout.tp)) for count in (spec.num_heads, spec.num_kv_heads))
    if layout.cp_method == "ulysses" and layout.cp > 1:
        heads, kv_heads = heads // layout.cp, max(1, kv_heads // layout.cp)
    elif layout.cp > 1:
        tokens //= layout.cp
    of = partial(
        AttentionShape,
        plan_batch(run, world_size).micro_batch_size,
        heads,
        kv_heads,
        tokens,
        head_dim=spec.head_dim,
        masked=run.data.mask_documents,
    )
    found = {of(keys=tokens, causal=True): layers}
    if layout.cp_method == "ring" and layout.cp > 1:
        found[of(keys=tokens // 2, causal=False)] = layers * (layout.cp - 1)
    return found


# -- how long ----------------------------------------------------------------------------------------------------------


def benchmark_matmul(run: RunSpec, world_size: int, device: torch.device, iterations: int) -> list[Row]:
    """Of each product median seconds and FLOP/s: forward, and of the gradients of its inputs and of its weights."""
    dtype = TORCH_DTYPES[run.training.precision]
    rows: list[Row] = []
    for product, (names, count) in matmul_shapes(run, world_size).items():
        row = {"layers": names, "count": count, **asdict(product), "flops": product.flops}
        timed = _timed(_product_calls(product, dtype, device), device, iterations)
        rows.append(row | {f"{what}_seconds": seconds for what, seconds in timed.items()})
    return rows


def _product_calls(product: MatmulShape, dtype: torch.dtype, device: torch.device) -> dict[str, Callable[[], Tensor]]:
    batch = (product.batch,) if product.batch > 1 else ()
    make = partial(torch.randn, device=device, dtype=dtype)
    x, weight = make(*batch, product.m, product.k), make(*batch, product.n, product.k)
    gradient = make(*batch, product.m, product.n)
    return {
        "forward": lambda: x @ weight.mT,
        "inputs": lambda: gradient @ weight,
        "weights": lambda: gradient.mT @ x,
    }


def benchmark_attention(run: RunSpec, world_size: int, device: torch.device, iterations: int) -> list[Row]:
    """Of each part of attention median seconds, forward and backward."""
    dtype = TORCH_DTYPES[run.training.precision]
    rows: list[Row] = []
    for core, count in attention_shapes(run, world_size).items():
        timed = _timed(_core_calls(core, dtype, device), device, iterations)
        row = {"count": count, **asdict(core), "flops": core.flops}
        rows.append(row | {f"{what}_seconds": seconds for what, seconds in timed.items()})
    return rows


def _core_calls(core: AttentionShape, dtype: torch.dtype, device: torch.device) -> dict[str, Callable[[], object]]:
    make = partial(torch.randn, device=device, dtype=dtype, requires_grad=True)
    q = make(core.batch, core.heads, core.queries, core.head_dim)
    k, v = (make(core.batch, core.kv_heads, core.keys, core.head_dim) for _ in range(2))
    mask = torch.ones(core.queries, core.keys, dtype=torch.bool, device=device) if core.masked else None
    mask = mask.tril() if mask is not None and core.causal else mask
    repeats = core.heads // core.kv_heads if mask is not None and device.type != "cpu" else 1  # as the model does

    def forward() -> Tensor:
        keys, values = (x.repeat_interleave(repeats, dim=1) if repeats > 1 else x for x in (k, v))
        return F.scaled_dot_product_attention(
            q,
            keys,
            values,
            attn_mask=mask,
            is_causal=core.causal and mask is None,
            enable_gqa=core.heads > keys.shape[1],
        )

    out = forward()
    gradient = torch.ones_like(out)
    return {"forward": forward, "backward": lambda: torch.autograd.grad(out, (q, k, v), gradient, retain_graph=True)}


def _timed(
    calls: dict[str, Callable[[], Tensor]] | dict[str, Callable[[], object]], device: torch.device, iterations: int
) -> dict[str, float]:
    return {what: median(time_calls(call, device, iterations)) for what, call in calls.items()}
