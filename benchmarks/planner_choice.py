"""Rank the layouts of published sweeps by prediction, and compare the first choice with the best layout."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy.stats import spearmanr

from benchmarks.published import Known, met
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


def sweeps(known: list[Known]) -> Iterator[str]:
    """Yield a row per source: failures and slowdown of the first choice, and the rank correlation."""
    found: dict[tuple[str, ...], list[Known]] = defaultdict(list)
    for row in known:
        if row.source in SWEPT:
            found[row.source, *(row.row[column] for column in SAME)].append(row)
    yield (
        f"| source | sweeps | first choice failed | slowdown of the first choice, mean (target {MEAN_BEHIND:.0%}) "
        f"| worst (target {MOST_BEHIND:.0%}) | rank correlation (target {ALIKE}) |"
    )
    yield "|---|---|---|---|---|---|"
    for source in SWEPT:
        results = [_sweep(rows) for key, rows in found.items() if key[0] == source]
        kept = [result for result in results if result is not None]
        if kept:
            failed, behind, alike = (np.array(part, dtype=float) for part in zip(*kept, strict=True))
            yield f"| {source} | {len(kept)} | {_judged(failed, behind[failed == 0], alike)} |"


def _judged(failed: Sweeps, behind: Sweeps, alike: Sweeps) -> str:
    """Format the cells of a source: failures and slowdown of the first choice, and the rank correlation.

    A failed choice misses the target of the maximum slowdown.
    """
    mean, worst = (behind.mean(), behind.max()) if len(behind) else (np.nan, np.nan)
    return " | ".join(
        [
            f"{int(failed.sum())}",
            f"{100 * mean:.1f} %, {met(mean <= MEAN_BEHIND)}" if len(behind) else "-, no",
            f"{100 * worst:.1f} %, {met(worst <= MOST_BEHIND and not failed.any())}" if len(behind) else "-, no",
            f"{alike.mean():.2f}, {met(alike.mean() >= ALIKE)}",
        ]
    )


def _sweep(rows: list[Known]) -> tuple[bool, float, float] | None:
    ran = [row for row in rows if row.step_seconds]
    if len({_layout(row) for row in ran}) < LEAST:
        return None
    predicted = list(predict_jobs([row.job for row in rows]))
    fits = [p.p_oom < MAX_OOM_PROBABILITY for p in predicted]
    times = [p.step_time_s if fit else np.inf for p, fit in zip(predicted, fits, strict=True)]
    pick = rows[int(np.argmin(times))]
    best = min(row.step_seconds for row in ran if row.step_seconds)
    both = [(p.step_time_s, row.step_seconds) for p, row in zip(predicted, rows, strict=True) if row.step_seconds]
    behind = pick.step_seconds / best - 1 if pick.step_seconds else np.nan
    return pick.step_seconds is None, behind, float(spearmanr(*zip(*both, strict=True)).statistic)


def _layout(row: Known) -> tuple[str, ...]:
    return tuple(row.row[column] for column in VARIED)


def best_of_sweeps(path: Path) -> Iterator[str]:
    """Yield the predicted rank of nanotron's best layout for each model and number of GPUs."""
    places = []
    rows = [row for row in read_rows(path) if row["id"].startswith("hfup")]
    for row in rows:
        job = job_from_row(row)
        grid = list(_grid(job.choices[0], float(row["gpus"]), float(row["global_batch"])))
        table = job_table(grid)
        seconds = step_seconds(time_constants(), table).total
        risk = oom_probability(memory_constants(), table, estimate_memory(memory_constants(), table))
        seconds = np.where(risk < MAX_OOM_PROBABILITY, seconds, np.inf)
        order = [_key(grid[at]) for at in np.argsort(seconds)]
        mine = _key(job.choices[0])
        places.append(order.index(mine) + 1 if mine in order else len(order))
    first_three = sum(place <= 3 for place in places)
    placed, published = PLACED
    reached = met(first_three * published >= placed * len(rows))
    yield (
        f"The best published layout is among the first three predicted layouts for {first_three} of {len(rows)} sweeps "
        f"(target {placed} of {published}): {reached}."
    )
    yield f"Its predicted ranks: {', '.join(map(str, sorted(places)))}."


def _key(choice: JobRow) -> tuple[float, ...]:
    return tuple(choice[column] for column in ("tp", "pp", "micro_batch", "zero_stage"))


def _grid(own: JobRow, ranks: float, batch: float) -> Iterator[JobRow]:
    """Yield the layouts that nanotron's sweep tried: tp, pp, micro-batch size, ZeRO-0 or ZeRO-1."""
    for tp, pp, micro_batch, zero in product((1, 2, 4, 8, 16, 32), (1, 2, 4, 8, 16), (1, 2, 4, 8, 16, 32, 64), (0, 1)):
        dp = ranks / tp / pp
        if dp < 1 or batch % (dp * micro_batch) or batch < dp * micro_batch or own["layers"] < pp:
            continue
        choice = {
            **own,
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
