"""Simulated and measured bubbles of every pipeline schedule.

    python -m benchmarks.pipeline       # prints the tables and writes docs/results/benchmarks/pipeline.md

Two ranks train a model. With more ranks than cores, each stage waits for a fixed time instead of computing, so that
only the schedule and its messages are measured. The bubble is the idle share of all ranks between the first start and
the last end in a step. The simulation uses the executed schedule, with the fixed times or the measured times of its
actions.
"""

from __future__ import annotations

import argparse
import platform
import statistics
from collections import defaultdict
from importlib.metadata import version
from pathlib import Path

from benchmarks.pages import write_results
from benchmarks.pipeline_ranks import layout_of, train, wait
from benchmarks.shapes import SHAPES
from phalanx.data.prepare import prepare
from phalanx.schedule.published import PUBLISHED
from phalanx.schedule.registry import layout_schedule
from phalanx.schedule.schedule import Action, Schedule
from phalanx.schedule.simulate import ActionTimes, Span, Timeline, simulate
from phalanx.spec.run import DataSpec
from phalanx.testing import rank_pool

PAGE = Path(__file__).parents[1] / "docs" / "results" / "benchmarks" / "pipeline.md"
UNIT_SECONDS = 0.03
"""Waiting time of a rank for the forward pass of a micro-batch, and for each half of its backward pass."""


def mean_action_times(schedule: Schedule, step: Timeline) -> ActionTimes:
    """Return the mean times of each stage's actions in a step; a full backward pass counts as its input half."""
    seconds_by_action: dict[tuple[int, str], list[float]] = defaultdict(list)
    for spans in step.spans:
        for action, start, end in spans:  # actions of overlapped pairs have the mean time of other such actions
            if isinstance(action, Action):
                seconds_by_action[action.stage, action.kind].append(float(end - start))
    mean = {key: statistics.mean(seconds) for key, seconds in seconds_by_action.items()}

    def of(kinds: str) -> list[float]:
        return [max((mean.get((stage, kind), 0.0) for kind in kinds), default=0.0) for stage in range(schedule.stages)]

    return ActionTimes(
        forward=of("F"), input_grad=of("I" if any(kind == "I" for _, kind in mean) else "B"), weight_grad=of("W")
    )


def row(name: str, p: int, m: int, steps: list[Timeline], simulated: float) -> tuple[str, float, float]:
    """Return the row of a schedule, its measured bubble and its median step time."""
    measured = statistics.median(float(step.bubble) for step in steps)
    seconds = statistics.median(float(step.makespan) for step in steps)
    difference = f"{100 * (measured - simulated):+.1f}"
    line = f"| {name} | {p} | {m} | {simulated:.1%} | {measured:.1%} | {difference} | {seconds:.3f} |"
    return line, measured, seconds


def by_step(by_rank: list[list[list[Span]]]) -> list[Timeline]:
    """Combine the spans of all ranks into one timeline per step."""
    return [Timeline(tuple(map(tuple, step))) for step in zip(*by_rank, strict=True)]


COLUMNS = (
    "schedule",
    "ranks",
    "micro-batches",
    "simulated bubble",
    "measured bubble",
    "difference, points",
    "seconds per step",
)
HEAD = f"| {' | '.join(COLUMNS)} |\n{'|---' * len(COLUMNS)}|"


def waiting_table(p: int, m: int, steps: int) -> str:
    """Return the table of ranks that wait instead of computing."""
    lines, seconds = [HEAD], {}
    for name in PUBLISHED:
        layout = layout_of(name, p)
        schedule = layout_schedule(layout, m)
        unit = UNIT_SECONDS / (schedule.stages // p)
        timelines = by_step(rank_pool(p).run(wait, layout, m, UNIT_SECONDS, steps, timeout=600))
        expected = simulate(schedule, ActionTimes(forward=unit, input_grad=unit, weight_grad=unit))
        line, _, seconds[name] = row(name, p, m, timelines, float(expected.bubble))
        lines.append(line)
        print(line, flush=True)
    faster = ", ".join(f"{name} {seconds['1f1b'] / seconds[name]:.2f}" for name in PUBLISHED if name.startswith("zb"))
    return "\n".join([*lines, "", f"Speed of a step relative to 1F1B: {faster}."])


def training_table(shape: str, steps: int) -> str:
    """Return the table of two ranks that train."""
    data, lines = prepare(DataSpec(tokenizer="bytes")).train, [HEAD]
    for name in PUBLISHED:
        layout = layout_of(name, 2)
        run = SHAPES[shape].run("ddp")
        m = SHAPES[shape].sequences
        run = run.model_copy(update={"layout": layout.model_copy(update={"micro_batch_size": 1})})
        timelines = by_step(rank_pool(2).run(train, run, data, steps, timeout=600))
        schedule = layout_schedule(layout, m)
        expected = statistics.median(
            float(simulate(schedule, mean_action_times(schedule, step)).bubble) for step in timelines
        )
        line, *_ = row(name, 2, m, timelines, expected)
        lines.append(line)
        print(line, flush=True)
    return "\n".join(lines)


def page(tables: list[tuple[str, str]], steps: int) -> str:
    """Return the page of the benchmark."""
    begin, end = __doc__.split("\n\n", 1)[0], __doc__.split("\n\n", 2)[2].strip()
    setup = f"torch {version('torch')}, {platform.machine()}, gloo; medians of {steps} steps."
    parts = [f"# {begin.rstrip('.')}", "    python -m benchmarks.pipeline", end, setup]
    return "\n\n".join([*parts, *(f"## {title}\n\n{table}" for title, table in tables)]) + "\n"


def main() -> None:
    """Measure, print the table and write the page."""
    parser = argparse.ArgumentParser("benchmarks.pipeline")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    args = parser.parse_args()
    tables = [
        (
            f"Two ranks that train the {args.shape} shape, simulated with the measured times of their actions",
            training_table(args.shape, args.steps),
        )
    ]
    for p in (4, 8):
        title = f"{p} ranks that wait {UNIT_SECONDS * 1e3:g} ms per forward pass, input half and weight half"
        tables.append((title, waiting_table(p, 2 * p, args.steps)))
    write_results(PAGE, page(tables, args.steps))


if __name__ == "__main__":
    main()
