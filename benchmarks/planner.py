"""Compare the planner with published runs by source, and write docs/results/accuracy.md.

    python -m benchmarks.planner              # a minute
    python -m benchmarks.planner --left-out   # also fits without each source

The errors of peers were computed once, over these rows and others of the same sources, without tuning: Calculon
caa4b11, llm-analysis 0.2.2 and SimuMax 1.2.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.calibration import LOOP, LOOP_HEADING
from benchmarks.fit_planner import fit_time
from benchmarks.gpu_memory import HEADING as GPU_MEMORY_HEADING
from benchmarks.gpu_memory import recorded_rows, section
from benchmarks.pages import write_results
from benchmarks.planner_choice import best_of_sweeps, sweeps
from benchmarks.published import ROWS, PublishedRun, format_verdict, read_published_runs, step_time_rows
from phalanx.cost.estimate.constants import time_constants
from phalanx.plan.search.search import search_layouts
from phalanx.plan.tables.csv_rows import read_rows
from phalanx.plan.tables.predict import Prediction, predict_jobs
from phalanx.spec.files.load import run_from_table
from phalanx.spec.resolved_run import ResolvedRun

FOUND = Path(__file__).with_name("found.md")
"""Errors of the plan that dry runs found."""
REPORT = Path(__file__).parents[1] / "docs" / "results" / "accuracy.md"
PEERS = {
    "hage flash": 10.0,
    "hage torch/fused": 20.1,
    "internevo": 13.5,
    "kort5": 4.5,
    "foundry A100": 18.6,
    "foundry H100": 16.7,
    "mtnlg": 29.4,
    "megascale own": 29.5,
    "megascale Megatron-LM": 5.0,
    "mlmh100": 145.0,
    "sc21t1": 7.4,
    "sc21t2 PTD-P": 10.3,
    "sc21t2 ZeRO-3": 40.1,
    "simumax": 5.7,
    "zb4 1F1B": 14.9,
    "zb4 1F1B-I": 16.7,
    "zb4 ZB-1p": 6.9,
    "zb4 ZB-2p": 6.1,
    "fmsfsdp": 127.7,
    "vtm": 11.2,
    "vtm tp16": 47.7,
    "tr11": 28.3,
}
"""Mean absolute percentage error of the best of Calculon, llm-analysis and SimuMax."""
LIMIT = 15.0
"""Maximum error of a source, in percent."""
MEMORY_LIMIT = 5.0
LAYOUTS_A_SECOND, SEARCH_SECONDS, HELP_SECONDS = 20_000, 5.0, 0.3
"""Speed targets; SEARCH_SECONDS is for the search of the 405B model."""


@dataclass(frozen=True)
class PredictedRow:
    """Published row, its prediction, and the step time at a constant utilization."""

    known: PublishedRun
    predicted: Prediction
    naive: float

    @property
    def truth(self) -> float:
        return self.known.step_seconds or np.nan


def rows_with_baseline(runs: list[PublishedRun]) -> list[PredictedRow]:
    """Predict rows with a step time, and compute a naive baseline.

    The baseline is the hardware FLOPs at one utilization for each hardware generation. This utilization is chosen in
    hindsight: the median over the medians of these sources.
    """
    predictions = list(predict_jobs([row.job for row in runs]))
    choices = [row.job.choices[0] for row in runs]
    work = np.array([row.job.flops_per_step * (4 / 3 if row.row["recompute"] == "full" else 1) for row in runs])
    speed = np.array([row.job.peak_flops for row in runs])
    seconds = np.array([row.step_seconds for row in runs])
    eras, groups = (
        np.array([choice["hardware_generation"] for choice in choices]),
        np.array([row.group for row in runs]),
    )
    utilization_by_era = {era: _median_utilization(work / speed / seconds, groups, eras == era) for era in set(eras)}
    naive = work / speed / np.array([utilization_by_era[era] for era in eras])
    return [PredictedRow(row, p, float(n)) for row, p, n in zip(runs, predictions, naive, strict=True)]


def _median_utilization(
    utilization: NDArray[np.float64], groups: NDArray[np.str_], selected: NDArray[np.bool_]
) -> float:
    return float(np.median([np.median(utilization[selected & (groups == group)]) for group in set(groups[selected])]))


def errors(rows: list[PredictedRow], value: Callable[[PredictedRow], float]) -> NDArray[np.float64]:
    return np.array([abs(value(row) / row.truth - 1) for row in rows]) * 100


def _predicted_seconds(row: PredictedRow) -> float:
    return row.predicted.step_time_s


def step_time_table(all_rows: list[PredictedRow], left_out: dict[str, float]) -> Iterator[str]:
    """Yield the table of errors and targets by source."""
    yield "| source | rows | error % | median | worst | left out | constant utilization | best peer | target | met |"
    yield "|---|---|---|---|---|---|---|---|---|---|"
    groups = sorted({row.known.group for row in all_rows})
    for group in groups:
        rows = [row for row in all_rows if row.known.group == group]
        plan_errors, naive_errors = errors(rows, _predicted_seconds), errors(rows, lambda r: r.naive)
        signed = np.median([r.predicted.step_time_s / r.truth - 1 for r in rows]) * 100
        peer, target = PEERS.get(group), min(PEERS.get(group, 99) / 2, LIMIT)
        left_out_cell = f"{left_out[group]:.1f}" if group in left_out else "-"
        yield (
            f"| {group} | {len(rows)} | {plan_errors.mean():.1f} | {signed:+.1f} | {plan_errors.max():.0f} "
            f"| {left_out_cell} | {naive_errors.mean():.1f} | {peer or '-'} | {target:.1f} "
            f"| {format_verdict(plan_errors.mean() <= target and plan_errors.mean() < naive_errors.mean())} |"
        )
    all_errors = errors(all_rows, _predicted_seconds)
    by_source = np.mean(
        [errors([r for r in all_rows if r.known.group == group], _predicted_seconds).mean() for group in groups]
    )
    verdict = format_verdict(all_errors.mean() <= 8)
    yield f"\nThe mean error over {len(all_rows)} rows is {all_errors.mean():.1f} % (target 8): {verdict}."
    yield f"The mean over sources is {by_source:.1f} %."
    if left_out:
        mean_left_out = np.mean(list(left_out.values()))
        yield f"With each source left out of the fit, the mean over sources is {mean_left_out:.1f} %."


def leave_one_out(runs: list[PublishedRun]) -> dict[str, float]:
    """Return the error of each group, predicted with constants that were fitted without its source."""
    errors_by_group: dict[str, float] = {}
    for source in sorted({row.source for row in runs}):
        constants = fit_time([row for row in runs if row.source != source], time_constants(), evaluations=25)
        source_runs = [row for row in runs if row.source == source]
        predicted = np.array([p.step_time_s for p in predict_jobs([row.job for row in source_runs], constants)])
        error = np.abs(predicted / np.array([row.step_seconds for row in source_runs]) - 1) * 100
        for group in {row.group for row in source_runs}:
            errors_by_group[group] = float(error[[row.group == group for row in source_runs]].mean())
        print(f"left out {source}", file=sys.stderr)
    return errors_by_group


def interval_lines(rows: list[PredictedRow]) -> Iterator[str]:
    """Yield the share of rows within their 80 % interval."""
    within = [r.predicted.step_time_low_s <= r.truth <= r.predicted.step_time_high_s for r in rows]
    verdict = format_verdict(0.75 <= np.mean(within) <= 0.85)
    yield f"{np.mean(within):.1%} of {len(rows)} rows are within their 80 % interval (target 75 to 85): {verdict}."
    yield "The interval widths were fitted to these rows."


def memory_lines(runs: list[PublishedRun]) -> Iterator[str]:
    """Yield the errors of published memory, and the out-of-memory labels with their predicted probabilities."""
    comparable = [row for row in runs if row.has_rank_memory]
    predicted = list(predict_jobs([row.job for row in comparable]))
    yield f"| source | rows | error % (target {MEMORY_LIMIT:.0f}) | median | met |"
    yield "|---|---|---|---|---|"
    for group in sorted({row.group for row in comparable if row.memory_gib}):
        pairs = [
            (p, r.memory_gib) for r, p in zip(comparable, predicted, strict=True) if r.group == group and r.memory_gib
        ]
        ratio = np.array([p.memory_gib / truth for p, truth in pairs])
        error, signed = 100 * np.abs(ratio - 1).mean(), 100 * np.median(ratio - 1)
        yield f"| {group} | {len(ratio)} | {error:.1f} | {signed:+.1f} | {format_verdict(error <= MEMORY_LIMIT)} |"
    labels = [(p.p_oom, r.out_of_memory) for r, p in zip(comparable, predicted, strict=True) if r.source == "hage"]
    risk, failed = np.array([p for p, _ in labels]), np.array([out for _, out in labels])
    right = ((risk > 0.5) == failed).mean()
    verdict = format_verdict(right >= 0.97)
    yield f"\nThe prediction of out of memory is right for {right:.1%} of {len(labels)} labels (target 97): {verdict}."
    missed, rejected = (failed & (risk <= 0.5)).sum(), (~failed & (risk > 0.5)).sum()
    yield f"{missed} runs that failed were predicted to fit, and {rejected} runs that fitted were predicted to fail."
    yield "\n| predicted P(OOM) | rows | failed |\n|---|---|---|"
    edges = [0, 0.02, 0.1, 0.3, 0.5, 0.7, 0.9, 0.98, 1.0001]
    for low, high in pairwise(edges):
        in_bin = (risk >= low) & (risk < high)
        if in_bin.any():
            yield f"| {low:.0%} to {min(high, 1):.0%} | {in_bin.sum()} | {failed[in_bin].mean():.0%} |"


def speed_lines() -> Iterator[str]:
    """Yield the speed of searches, which count their ten best layouts exactly, and of the command's help."""
    for model, sequences, nodes, limit in (
        ("llama3-70b", 1024, 128, None),
        ("llama3-405b", 2048, 2048, SEARCH_SECONDS),
    ):
        run = run_from_table(
            {
                "model": {"preset": model},
                "training": {"seq_len": 8192, "tokens_per_step": 8192 * sequences},
                "cluster": {"preset": "h100", "nodes": nodes, "nproc_per_node": 8},
            }
        )
        durations = []
        for _ in range(3):
            start = time.perf_counter()
            plan = search_layouts(ResolvedRun(run, nodes * 8), keep=10)
            durations.append(time.perf_counter() - start)
        yield f"{model} on {nodes * 8:,} H100: {search_speed(plan.searched, float(np.median(durations)), limit)}."
    durations = []
    for _ in range(5):
        start = time.perf_counter()
        subprocess.run([Path(sys.executable).with_name("phalanx"), "plan", "--help"], check=True, capture_output=True)
        durations.append(time.perf_counter() - start)
    seconds = float(np.median(durations))
    yield f"`phalanx plan --help`: {seconds:.2f} s (target {HELP_SECONDS}): {format_verdict(seconds <= HELP_SECONDS)}."


def search_speed(layouts: int, seconds: float, limit: float | None) -> str:
    """Describe a search: its seconds, compared with the limit if there is one, and its layouts per second."""
    text = f"{layouts:,} layouts in {seconds:.2f} s"
    if limit:
        text += f" (target {limit:.0f}): {format_verdict(seconds <= limit)}"
    rate = layouts / seconds
    return f"{text}, {rate:,.0f} per second (target {LAYOUTS_A_SECOND:,}): {format_verdict(rate >= LAYOUTS_A_SECOND)}"


def source_table(path: Path) -> Iterator[str]:
    """Yield the publication of each source, as its first row names it."""
    yield "| source | rows | publication of the first row |"
    yield "|---|---:|---|"
    rows_by_source: dict[str, list[str]] = {}
    for row in read_rows(path):
        rows_by_source.setdefault(row["id"].rsplit("-", 1)[0], []).append(row["source"])
    for source, publications in sorted(rows_by_source.items()):
        yield f"| {source} | {len(publications)} | {publications[0]} |"


def recorded_sections() -> dict[str, list[str]]:
    """Return the sections that other commands and people wrote."""
    return {
        "Errors found by dry runs": FOUND.read_text().splitlines(),
        LOOP_HEADING: LOOP.read_text().splitlines(),
        GPU_MEMORY_HEADING: section(recorded_rows()).splitlines(),
    }


def head(path: Path, leave_out: bool) -> list[str]:
    """Return the title of the report and the command that wrote it."""
    arguments = ("" if path == ROWS else f" {path}") + (" --left-out" if leave_out else "")
    return [
        "# Accuracy of the planner",
        "",
        f"Written by `python -m benchmarks.planner{arguments}`. Rows are published runs in 16-bit precision, of",
        "`benchmarks/published_runs.csv`. Errors are absolute percentages of the published step time. The target is",
        f"half of the best peer's error, and at most {LIMIT:g} %.",
        "",
        "- Left out: the error with constants that were fitted without the source.",
        "- Constant utilization: the error of a baseline with one utilization for each hardware generation.",
        "- Best peer: the lowest error of Calculon, llm-analysis and SimuMax.",
        "",
    ]


def main(path: Path, leave_out: bool) -> None:
    """Print the report and write it."""
    runs = read_published_runs(path)
    timed = [row for row in step_time_rows(runs) if not row.low_precision]
    rows = rows_with_baseline(timed)
    sections: dict[str, Iterable[str]] = {
        "Step time": step_time_table(rows, leave_one_out(timed) if leave_out else {}),
        "Intervals": interval_lines(rows),
        "Choice of layout": sweeps(runs),
        "Best of a sweep": best_of_sweeps(path),
        "Memory": memory_lines(runs),
        "Speed": speed_lines(),
        "Sources": source_table(path),
    }
    lines = head(path, leave_out)
    sections |= recorded_sections()
    for title, body in sections.items():
        lines += [f"## {title}", "", *body, ""]
    text = "\n".join(lines)
    print(text)
    write_results(REPORT, text)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("rows", type=Path, nargs="?", default=ROWS, help="table of runs like published_runs.csv")
    parser.add_argument("--left-out", action="store_true", help="fit also without each source")
    args = parser.parse_args()
    main(args.rows, args.left_out)
