"""Operations timed outside of steps, as evidence for the planner's constants.

`phalanx bench` times products, attention, memory and collectives; profiled steps also time collectives.
"""

from __future__ import annotations

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
from phalanx.spec.files.tables import parse_json, parse_toml
from phalanx.spec.run import RunSpec

KNOWN_OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send")
NOISE = 0.1
"""Standard deviation of the logarithm of the total time of all operations of a kind.

Operations of a kind have similar errors: many contain little more information than a few.
"""
Array = NDArray[np.float64]
OperationIndices = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class OperationTimings:
    """Operations of a kind on one machine, for one run."""

    source: str
    """Name of a run, or file of `phalanx bench`."""
    kind: str
    seconds: Array
    shares: Array
    """Weight of each operation; the sum is 1."""
    predicted: Callable[[TimeConstants, OperationIndices], Column]
    """Predicted seconds of the operations with these indices; each can have constants of its own."""
    run: int | None = None
    """Index of the operations' run; None if they were timed outside of runs."""

    def errors(self, c: TimeConstants, points: int = 1) -> Array:
        """Return the errors of the logarithms of times, in standard deviations: [points, operation].

        The constants are equal for all, or those of all points and operations, in this order.
        """
        run_indices = np.tile(np.arange(len(self.seconds)), points)
        log_errors = np.log(self.predicted(c, run_indices)).reshape(points, -1) - np.log(self.seconds)
        return np.asarray(log_errors * np.sqrt(self.shares) / NOISE)

    def geometric_mean_error(self, c: TimeConstants) -> float:
        """Return the weighted geometric mean of the factor by which predictions differ, minus 1."""
        return float(np.exp(np.sum(self.shares * np.abs(NOISE * self.errors(c)[0] / np.sqrt(self.shares)))) - 1)


@dataclass(frozen=True, kw_only=True)
class CollectiveTiming:
    """Timing of a collective, or of a message to the next stage."""

    operation: str
    ranks: int
    stride: int
    """Distance between the first two ranks."""
    size_bytes: float
    """Size of the full tensor: reduced, broadcast or gathered, or that a rank scatters or sends."""
    seconds: float


@dataclass(frozen=True, kw_only=True)
class BenchmarkFile:
    """Result of `phalanx bench` on a machine, for a run on `ranks` ranks."""

    name: str
    run: RunSpec
    ranks: int
    products: Array
    """Rows of (batch, m, n, k, seconds, times in a pass), for the three products of both passes."""
    attention_seconds: Array
    """In a layer, forward and backward; empty if not measured."""
    passes: Array
    """Rows of (bytes, seconds), one per memory pass."""
    exchanges: tuple[CollectiveTiming, ...]


def read_benchmark_file(file: Path) -> BenchmarkFile:
    """Return the contents of a file that `phalanx bench --out` wrote.

    Raises UserError if the file has another format.
    """
    try:
        results = parse_json(file.read_bytes())
        run = run_from_table(parse_toml(results["run_file"]))
        ranks = int(results["world_size"])
        cluster = run.cluster.replace(nproc_per_node=ranks)
        return BenchmarkFile(
            name=file.name,
            run=run.replace(cluster=cluster),
            ranks=ranks,
            products=_parse_products(results.get("matmul", [])),
            attention_seconds=_parse_attention(results.get("attention", [])),
            passes=np.array([(row["moved_bytes"], row["seconds"]) for row in results.get("bandwidth", [])], float),
            exchanges=tuple(
                CollectiveTiming(
                    operation=collective["operation"],
                    ranks=len(collective["groups"][0]),
                    stride=collective["groups"][0][1] - collective["groups"][0][0],
                    size_bytes=row["size_bytes"],
                    seconds=row["seconds"],
                )
                for collective in results.get("collectives", [])
                for row in collective["sizes"]
            ),
        )
    except OSError as error:
        raise UserError("measured", str(file), f"cannot be read: {error.strerror}", fix="use another file") from None
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        problem = f"is not a file of phalanx bench ({type(error).__name__}: {error})"
        fix = "create it with phalanx bench RUN.toml --out FILE.json"
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
    """Return the seconds of a layer's attention, forward and backward.

    In a ring, a layer consists of the rank's own tokens, which are causal, and those of each other rank.
    """
    layers = sum(row["count"] for row in rows if row["causal"])
    total = [sum(row["count"] * row[f"{direction}_seconds"] for row in rows) for direction in ("forward", "backward")]
    return np.array(total) / layers if rows else np.zeros(0)


# -- Predictions of the model ------------------------------------------------------------------------------------------


def benchmark_timings(sweep: BenchmarkFile, jobs: JobTable) -> list[OperationTimings]:
    """Return the timings of a benchmark file; `jobs` is a table of one job, its run on that machine."""
    timings = [collective_timings(sweep.name, sweep.exchanges, jobs)]

    def add_timing(kind: str, seconds: Array, shares: Array, predicted: Callable[..., Column]) -> None:
        timings.append(
            OperationTimings(source=sweep.name, kind=kind, seconds=seconds, shares=shares, predicted=predicted)
        )

    if len(sweep.products):
        batch, m, n, k, seconds, times = sweep.products.T

        def predict_products(c: TimeConstants, indices: OperationIndices) -> Column:
            timing = (column[indices] for column in (m, n, k, batch))
            return matmul_seconds(c, _repeat_job(jobs, indices), *timing)

        add_timing("matrix products", seconds, seconds * times / (seconds @ times), predict_products)
    if len(sweep.attention_seconds):

        def predict_attention(c: TimeConstants, indices: OperationIndices) -> Column:
            # A sweep times attention with the sizes of the first kind of layers.
            kind = next(_repeat_job(jobs, indices).by_kind())
            return np.choose(indices, attention_seconds(c, kind))

        add_timing("attention", sweep.attention_seconds, np.full(2, 0.5), predict_attention)
    if len(sweep.passes):
        moved, pass_seconds = sweep.passes.T

        def predict_memory_passes(c: TimeConstants, indices: OperationIndices) -> Column:
            return memory_pass_seconds(c, _repeat_job(jobs, indices), moved[indices])

        add_timing("memory", pass_seconds, _equal_shares(len(moved)), predict_memory_passes)
    return [timing for timing in timings if len(timing.seconds)]


def collective_timings(
    source: str, exchanges: Sequence[CollectiveTiming], jobs: JobTable, run: int | None = None
) -> OperationTimings:
    """Return the timings of collectives and messages that the model can predict.

    Parameter servers are excluded. All operations have equal weight: small ones determine latencies, large ones
    bandwidths. `jobs` is the row of the run, whose index is `run`; None if they were timed outside of runs.
    """
    predictable = [exchange for exchange in exchanges if exchange.operation in KNOWN_OPERATIONS]
    ranks, stride, size = (
        np.array([getattr(exchange, name) for exchange in predictable], float)
        for name in ("ranks", "stride", "size_bytes")
    )
    reduces, sends = (
        np.array([exchange.operation == operation for exchange in predictable]) for operation in ("all_reduce", "send")
    )
    all_to_alls = np.array([exchange.operation == "all_to_all" for exchange in predictable])

    def predict_collectives(c: TimeConstants, indices: OperationIndices) -> Column:
        rows = _repeat_job(jobs, indices)
        sent = size[indices]
        group = ranks[indices], stride[indices]
        reduced = ring_seconds(c, rows, sent, *group, all_reduce=True)
        exchanged = all_to_all_seconds(c, rows, sent, *group)
        return np.select(
            [reduces[indices], sends[indices], all_to_alls[indices]],
            [reduced, p2p_seconds(c, rows, sent), exchanged],
            ring_seconds(c, rows, sent, *group),
        )

    seconds = np.array([exchange.seconds for exchange in predictable], float)
    return OperationTimings(
        source=source,
        kind="collectives",
        seconds=seconds,
        shares=_equal_shares(len(predictable)),
        predicted=predict_collectives,
        run=run,
    )


def _repeat_job(jobs: JobTable, indices: OperationIndices) -> JobTable:
    return jobs.select(np.zeros_like(indices))


def _equal_shares(count: int) -> Array:
    return np.full(count, 1 / max(count, 1))
