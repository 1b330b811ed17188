"""A block on one rank of a fake process group, which sends nothing, and the numbers of its declaration."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from phalanx.cost.exact.block_moments import WeightGradients, block_moments, largest_moment
from phalanx.cost.exact.derive.deferred import deferred_by_block
from phalanx.cost.exact.derive.saved import branch_norm_bytes, norm_output_bytes, saved_by_part, shared_output_bytes
from phalanx.cost.exact.derive.traffic import part_traffic
from phalanx.cost.exact.derive.weights import matrix_numbers
from phalanx.cost.exact.forward_shape import ForwardShape
from phalanx.cost.formulas.collectives import Traffic
from phalanx.model import chunks
from phalanx.model.dropout import dropping
from phalanx.model.moe import Router
from phalanx.model.sequence_context import Documents
from phalanx.model.transformer import Transformer
from phalanx.parallel import apply
from phalanx.parallel.comm.collectives import REQUESTED_OPERATION
from phalanx.parallel.mesh import build_mesh
from phalanx.parallel.pipeline.split_backward import DeferredWeightGrads, split_backward
from phalanx.parallel.strategy import Strategy
from phalanx.program.rank_tensors import local_shape
from phalanx.spec.layers import layer_specs
from phalanx.spec.layout import Layout
from phalanx.spec.model import ModelSpec
from phalanx.spec.parts.block import Block
from phalanx.spec.parts.flops import kernel_flops, tokens_through
from phalanx.spec.parts.operations import GroupedLinear, Part
from phalanx.spec.precision import Precision
from phalanx.spec.tensor_sharding import block_shardings
from phalanx.train.profiling.collective_recorder import CollectiveCall, CollectiveRecorder
from phalanx.train.profiling.flop_counter import FlopCounter
from tests.helpers.live_memory import PeakLiveBytes, SavedStorages, find_tensors

CPU = torch.device("cpu")
BATCH = 2
Messages = dict[tuple[str, int], tuple[int, float]]
"""Calls and sent bytes by operation and number of ranks."""


class Numerics(NamedTuple):
    """How a block computes."""

    precision: Precision
    autocast: bool = False


@dataclass(frozen=True, kw_only=True)
class BlockCase:
    """A model of one block, or of one more for multi-token prediction or shared keys, and how a rank computes the last
    one."""

    spec: ModelSpec
    layout: Layout
    numerics: Numerics
    masked: bool
    """True if documents are hidden from each other."""
    sequence: int = 48
    """T, tokens of a sequence."""

    @property
    def world_size(self) -> int:
        """Number of ranks: expert-parallel ones are among the others."""
        return max(self.layout.tp * self.layout.cp, self.layout.ep)

    @property
    def shape(self) -> ForwardShape:
        """Sizes of a rank's forward pass."""
        precision, autocast = self.numerics
        return ForwardShape(
            batch=BATCH,
            sequence=self.sequence,
            precision=precision,
            layout=self.layout,
            autocast=autocast,
            masked=self.masked,
        )


@dataclass(frozen=True, kw_only=True)
class BlockNumbers:
    """Parameters of a block, and its memory, FLOPs and messages in a micro-batch."""

    parameters: dict[str, tuple[int, ...]]
    saved_bytes: int
    deferred_bytes: int
    """Bytes between the halves of a split backward pass."""
    flops: tuple[float, float]
    """FLOPs of the forward pass, and of the backward pass."""
    forward_messages: Messages
    backward_messages: Messages
    peak_bytes: int
    """Largest memory inside the backward pass: saved tensors, gradients and temporary tensors."""


# -- declared ----------------------------------------------------------------------------------------------------------


def declared_numbers(case: BlockCase, block: Block) -> BlockNumbers:
    """Return what follows from the declaration of a block."""
    shape = case.shape
    recomputes_norms = case.layout.activation_checkpointing == "norms"
    saved_by = {branch.part: saved_by_part(case.spec, branch.part, shape) for branch in block}
    saved_bytes = sum(saved_by[branch.part].total() for branch in block)
    saved_bytes += sum(branch_norm_bytes(branch, shape) for branch in block)
    if recomputes_norms:
        saved_bytes -= sum(norm_output_bytes(branch.part, shape) for branch in block)
    else:
        saved_bytes -= sum(shared_output_bytes(block, branch, shape) for branch in block)
    parts = [branch.part for branch in block]
    traffic = [part_traffic(part, shape) for part in parts]
    forward_flops, backward_flops = (
        sum(flops) for flops in zip(*(_rank_flops(part, shape) for part in parts), strict=True)
    )
    moments = block_moments(
        block,
        shape,
        saved_by=saved_by,
        output_gradient=shape.value_bytes(parts[0].input),
        splits_backward=False,
    )
    gradients = WeightGradients(own=shape.compute_bytes)
    shardings = block_shardings(block, case.layout)
    return BlockNumbers(
        parameters={
            name: local_shape(case.layout, shardings[name], parameter.shape, tp_rank=0)
            for branch in block
            for name, parameter in branch.parameters.items()
        },
        saved_bytes=saved_bytes,
        deferred_bytes=deferred_by_block(block, shape, recomputes_norms),
        flops=(forward_flops, backward_flops),
        forward_messages=_sum_traffic(case.layout, [row for part in traffic for row in part.forward]),
        backward_messages=_sum_traffic(case.layout, [row for part in traffic for row in part.backward]),
        peak_bytes=saved_bytes + largest_moment([*moments.mlp, *moments.attention], gradients),
    )


def _rank_flops(part: Part, shape: ForwardShape) -> tuple[float, float]:
    """Return the FLOPs of the forward and the backward pass."""
    ulysses = shape.layout.cp if shape.layout.cp_method == "ulysses" else 1
    forward = kernel_flops(part, shape.sequence, shape.tp, ulysses) * shape.tokens
    backward = 2 * forward
    for linear in part.linears:
        matrices = linear.matrix.shape[0] // shape.layout.ep if isinstance(linear, GroupedLinear) else 1
        tokens = tokens_through(linear, shape.layout, shape.tokens)
        flops = 2 * tokens * matrix_numbers(linear, shape) / matrices
        forward += flops
        backward += flops * (1 + linear.is_trained)
    return forward, backward


def _sum_traffic(layout: Layout, rows: Iterable[Traffic]) -> Messages:
    ranks = {"tp": layout.tp, "cp": layout.cp, "ep": layout.ep}
    return _sum_messages((row.operation, ranks[row.group_kind], row.calls, row.bytes) for row in rows if row.bytes)


def _sum_messages(rows: Iterable[tuple[str, int, int, float]]) -> Messages:
    calls: Counter[tuple[str, int]] = Counter()
    sent_bytes: Counter[tuple[str, int]] = Counter()
    for operation, ranks, count, size in rows:
        calls[operation, ranks] += count
        sent_bytes[operation, ranks] += size  # type: ignore[assignment]
    return {key: (calls[key], sent_bytes[key]) for key in sorted(calls)}


# -- traced ------------------------------------------------------------------------------------------------------------


class EchoedMessages(TorchDispatchMode):
    """All-to-alls of the fake process group that return what was sent, as ranks with balanced experts do."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func._schema.name == "c10d::alltoall_base_" and args[0].shape == args[1].shape:
            args[0].copy_(args[1])
        return out


def trace_block(case: BlockCase) -> BlockNumbers:
    """Run a block forward and backward on the first rank of a fake process group."""
    if case.world_size > 1:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=case.world_size)
    try:
        strategy = _apply_layout(case)
        for module in strategy.module.modules():
            if isinstance(module, Router):
                module.gate.register_forward_hook(lambda gate, args, logits: balanced_router_logits(logits))
        # Blocks of usual sizes have many chunks of rows, this one a hundred.
        few_rows = mock.patch.object(chunks, "CPU_CHUNK_ELEMENTS", case.spec.hidden_size * max(1, case.sequence // 48))
        with few_rows, dropping(torch.zeros(BATCH, case.sequence // case.layout.cp, dtype=torch.int32)):
            return _trace(case, strategy)
    finally:
        if case.world_size > 1:
            dist.destroy_process_group()


def _apply_layout(case: BlockCase) -> Strategy:
    precision, autocast = case.numerics
    # With a single replica, DDP would be ZeRO-1, which computes in bf16.
    strategy = "zero1" if precision == "bf16" and not autocast else "ddp"
    layout = case.layout.replace(data_parallel=strategy)
    with mock.patch.object(apply, "replica_strategy", lambda strategy, *_: strategy):
        mesh = build_mesh(layout, case.world_size, "cpu")
        return apply.apply_layout(case.spec, layout, mesh, CPU, lambda _, shape: torch.zeros(shape), precision)


def balanced_router_logits(logits: Tensor) -> Tensor:
    """Return router logits by which tokens choose the first experts, the next experts, and so on."""
    flat = logits.flatten(0, -2)
    choice = torch.arange(len(flat) * flat.shape[1]).view(flat.shape) // flat.shape[1] + torch.arange(flat.shape[1])
    return logits * 0 + (choice % flat.shape[1]).view(logits.shape)


def _trace(case: BlockCase, strategy: Strategy) -> BlockNumbers:
    model = strategy.module
    assert isinstance(model, Transformer)
    *_, block = model.blocks
    # A document a row, because FLOPs of shorter ones are not planned.
    documents = Documents.whole_rows(BATCH, case.sequence, CPU) if case.masked else None
    parameters = {name: tuple(parameter.shape) for name, parameter in block.named_parameters()}
    for parameter in filter(attrgetter("requires_grad"), model.parameters()):
        parameter.register_post_accumulate_grad_hook(_free_gradient)
    saved = SavedStorages(model)
    saved.exclude_bounds(documents)
    peak = PeakLiveBytes()
    forward, backward = CollectiveRecorder(REQUESTED_OPERATION.get), CollectiveRecorder(REQUESTED_OPERATION.get)
    forward_flops, backward_flops = FlopCounter(), FlopCounter()
    (x, *others), embedding = _block_inputs(case, model, documents, peak)
    saved.exclude(*find_tensors([others, _given_tensors(embedding)]))
    with EchoedMessages(), forward, forward_flops, peak, saved.record_saved_tensors(case.numerics.autocast):
        outputs = _without_none(block(x, *others, **embedding))
    del x, embedding
    saved_bytes = saved.bytes
    saved.clear()
    with peak:
        gradients = [torch.ones_like(output) for output in outputs]
    edges = [get_gradient_edge(output) for output in outputs]
    # The next block would save the output: its bytes are not this block's.
    del outputs
    peak.peak = 0
    with EchoedMessages(), backward, backward_flops, peak:
        torch.autograd.backward(edges, gradients)
    return BlockNumbers(
        parameters=parameters,
        saved_bytes=saved_bytes,
        deferred_bytes=_trace_deferred(case, strategy, documents),
        flops=(forward_flops.flops, backward_flops.flops),
        forward_messages=_sum_calls(forward.calls),
        backward_messages=_sum_calls(backward.calls),
        peak_bytes=peak.peak,
    )


def _free_gradient(parameter: Tensor) -> None:
    parameter.grad = None


def _without_none(outputs: tuple[Tensor, Tensor | None]) -> list[Tensor]:
    return [output for output in outputs if output is not None]


class _Arguments(nn.Module):
    """A block that only notes its arguments."""

    def __init__(self, block: Any) -> None:
        super().__init__()
        self.sequence_inputs = block.sequence_inputs

    def forward(self, *args: Any, **options: Tensor) -> tuple[Tensor, None]:
        self.args = args, options
        return args[0], None


def _given_tensors(options: dict[str, Any]) -> list[Tensor]:
    """Return what other layers, or the start of the model, keep for a block."""
    return [*options.get("keys_and_values", ()), *(options[name] for name in ("given_BTP",) if name in options)]


def _block_inputs(case: BlockCase, model: Transformer, documents: Documents | None, peak: PeakLiveBytes) -> Any:
    """Return the arguments of the block. Its input is not a leaf: autocast would cache its cast."""
    tokens = case.sequence // case.layout.cp
    tokens = tokens // case.layout.tp if case.layout.sequence_parallel else tokens
    dtype = next(model.blocks.parameters()).dtype
    leaf = torch.zeros(BATCH, tokens, case.spec.hidden_size, dtype=dtype, requires_grad=True)
    *_, block = model.blocks
    with peak:
        x = leaf * 1
        embedding = {"embedding_BTD": leaf * 1} if case.spec.mtp else {}
    arguments = _Arguments(block)
    with torch.autocast("cpu", torch.bfloat16, enabled=case.numerics.autocast):
        model.run_blocks([arguments], x, model.sequence_context(x, documents), **embedding)
    inputs, options = arguments.args
    *_, layer = layer_specs(case.spec)
    compute = torch.bfloat16 if case.numerics.autocast else dtype

    def given(*sizes: int) -> Tensor:
        return torch.zeros(BATCH, *sizes, dtype=compute, requires_grad=True)

    if layer.per_layer_input_size:
        options["given_BTP"] = given(tokens, layer.per_layer_input_size)
    if layer.num_shared_kv_layers:
        heads = max(1, layer.num_kv_heads // case.layout.tp)
        options["keys_and_values"] = [given(case.sequence // case.layout.cp, heads, layer.head_dim) for _ in "kv"]
    return inputs, options


def _trace_deferred(case: BlockCase, strategy: Strategy, documents: Documents | None) -> int:
    """Return the bytes that a block needs for the second half of its backward pass."""
    model = strategy.module
    assert isinstance(model, Transformer)
    tp = strategy.model_parallel.tensor_parallel if strategy.model_parallel else None
    deferred_grads = tp.deferred_grads if tp else DeferredWeightGrads()  # type: ignore[attr-defined]
    split_backward(model, deferred_grads)
    needed = SavedStorages(model)
    *_, block = model.blocks
    arguments, embedding = _block_inputs(case, model, documents, PeakLiveBytes())
    with EchoedMessages(), torch.autocast("cpu", torch.bfloat16, enabled=case.numerics.autocast):
        outputs = _without_none(block(*arguments, **embedding))
    with EchoedMessages(), deferred_grads.deferring() as deferred:
        torch.autograd.backward(outputs, [torch.ones_like(output) for output in outputs])
        for tensor in find_tensors(deferred):
            needed.record(tensor)
        deferred.clear()
    return needed.bytes


def _sum_calls(calls: Iterable[CollectiveCall]) -> Messages:
    return _sum_messages((call.operation, call.ranks, 1, call.sent_bytes) for call in calls if call.operation != "recv")
