"""Peaks of activations in flight, compared with a replay of the schedule pass by pass."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from phalanx.cost.exact.activation_memory import ActivationBytes
from phalanx.cost.exact.in_flight_memory import PeakInFlightBytes, _growth, _temporary, peak_in_flight_bytes
from phalanx.schedule.registry import PUBLISHED, build_schedule
from phalanx.schedule.schedule import Schedule


def replay(schedule: Schedule, rank: int, saved: Sequence[ActivationBytes], inside: Sequence[int]) -> PeakInFlightBytes:
    live = offloaded = offloaded_peak = 0
    has_gradients = False
    peaks = [0, 0]
    for stage, kind, _ in schedule.actions(rank):
        activations = saved[stage]
        has_gradients = has_gradients or kind == "W"
        peaks[has_gradients] = max(peaks[has_gradients], live + _temporary(activations, inside[stage])[kind])
        live += _growth(activations)[kind]
        if kind == "B":
            has_gradients = True
            end = max(activations.within_blocks(1.0) + inside[stage], activations.embedding_gradient)
            peaks[True] = max(peaks[True], live + end)
        offloaded += {"F": 1, "B": -1, "I": -1, "W": 0}[kind] * activations.offloaded
        offloaded_peak = max(offloaded_peak, offloaded)
    return PeakInFlightBytes(peaks[0], peaks[1], offloaded=offloaded_peak)


@pytest.mark.parametrize("name", PUBLISHED)
def test_peak_in_flight_bytes_equal_a_replay_of_the_schedule(name: str) -> None:
    generator = random.Random(name)
    fields = [field for field in ActivationBytes.__dataclass_fields__ if field != "prefetch_end"]
    for _ in range(20):
        ranks = generator.choice([2, 3, 4])
        schedule = build_schedule(name, ranks, 2 * ranks)
        saved = [
            ActivationBytes(**{field: generator.choice([0, generator.randrange(1000)]) for field in fields})
            for _ in range(schedule.stages)
        ]
        inside = [generator.randrange(500) for _ in saved]
        for rank in range(ranks):
            found = peak_in_flight_bytes(schedule, rank, saved, inside)
            assert found == replay(schedule, rank, saved, inside), (ranks, rank)
