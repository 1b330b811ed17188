"""Reader of a run directory as one measurement for the calibration."""

from __future__ import annotations

import statistics
from dataclasses import replace
from pathlib import Path

import numpy as np

from phalanx.cost.exact.flops import training_flops_per_token
from phalanx.plan.calibrate.measured_run import MIN_STEPS, WARM_UP_STEPS, MeasuredRun
from phalanx.report.collective_times import collective_times
from phalanx.report.run_data import read_run
from phalanx.report.step_breakdown import step_times
from phalanx.runs.create import RUN_FILE, require_run
from phalanx.runs.decode import read_bytes
from phalanx.runs.jsonl import JsonRecord, parse_jsonl
from phalanx.runs.measured import measured_file, read_measured_since
from phalanx.runs.metrics import METRICS_FILE, decode_metrics, peak_from_mfu
from phalanx.spec.errors import UserError
from phalanx.spec.files.load import load_run
from phalanx.spec.files.teacher import with_kept_teacher
from phalanx.spec.phases import phase_at, phases_of


def read_measured_run(directory: Path) -> MeasuredRun:
    """Return the measured steps of a run directory since the last start.

    Raises UserError if the directory is not a run directory, or has too few steps.
    """
    require_run(directory)
    records = _read_step_records(directory)
    world_size = records[-1].get("ranks") if records else None
    if world_size is None:
        raise UserError("run directory", str(directory), "does not contain the number of ranks", fix="repeat the run")
    # Rank 0 measures one slower step with --profile-memory.
    measured: JsonRecord = {}
    file = measured_file(directory, 0)
    if file.exists():
        measured = read_measured_since(directory, 0, world_size=0, problems=[]).get(0, {})
        if not measured:
            raise UserError("run directory", str(file), "is damaged", fix="remove it, or repeat --profile-memory")
    run = with_kept_teacher(load_run(directory / RUN_FILE, environment={}), directory)
    phase = phase_at(phases_of(run), records[-1]["step"] - 1)
    run = phase.run
    of_phase = [record for record in records if record["step"] > phase.first_step]
    steady = _select_steady_records(directory, of_phase, measured_step=measured.get("step"))
    run = run.replace(cluster=run.cluster.replace(nproc_per_node=world_size // run.cluster.nodes))
    if "peak_memory_bytes" not in steady[-1]:
        raise UserError("run directory", str(directory), "does not contain the peak memory", fix="repeat the run")
    return MeasuredRun(
        name=directory.name,
        run=run,
        ranks=world_size,
        step_seconds=statistics.median(record["step_seconds"] for record in steady),
        memory_bytes=steady[-1]["peak_memory_bytes"],
        peak_flops=peak_from_mfu(steady[-1], training_flops_per_token(run.model, run.training.seq_len), world_size),
        tensor_bytes=measured.get("peak_bytes", {}).get("total"),
    )


def _read_step_records(directory: Path) -> list[JsonRecord]:
    """Return the records of steps in metrics.jsonl, of which every line must be readable."""
    file = directory / METRICS_FILE
    if not file.is_file():
        fix = "use a run directory of phalanx train"
        raise UserError("run directory", str(directory), f"has no {METRICS_FILE}", fix=fix)
    try:
        content = read_bytes(file)
    except OSError as error:
        fix = "restore it from a copy"
        raise UserError("run directory", str(file), f"cannot be read: {error.strerror}", fix=fix) from None
    records = []
    for line, record in parse_jsonl(content, decode_metrics):
        if record is None:
            problem = f"has a damaged line: {line.decode(errors='replace')[:40]}"
            raise UserError("run directory", str(file), problem, fix="correct or remove the line")
        if "step_seconds" in record:
            records.append(record)
    return records


def _select_steady_records(directory: Path, records: list[JsonRecord], measured_step: int | None) -> list[JsonRecord]:
    """Return the steps of the last start after the warm-up, without profiled steps and the measured one."""
    last_record = records[-1]
    last_start: list[JsonRecord] = []
    for record in reversed(records):
        if any(record.get(name) != last_record.get(name) for name in ("ranks", "resumed_at_step")):
            break
        last_start.append(record)
    last_start.reverse()
    after_warm_up = last_start[WARM_UP_STEPS:]
    steady = [record for record in after_warm_up if record["step"] != measured_step and "profiled" not in record]
    if len(steady) < MIN_STEPS:
        problem = (
            f"has {len(last_start)} steps; at least {MIN_STEPS} are required after the first {WARM_UP_STEPS}, "
            "without profiled steps"
        )
        raise UserError("run directory", str(directory), problem, fix="increase training.steps")
    return steady


def with_measured_parts(measured: MeasuredRun, directory: Path) -> MeasuredRun:
    """Return a measured run with its compute and waiting times, and the collectives of profiled steps."""
    run_data = read_run(directory)
    device = next((record.device for record in run_data.ranks.values()), None)
    run = measured.run.on_device(device) if device else measured.run
    measured = replace(measured, run=run, device=device, exchanges=collective_times(run_data))
    times = step_times(run_data)
    if times is None or not times.has_wait_times:
        return measured
    return replace(
        measured,
        computing_seconds=float(np.median(times.compute.max(1))),
        waiting_seconds=float(np.median(times.communication.min(1))),
    )
