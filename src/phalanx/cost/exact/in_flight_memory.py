"""Activations of the micro-batches that are in flight on a pipeline rank, by the schedule's actions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from phalanx.cost.exact.activation_memory import ActivationBytes
from phalanx.schedule.schedule import ActionKind, Schedule


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
    schedule: Schedule, rank: int, saved: Sequence[ActivationBytes], inside: int
) -> PeakInFlightBytes:
    """Return the peak activations of a pipeline rank.

    Args:
        schedule: Schedule of the pipeline.
        rank: Pipeline rank.
        saved: Activations per stage and micro-batch, from forward to backward and between the halves of backward.
        inside: Bytes of communication inside blocks.
    """
    local = {stage: saved[stage] for stage in schedule.stages_of(rank)}
    temporary = {(stage, kind): size for stage in local for kind, size in _temporary(local[stage], inside).items()}
    growth = {(stage, kind): size for stage in local for kind, size in _growth(local[stage]).items()}
    live = 0
    offloaded = 0
    offloaded_peak = 0
    has_gradients = False
    peaks = [0, 0]
    for stage, kind, _ in schedule.actions(rank):
        has_gradients = has_gradients or kind == "W"
        peaks[has_gradients] = max(peaks[has_gradients], live + temporary[stage, kind])
        live += growth[stage, kind]
        if kind == "B":
            has_gradients = True
            end_bytes = max(local[stage].within_blocks(1.0) + inside, local[stage].embedding_gradient)
            peaks[True] = max(peaks[True], live + end_bytes)
        if kind != "W":
            offloaded += local[stage].offloaded * (1 if kind == "F" else -1)
            offloaded_peak = max(offloaded_peak, offloaded)
    return PeakInFlightBytes(peaks[0], peaks[1], offloaded=offloaded_peak)


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
