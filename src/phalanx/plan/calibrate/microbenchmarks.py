"""Single operations that were timed apart from steps, as evidence for the planner's constants: products, attention and
memory by `phalanx bench`, collectives by it or in steps that were looked at closely."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phalanx.cost.estimate.collective_time import all_to_all_seconds, p2p_seconds, ring_seconds
from phalanx.cost.estimate.constants import TimeConstants
from phalanx.cost.estimate.job_table import JobTable
from phalanx.cost.estimate.kernel_time import attention_seconds, matmul_seconds, memory_pass_seconds
from phalanx.cost.kinds import Column
from phalanx.spec.errors import UserError
from phalanx.spec.files.load import run_from_table
from phalanx.spec.run import RunSpec

KNOWN_OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send")
NOISE = 0.1
"""Of the logarithm of what all operations of a kind take together: those of a kind err alike, so that many of them say
little more than a few."""
Array = NDArray[np.float64]
OperationIndices = NDArray[np.int64]


@dataclass(frozen=True)
class OperationTimings:
    """Operations of a kind on one machine, for one run."""

    source: str
    """Whose: of a run, or a file of `phalanx bench`."""
    kind: str
    seconds: Array
    shares: Array
    """How much each counts; together 1."""
    predicted: Callable[[TimeConstants, OperationIndices], Column]
    """Seconds as the model has them of the operations with these numbers; each may have constants of its own."""
    run: int | None = None
    """The number of the run in which they were; None if they were timed apart from runs."""

    def errors(self, c: TimeConstants, points: int = 1) -> Array:
        """Of the logarithms of times, in standard deviations: [points, operation], for constants of all points and
        operations in this order, or the same for all."""
        run_indices = np.tile(np.arange(len(self.seconds)), points)
        log_errors = np.log(self.predicted(c, run_indices)).reshape(points, -1) - np.log(self.seconds)
        return np.asarray(log_errors * np.sqrt(self.shares) / NOISE)

    def geometric_mean_error(self, c: TimeConstants) -> float:
        """The factor by which a prediction is off, minus 1: of all the geometric mean, weighted."""
        return float(np.exp(np.sum(self.shares * np.abs(NOISE * self.errors(c)[0] / np.sqrt(self.shares)))) - 1)


@dataclass(frozen=True)
class CollectiveTiming:
    """A collective, or a message to the next stage."""

    operation: str
    ranks: int
    stride: int
    """Of its ranks, how far the first two are apart."""
    size_bytes: float
    """Of the whole: what is reduced or broadcast, what is gathered from all, what a rank has to scatter or send."""
    seconds: float


@dataclass(frozen=True)
class BenchmarkFile:
    """What `phalanx bench` found of a machine, for a run on so many ranks."""

    name: str
    run: RunSpec
    ranks: int
    products: Array
    """[product, (batch, m, n, k, seconds, times in a pass)], each of both passes' three."""
    core: Array
    """Seconds of attention in a layer, forward and backward; none if they were not measured."""
    passes: Array
    """[pass over memory, (bytes, seconds)]."""
    exchanges: tuple[CollectiveTiming, ...]


def read_benchmark_file(file: Path) -> BenchmarkFile:
    """What `phalanx bench --out` wrote.

    Raises UserError for what is no such file.
    """
    try:
        results = json.loads(file.read_text())
        run = run_from_table(tomllib.loads(results["run_file"]))
        ranks = int(results["world_size"])
        cluster = run.cluster.model_copy(update={"nproc_per_node": ranks})
        return BenchmarkFile(
            file.name,
            run.model_copy(update={"cluster": cluster}),
            ranks,
            products=_parse_products(results.get("matmul", [])),
            core=_parse_attention(results.get("attention", [])),
            passes=np.array([(row["moved_bytes"], row["seconds"]) for row in results.get("bandwidth", [])], float),
            exchanges=tuple(
                exchange
                for group_result in results.get("collectives", [])
                for exchange in _parse_collective(group_result)
            ),
        )
    except OSError as error:
        raise UserError("measured", str(file), f"cannot be read: {error.strerror}", fix="name another file") from None
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        problem = f"is not what phalanx bench writes ({type(error).__name__}: {error})"
        fix = "write it with phalanx bench RUN.toml --out FILE.json"
        raise UserError("measured", str(file), problem, fix=fix) from None


def _parse_products(rows: Sequence[dict[str, Any]]) -> Array:
    return np.array(
        [
            (row["batch"], m, n, k, row[f"{dimension}_seconds"], row["count"])
            for row in rows
            for dimension, m, n, k in (
                ("forward", row["m"], row["n"], row["k"]),
                ("inputs", row["m"], row["k"], row["n"]),
                ("weights", row["k"], row["n"], row["m"]),
            )
        ],
        float,
    )


def _parse_attention(rows: Sequence[dict[str, Any]]) -> Array:
    """A layer's parts together: in a ring its own tokens, which are causal, and each of the others'."""
    layers = sum(row["count"] for row in rows if row["causal"])
    total = [sum(row["count"] * row[f"{direction}_seconds"] for row in rows) for direction in ("forward", "backward")]
    return np.array(total) / layers if rows else np.zeros(0)


def _parse_collective(group_result: dict[str, Any]) -> list[CollectiveTiming]:
    group = group_result["groups"][0]
    return [
        CollectiveTiming(
            group_result["operation"],
            len(group),
            group[1] - group[0],
            size_bytes=size_result["size_bytes"],
            seconds=size_result["seconds"],
        )
        for size_result in group_result["sizes"]
    ]


# -- beside the model --------------------------------------------------------------------------------------------------


def benchmark_timings(sweep: BenchmarkFile, jobs: JobTable) -> list[OperationTimings]:
    """What was measured for a run, with its columns on that machine (of one job)."""
    timings = [collective_timings(sweep.name, sweep.exchanges, jobs)]
    if len(sweep.products):
        batch, m, n, k, seconds, times = sweep.products.T

        def predict_products(c: TimeConstants, which: OperationIndices) -> Column:
            columns = (column[which] for column in (m, n, k, batch))
            return matmul_seconds(c, _repeat_job(jobs, which), *columns)

        timings.append(
            OperationTimings(
                sweep.name,
                "matrix products",
                seconds,
                shares=seconds * times / (seconds @ times),
                predicted=predict_products,
            )
        )
    if len(sweep.core):

        def predict_attention(c: TimeConstants, which: OperationIndices) -> Column:
            return np.choose(which, attention_seconds(c, _repeat_job(jobs, which)))

        timings.append(
            OperationTimings(sweep.name, "attention", sweep.core, shares=np.full(2, 0.5), predicted=predict_attention)
        )
    if len(sweep.passes):
        moved, pass_seconds = sweep.passes.T

        def predict_memory_passes(c: TimeConstants, which: OperationIndices) -> Column:
            return memory_pass_seconds(c, _repeat_job(jobs, which), moved[which])

        timings.append(
            OperationTimings(
                sweep.name, "memory", pass_seconds, shares=_equal_shares(len(moved)), predicted=predict_memory_passes
            )
        )
    return [columns for columns in timings if len(columns.seconds)]


def collective_timings(
    source: str, exchanges: Sequence[CollectiveTiming], jobs: JobTable, run: int | None = None
) -> OperationTimings:
    """Collectives and messages, as far as the model knows them: not those of parameter servers. Each counts as much:
    small ones tell latencies, and large ones bandwidths."""
    known = [exchange for exchange in exchanges if exchange.operation in KNOWN_OPERATIONS]
    ranks, stride, size = (
        np.array([getattr(exchange, name) for exchange in known], float) for name in ("ranks", "stride", "size_bytes")
    )
    reduces, sends = (np.array([exchange.operation == kind for exchange in known]) for kind in ("all_reduce", "send"))
    all_to_alls = np.array([exchange.operation == "all_to_all" for exchange in known])

    def predict_collectives(c: TimeConstants, which: OperationIndices) -> Column:
        rows = _repeat_job(jobs, which)
        n = ranks[which]
        strides = stride[which]
        sent = size[which]
        summed = ring_seconds(c, rows, sent, ranks=n, stride=strides, reduces=True)
        return np.select(
            [reduces[which], sends[which], all_to_alls[which]],
            [summed, p2p_seconds(c, rows, sent), all_to_all_seconds(c, rows, sent, ranks=n, stride=strides)],
            ring_seconds(c, rows, sent, ranks=n, stride=strides),
        )

    seconds = np.array([exchange.seconds for exchange in known], float)
    return OperationTimings(
        source, "collectives", seconds, shares=_equal_shares(len(known)), predicted=predict_collectives, run=run
    )


def _repeat_job(jobs: JobTable, which: OperationIndices) -> JobTable:
    return jobs.select(np.zeros_like(which))


def _equal_shares(count: int) -> Array:
    return np.full(count, 1 / max(count, 1))
