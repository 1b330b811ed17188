"""Predicted beside measured on this machine, of layouts that the planner was not calibrated on.

    python -m benchmarks.calibration           # prints the tables and writes docs/results/benchmarks/calibration.md,
                                               # and the section of docs/results/accuracy.md on before and after

Short runs of `phalanx train` with 2 and 4 processes, a dense model and one with experts. The first of them go to
`phalanx calibrate`; the others are predicted, then looked at. Runs that are done are kept (--work), so that one that
is interrupted goes on.
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

from phalanx.plan.calibrate.calibrate import Calibration, calibrate, detect_cpu, predict_run, write_machine
from phalanx.plan.calibrate.measured_run import MIN_WAIT_FRACTION, MeasuredRun
from phalanx.plan.calibrate.microbenchmarks import BenchmarkFile, read_benchmark_file
from phalanx.plan.predicted_vs_measured import compare_with_prediction
from phalanx.plan.search.candidates import candidate_from_run
from phalanx.plan.search.evaluate import evaluate_layout
from phalanx.plan.search.pipeline_simulation import simulate_candidate
from phalanx.plan.tables.job_columns import time_constants_for
from phalanx.report.facts import step_rows
from phalanx.report.measured_run import read_measured_run, with_measured_parts
from phalanx.report.run_data import read_run
from phalanx.report.step_breakdown import step_times
from phalanx.spec.cluster import ClusterSpec
from phalanx.spec.files.load import load_machine
from phalanx.spec.formatting import GIB

MIB = 2**20
LOOP, ACCURACY = Path(__file__).with_name("loop.md"), Path(__file__).parents[1] / "docs" / "results" / "accuracy.md"
LOOP_HEADING = "Before and after calibrate"
LOOP_TEXT = """{runs} runs of `python -m benchmarks.calibration{few}` that were not calibrated on, held against the plan
that knows this machine's peak alone, against the plan after `phalanx calibrate` of {fitted} others, of which two steps
each were looked at closely, and against that with {sweeps} files of `phalanx bench` beside them. Computing and
waiting are told apart where every rank has a core of its own. Bytes, and those of tensors, are counted: no calibration
changes them.

{table}
"""
BUBBLE = "bubble of a pipeline"
SENT = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send")
PAGE = Path(__file__).parents[1] / "docs" / "results" / "benchmarks" / "calibration.md"
STEPS, CLOSELY = 14, "5:6"
"""Two do not count, one is measured from inside, and two are looked at closely, of which that is the first."""
TIME_GOAL, MEMORY_GOAL = 0.10, 0.05
LEAST_GOOD = 20
"""Layouts that are to be within both goals."""
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
class Short:
    """A run to make: model, processes, layout."""

    model: str
    ranks: int
    layout: str

    @property
    def name(self) -> str:
        return f"{self.model}-{self.ranks}-{self.layout}".replace("=", "").replace(",", "-")

    def __str__(self) -> str:
        return f"{self.model}, {self.ranks} processes: {self.layout}"


def _all(model: str, ranks: int, *layouts: str) -> list[Short]:
    return [Short(model, ranks, layout) for layout in layouts]


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


def command_of(words: Sequence[str], short: Short, work: Path) -> None:
    """A command of ours on the run file of a layout."""
    file = work / f"{short.name}.toml"
    file.write_text(RUN.format(model=MODELS[short.model], steps=STEPS))
    chosen = [f"name={short.name}", f"output_dir={work}", *(f"layout.{choice}" for choice in short.layout.split(","))]
    given = ["--nproc", str(short.ranks), *(f"--set={choice}" for choice in chosen)]
    command = [sys.executable, "-m", "phalanx", words[0], str(file), *words[1:], *given]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment, check=False)
    if done.returncode:
        raise SystemExit(f"{short}: {done.stderr[-2000:]}")


def sweep(short: Short, work: Path) -> BenchmarkFile:
    """What `phalanx bench` finds for a layout, unless it is there."""
    file = work / f"{short.name}.json"
    if not file.exists():
        command_of(["bench", "--sweep", "4KiB:4MiB", "--out", str(file)], short, work)
    return read_benchmark_file(file)


def train(short: Short, work: Path) -> MeasuredRun:
    """Make a run, unless it is there."""
    directory = work / short.name
    if not (directory / "done").exists():
        shutil.rmtree(directory, ignore_errors=True)
        command_of(["train", "--profile-memory", "--profile-steps", CLOSELY], short, work)
        shutil.rmtree(directory / "checkpoints")
        (directory / "done").touch()
    return with_measured_parts(replace(read_measured_run(directory), name=str(short)), directory)


@dataclass(frozen=True)
class Loop:
    """How far off a plan is on runs, with what is known of the machine before and after `phalanx calibrate`: predicted
    / measured - 1, but of bubbles the difference of shares."""

    before: dict[str, list[float]]
    after: dict[str, list[float]]
    measured: dict[str, list[float]]
    """With what `phalanx bench` found, too."""

    def __str__(self) -> str:
        lines = ["| | runs | median error before | after | with `measure` |", "|---|---:|---:|---:|---:|"]
        for what, errors in self.before.items():
            unit = " points" if what == BUBBLE else " %"
            each = (statistics.median(map(abs, found[what])) for found in (self.before, self.after, self.measured))
            cells = " | ".join(f"{100 * error:.1f}{unit}" for error in each)
            lines.append(f"| {what} | {len(errors)} | {cells} |")
        return "\n".join(lines)


def loop(runs: dict[Path, MeasuredRun], before: ClusterSpec, after: ClusterSpec, measured: ClusterSpec) -> Loop:
    """The errors on runs that were not calibrated on, with the machine as it is known without a run (but for its peak,
    which every run measures), as other runs showed it, and as `phalanx bench` did beside them."""
    return Loop(*(_errors(runs, machine) for machine in (before, after, measured)))


def _errors(runs: dict[Path, MeasuredRun], machine: ClusterSpec) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {
        "step time": [],
        "computing": [],
        "waiting for collectives": [],
        "memory of a process": [],
        "memory of tensors": [],
        "bytes of a collective": [],
        BUBBLE: [],
    }
    for directory, run in runs.items():
        cluster = machine.model_copy(update={"nodes": 1, "nproc_per_node": run.ranks})
        own = run.run.model_copy(update={"cluster": cluster})
        option = evaluate_layout(own, run.ranks, own.layout)
        recorded = read_run(directory)
        rows = {row.quantity: row.measured for row in step_rows(recorded, step_times(recorded), None, None)}
        found["step time"].append(option.step_seconds / run.step_seconds - 1)
        if run.ranks <= (machine.cores or 1):
            found["computing"].append(option.parts["compute"] / run.computing_seconds - 1)
            if run.waiting_seconds > MIN_WAIT_FRACTION * run.step_seconds:
                waiting = option.parts["exchange"] + option.parts["data_parallel"]
                found["waiting for collectives"].append(waiting / run.waiting_seconds - 1)
        found["memory of a process"].append(option.memory_bytes / run.memory_bytes - 1)
        found["memory of tensors"].append(run.counted_peak_bytes / (run.tensor_bytes or 1) - 1)
        sent = [
            row
            for row in compare_with_prediction(own, run.ranks, recorded.measured)
            if row.quantity in SENT and row.predicted
        ]
        found["bytes of a collective"] += [row.predicted / row.measured - 1 for row in sent]
        if own.layout.pp > 1:
            planned = simulate_candidate(own, run.ranks, candidate_from_run(own, run.ranks))
            found[BUBBLE].append(float(planned.bubble) - rows["bubble"])
    return found


@dataclass(frozen=True)
class Compared:
    """A table of runs, and how far predictions are off: time, tensors, the process."""

    lines: str
    time: list[float]
    tensors: list[float]
    process: list[float]

    @property
    def both(self) -> str:
        """How many layouts are within the goals of time and of tensors, beside the target."""
        pairs = zip(self.time, self.tensors, strict=True)
        near = sum(abs(time) <= TIME_GOAL and abs(held) <= MEMORY_GOAL for time, held in pairs)
        said = f"{near} of {len(self.time)} within both {TIME_GOAL:.0%} of time and {MEMORY_GOAL:.0%} of tensors"
        return f"{said} (target: at least {LEAST_GOOD}): {'met' if near >= LEAST_GOOD else 'missed'}"

    def __str__(self) -> str:
        return f"""{self.lines}

Step time: {within(self.time, TIME_GOAL)}.
Tensors: {within(self.tensors, MEMORY_GOAL)}.
Process: {within(self.process, MEMORY_GOAL)}."""


def compared(runs: Sequence[MeasuredRun], seconds: Sequence[float], memory: Sequence[float]) -> Compared:
    """Runs beside predicted seconds and bytes of the process; tensors are as they are counted."""
    found = Compared("", [], [], [])
    lines = [
        "| run | "
        + " | ".join(f"{what} | predicted | error %" for what in ("step s", "tensors MiB", "process MiB"))
        + " |",
        "|---" * 10 + "|",
    ]
    for run, time, process in zip(runs, seconds, memory, strict=True):
        assert run.tensor_bytes is not None
        cells = [run.name]
        for errors, said, measured, form, unit in (
            (found.time, time, run.step_seconds, ".3f", 1),
            (found.tensors, run.counted_peak_bytes, run.tensor_bytes, ".0f", MIB),
            (found.process, process, run.memory_bytes, ".0f", MIB),
        ):
            errors.append(said / measured - 1)
            cells += [f"{measured / unit:{form}}", f"{said / unit:{form}}", f"{100 * errors[-1]:+.1f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return replace(found, lines="\n".join(lines))


def within(errors: Sequence[float], goal: float) -> str:
    """How many errors are within a goal, in words."""
    near = sum(abs(error) <= goal for error in errors)
    median = statistics.median(abs(error) for error in errors)
    return f"{near} of {len(errors)} within {goal:.0%}, median {median:.1%}, worst {max(map(abs, errors)):.1%}"


def not_calibrated(machine: ClusterSpec) -> ClusterSpec:
    """A machine of which only the peak is known, that every run measures when it begins."""
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
    """Put a section in a page, in place of the one with its heading, or at the end."""
    before, _, rest = page.read_text().partition(f"## {heading}\n")
    after = rest[rest.index("\n## ") :] if "\n## " in rest else ""
    page.write_text(f"{before.rstrip()}\n\n## {heading}\n\n{body}{after}")


def constants_of(machine: ClusterSpec) -> str:
    """What runs decided, moved or not from where published runs put it."""
    times, decided = (
        time_constants_for(machine),
        machine.calibration.identified_constants if machine.calibration else [],
    )
    return ", ".join(f"{name} {getattr(times, name):.3g}" for name in decided)


def page(fitted: list[MeasuredRun], found: Calibration, others: list[MeasuredRun]) -> str:
    """All that was measured and predicted."""
    seconds, widths, memory = zip(*(predict_run(found.machine, run) for run in others), strict=True)
    held_out = compared(others, seconds, memory)
    inside = sum(
        low <= run.step_seconds <= high
        for run, time, width in zip(others, seconds, widths, strict=True)
        for low, high in [(time / width, time * width)]
    )
    before = statistics.median(abs(b / run.step_seconds - 1) for b, run in zip(found.before, fitted, strict=True))
    measured = found.machine.calibration
    assert measured is not None
    process, share = measured.baseline_process_bytes / GIB, measured.bytes_per_counted_byte
    return f"""# Predicted beside measured, on one machine

Written by `python -m benchmarks.calibration`: {os.cpu_count()} cores, PyTorch {version("torch")}, Python
{platform.python_version()}; medians of {STEPS - 4} steps. Memory is of rank 0: the most that its tensors hold at one
time (what `torch.cuda.max_memory_allocated` says on a GPU), counted without any calibration; and the most that the
process holds, with the gaps of its allocator, which is calibrated.

## Layouts that were not calibrated on

{held_out}

{held_out.both}.
{inside} of {len(others)} step times lie within their 80 % interval.

## Layouts that were calibrated on

{compared(fitted, list(found.after), list(found.memory))}

Before, with the peak that these runs measured, guesses of memory and links, and constants of published runs on GPUs,
the median error of their step times was {before:.0%}.

Measured: {constants_of(found.machine)}. A process has
{process:.2f} GiB beside its tensors, and {share:.2f} bytes for each that is counted.
"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, calibrate, predict, write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("runs/calibration"), help="where the runs lie")
    parser.add_argument("--machine", help="as of phalanx calibrate")
    parser.add_argument(
        "--few", action="store_true", help="fewer runs, and only the section of docs/results/accuracy.md"
    )
    given = parser.parse_args(arguments)
    given.work.mkdir(parents=True, exist_ok=True)
    made: dict[Short, MeasuredRun] = {}
    to_fit, to_predict = (CALIBRATED[::2], HELD_OUT[::3]) if given.few else (CALIBRATED, HELD_OUT)
    every = [*to_fit, *to_predict]
    # In mixed order: a machine that others use too is slower at one time than at another.
    for at, short in enumerate(random.Random(0).sample(every, len(every)), 1):
        run = made[short] = train(short, given.work)
        print(f"{at} of {len(every)}, {run.name}: {run.step_seconds:.3f} s", flush=True)
    fitted, others = [made[short] for short in to_fit], [made[short] for short in to_predict]
    known = load_machine(given.machine) if given.machine else detect_cpu()
    sweeps = [sweep(short, given.work) for short in SWEPT]
    found, with_sweeps = calibrate(fitted, known), calibrate(fitted, known, sweeps)
    for each in with_sweeps.operations:
        print(f"{each.kind} in {each.of}, {each.count}: off by {each.before:.0%}, now {each.after:.0%}")
    write_machine(given.work / "machine.toml", found.machine, [run.name for run in fitted])
    if not given.few:
        text = page(fitted, found, others)
        print(text)
        PAGE.write_text(text)
    directories = {given.work / short.name: made[short] for short in to_predict}
    table = loop(directories, not_calibrated(found.machine), found.machine, with_sweeps.machine)
    few = " --few" if given.few else ""
    section = LOOP_TEXT.format(runs=len(others), fitted=len(fitted), sweeps=len(sweeps), table=table, few=few)
    print(section)
    LOOP.write_text(section)
    write_section(ACCURACY, LOOP_HEADING, section)


if __name__ == "__main__":
    main()
