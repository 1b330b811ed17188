"""Rank the layouts of published sweeps by prediction, and compare the first choice with the best layout."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy.stats import spearmanr

from benchmarks.published import PublishedRun, format_verdict
from phalanx.cost.estimate.constants import memory_constants, time_constants
from phalanx.cost.estimate.job_table import job_table
from phalanx.cost.estimate.memory import estimate_memory, oom_probability
from phalanx.cost.estimate.step_time import step_seconds
from phalanx.plan.search.oom_risk import MAX_OOM_PROBABILITY
from phalanx.plan.tables.csv_rows import read_rows
from phalanx.plan.tables.job_columns import JobRow, stage_columns
from phalanx.plan.tables.predict import predict_jobs
from phalanx.plan.tables.row_to_job import job_from_row

Sweeps = NDArray[np.float64]
SWEPT = ("hage", "vtm", "tr11")
"""Sources that publish many layouts of one model on one machine."""
SAME = ("model", "layers", "hidden", "heads", "seq", "gpus", "global_batch", "precision", "facts")
"""Columns that are equal in all runs of a sweep."""
VARIED = ("tp", "pp", "micro_batch", "recompute", "seq_parallel", "zero")
LEAST = 4
"""Minimum number of different layouts that ran."""
MEAN_BEHIND, MOST_BEHIND, ALIKE = 0.01, 0.03, 0.9
"""Targets: mean and maximum slowdown of the first choice, and the rank correlation."""
PLACED = (20, 26)
"""Target: number of best published layouts among the first three predicted, and number of sweeps."""


def sweeps(runs: list[PublishedRun]) -> Iterator[str]:
    """Yield a row per source: failures and slowdown of the first choice, and the rank correlation."""
    rows_by_sweep: dict[tuple[str, ...], list[PublishedRun]] = defaultdict(list)
    for row in runs:
        if row.source in SWEPT:
            rows_by_sweep[row.source, *(row.row[column] for column in SAME)].append(row)
    yield (
        f"| source | sweeps | first choice failed | slowdown of the first choice, mean (target {MEAN_BEHIND:.0%}) "
        f"| worst (target {MOST_BEHIND:.0%}) | rank correlation (target {ALIKE}) |"
    )
    yield "|---|---|---|---|---|---|"
    for source in SWEPT:
        results = [_evaluate_sweep(rows) for key, rows in rows_by_sweep.items() if key[0] == source]
        evaluated = [result for result in results if result is not None]
        if evaluated:
            failed, slowdown, correlation = (np.array(part, dtype=float) for part in zip(*evaluated, strict=True))
            yield f"| {source} | {len(evaluated)} | {_format_cells(failed, slowdown[failed == 0], correlation)} |"


def _format_cells(failed: Sweeps, slowdown: Sweeps, correlation: Sweeps) -> str:
    """Format the cells of a source: failures and slowdown of the first choice, and the rank correlation.

    A failed choice misses the target of the maximum slowdown.
    """
    mean, worst = (slowdown.mean(), slowdown.max()) if len(slowdown) else (np.nan, np.nan)
    return " | ".join(
        [
            f"{int(failed.sum())}",
            f"{100 * mean:.1f} %, {format_verdict(mean <= MEAN_BEHIND)}" if len(slowdown) else "-, no",
            f"{100 * worst:.1f} %, {format_verdict(worst <= MOST_BEHIND and not failed.any())}"
            if len(slowdown)
            else "-, no",
            f"{correlation.mean():.2f}, {format_verdict(correlation.mean() >= ALIKE)}",
        ]
    )


def _evaluate_sweep(rows: list[PublishedRun]) -> tuple[bool, float, float] | None:
    ran = [row for row in rows if row.step_seconds]
    if len({_layout(row) for row in ran}) < LEAST:
        return None
    predicted = list(predict_jobs([row.job for row in rows]))
    fits = [p.p_oom < MAX_OOM_PROBABILITY for p in predicted]
    times = [p.step_time_s if fit else np.inf for p, fit in zip(predicted, fits, strict=True)]
    pick = rows[int(np.argmin(times))]
    best = min(row.step_seconds for row in ran if row.step_seconds)
    pairs = [(p.step_time_s, row.step_seconds) for p, row in zip(predicted, rows, strict=True) if row.step_seconds]
    slowdown = pick.step_seconds / best - 1 if pick.step_seconds else np.nan
    return pick.step_seconds is None, slowdown, float(spearmanr(*zip(*pairs, strict=True)).statistic)


def _layout(row: PublishedRun) -> tuple[str, ...]:
    return tuple(row.row[column] for column in VARIED)


def best_of_sweeps(path: Path) -> Iterator[str]:
    """Yield the predicted rank of nanotron's best layout for each model and number of GPUs."""
    ranks = []
    rows = [row for row in read_rows(path) if row["id"].startswith("hfup")]
    for row in rows:
        job = job_from_row(row)
        grid = list(_grid(job.choices[0], float(row["gpus"]), float(row["global_batch"])))
        table = job_table(grid)
        seconds = step_seconds(time_constants(), table).total
        risk = oom_probability(memory_constants(), table, estimate_memory(memory_constants(), table))
        seconds = np.where(risk < MAX_OOM_PROBABILITY, seconds, np.inf)
        order = [_key(grid[index]) for index in np.argsort(seconds)]
        best = _key(job.choices[0])
        ranks.append(order.index(best) + 1 if best in order else len(order))
    first_three = sum(rank <= 3 for rank in ranks)
    placed, published = PLACED
    verdict = format_verdict(first_three * published >= placed * len(rows))
    yield (
        f"The best published layout is among the first three predicted layouts for {first_three} of {len(rows)} sweeps "
        f"(target {placed} of {published}): {verdict}."
    )
    yield f"Its predicted ranks: {', '.join(map(str, sorted(ranks)))}."


def _key(choice: JobRow) -> tuple[float, ...]:
    return tuple(choice[column] for column in ("tp", "pp", "micro_batch", "zero_stage"))


def _grid(best: JobRow, ranks: float, batch: float) -> Iterator[JobRow]:
    """Yield the layouts that nanotron's sweep tried: tp, pp, micro-batch size, ZeRO-0 or ZeRO-1."""
    for tp, pp, micro_batch, zero in product((1, 2, 4, 8, 16, 32), (1, 2, 4, 8, 16), (1, 2, 4, 8, 16, 32, 64), (0, 1)):
        dp = ranks / tp / pp
        if dp < 1 or batch % (dp * micro_batch) or batch < dp * micro_batch or best["layers"] < pp:
            continue
        choice = {
            **best,
            "tp": tp,
            "pp": pp,
            "dp": dp,
            "micro_batch": micro_batch,
            "micro_batches": batch / dp / micro_batch,
            "zero_stage": zero,
            "shard_group_size": dp if zero else 1,
            "schedule": "1f1b" if pp > 1 else "none",
            "sequence_parallel": float(tp > 1),
        }
        yield choice | stage_columns(choice)
