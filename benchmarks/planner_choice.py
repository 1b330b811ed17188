"""Does the planner choose well? Published sweeps of one model on one machine, ranked by prediction."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import numpy as np
from scipy.stats import spearmanr

from benchmarks.published import Known
from phalanx.cost.constants import memory_constants, time_constants
from phalanx.cost.footprint import footprint, out_of_memory
from phalanx.cost.jobs import Order, columns
from phalanx.cost.step import step_seconds
from phalanx.plan.describe import Numbers
from phalanx.plan.predict import predict
from phalanx.plan.search import LIKELY
from phalanx.plan.table import job_of, read_rows

SWEPT = ("hage", "vtm", "tr11")
"""Sources that publish many layouts of one model on one machine."""
SAME = ("model", "layers", "hidden", "heads", "seq", "gpus", "global_batch", "precision", "facts")
"""What the runs of a sweep have in common."""
VARIED = ("tp", "pp", "micro_batch", "recompute", "seq_parallel", "zero")
LEAST = 4
"""Different layouts that ran."""


def sweeps(known: list[Known]) -> Iterator[str]:
    """For each source: did the first choice run, how far from the best is it, how alike are the rankings."""
    found: dict[tuple[str, ...], list[Known]] = defaultdict(list)
    for row in known:
        if row.source in SWEPT:
            found[row.source, *(row.row[column] for column in SAME)].append(row)
    yield "| source | sweeps | first choice failed | behind the best, mean | worst | rank correlation |"
    yield "|---|---|---|---|---|---|"
    for source in SWEPT:
        results = [_sweep(rows) for key, rows in found.items() if key[0] == source]
        kept = [result for result in results if result is not None]
        if kept:
            failed, behind, alike = (np.array(part, dtype=float) for part in zip(*kept, strict=True))
            ran = behind[failed == 0]
            far = f"{100 * ran.mean():.1f} % | {100 * ran.max():.1f} %" if len(ran) else "- | -"
            yield f"| {source} | {len(kept)} | {int(failed.sum())} | {far} | {alike.mean():.2f} |"


def _sweep(rows: list[Known]) -> tuple[bool, float, float] | None:
    ran = [row for row in rows if row.step_seconds]
    if len({_layout(row) for row in ran}) < LEAST:
        return None
    predicted = list(predict([row.job for row in rows]))
    fits = [p.p_oom < LIKELY for p in predicted]
    times = [p.step_time_s if fit else np.inf for p, fit in zip(predicted, fits, strict=True)]
    pick = rows[int(np.argmin(times))]
    best = min(row.step_seconds for row in ran if row.step_seconds)
    both = [(p.step_time_s, row.step_seconds) for p, row in zip(predicted, rows, strict=True) if row.step_seconds]
    behind = pick.step_seconds / best - 1 if pick.step_seconds else np.nan
    return pick.step_seconds is None, behind, float(spearmanr(*zip(*both, strict=True)).statistic)


def _layout(row: Known) -> tuple[str, ...]:
    return tuple(row.row[column] for column in VARIED)


def best_of_sweeps(path: Path) -> Iterator[str]:
    """Nanotron's best layout of each model and number of GPUs: where is it among ours?"""
    places = []
    rows = [row for row in read_rows(path) if row["id"].startswith("hfup")]
    for row in rows:
        job = job_of(row)
        grid = list(_grid(job.choices[0], float(row["gpus"]), float(row["global_batch"])))
        table = columns(grid)
        seconds = step_seconds(time_constants(), table).total
        risk = out_of_memory(memory_constants(), table, footprint(memory_constants(), table))
        seconds = np.where(risk < LIKELY, seconds, np.inf)
        order = [_key(grid[at]) for at in np.argsort(seconds)]
        mine = _key(job.choices[0])
        places.append(order.index(mine) + 1 if mine in order else len(order))
    first_three = sum(place <= 3 for place in places)
    yield f"The published best is among our first three for {first_three} of {len(rows)} (target 20 of 26)."
    yield f"Its places: {', '.join(map(str, sorted(places)))}."


def _key(choice: Numbers) -> tuple[float, ...]:
    return tuple(choice[column] for column in ("tp", "pp", "micro_batch", "zero"))


def _grid(own: Numbers, ranks: float, batch: float) -> Iterator[Numbers]:
    """Layouts that nanotron's sweep tried: tp, pp, micro-batch, ZeRO-0 or 1."""
    for tp, pp, micro_batch, zero in product((1, 2, 4, 8, 16, 32), (1, 2, 4, 8, 16), (1, 2, 4, 8, 16, 32, 64), (0, 1)):
        dp = ranks / tp / pp
        if dp < 1 or batch % (dp * micro_batch) or batch < dp * micro_batch or own["layers"] < pp:
            continue
        yield {
            **own, "tp": tp, "pp": pp, "dp": dp, "micro_batch": micro_batch, "micro_batches": batch / dp / micro_batch,
            "zero": zero, "shard": dp if zero else 1, "order": Order.ONE_F_ONE_B if pp > 1 else Order.NONE,
            "sequence_parallel": float(tp > 1), "trimmed": float(pp > 1 and own["layers"] % pp > 0),
        }  # fmt: skip
