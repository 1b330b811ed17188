"""Bytes that collectives send: of each operation, and of one optimizer update."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from phalanx.spec.communication_groups import GroupKind

Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast"]
Operation = Collective | Literal["send", "recv"]
Strategy = Literal["ddp", "zero1", "zero2", "zero3", "hsdp", "parameter_server"]


def bus_factor(operation: Collective, ranks: int) -> float:
    """busbw = algbw x this factor, where algbw = size / time (NVIDIA/nccl-tests, doc/PERFORMANCE.md).

    It makes speeds over different numbers of ranks comparable with a link's: it is the part of the size that a rank
    sends. Size is of the whole tensor, gathered or yet unscattered; for all_to_all, of what one rank holds.
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
    """Bytes that each rank sends, with `size_bytes` as in `bus_factor` and ring algorithms.

    A broadcast goes down a chain from its root: every rank but the last passes the whole on.
    """
    return size_bytes * bus_factor(operation, ranks)


def ring_steps(operation: Collective, ranks: int) -> int:
    """Messages that wait for one another: 2 (N-1) for an all-reduce, half as many for the others."""
    return (2 if operation == "all_reduce" else 1) * (ranks - 1)


@dataclass(frozen=True)
class Traffic:
    """What one rank sends for one purpose in one optimizer update, over however many calls."""

    operation: Operation
    """Named as in torch.distributed."""
    bytes: float
    """Sent by the rank; received, if the operation is recv."""
    purpose: str
    group_kind: GroupKind = "data"
    """The ranks that it goes to."""
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
    """Traffic of one rank for one optimizer update of `accumulation` micro-batches.

    P and G are the bytes of all parameters and gradients of the model as they are exchanged, N `ranks` (for hsdp, those
    that share one of R = `replicas` copies), a `accumulation`. In sum, with f = (N-1)/N (ZeRO, arXiv 1910.02054,
    section 7: 2 Psi for DDP and ZeRO-1 and 2, 3 Psi for ZeRO-3, where P = G = Psi, a = 1 and N is large):

        ddp 2 G f | zero1 (G + P) f | zero2 (a G + P) f | zero3 a (2 P + G) f, or a (P + G) f if not resharded
        hsdp: zero3, + 2 (G/N) (R-1)/R
        parameter_server: P received, G sent by a worker

    All is linear in P and G: parts of a model that are treated differently add up.
    """

    def traffic_row(operation: Collective, size_bytes: float, num_calls: int, purpose: str) -> Traffic:
        return Traffic(operation, num_calls * sent_bytes(operation, size_bytes, ranks), purpose, calls=num_calls)

    match strategy:
        case "ddp":
            return [traffic_row("all_reduce", gradient_bytes, 1, purpose="gradients, summed once per update")]
        case "zero1" | "zero2":
            num_calls = 1 if strategy == "zero1" else accumulation
            return [
                traffic_row(
                    "reduce_scatter", gradient_bytes, num_calls, purpose="gradients, to the rank that updates them"
                ),
                traffic_row("all_gather", parameter_bytes, 1, purpose="updated parameters"),
            ]
        case "zero3" | "hsdp":
            traffic = [
                traffic_row("all_gather", parameter_bytes, accumulation, purpose="parameters, for the forward pass")
            ]
            if reshard_after_forward:
                traffic += [
                    traffic_row(
                        "all_gather", parameter_bytes, accumulation, purpose="parameters, for the backward pass"
                    )
                ]
            traffic += [
                traffic_row(
                    "reduce_scatter", gradient_bytes, accumulation, purpose="gradients, to the rank that keeps them"
                )
            ]
            if strategy == "hsdp":
                replica_bytes = sent_bytes("all_reduce", gradient_bytes / ranks, replicas)
                traffic += [
                    Traffic(
                        "all_reduce", replica_bytes, "this rank's gradients, between replicas", group_kind="replicas"
                    )
                ]
            return traffic
        case "parameter_server":
            return [
                Traffic("recv", parameter_bytes, "parameters, from the servers"),
                Traffic("send", gradient_bytes, "gradients, to the servers"),
            ]
