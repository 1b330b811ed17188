"""Calibration: the planner's constants, fitted to runs on a machine.

The fit starts at the constants of published runs, and keeps those for which the runs have no evidence.

Why: `docs/design/decisions/calibration-posterior.md`.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from math import nan
from pathlib import Path

import numpy as np
import tomli_w
from numpy.typing import NDArray

from phalanx.cost.estimate.constants import time_constants
from phalanx.cost.estimate.job_table import JobRow, JobTable, job_table
from phalanx.cost.estimate.step_time import step_seconds
from phalanx.plan.calibrate.measured_run import MIN_WAIT_FRACTION, MeasuredRun
from phalanx.plan.calibrate.memory_fit import fit_memory
from phalanx.plan.calibrate.microbenchmarks import BenchmarkFile, benchmark_timings, collective_timings
from phalanx.plan.calibrate.posterior import (
    NOISE,
    MeasuredTargets,
    Prior,
    identified_constants,
    leave_one_out_errors,
    map_estimate,
)
from phalanx.plan.search.candidate_columns import candidate_jobs
from phalanx.plan.search.candidates import candidate_from_run
from phalanx.plan.tables.job_columns import interval_half_width, time_constants_for
from phalanx.spec.cluster import CalibratedPrecision, CalibrationSpec, ClusterSpec
from phalanx.spec.errors import UserError
from phalanx.spec.files.load import cluster_overrides, load_machine
from phalanx.spec.formatting import WRITTEN_BY
from phalanx.spec.resolved_run import ResolvedRun

Z_80_PERCENT = 1.2816
"""Standard deviations of a normal distribution on each side of the middle 80 %."""
Array = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class OperationFit:
    """Number of operations of a kind that were timed outside of steps, and the model's error on them."""

    of: str
    """Name of a run, or file of `phalanx bench`."""
    kind: str
    count: int
    before: float
    after: float


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Calibrated machine, and the predictions of its runs in seconds or bytes, in the order of the runs."""

    machine: ClusterSpec
    before: Array
    after: Array
    leave_one_out: Array
    """Prediction of each run by the other runs."""
    memory: Array
    operations: list[OperationFit]


def calibrate(runs: Sequence[MeasuredRun], machine: ClusterSpec, sweeps: Sequence[BenchmarkFile] = ()) -> Calibration:
    """Return a machine with the constants that its runs and benchmarks make likely.

    Raises UserError if precisions differ, or the planner does not support a layout.
    """
    _check_same_device(runs, machine)
    precision = _common_precision(runs, sweeps)
    # The fit starts at the constants of an earlier calibration of the machine, if any.
    start = CalibrationSpec(
        runs=len(runs),
        precision=precision,
        time_constants=dict(machine.calibration.time_constants) if machine.calibration else {},
        identified_constants=[],
        log_half_width=1.0,
        baseline_process_bytes=0,
        bytes_per_counted_byte=1.0,
    )
    machine = _with_measured_peak(runs, machine).replace(calibration=start)
    jobs = job_table([job_row(run, machine) for run in runs])
    # Operations that were timed outside of steps.
    operations = [
        timing for sweep in sweeps for timing in benchmark_timings(sweep, job_table([job_row(sweep, machine)]))
    ]
    for index, run in enumerate(runs):
        timings = collective_timings(run.name, run.exchanges, jobs.select(np.array([index])), run=index)
        operations += [timings] if len(timings.seconds) else []
    targets = replace(measured_targets(runs, jobs), operations=tuple(operations))
    prior = Prior(time_constants_for(machine))
    z = map_estimate(prior, jobs, targets)
    constants = prior.constants(z)
    errors = leave_one_out_errors(prior, jobs, targets, z)
    memory = fit_memory(runs)
    published = asdict(time_constants())
    calibration = start.replace(
        time_constants={name: value for name, value in asdict(constants).items() if value != published[name]},
        identified_constants=identified_constants(prior, jobs, targets, z),
        # At least the noise, since runs may be too similar.
        log_half_width=Z_80_PERCENT * max(NOISE, float(np.sqrt(np.mean(errors**2)))),
        baseline_process_bytes=round(memory.process_bytes),
        bytes_per_counted_byte=memory.bytes_per_counted_byte,
        buffer_overhead=memory.buffer_overhead,
    )
    return Calibration(
        machine=machine.replace(calibration=calibration),
        before=np.broadcast_to(step_seconds(prior.start, jobs).total, len(runs)),
        after=np.broadcast_to(step_seconds(constants, jobs).total, len(runs)),
        leave_one_out=targets.step_total * np.exp(errors),
        memory=memory.predicted,
        operations=[
            OperationFit(
                of=timings.source,
                kind=timings.kind,
                count=len(timings.seconds),
                before=timings.geometric_mean_error(prior.start),
                after=timings.geometric_mean_error(constants),
            )
            for timings in operations
        ],
    )


def _common_precision(runs: Sequence[MeasuredRun], sweeps: Sequence[BenchmarkFile]) -> CalibratedPrecision:
    """Return the precision that all runs and benchmarks share.

    Raises UserError if they have several precisions, or fp8.
    """
    precisions = {
        measured.training.precision for measured in (*(run.run for run in runs), *(sweep.run for sweep in sweeps))
    }
    if len(precisions) > 1:
        problem = "differs between the runs"
        fix = "calibrate with runs of one precision"
        raise UserError("training.precision", ", ".join(sorted(precisions)), problem, fix=fix)
    (precision,) = precisions
    if precision == "fp8":
        problem = "is not supported by calibrations, whose speeds are those of one dtype"
        raise UserError("training.precision", precision, problem, fix="calibrate with runs in bf16")
    return precision


def _with_measured_peak(runs: Sequence[MeasuredRun], machine: ClusterSpec) -> ClusterSpec:
    """Return the machine with the median of the measured peaks of its cores."""
    peaks = [run.peak_flops * _with_cluster_size(machine, run).ranks_per_core for run in runs if run.peak_flops]
    if not (peaks and machine.cores):
        return machine
    peak = statistics.median(peaks)
    return machine.replace(peak_flops=peak, matmul_flops=peak)


def _check_same_device(runs: Sequence[MeasuredRun], machine: ClusterSpec) -> None:
    """Raise UserError for a run on another kind of machine."""
    for run in runs:
        if run.device is not None and run.device != (machine.device if machine.device != "auto" else run.device):
            name = f" ({machine.preset})" if machine.preset else ""
            problem = f'ran on device "{run.device}", but the machine{name} has device "{machine.device}"'
            raise UserError("RUN_DIR", run.name, problem, fix="use the machine on which the runs were made")


def measured_targets(runs: Sequence[MeasuredRun], jobs: JobTable) -> MeasuredTargets:
    """Return the measurements of runs.

    Ranks that share cores contribute full steps only, because the compute time of one is also time of the others. Very
    short waits are ignored as noise.
    """
    measured_seconds = np.array([run.step_seconds for run in runs])
    has_own_core = np.broadcast_to(jobs.ranks_per_core, len(runs)) <= 1
    computing = np.array([run.computing_seconds for run in runs])
    waiting = np.array([run.waiting_seconds for run in runs])
    has_waits = has_own_core & (waiting > MIN_WAIT_FRACTION * measured_seconds)
    return MeasuredTargets(measured_seconds, np.where(has_own_core, computing, nan), np.where(has_waits, waiting, nan))


def detect_cpu() -> ClusterSpec:
    """Return the CPU of this process: the number of usable cores, and their memory."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return load_machine("cpu").replace(cores=cores, memory_bytes=memory)


def write_machine(file: Path, machine: ClusterSpec, sources: Sequence[str]) -> None:
    """Write a machine to a file that `--machine` and `cluster.preset` accept.

    Raises UserError if the file cannot be written.
    """
    head = f"# {WRITTEN_BY} calibrate, from {', '.join(sources)}.\n"
    try:
        file.write_text(head + tomli_w.dumps(cluster_overrides(machine)))
    except OSError as error:
        raise UserError("--out", str(file), f"cannot be written: {error.strerror}", fix="use another file") from None


def _with_cluster_size(machine: ClusterSpec, measured: MeasuredRun | BenchmarkFile) -> ClusterSpec:
    run_cluster = measured.run.cluster
    return machine.replace(nodes=run_cluster.nodes, nproc_per_node=run_cluster.nproc_per_node)


def job_row(measured: MeasuredRun | BenchmarkFile, machine: ClusterSpec) -> JobRow:
    """Return the columns of a run on a machine (`cost.estimate.job_table`).

    Raises UserError if the planner does not support the layout.
    """
    run = ResolvedRun(measured.run.replace(cluster=_with_cluster_size(machine, measured)), measured.ranks)
    try:
        jobs = candidate_jobs(run, [candidate_from_run(run)])
    except UserError as error:
        raise UserError(f"{measured.name}: {error.field}", error.value, error.problem, fix=error.fix) from None
    return {field.name: getattr(jobs, field.name)[..., 0].tolist() for field in fields(JobTable)}


def predict_run(machine: ClusterSpec, measured: MeasuredRun) -> tuple[float, float, float]:
    """Return the step seconds, the interval factor and rank 0's memory of a run on a calibrated machine.

    The step seconds times and divided by the factor are the ends of the 80 % interval.
    """
    jobs = job_table([job_row(measured, machine)])
    interval_factor = float(np.exp(interval_half_width(machine, jobs)[0]))
    calibration = machine.calibration
    if calibration is None:
        raise ValueError("the machine is not calibrated")
    unaccounted_buffer_bytes = calibration.buffer_overhead * measured.memory.communication
    memory = (
        calibration.bytes_per_counted_byte * (measured.counted_peak_bytes + unaccounted_buffer_bytes)
        + calibration.baseline_process_bytes
    )
    return float(step_seconds(time_constants_for(machine), jobs).total[0]), interval_factor, memory
