"""The arithmetic of the comparison with other trainers, without running the trainers."""

from __future__ import annotations

import pytest

from benchmarks.overhead import OURS, PLAIN, Comparison, Round, loss_difference, overhead_table, ratio, speed
from benchmarks.peers.launch import Block
from benchmarks.shapes import RANKS, SHAPES
from phalanx.cost.exact.parameters import count_parameters
from phalanx.spec.resolved_run import ResolvedRun


def make_round(fast: float, slow: float, loss: float = 1.0) -> Round:
    """Return a round of two ranks that wait for each other: equal step times, different amounts of work."""
    return [Block([slow] * 3, [fast] * 3, [loss] * 3, 10), Block([slow] * 3, [slow] * 3, [loss] * 3, 20)]


def test_overhead_benchmark_speed_equals_that_of_slowest_rank() -> None:
    result = speed([make_round(1, 2), make_round(1, 4), make_round(1, 8)], tokens=800)
    assert (result.wall, result.cpu_bound) == (200, 200)


def test_overhead_benchmark_ratio_pairs_adjacent_rounds() -> None:
    """The ratio stays constant when the machine slows down for both trainers."""
    our_rounds, their_rounds = [make_round(1, 2), make_round(1, 20)], [make_round(1, 4), make_round(1, 40)]
    assert ratio(our_rounds, their_rounds).wall == 2


def test_overhead_benchmark_reports_relative_loss_difference() -> None:
    assert loss_difference([make_round(1, 1, 2.0)], [make_round(1, 1, 2.5)]) == pytest.approx(0.2)


def test_overhead_table_contains_speed_memory_and_loss_ratios() -> None:
    rounds = {OURS: [make_round(1, 4)], PLAIN: [make_round(1, 2)]}
    assert "| tiny | ddp | 2,048 | 4,096 | 0.500 | 0.500 | 1.000 | 0e+00 |" in overhead_table(
        [Comparison("tiny", "ddp", rounds, rounds)]
    )


@pytest.mark.parametrize(("name", "size"), [("tiny", 6.16e6), ("small", 33.6e6)])
def test_overhead_benchmark_shapes_match_published_parameter_counts(name: str, size: float) -> None:
    shape = SHAPES[name]
    assert count_parameters(shape.model).total == pytest.approx(size, rel=0.002)
    for layout in ("ddp", "fsdp"):
        batch_plan = ResolvedRun(shape.run(layout), RANKS).batch
        assert (batch_plan.micro_batch_size, batch_plan.gradient_accumulation_steps) == (
            shape.micro_batch,
            shape.accumulation,
        )
