"""Plain PyTorch loop that splits a small Llama over two ranks.

- tp2: `parallelize_module` with sequence parallelism and `loss_parallel`
- pp2: `torch.distributed.pipelining`
- cp2: the ring attention of `torch.distributed.tensor.experimental` under DDP
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.tensor.experimental._context_parallel._attention as ring
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.experimental._attention import _cp_options, set_rotate_method
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from benchmarks.peers.plain import ADAMW
from benchmarks.peers.rank import Step
from benchmarks.shapes import OPTIMIZER, RANKS, SEED, STEPS, Shape
from phalanx.data.indexed_dataset import IndexedDataset
from phalanx.data.loader import TokenLoader, prefetch
from phalanx.model.init import initial_weight

ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
ATTENTION_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])


class Ring(torch.autograd.Function):
    """PyTorch's ring attention with load balancing."""

    group: dist.ProcessGroup

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, total, *_ = ring._templated_ring_attention(Ring.group, 2, ATTENTION, q, k, v, is_causal=True)
        ctx.save_for_backward(q, k, v, out, total)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        q, k, v, out, total = ctx.saved_tensors
        return ring._templated_ring_attention_backward(
            Ring.group,
            2,
            ATTENTION_BACKWARD,
            grad_out=gradient.contiguous(),
            grad_out_name="grad_out",
            query=q,
            key=k,
            value=v,
            out=out,
            logsumexp=total,
            is_causal=True,
            dropout_p=0.0,
        )[:3]


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head = shape.width // shape.heads
        self.wq = nn.Linear(shape.width, shape.width, bias=False)
        self.wk = nn.Linear(shape.width, shape.kv_heads * self.head, bias=False)
        self.wv = nn.Linear(shape.width, shape.kv_heads * self.head, bias=False)
        self.wo = nn.Linear(shape.width, shape.width, bias=False)

    def forward(self, x: Tensor, table: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (-1, self.head)).transpose(1, 2) for layer in (self.wq, self.wk, self.wv))
        return self.wo(attend(turn(q, table), turn(k, table), v).transpose(1, 2).flatten(2))


def turn(x: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * table[0] + torch.cat((-second, first), dim=-1) * table[1]


class MLP(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate = nn.Linear(shape.width, shape.ffn, bias=False)
        self.up = nn.Linear(shape.width, shape.ffn, bias=False)
        self.down = nn.Linear(shape.ffn, shape.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.RMSNorm(shape.width, 1e-5), nn.RMSNorm(shape.width, 1e-5)
        self.attention, self.mlp = Attention(shape), MLP(shape)

    def forward(self, x: Tensor, table: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        x = x + self.attention(self.attention_norm(x), table, attend)
        return x + self.mlp(self.mlp_norm(x))


class Llama(nn.Module):
    """Llama, or a pipeline stage of it with the embedding before the first layer and the head after the last."""

    def __init__(self, shape: Shape, layers: range, places: Tensor, attend: Attend = causal) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocab, shape.width) if 0 in layers else None
        self.blocks = nn.ModuleDict({str(layer): Block(shape) for layer in layers})
        last = shape.layers - 1 in layers
        self.norm = nn.RMSNorm(shape.width, 1e-5) if last else None
        self.head = nn.Linear(shape.width, shape.vocab, bias=False) if last else None
        self.attend = attend
        size = shape.width // shape.heads
        angle = places[:, None] * 10_000.0 ** -(torch.arange(0, size, 2) / size)
        angle = torch.cat((angle, angle), dim=-1)
        self.table = angle.cos(), angle.sin()
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                parameter.copy_(initial_weight(shape.model, name, parameter.shape, SEED))

    def forward(self, x: Tensor) -> Tensor:
        if self.embedding is not None:
            x = self.embedding(x)
        for block in self.blocks.values():
            x = block(x, self.table, self.attend)
        return x if self.head is None else self.head(self.norm(x))


def build(shape: Shape, layout: str, dataset: IndexedDataset) -> Step:
    """Return a step of `layout`."""
    batches = prefetch(
        TokenLoader(dataset, shape.sequence, shape.sequences, SEED, 0, 1, mask_documents=False), 0, STEPS
    )
    make = {"tp2": tensor, "pp2": pipeline, "cp2": context}[layout]
    model, passes = make(shape)
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": OPTIMIZER.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, **ADAMW)

    def step() -> float:
        batch = next(batches)
        optimizer.zero_grad()
        loss = passes(torch.from_numpy(batch.tokens), torch.from_numpy(batch.targets))
        if layout == "pp2":  # the norm of the model is that of the stages' norms
            norm = torch.stack(torch._foreach_norm([p.grad for p in model.parameters()])).square().sum()
            dist.all_reduce(norm)
            nn.utils.clip_grads_with_norm_(model.parameters(), OPTIMIZER.max_grad_norm, norm.sqrt())
        else:
            nn.utils.clip_grad_norm_(model.parameters(), OPTIMIZER.max_grad_norm)
        optimizer.step()
        return loss

    return step


Passes = Callable[[Tensor, Tensor], float]


def micro_batches(shape: Shape, tokens: Tensor, targets: Tensor) -> list[tuple[Tensor, Tensor]]:
    return list(zip(tokens.split(shape.micro_batch), targets.split(shape.micro_batch), strict=True))


def accumulate(
    shape: Shape,
    model: nn.Module,
    around: Callable[[bool], AbstractContextManager[Any]],
    tokens: Tensor,
    targets: Tensor,
    total: int,
) -> Tensor:
    losses = torch.zeros(())
    parts = micro_batches(shape, tokens, targets)
    for index, (x, y) in enumerate(parts):
        with around(index == len(parts) - 1):
            loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="sum") / total
            loss.backward()
        losses += loss.detach().full_tensor() if hasattr(loss, "full_tensor") else loss.detach()
    return losses


def tensor(shape: Shape) -> tuple[nn.Module, Passes]:
    mesh = init_device_mesh("cpu", (RANKS,))
    model = Llama(shape, range(shape.layers), torch.arange(shape.sequence))
    plan = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
    }
    parallelize_module(model, mesh, plan)
    for block in model.blocks.values():
        whole = PrepareModuleInput(
            input_layouts=(Shard(1), None, None), desired_input_layouts=(Replicate(), None, None)
        )
        one = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
        columns = {f"attention.{name}": ColwiseParallel() for name in ("wq", "wk", "wv")}
        columns |= {f"mlp.{name}": ColwiseParallel() for name in ("gate", "up")}
        rows = {name: RowwiseParallel(output_layouts=Shard(1)) for name in ("attention.wo", "mlp.down")}
        norms = {"attention_norm": SequenceParallel(), "mlp_norm": SequenceParallel()}
        parallelize_module(block, mesh, {**norms, "attention": whole, "mlp": one, **columns, **rows})

    def passes(tokens: Tensor, targets: Tensor) -> float:
        return accumulate(shape, model, lambda _: loss_parallel(), tokens, targets, targets.numel()).item()

    return model, passes


def pipeline(shape: Shape) -> tuple[nn.Module, Passes]:
    """Return 1F1B of two stages with equal numbers of layers."""
    rank, half = dist.get_rank(), shape.layers // 2
    layers = range(half) if rank == 0 else range(half, shape.layers)
    model = Llama(shape, layers, torch.arange(shape.sequence))
    stage = PipelineStage(model, rank, RANKS, torch.device("cpu"))
    tokens_in_all = shape.tokens

    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / tokens_in_all

    count = shape.sequences // shape.micro_batch
    schedule = Schedule1F1B(stage, count, loss_fn=loss, scale_grads=False)

    def passes(tokens: Tensor, targets: Tensor) -> float:
        total, losses = torch.zeros(()), list[Tensor]()
        if rank == 0:
            schedule.step(tokens)
        else:
            schedule.step(target=targets, losses=losses)
            total = torch.stack(losses).sum().detach()
        dist.all_reduce(total)
        return total.item()

    return model, passes


def context(shape: Shape) -> tuple[nn.Module, Passes]:
    """Return ring attention in which a rank has the first and last quarter of a row, or the two between."""
    set_rotate_method("alltoall")
    _cp_options.enable_load_balance = _cp_options.convert_to_f32 = True
    Ring.group = dist.group.WORLD
    pieces = torch.arange(shape.sequence).chunk(2 * RANKS)
    places = torch.cat([pieces[dist.get_rank()], pieces[2 * RANKS - 1 - dist.get_rank()]])

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        count = q.shape[1] // k.shape[1]
        return Ring.apply(q, k.repeat_interleave(count, 1), v.repeat_interleave(count, 1))

    model = DistributedDataParallel(Llama(shape, range(shape.layers), places, attend))

    def around(last: bool) -> AbstractContextManager[Any]:
        return nullcontext() if last else model.no_sync()

    def passes(tokens: Tensor, targets: Tensor) -> float:
        mine, its_targets = tokens[:, places], targets[:, places]
        total = accumulate(shape, model, around, mine, its_targets, targets.numel() // RANKS)  # DDP averages
        dist.all_reduce(total)
        return total.item() / RANKS

    return model, passes
