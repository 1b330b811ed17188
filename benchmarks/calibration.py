"""Compare predicted and measured layouts on this machine, for layouts that the planner was not calibrated on.

    python -m benchmarks.calibration           # prints the tables and writes docs/results/benchmarks/calibration.md,
                                               # and the section of docs/results/accuracy.md on before and after

Short runs of `phalanx train` with 2 and 4 processes train a dense model and a model with experts. `phalanx calibrate`
uses the runs of CALIBRATED; the runs of HELD_OUT are predicted, then compared. Finished runs are kept in --work, so
that an interrupted benchmark continues.
"""

from __future__ import annotations

import argparse
import os
import platform
import random
import shutil
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path

from benchmarks.pages import write_results
from phalanx.plan.calibrate.calibrate import Calibration, calibrate, detect_cpu, predict_run, write_machine
from phalanx.plan.calibrate.measured_run import MIN_WAIT_FRACTION, MeasuredRun
from phalanx.plan.calibrate.microbenchmarks import BenchmarkFile, read_benchmark_file
from phalanx.plan.predicted_vs_measured import compare_with_prediction
from phalanx.plan.search.candidates import candidate_from_run
from phalanx.plan.search.evaluate import evaluate_layout
from phalanx.plan.search.pipeline_simulation import simulate_candidate
from phalanx.plan.tables.job_columns import time_constants_for
from phalanx.report.measured_run import read_measured_run, with_measured_parts
from phalanx.report.run_data import read_run
from phalanx.report.step_breakdown import step_times
from phalanx.report.step_comparison import step_rows
from phalanx.spec.cluster import ClusterSpec
from phalanx.spec.files.load import load_machine
from phalanx.spec.formatting import GIB
from phalanx.spec.resolved_run import ResolvedRun

MIB = 2**20
LOOP, ACCURACY = Path(__file__).with_name("loop.md"), Path(__file__).parents[1] / "docs" / "results" / "accuracy.md"
LOOP_HEADING = "Before and after calibrate"
LOOP_TEXT = """The table compares {runs} held-out runs of `python -m benchmarks.calibration{few}` with three
plans. The plan "before" has only the measured peak FLOP/s of this machine. The plan "after" uses `phalanx calibrate` on
{fitted} other runs, each with two profiled steps. The third plan also uses {sweeps} files of `phalanx bench`.

Computing and waiting times are compared only for runs in which every rank has its own core. Traffic and tensor memory
are counted exactly, so calibration does not change them.

{table}
"""
BUBBLE = "pipeline bubble"
SENT = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send")
PAGE = Path(__file__).parents[1] / "docs" / "results" / "benchmarks" / "calibration.md"
STEPS, CLOSELY = 14, "5:6"
"""Steps of a run, and its profiled steps.

Two warm-up steps and the two profiled steps are not timed. The first profiled step also measures memory.
"""
TIME_GOAL, MEMORY_GOAL = 0.10, 0.05
LEAST_GOOD = 20
"""Target for the number of layouts within both goals."""
RUN = """
[model]
{model}
[training]
steps = {steps}
seq_len = 256
tokens_per_step = 4096
precision = "fp32"
[data]
mask_documents = false
[evaluation]
tokens = 256
[checkpoint]
every = 0
"""
SHAPE = (
    "vocab_size = 2048\nhidden_size = 256\nnum_heads = 8\nffn_hidden_size = 768\n"
    "max_seq_len = 256\ntie_embeddings = false\n"
)
MODELS = {
    "dense": SHAPE + "num_layers = 8",
    "experts": SHAPE + "num_layers = 6\n[model.moe]\nnum_experts = 8\ntop_k = 2\nexpert_ffn_size = 384",
}


@dataclass(frozen=True)
class ShortRun:
    """Short run to train: model, number of processes, layout."""

    model: str
    ranks: int
    layout: str

    @property
    def name(self) -> str:
        return f"{self.model}-{self.ranks}-{self.layout}".replace("=", "").replace(",", "-")

    def __str__(self) -> str:
        return f"{self.model}, {self.ranks} processes: {self.layout}"


def _all(model: str, ranks: int, *layouts: str) -> list[ShortRun]:
    return [ShortRun(model, ranks, layout) for layout in layouts]


CALIBRATED = [
    *_all(
        "dense",
        2,
        "micro_batch_size=4",
        "micro_batch_size=1",
        "data_parallel=zero1,micro_batch_size=4",
        "data_parallel=zero2,micro_batch_size=4",
        "data_parallel=zero3,micro_batch_size=4",
        "tp=2,micro_batch_size=4",
        "tp=2,micro_batch_size=16",
        "cp=2,micro_batch_size=4",
        "pp=2,micro_batch_size=2",
    ),
    *_all(
        "dense",
        4,
        "micro_batch_size=4",
        "data_parallel=zero1,micro_batch_size=2",
        "data_parallel=zero3,micro_batch_size=4",
        "tp=4,micro_batch_size=4",
        "pp=4,micro_batch_size=2",
        "tp=2,pp=2,micro_batch_size=2",
    ),
    *_all("experts", 2, "ep=2,micro_batch_size=4", "micro_batch_size=4"),
    *_all("experts", 4, "ep=4,micro_batch_size=4"),
]
HELD_OUT = [
    *_all(
        "dense",
        2,
        "micro_batch_size=2",
        "micro_batch_size=8",
        "data_parallel=zero1,micro_batch_size=8",
        "data_parallel=zero2,micro_batch_size=8",
        "data_parallel=zero3,micro_batch_size=8",
        "data_parallel=zero3,micro_batch_size=2",
        "tp=2,micro_batch_size=8",
        "tp=2,micro_batch_size=2",
        "cp=2,micro_batch_size=8",
        "cp=2,cp_method=ulysses,micro_batch_size=4",
        "pp=2,micro_batch_size=4",
        "pp=2,micro_batch_size=1",
        "pp=2,schedule=gpipe,micro_batch_size=2",
        "pp=2,schedule=zb-h1,micro_batch_size=2",
        "pp=2,schedule=interleaved,virtual_stages=2,micro_batch_size=2",
        "activation_checkpointing=full,micro_batch_size=4",
    ),
    *_all(
        "dense",
        4,
        "micro_batch_size=2",
        "micro_batch_size=1",
        "data_parallel=zero1,micro_batch_size=4",
        "data_parallel=zero2,micro_batch_size=2",
        "data_parallel=zero3,micro_batch_size=2",
        "data_parallel=hsdp,dp_shard=2,micro_batch_size=4",
        "tp=2,micro_batch_size=4",
        "tp=2,data_parallel=zero1,micro_batch_size=8",
        "tp=4,micro_batch_size=8",
        "pp=2,micro_batch_size=2",
        "pp=2,data_parallel=zero1,micro_batch_size=4",
        "pp=4,micro_batch_size=1",
        "cp=2,micro_batch_size=4",
        "cp=4,micro_batch_size=4",
        "tp=2,cp=2,micro_batch_size=4",
        "pp=2,cp=2,micro_batch_size=2",
    ),
    *_all("experts", 2, "ep=2,micro_batch_size=8", "data_parallel=zero1,micro_batch_size=8"),
    *_all("experts", 4, "micro_batch_size=4", "ep=2,micro_batch_size=2", "ep=2,tp=2,micro_batch_size=4"),
]

SWEPT = [
    *_all(
        "dense",
        2,
        "data_parallel=zero1,micro_batch_size=4",
        "tp=2,micro_batch_size=4",
        "pp=2,micro_batch_size=2",
        "cp=2,micro_batch_size=4",
    ),
    *_all("experts", 2, "ep=2,micro_batch_size=4"),
    *_all("dense", 4, "data_parallel=zero1,micro_batch_size=2", "tp=4,micro_batch_size=4"),
]
"""Layouts whose operations `phalanx bench` times."""


def run_phalanx(arguments: Sequence[str], short: ShortRun, work: Path) -> None:
    """Run a `phalanx` command on the run file of a layout."""
    file = work / f"{short.name}.toml"
    file.write_text(RUN.format(model=MODELS[short.model], steps=STEPS))
    settings = [f"name={short.name}", f"output_dir={work}", *(f"layout.{choice}" for choice in short.layout.split(","))]
    options = ["--nproc", str(short.ranks), *(f"--set={choice}" for choice in settings)]
    command = [sys.executable, "-m", "phalanx", arguments[0], str(file), *arguments[1:], *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment, check=False)
    if done.returncode:
        raise SystemExit(f"{short}: {done.stderr[-2000:]}")


def sweep(short: ShortRun, work: Path) -> BenchmarkFile:
    """Return the measurements of `phalanx bench` for a layout; measure them unless their file exists."""
    file = work / f"{short.name}.json"
    if not file.exists():
        run_phalanx(["bench", "--sweep", "4KiB:4MiB", "--out", str(file)], short, work)
    return read_benchmark_file(file)


def train(short: ShortRun, work: Path) -> MeasuredRun:
    """Train a run unless it is finished, and return its measurements."""
    directory = work / short.name
    if not (directory / "done").exists():
        shutil.rmtree(directory, ignore_errors=True)
        run_phalanx(["train", "--profile-memory", "--profile-steps", CLOSELY], short, work)
        shutil.rmtree(directory / "checkpoints")
        (directory / "done").touch()
    return with_measured_parts(replace(read_measured_run(directory), name=str(short)), directory)


@dataclass(frozen=True)
class HeldOutErrors:
    """Errors of plans before and after `phalanx calibrate`: predicted / measured - 1, for bubbles the difference."""

    before: dict[str, list[float]]
    after: dict[str, list[float]]
    measured: dict[str, list[float]]
    """After calibration that also uses the measurements of `phalanx bench`."""

    def __str__(self) -> str:
        lines = ["| | runs | median error before | after | with `phalanx bench` |", "|---|---:|---:|---:|---:|"]
        for quantity, errors in self.before.items():
            unit = " points" if quantity == BUBBLE else " %"
            medians = (
                statistics.median(map(abs, errors_by_quantity[quantity]))
                for errors_by_quantity in (self.before, self.after, self.measured)
            )
            cells = " | ".join(f"{100 * error:.1f}{unit}" for error in medians)
            lines.append(f"| {quantity} | {len(errors)} | {cells} |")
        return "\n".join(lines)


def held_out_errors(
    runs: dict[Path, MeasuredRun], before: ClusterSpec, after: ClusterSpec, measured: ClusterSpec
) -> HeldOutErrors:
    """Return the errors on held-out runs for machines with the peak only, calibrated, and calibrated with bench."""
    return HeldOutErrors(*(_errors(runs, machine) for machine in (before, after, measured)))


def _errors(runs: dict[Path, MeasuredRun], machine: ClusterSpec) -> dict[str, list[float]]:
    errors: dict[str, list[float]] = {
        "step time": [],
        "computing time": [],
        "waiting for collectives": [],
        "process memory": [],
        "tensor memory": [],
        "collective traffic": [],
        BUBBLE: [],
    }
    for directory, run in runs.items():
        cluster = machine.model_copy(update={"nodes": 1, "nproc_per_node": run.ranks})
        run_spec = run.run.model_copy(update={"cluster": cluster})
        option = evaluate_layout(ResolvedRun(run_spec, run.ranks), run_spec.layout)
        run_data = read_run(directory)
        times = step_times(run_data)
        rows = {row.quantity: row.measured for row in step_rows(run_data, times, None, None)} if times else {}
        errors["step time"].append(option.step_seconds / run.step_seconds - 1)
        if run.ranks <= (machine.cores or 1):
            errors["computing time"].append(option.parts["compute"] / run.computing_seconds - 1)
            if run.waiting_seconds > MIN_WAIT_FRACTION * run.step_seconds:
                waiting_seconds = option.parts["exchange"] + option.parts["data_parallel"]
                errors["waiting for collectives"].append(waiting_seconds / run.waiting_seconds - 1)
        errors["process memory"].append(option.memory_bytes / run.memory_bytes - 1)
        errors["tensor memory"].append(run.counted_peak_bytes / (run.tensor_bytes or 1) - 1)
        traffic = [
            row
            for row in compare_with_prediction(ResolvedRun(run_spec, run.ranks), run_data.measured)
            if row.quantity in SENT and row.predicted
        ]
        errors["collective traffic"] += [row.predicted / row.measured - 1 for row in traffic]
        if run_spec.layout.pp > 1:
            simulated = simulate_candidate(
                ResolvedRun(run_spec, run.ranks), candidate_from_run(ResolvedRun(run_spec, run.ranks))
            )
            errors[BUBBLE].append(float(simulated.bubble) - rows["bubble"])
    return errors


@dataclass(frozen=True)
class Comparison:
    """Table of runs, and the errors of predicted step time, tensor memory and process memory."""

    lines: str
    time: list[float]
    tensors: list[float]
    process: list[float]

    @property
    def both(self) -> str:
        """Number of layouts within the goals of step time and tensor memory, compared with the target."""
        pairs = zip(self.time, self.tensors, strict=True)
        near = sum(abs(time) <= TIME_GOAL and abs(memory) <= MEMORY_GOAL for time, memory in pairs)
        goals = f"{TIME_GOAL:.0%} of the step time and {MEMORY_GOAL:.0%} of the tensor memory"
        verdict = f"(target: at least {LEAST_GOOD}): {'met' if near >= LEAST_GOOD else 'missed'}"
        return f"{near} of {len(self.time)} layouts are within {goals} {verdict}"

    def __str__(self) -> str:
        return f"""{self.lines}

Step time: {describe_errors(self.time, TIME_GOAL)}.
Tensors: {describe_errors(self.tensors, MEMORY_GOAL)}.
Process: {describe_errors(self.process, MEMORY_GOAL)}."""


def compare_runs(runs: Sequence[MeasuredRun], seconds: Sequence[float], memory: Sequence[float]) -> Comparison:
    """Compare runs with predicted seconds and process bytes, and with the exact count of tensor bytes."""
    comparison = Comparison("", [], [], [])
    lines = [
        "| run | "
        + " | ".join(f"{column} | predicted | error %" for column in ("step time, s", "tensors, MiB", "process, MiB"))
        + " |",
        "|---" * 10 + "|",
    ]
    for run, time, process in zip(runs, seconds, memory, strict=True):
        assert run.tensor_bytes is not None
        cells = [run.name]
        for errors, predicted, measured, form, unit in (
            (comparison.time, time, run.step_seconds, ".3f", 1),
            (comparison.tensors, run.counted_peak_bytes, run.tensor_bytes, ".0f", MIB),
            (comparison.process, process, run.memory_bytes, ".0f", MIB),
        ):
            errors.append(predicted / measured - 1)
            cells += [f"{measured / unit:{form}}", f"{predicted / unit:{form}}", f"{100 * errors[-1]:+.1f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return replace(comparison, lines="\n".join(lines))


def describe_errors(errors: Sequence[float], goal: float) -> str:
    """Describe the number of errors within a goal, and the median and the worst error."""
    near = sum(abs(error) <= goal for error in errors)
    median = statistics.median(abs(error) for error in errors)
    return f"{near} of {len(errors)} within {goal:.0%}, median {median:.1%}, worst {max(map(abs, errors)):.1%}"


def uncalibrated(machine: ClusterSpec) -> ClusterSpec:
    """Return a machine without calibration except its peak FLOP/s, which every run measures at its start."""
    assert machine.calibration is not None
    nothing = {
        "time_constants": {},
        "identified_constants": [],
        "baseline_process_bytes": 0,
        "bytes_per_counted_byte": 1.0,
        "buffer_overhead": 0.0,
    }
    return machine.model_copy(update={"calibration": machine.calibration.model_copy(update=nothing)})


def write_section(page: Path, heading: str, body: str) -> None:
    """Write a section into a page: replace the section with this heading, or append it."""
    before, _, rest = page.read_text().partition(f"## {heading}\n")
    after = rest[rest.index("\n## ") :] if "\n## " in rest else ""
    page.write_text(f"{before.rstrip()}\n\n## {heading}\n\n{body}{after}")


def constants_of(machine: ClusterSpec) -> str:
    """List the constants that the calibration runs identify, whether or not they differ from the published fit."""
    times, decided = (
        time_constants_for(machine),
        machine.calibration.identified_constants if machine.calibration else [],
    )
    return ", ".join(f"{name} {getattr(times, name):.3g}" for name in decided)


def page(fitted: list[MeasuredRun], calibration: Calibration, held_out_runs: list[MeasuredRun]) -> str:
    """Return the page with all measurements and predictions."""
    seconds, widths, memory = zip(*(predict_run(calibration.machine, run) for run in held_out_runs), strict=True)
    held_out = compare_runs(held_out_runs, seconds, memory)
    inside = sum(
        low <= run.step_seconds <= high
        for run, time, width in zip(held_out_runs, seconds, widths, strict=True)
        for low, high in [(time / width, time * width)]
    )
    before = statistics.median(abs(b / run.step_seconds - 1) for b, run in zip(calibration.before, fitted, strict=True))
    measured = calibration.machine.calibration
    assert measured is not None
    process, share = measured.baseline_process_bytes / GIB, measured.bytes_per_counted_byte
    return f"""# Predicted and measured runs on one machine

Written by `python -m benchmarks.calibration`: {os.cpu_count()} cores, PyTorch {version("torch")}, Python
{platform.python_version()}; medians of {STEPS - 4} steps. Memory is that of rank 0. "Tensors" is the peak size of its
tensors, the value of `torch.cuda.max_memory_allocated` on a GPU; its prediction is an exact count without calibration.
"Process" is the peak memory of the process, including the gaps of its allocator. Its prediction is calibrated.

## Held-out layouts

{held_out}

{held_out.both}.
{inside} of {len(held_out_runs)} step times are within their 80 % interval.

## Layouts used for calibration

{compare_runs(fitted, list(calibration.after), list(calibration.memory))}

Before calibration, the median error of these step times was {before:.0%}. That plan had the peak FLOP/s that these
runs measured, default values for memory and links, and constants fitted to published runs on GPUs.

Identified constants: {constants_of(calibration.machine)}. A process needs
{process:.2f} GiB in addition to its tensors, and {share:.2f} bytes per counted tensor byte.
"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, calibrate and predict the runs, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("runs/calibration"), help="folder of the runs")
    parser.add_argument("--machine", help="as in phalanx calibrate")
    parser.add_argument(
        "--few", action="store_true", help="train fewer runs, and write only the section of docs/results/accuracy.md"
    )
    args = parser.parse_args(arguments)
    args.work.mkdir(parents=True, exist_ok=True)
    measured_runs: dict[ShortRun, MeasuredRun] = {}
    to_fit, to_predict = (CALIBRATED[::2], HELD_OUT[::3]) if args.few else (CALIBRATED, HELD_OUT)
    all_runs = [*to_fit, *to_predict]
    # In random order, because the speed of a machine that other programs use changes over time.
    for number, short in enumerate(random.Random(0).sample(all_runs, len(all_runs)), 1):
        run = measured_runs[short] = train(short, args.work)
        print(f"{number} of {len(all_runs)}, {run.name}: {run.step_seconds:.3f} s", flush=True)
    fitted, held_out_runs = [measured_runs[short] for short in to_fit], [measured_runs[short] for short in to_predict]
    machine = load_machine(args.machine) if args.machine else detect_cpu()
    sweeps = [sweep(short, args.work) for short in SWEPT]
    calibration, with_sweeps = calibrate(fitted, machine), calibrate(fitted, machine, sweeps)
    for operation in with_sweeps.operations:
        print(
            f"{operation.kind} in {operation.of}, {operation.count}: "
            f"off by {operation.before:.0%}, now {operation.after:.0%}"
        )
    write_machine(args.work / "machine.toml", calibration.machine, [run.name for run in fitted])
    if not args.few:
        text = page(fitted, calibration, held_out_runs)
        print(text)
        write_results(PAGE, text)
    directories = {args.work / short.name: measured_runs[short] for short in to_predict}
    table = held_out_errors(directories, uncalibrated(calibration.machine), calibration.machine, with_sweeps.machine)
    few = " --few" if args.few else ""
    section = LOOP_TEXT.format(runs=len(held_out_runs), fitted=len(fitted), sweeps=len(sweeps), table=table, few=few)
    print(section)
    LOOP.write_text(section)
    write_section(ACCURACY, LOOP_HEADING, section)


if __name__ == "__main__":
    main()
