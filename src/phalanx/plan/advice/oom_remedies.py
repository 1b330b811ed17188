"""Remedies for OOM, as data: each change, its cost, and the paper of its method.

The order applies if times are unknown; otherwise `oom.py` orders by time. A smaller batch and accumulation come first,
then recomputation, then sharding of the state: ZeRO before model parallelism, and offload. Changes of numerics (mixed
precision, another optimizer) or of the price are tried after all remedies that only cost time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, get_args

from phalanx.cost.exact.layout_checks import check_divisibility
from phalanx.cost.formulas.activation_checkpointing import recompute_overhead
from phalanx.plan.advice.papers import (
    BFLOAT16,
    CHECKPOINTING,
    EXPERTS,
    GPIPE,
    LONG_SEQUENCES,
    LORA,
    MEGATRON,
    OFFLOAD,
    QLORA,
    SEQUENCE_PARALLELISM,
    ZERO,
)
from phalanx.plan.search.candidates import ZERO_STAGES
from phalanx.plan.search.enumerate_layouts import choose_rank_order
from phalanx.spec.base import divisors
from phalanx.spec.errors import UserError
from phalanx.spec.layout import VALID_DATA_STRATEGIES, CheckpointingName, without_inapplicable_options
from phalanx.spec.precision import BF16_PRECISIONS
from phalanx.spec.resolved_run import ResolvedRun
from phalanx.spec.run import RunSpec
from phalanx.spec.tuning import AdapterSpec

MAX_DEVICE_MULTIPLE = 64
"""Maximum multiple of the devices that the last remedy tries."""


@dataclass(frozen=True)
class Remedy:
    """One kind of change."""

    name: str
    cost: str
    source: str
    changes: Callable[[RunSpec], Iterator[RunSpec]]
    """Runs with more and more of the change."""
    no_change_reason: str = "already applied"
    """Reason why `changes` yields no run."""
    is_last_resort: bool = False
    """True for costs other than step time; the remedy is then tried after those that only cost time."""


def with_layout(run: RunSpec, **changes: Any) -> RunSpec:
    """Return the run with a changed layout, without the options that have no meaning in it."""
    if changes.get("pp", run.layout.pp) != run.layout.pp:
        changes = {**changes, "recomputed_blocks": None}  # the ranks have other blocks
    layout = run.layout.model_copy(update=changes)
    return run.model_copy(update={"layout": without_inapplicable_options(layout)})


def _reduce_micro_batch(run: RunSpec) -> Iterator[RunSpec]:
    current_size = ResolvedRun.on_cluster(run).batch.micro_batch_size
    return (with_layout(run, micro_batch_size=size) for size in reversed(divisors(current_size)[:-1]))


def _increase_recompute(method: str) -> Callable[[RunSpec], Iterator[RunSpec]]:
    methods = get_args(CheckpointingName)

    def changes(run: RunSpec) -> Iterator[RunSpec]:
        layout = run.layout
        if (method == "offload" and run.cluster.uses_cpu) or (method == "norms" and layout.fsdp_unit == "sublayer"):
            return
        added_levels = methods.index(method) - methods.index(layout.activation_checkpointing)
        if added_levels > 0 or (added_levels == 0 and layout.recomputed_blocks is not None):
            yield with_layout(run, activation_checkpointing=method, recomputed_blocks=None)

    return changes


def _use_bf16(run: RunSpec) -> Iterator[RunSpec]:
    if run.training.precision not in BF16_PRECISIONS:
        yield run.model_copy(update={"training": run.training.model_copy(update={"precision": "bf16"})})


def _raise_zero_stage(stage: int) -> Callable[[RunSpec], Iterator[RunSpec]]:
    def changes(run: RunSpec) -> Iterator[RunSpec]:
        can_shard = run.cluster.ranks > 1 or (run.layout.offload != "none" and stage < 3)
        if can_shard and ZERO_STAGES.get(run.layout.data_parallel, 0) < stage:
            yield with_layout(run, data_parallel=f"zero{stage}")

    return changes


def _increase_degree(axis: str, within_domain: bool = False) -> Callable[[RunSpec], Iterator[RunSpec]]:
    """Return a function that yields larger and larger degrees that divide the ranks."""

    def changes(run: RunSpec) -> Iterator[RunSpec]:
        current_degree = getattr(run.layout, axis)
        max_degree = run.cluster.fast_link_domain_size if within_domain else run.cluster.ranks
        larger = (degree for degree in divisors(run.cluster.ranks) if current_degree < degree <= max_degree)
        return (with_layout(run, **{axis: degree}) for degree in larger)

    return changes


def increase_pp(run: RunSpec) -> Iterator[RunSpec]:
    """Yield larger pipelines, with the rank order that the planner chooses."""
    for changed in _increase_degree("pp")(run):
        layout = changed.layout
        dp = run.cluster.ranks // (layout.tp * layout.pp * layout.cp)
        order = choose_rank_order(dp, layout.tp, layout.pp, layout.cp, run.cluster.fast_link_domain_size)
        yield with_layout(changed, rank_order=order)


def _increase_cp(run: RunSpec) -> Iterator[RunSpec]:
    """Yield larger context-parallel degrees.

    The method is the run's, or as the planner chooses: on a GPU ulysses if there are enough heads, else a ring.
    """
    planner_methods = ("ring",) if run.cluster.uses_cpu else ("ulysses", "ring")
    methods = (run.layout.cp_method,) if run.layout.cp > 1 else planner_methods
    for changed in _increase_degree("cp")(run):
        for method in methods:
            variant = with_layout(changed, cp_method=method)
            with suppress(UserError):
                check_divisibility(ResolvedRun.on_cluster(variant))
                break
        yield variant


def _increase_ep(run: RunSpec) -> Iterator[RunSpec]:
    if run.model.moe is not None:
        yield from _increase_degree("ep")(run)


def _use_offload(run: RunSpec) -> Iterator[RunSpec]:
    if run.layout.offload == "none" and not run.cluster.uses_cpu:
        # Offload requires sharding; otherwise with_layout would drop the option again.
        sharding_strategies = ("zero1", "zero2") if run.cluster.ranks == 1 else ("zero1",)
        strategies = (
            (run.layout.data_parallel,)
            if run.layout.data_parallel in VALID_DATA_STRATEGIES["offload"]
            else sharding_strategies
        )
        yield from (with_layout(run, data_parallel=strategy, offload="cpu") for strategy in strategies)


def _use_sgd(run: RunSpec) -> Iterator[RunSpec]:
    optimizer = run.optimizer
    if optimizer.name == "sgd" and not optimizer.momentum:
        return
    with_momentum = [] if optimizer.name == "sgd" else [optimizer.momentum]
    for momentum in dict.fromkeys([*with_momentum, 0.0]):
        yield run.model_copy(update={"optimizer": optimizer.model_copy(update={"name": "sgd", "momentum": momentum})})


def _use_adapters(run: RunSpec) -> Iterator[RunSpec]:
    tunes_all = run.adapter is None and not run.training.freeze
    if run.model.from_hf is not None and tunes_all and run.swarm is None:
        yield run.replace(adapter=AdapterSpec(rank=64, alpha=16))


def _quantize_base(run: RunSpec) -> Iterator[RunSpec]:
    for lora in [run] if run.adapter else _use_adapters(run):
        if lora.adapter and lora.adapter.base_dtype is None:
            with suppress(UserError):  # widths that are no multiples of a block
                yield lora.replace(adapter=lora.adapter.replace(base_dtype="nf4"))


def _add_devices(run: RunSpec) -> Iterator[RunSpec]:
    multiple = 2
    while multiple <= MAX_DEVICE_MULTIPLE:
        cluster = run.cluster.model_copy(update={"nodes": run.cluster.nodes * multiple})
        larger = run.model_copy(update={"cluster": cluster})
        try:
            share = ResolvedRun.on_cluster(with_layout(larger, micro_batch_size=1)).micro_batches
        except UserError:
            return
        fitting = [size for size in divisors(share) if size <= (run.layout.micro_batch_size or share)]
        yield with_layout(larger, micro_batch_size=fitting[-1])
        multiple *= 2


NO_PEERS_REASON = "already applied, or a single device has no peers"
NO_LARGER_DEGREE_REASON = "no larger degree divides the devices"
REMEDIES = (
    Remedy(
        "smaller micro-batch",
        "more accumulation steps with smaller products",
        GPIPE,
        _reduce_micro_batch,
        "a micro-batch is one sequence",
    ),
    Remedy(
        "recompute norms",
        "two more passes over the residual stream per block",
        SEQUENCE_PARALLELISM,
        _increase_recompute("norms"),
        "already recomputed, alone or with more, or norms are FSDP units",
    ),
    Remedy(
        "recompute attention",
        "one more forward pass of attention",
        SEQUENCE_PARALLELISM,
        _increase_recompute("selective"),
    ),
    Remedy(
        "recompute blocks",
        f"one more forward pass: about {recompute_overhead():+.0%} compute",
        CHECKPOINTING,
        _increase_recompute("full"),
    ),
    Remedy("bf16", "lower precision", BFLOAT16, _use_bf16, is_last_resort=True),
    Remedy("ZeRO-1", "optimizer state sharded: no additional traffic", ZERO, _raise_zero_stage(1), NO_PEERS_REASON),
    Remedy("ZeRO-2", "gradients sent for every micro-batch", ZERO, _raise_zero_stage(2), NO_PEERS_REASON),
    Remedy("ZeRO-3", "parameters gathered for every pass", ZERO, _raise_zero_stage(3), NO_PEERS_REASON),
    Remedy(
        "expert parallelism",
        "four all-to-alls per block",
        EXPERTS,
        _increase_ep,
        "the model has no experts, or no larger degree divides the devices",
    ),
    Remedy(
        "tensor parallelism",
        "communication in every block: fast links only",
        MEGATRON,
        _increase_degree("tp", within_domain=True),
        NO_LARGER_DEGREE_REASON,
    ),
    Remedy(
        "context parallelism", "communication in every attention", LONG_SEQUENCES, _increase_cp, NO_LARGER_DEGREE_REASON
    ),
    Remedy("pipeline", "stages wait for each other", GPIPE, increase_pp, NO_LARGER_DEGREE_REASON),
    Remedy(
        "offload activations",
        "one more forward pass; inputs of blocks cross PCIe",
        ZERO,
        _increase_recompute("offload"),
        "already applied, or ranks compute on CPUs",
    ),
    Remedy(
        "offload to CPU memory",
        "state crosses PCIe every step",
        OFFLOAD,
        _use_offload,
        "already applied, or CPU memory is insufficient",
    ),
    Remedy("SGD", "may converge more slowly; needs new learning rates", ZERO, _use_sgd, is_last_resort=True),
    Remedy(
        "LoRA",
        "trains adapters of a frozen model: new learning rates",
        LORA,
        _use_adapters,
        "a part of the model is trained already, or there are no trained weights (model.from_hf)",
        is_last_resort=True,
    ),
    Remedy(
        "QLoRA",
        "as LoRA; weights are rounded to 4 bits, and each product computes its matrix from them",
        QLORA,
        _quantize_base,
        "already applied, a part of the model is trained already, or widths are no multiples of 64",
        is_last_resort=True,
    ),
    Remedy(
        "more devices",
        "their price",
        ZERO,
        _add_devices,
        "no more devices can share a step's sequences",
        is_last_resort=True,
    ),
)
"""Remedies in the order to try them. Tensor parallelism includes sequence parallelism."""
