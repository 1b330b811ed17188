"""Bytes that collectives send, per operation and per optimizer update."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from phalanx.spec.communication_groups import GroupKind
from phalanx.spec.layout import StrategyName

Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast"]
Operation = Collective | Literal["send", "recv"]
Strategy = StrategyName


def bus_factor(operation: Collective, ranks: int) -> float:
    """Return bus bandwidth / algorithm bandwidth of a collective (NVIDIA/nccl-tests, doc/PERFORMANCE.md).

    The algorithm bandwidth is size / time. The factor is the fraction of the size that a rank sends, so that bus
    bandwidths over different numbers of ranks compare with the speed of a link. Size is that of the full tensor: after
    an all-gather, before a reduce-scatter. For all_to_all, it is the size of one rank's buffer.
    """
    sent_fraction = (ranks - 1) / ranks
    factors: dict[Collective, float] = {
        "all_reduce": 2 * sent_fraction,
        "all_gather": sent_fraction,
        "reduce_scatter": sent_fraction,
        "all_to_all": sent_fraction,
        "broadcast": float(ranks > 1),
    }
    return factors[operation]


def sent_bytes(operation: Collective, size_bytes: float, ranks: int) -> float:
    """Return the bytes that each rank sends with ring algorithms.

    A broadcast is a chain that starts at its root: every rank except the last forwards the full tensor.

    Args:
        operation: The collective.
        size_bytes: Size as in `bus_factor`: that of the full tensor, or one rank's buffer for all_to_all.
        ranks: Number of ranks.
    """
    return size_bytes * bus_factor(operation, ranks)


def ring_steps(operation: Collective, ranks: int) -> int:
    """Return the number of sequential messages: 2 (N-1) for an all-reduce, N-1 for the other collectives."""
    return (2 if operation == "all_reduce" else 1) * (ranks - 1)


@dataclass(frozen=True)
class Traffic:
    """Bytes that one rank sends for one purpose in one optimizer update, summed over `calls`."""

    operation: Operation
    """Name as in torch.distributed."""
    bytes: float
    """Bytes that the rank sends, or receives if the operation is recv."""
    purpose: str
    group_kind: GroupKind = "data"
    """Group that the collective runs in."""
    calls: int = 1


def step_traffic(
    strategy: Strategy,
    parameter_bytes: float,
    gradient_bytes: float,
    ranks: int,
    accumulation: int = 1,
    *,
    replicas: int = 1,
    reshard_after_forward: bool = True,
) -> list[Traffic]:
    """Return the traffic of one rank for one optimizer update.

    Sum over all rows, with f = (N-1)/N (ZeRO, arXiv 1910.02054, section 7: 2 Psi for DDP and ZeRO-1 and 2, 3 Psi for
    ZeRO-3, where P = G = Psi, a = 1 and N is large):

        ddp 2 G f | zero1 (G + P) f | zero2 (a G + P) f | zero3 a (2 P + G) f, or a (P + G) f if not resharded
        hsdp: zero3, + 2 (G/N) (R-1)/R
        parameter_server: P received, G sent by a worker

    The formula is linear in P and G, so parts of a model with different strategies add up.

    Args:
        strategy: Data-parallel strategy.
        parameter_bytes: P, bytes of all parameters of the model as they are sent.
        gradient_bytes: G, bytes of all gradients of the model as they are sent.
        ranks: N; for hsdp, the number of ranks that shard one replica.
        accumulation: a, the number of micro-batches per update.
        replicas: R, the number of replicas of hsdp.
        reshard_after_forward: Free gathered parameters after the forward pass and gather them again for backward.
    """
    match strategy:
        case "ddp":
            return [_collective("all_reduce", gradient_bytes, ranks, purpose="gradients, summed once per update")]
        case "zero1":
            return _zero_traffic(parameter_bytes, gradient_bytes, ranks)
        case "zero2":
            return _zero_traffic(parameter_bytes, gradient_bytes, ranks, num_reductions=accumulation)
        case "zero3" | "hsdp":
            passes = ("forward", "backward") if reshard_after_forward else ("forward",)
            traffic = _fsdp_traffic(parameter_bytes, gradient_bytes, ranks, accumulation=accumulation, passes=passes)
            purpose = "this rank's gradients, between replicas"
            between = _collective("all_reduce", gradient_bytes / ranks, replicas, purpose)
            return traffic if strategy == "zero3" else [*traffic, replace(between, group_kind="replicas")]
        case "parameter_server":
            return [
                Traffic("recv", parameter_bytes, "parameters, from the servers"),
                Traffic("send", gradient_bytes, "gradients, to the servers"),
            ]


def _zero_traffic(parameter_bytes: float, gradient_bytes: float, ranks: int, num_reductions: int = 1) -> list[Traffic]:
    """Return the traffic of ZeRO-1 and 2: gradients to the rank that updates them, and parameters back."""
    purpose = "gradients, to the rank that updates them"
    return [
        _collective("reduce_scatter", gradient_bytes, ranks, purpose=purpose, calls=num_reductions),
        _collective("all_gather", parameter_bytes, ranks, purpose="updated parameters"),
    ]


def _fsdp_traffic(
    parameter_bytes: float, gradient_bytes: float, ranks: int, accumulation: int, passes: Sequence[str]
) -> list[Traffic]:
    """Return the traffic of ZeRO-3: parameters for each of the `passes` of a micro-batch, and gradients."""
    traffic = []
    for name in passes:
        purpose = f"parameters, for the {name} pass"
        traffic.append(_collective("all_gather", parameter_bytes, ranks, purpose=purpose, calls=accumulation))
    purpose = "gradients, to the rank that keeps them"
    return [*traffic, _collective("reduce_scatter", gradient_bytes, ranks, purpose=purpose, calls=accumulation)]


def _collective(operation: Collective, size_bytes: float, ranks: int, purpose: str, calls: int = 1) -> Traffic:
    return Traffic(operation, calls * sent_bytes(operation, size_bytes, ranks), purpose, calls=calls)
