"""Activations of the micro-batches that are in flight on a pipeline rank, by the schedule's actions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import add

from phalanx.cost.exact.activation_memory import ActivationBytes
from phalanx.schedule.schedule import ActionKind, Schedule, StagePass


@dataclass(frozen=True)
class PeakInFlightBytes:
    """Peak bytes of activations on a pipeline rank."""

    forward_only: int
    """Peak before the rank has gradients of its parameters."""
    with_gradients: int
    """Peak from then on."""
    offloaded: int
    """Peak in CPU memory."""


def peak_in_flight_bytes(
    schedule: Schedule, rank: int, saved: Sequence[ActivationBytes], inside: Sequence[int]
) -> PeakInFlightBytes:
    """Return the peak activations of a pipeline rank.

    Args:
        schedule: Schedule of the pipeline.
        rank: Pipeline rank.
        saved: Activations per stage and micro-batch, from forward to backward and between the halves of backward.
        inside: Bytes of communication inside blocks, by stage.
    """
    local = {stage: saved[stage] for stage in schedule.stages_of(rank)}
    temporary = {
        (stage, kind): size for stage in local for kind, size in _temporary(local[stage], inside[stage]).items()
    }
    growth = {(stage, kind): size for stage in local for kind, size in _growth(local[stage]).items()}
    at_end = dict.fromkeys(growth, 0)
    for stage, activations in local.items():
        at_end[stage, "B"] = max(activations.within_blocks(1.0) + inside[stage], activations.embedding_gradient)
    # Iterators of the standard library, because a search counts hundreds of schedules of thousands of passes.
    passes = schedule.stage_passes(rank)
    live = list(accumulate(map(growth.__getitem__, passes), initial=0))
    during = list(map(add, live, map(temporary.__getitem__, passes)))
    after = list(map(add, live[1:], map(at_end.__getitem__, passes)))
    # Gradients are there from the first weight gradients on, or from the end of the first whole backward pass.
    first = next((index for index, (_, kind) in enumerate(passes) if kind in "BW"), len(passes))
    start = first + (first < len(passes) and passes[first][1] == "B")
    return PeakInFlightBytes(
        max(during[:start], default=0),
        max(during[start:] + after[first:], default=0),
        offloaded=_offloaded_peak(passes, local),
    )


def _offloaded_peak(passes: Sequence[StagePass], local: Mapping[int, ActivationBytes]) -> int:
    """Return the peak bytes of activations in CPU memory."""
    if not any(activations.offloaded for activations in local.values()):
        return 0
    signs = {"F": 1, "B": -1, "I": -1, "W": 0}
    return max(accumulate((signs[kind] * local[stage].offloaded for stage, kind in passes), initial=0))


def _temporary(activations: ActivationBytes, inside: int) -> dict[ActionKind, int]:
    """Return the peak bytes of each pass of a stage, beyond those that are alive before it."""
    whole_backward = max(activations.at_backward_start, activations.within_blocks() + inside)
    input_gradients = max(
        activations.at_backward_start,
        activations.inside_blocks + activations.mlp_gradients,
        activations.deferred_weight_grads + max(activations.residual_gradient + inside, activations.embedding_gradient),
    )
    return {
        "F": activations.total,
        "B": whole_backward - activations.total,
        "I": input_gradients - activations.total,
        "W": activations.weight_gradient,
    }


def _growth(activations: ActivationBytes) -> dict[ActionKind, int]:
    """Return the bytes that each pass of a stage leaves, minus those that it frees."""
    return {
        "F": activations.total,
        "B": -activations.total,
        "I": activations.deferred_weight_grads - activations.total,
        "W": -activations.deferred_weight_grads,
    }
