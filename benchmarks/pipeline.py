"""Bubbles as they are simulated and as they are measured, of every pipeline schedule.

    python -m benchmarks.pipeline       # prints the tables and writes docs/results/benchmarks/pipeline.md

Two ranks train a model; with more ranks than cores each stage's computation is a wait of stated length, so that nothing
but the schedule and its messages is left. The bubble is the idle share of all ranks between the first start and the
last end of a step. What is simulated is the very schedule that runs: with the stated times, or those of its actions.
"""

from __future__ import annotations

import argparse
import platform
import statistics
from collections import defaultdict
from importlib.metadata import version
from pathlib import Path

from benchmarks.pipeline_ranks import layout_of, train, wait
from benchmarks.shapes import SHAPES
from phalanx.data.prepare import prepare
from phalanx.schedule.registry import PUBLISHED, layout_schedule
from phalanx.schedule.schedule import Action, Schedule
from phalanx.schedule.simulate import ActionTimes, Span, Timeline, simulate
from phalanx.spec.run import DataSpec
from phalanx.testing import rank_pool

PAGE = Path(__file__).parents[1] / "docs" / "results" / "benchmarks" / "pipeline.md"
UNIT_SECONDS = 0.03
"""What a rank waits for the forward pass of a micro-batch, and for each half of its backward pass."""


def times_of(schedule: Schedule, step: Timeline) -> ActionTimes:
    """What each stage's actions took in a step, on average; a whole backward pass counts as its input half."""
    taken: dict[tuple[int, str], list[float]] = defaultdict(list)
    for spans in step.spans:
        for action, begun, ended in spans:  # of an overlapped pair each counts by what such actions take elsewhere
            if isinstance(action, Action):
                taken[action.stage, action.kind].append(float(ended - begun))
    mean = {key: statistics.mean(seconds) for key, seconds in taken.items()}

    def of(kinds: str) -> list[float]:
        return [max((mean.get((stage, kind), 0.0) for kind in kinds), default=0.0) for stage in range(schedule.stages)]

    return ActionTimes(of("F"), of("I" if any(kind == "I" for _, kind in mean) else "B"), of("W"))


def row(name: str, p: int, m: int, steps: list[Timeline], simulated: float) -> tuple[str, float, float]:
    """A line of a table, the measured bubble, and the median step."""
    measured = statistics.median(float(step.bubble) for step in steps)
    seconds = statistics.median(float(step.makespan) for step in steps)
    apart = f"{100 * (measured - simulated):+.1f}"
    line = f"| {name} | {p} | {m} | {simulated:.1%} | {measured:.1%} | {apart} | {seconds:.3f} |"
    return line, measured, seconds


def by_step(by_rank: list[list[list[Span]]]) -> list[Timeline]:
    """What all ranks did, step by step."""
    return [Timeline(tuple(map(tuple, step))) for step in zip(*by_rank, strict=True)]


COLUMNS = ("schedule", "ranks", "micro-batches", "bubble simulated", "measured", "points apart", "seconds per step")
HEAD = f"| {' | '.join(COLUMNS)} |\n{'|---' * len(COLUMNS)}|"


def waited(p: int, m: int, steps: int) -> str:
    """The table of ranks that wait."""
    lines, seconds = [HEAD], {}
    for name in PUBLISHED:
        layout = layout_of(name, p)
        schedule = layout_schedule(layout, m)
        unit = UNIT_SECONDS / (schedule.stages // p)
        ran = by_step(rank_pool(p).run(wait, layout, m, UNIT_SECONDS, steps, timeout=600))
        expected = simulate(schedule, ActionTimes(unit, unit, unit))
        line, _, seconds[name] = row(name, p, m, ran, float(expected.bubble))
        lines.append(line)
        print(line, flush=True)
    faster = ", ".join(f"{name} {seconds['1f1b'] / seconds[name]:.2f}" for name in PUBLISHED if name.startswith("zb"))
    return "\n".join([*lines, "", f"Speed of a step beside 1F1B's: {faster}."])


def trained(shape: str, steps: int) -> str:
    """The table of two ranks that learn."""
    data, lines = prepare(DataSpec(tokenizer="bytes")).train, [HEAD]
    for name in PUBLISHED:
        layout = layout_of(name, 2)
        run = SHAPES[shape].run("ddp")
        m = SHAPES[shape].sequences
        run = run.model_copy(update={"layout": layout.model_copy(update={"micro_batch_size": 1})})
        ran = by_step(rank_pool(2).run(train, run, data, steps, timeout=600))
        schedule = layout_schedule(layout, m)
        expected = statistics.median(float(simulate(schedule, times_of(schedule, step)).bubble) for step in ran)
        line, *_ = row(name, 2, m, ran, expected)
        lines.append(line)
        print(line, flush=True)
    return "\n".join(lines)


def page(tables: list[tuple[str, str]], steps: int) -> str:
    """What is written to docs/."""
    begin, end = __doc__.split("\n\n", 1)[0], __doc__.split("\n\n", 2)[2].strip()
    where = f"torch {version('torch')}, {platform.machine()}, gloo; medians of {steps} steps."
    parts = [f"# {begin}", "    python -m benchmarks.pipeline", end, where]
    return "\n\n".join([*parts, *(f"## {title}\n\n{table}" for title, table in tables)]) + "\n"


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser("benchmarks.pipeline")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    asked = parser.parse_args()
    tables = [
        (
            f"Two ranks that train the {asked.shape} shape, times of each stage's own actions",
            trained(asked.shape, asked.steps),
        )
    ]
    for p in (4, 8):
        title = f"{p} ranks that wait {UNIT_SECONDS * 1e3:g} ms for each of forward pass, input and weight half"
        tables.append((title, waited(p, 2 * p, asked.steps)))
    PAGE.parent.mkdir(parents=True, exist_ok=True)
    PAGE.write_text(page(tables, asked.steps))


if __name__ == "__main__":
    main()
