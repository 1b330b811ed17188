"""Activations of the micro-batches that are in flight on a pipeline rank, by the schedule's actions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

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
    passes = {
        (stage, kind): each
        for stage, activations in local.items()
        for kind, each in _passes(activations, cuda_exchange, sums.weight_gradients).items()
    }
    widens = sums.narrow < 1
    live = offloaded = offloaded_peak = 0
    num_added = dict.fromkeys(local, 0)
    num_head_gradients = dict.fromkeys(local, 0)
    fraction = 0.0
    peak = 0
    peaks = {fraction: peak}
    for stage, kind, _ in schedule.actions(rank):  # a search counts hundreds of thousands of them
        temporary, growth, at_end, offloaded_growth = passes[stage, kind]
        if widens and kind in "BI":
            if num_head_gradients[stage] == MAX_BF16_SUMS:
                temporary = max(temporary, local[stage].widened_head)
            num_head_gradients[stage] += 1
        if widens and kind == "W" and num_added[stage] == MAX_BF16_SUMS:
            temporary = max(temporary, local[stage].widened_gradient)
        if live + temporary > peak:
            peak = live + temporary
        live += growth
        if kind in "BW":
            num_added[stage] += 1
            if num_added[stage] in (1, MAX_BF16_SUMS + 1):  # a sum begins, or widens
                peaks[fraction] = peak
                fraction = sums.fraction(num_added)
                peak = peaks.get(fraction, 0)
            if live + at_end > peak:
                peak = live + at_end
        if offloaded_growth:
            offloaded += offloaded_growth
            offloaded_peak = max(offloaded_peak, offloaded)
    peaks[fraction] = peak
    return PeakInFlightBytes(peaks, offloaded=offloaded_peak)


class _Pass(NamedTuple):
    """Bytes of one pass of a stage."""

    temporary: int
    """Peak beyond what is alive before it."""
    growth: int
    """Bytes that it leaves, minus those that it frees."""
    at_end: int
    """Bytes in its last block, beyond what it leaves."""
    offloaded_growth: int
    """Bytes that it leaves in CPU memory, minus those that it frees."""


def _passes(activations: ActivationBytes, cuda_exchange: int, gradients: WeightGradients) -> dict[ActionKind, _Pass]:
    """Return the bytes of each pass of a stage."""
    whole_backward = max(activations.at_backward_start, activations.within_blocks(0.0, gradients) + cuda_exchange)
    input_gradients = max(
        activations.at_backward_start,
        activations.inside_blocks + largest_moment(activations.mlp_moments, NO_GRADIENTS),
        activations.deferred_weight_grads
        + max(activations.residual_gradient + activations.exchanged + cuda_exchange, activations.embedding_gradient),
    )
    in_last_block = max(activations.within_blocks(1.0, gradients) + cuda_exchange, activations.embedding_gradient)
    deferred = activations.deferred_weight_grads
    total = activations.total
    offloaded = activations.offloaded
    return {
        "F": _Pass(total, growth=total, at_end=0, offloaded_growth=offloaded),
        "B": _Pass(whole_backward - total, growth=-total, at_end=in_last_block, offloaded_growth=-offloaded),
        "I": _Pass(input_gradients - total, growth=deferred - total, at_end=0, offloaded_growth=-offloaded),
        "W": _Pass(activations.weight_gradient, growth=-deferred, at_end=0, offloaded_growth=0),
    }
