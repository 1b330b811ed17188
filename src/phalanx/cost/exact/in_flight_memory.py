"""Activations of the micro-batches that are in flight on a pipeline rank, by the schedule's actions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from phalanx.cost.exact.activation_bytes import ActivationBytes
from phalanx.cost.exact.block_moments import NO_GRADIENTS, WeightGradients, largest_moment
from phalanx.schedule.schedule import ActionKind, Schedule
from phalanx.spec.layout import MAX_BF16_SUMS


@dataclass(frozen=True)
class PeakInFlightBytes:
    """Peak bytes of activations on a pipeline rank."""

    by_gradients: Mapping[float, int]
    """Peak while a fraction of the bytes exists that the sums of gradients have at the end of the step."""
    offloaded: int
    """Peak in CPU memory."""

    @property
    def activations(self) -> int:
        """Peak at any time."""
        return max(self.by_gradients.values())


@dataclass(frozen=True, kw_only=True)
class GradientSums:
    """Sums of gradients over the micro-batches of a pipeline, by stage."""

    shares: Mapping[int, float]
    """Fraction of a rank's gradients that belongs to each of its stages."""
    narrow: float = 1.0
    """Bytes of the sums of at most `MAX_BF16_SUMS` micro-batches, relative to those of all: 1 if they do not grow."""
    weight_gradients: WeightGradients
    """Bytes of the gradient of a weight until it is in a sum."""

    def fraction(self, num_added: Mapping[int, int]) -> float:
        """Return the fraction of the final bytes, when a number of micro-batches is in the sums of each stage."""
        return sum(
            share * (self.narrow if num_added[stage] <= MAX_BF16_SUMS else 1.0)
            for stage, share in self.shares.items()
            if num_added[stage]
        )


def peak_in_flight_bytes(
    schedule: Schedule, rank: int, saved: Sequence[ActivationBytes], cuda_exchange: int, sums: GradientSums
) -> PeakInFlightBytes:
    """Return the peak activations of a pipeline rank.

    Args:
        schedule: Schedule of the pipeline.
        rank: Pipeline rank.
        saved: Activations per stage and micro-batch, from forward to backward and between the halves of backward.
        cuda_exchange: Bytes of communication inside blocks on CUDA; on a CPU the activations contain it.
        sums: Sums of gradients of the rank.
    """
    local = {stage: saved[stage] for stage in schedule.stages_of(rank)}
    temporary = {
        (stage, kind): size
        for stage in local
        for kind, size in _temporary(local[stage], cuda_exchange, sums.weight_gradients).items()
    }
    growth = {(stage, kind): size for stage in local for kind, size in _growth(local[stage]).items()}
    in_last_block = {
        stage: max(
            activations.within_blocks(1.0, sums.weight_gradients) + cuda_exchange, activations.embedding_gradient
        )
        for stage, activations in local.items()
    }
    live = 0
    offloaded = 0
    offloaded_peak = 0
    num_added = Counter[int]()
    num_head_gradients = Counter[int]()
    fraction = 0.0
    peaks = {0.0: 0}

    def update_peak(size: int) -> None:
        peaks[fraction] = max(peaks.get(fraction, 0), live + size)

    for stage, kind, _ in schedule.actions(rank):
        update_peak(temporary[stage, kind])
        if kind in "BI" and num_head_gradients[stage] == MAX_BF16_SUMS and sums.narrow < 1:
            update_peak(local[stage].widened_head)
        if kind == "W" and num_added[stage] == MAX_BF16_SUMS and sums.narrow < 1:
            update_peak(local[stage].widened_gradient)
        num_head_gradients[stage] += kind in "BI"
        live += growth[stage, kind]
        if kind in "BW":
            num_added[stage] += 1
            fraction = sums.fraction(num_added)
            update_peak(in_last_block[stage] if kind == "B" else 0)
        if kind != "W":
            offloaded += local[stage].offloaded * (1 if kind == "F" else -1)
            offloaded_peak = max(offloaded_peak, offloaded)
    return PeakInFlightBytes(peaks, offloaded=offloaded_peak)


def _temporary(activations: ActivationBytes, cuda_exchange: int, gradients: WeightGradients) -> dict[ActionKind, int]:
    """Return the peak bytes of each pass of a stage, beyond those that are alive before it."""
    whole_backward = max(activations.at_backward_start, activations.within_blocks(0.0, gradients) + cuda_exchange)
    input_gradients = max(
        activations.at_backward_start,
        activations.inside_blocks + largest_moment(activations.moments.mlp, NO_GRADIENTS),
        activations.deferred_weight_grads
        + max(activations.residual_gradient + activations.exchanged + cuda_exchange, activations.embedding_gradient),
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
