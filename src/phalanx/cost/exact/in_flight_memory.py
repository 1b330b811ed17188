"""Activations of the micro-batches that are in flight on a pipeline rank, by the schedule's actions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from phalanx.cost.exact.activation_memory import ActivationBytes
from phalanx.schedule.schedule import Schedule


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
    stage_activations = {stage: saved[stage] for stage in schedule.stages_of(rank)}
    sizes = {
        stage: (
            activations.total,
            max(activations.at_backward_start, activations.within_blocks() + inside[stage]),
            activations.deferred_weight_grads,
            activations.within_blocks(1.0) + inside[stage],
        )
        for stage, activations in stage_activations.items()
    }
    live = 0
    offloaded = 0
    offloaded_peak = 0
    has_gradients = False
    peaks = [0, 0]
    for stage, kind, _ in schedule.actions(rank):
        total, peak, deferred, end_peak = sizes[stage]
        current = live + (total if kind == "F" else 0 if kind == "W" else peak - total)
        if kind == "W":
            has_gradients = True
        if current > peaks[has_gradients]:
            peaks[has_gradients] = current
        if kind != "W":
            offloaded += stage_activations[stage].offloaded * (1 if kind == "F" else -1)
            offloaded_peak = max(offloaded_peak, offloaded)
        if kind == "F":
            live += total
        elif kind == "I":
            live += deferred - total
        elif kind == "W":
            live -= deferred
        else:
            live, has_gradients = live - total, True
            if live + end_peak > peaks[True]:
                peaks[True] = live + end_peak
    return PeakInFlightBytes(peaks[0], peaks[1], offloaded=offloaded_peak)
