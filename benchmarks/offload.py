"""Measure training with optimizer state on a local disk that is four times as large as the memory limit.

    python -m benchmarks.offload        # prints the table and writes docs/results/benchmarks/offload.md

The same run of `phalanx train` runs twice: in memory without a limit, and with layout.offload = "nvme" in a cgroup. The
limit of the cgroup is a quarter of the optimizer state. The runs take turns: one is stopped (SIGSTOP) during a step of
the other, so that other programs slow both runs equally. Needs root for the cgroup, and 20 bytes of disk and 16 of
memory per parameter.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.limit import Limit, memory_limit
from benchmarks.pages import write_results
from phalanx.cost.exact.parameters import count_parameters
from phalanx.spec.files.load import run_from_table
from phalanx.spec.files.write import to_toml
from phalanx.spec.run import RunSpec

LAYERS, WIDTH, FFN, SEQUENCE = 36, 1024, 2816, 256
STATE_BYTES_PER_PARAMETER = 12
"""Bytes of the fp32 master weights and Adam's two moments."""
SHARE = 4
"""State as a multiple of the limit."""
GOAL = 0.5
TRAIN = "from phalanx.cli.main import main; main()"
PAGE = Path(__file__).parents[1] / "docs" / "results" / "benchmarks" / "offload.md"


@dataclass(frozen=True)
class Step:
    """Measurements of one step of one run."""

    seconds: float
    loss: float
    grad_norm: float
    optimizer_seconds: float
    read_bytes: int
    written_bytes: int


@dataclass
class Run:
    """Training process that is continued step by step."""

    name: str
    limit: Limit
    directory: Path
    process: subprocess.Popen[bytes]
    steps: list[Step] = field(default_factory=list)
    peak_rss_bytes: int = 0

    def step(self) -> None:
        """Continue the process for one step."""
        disk_before, start = self._disk_bytes(), time.perf_counter()
        self.process.send_signal(signal.SIGCONT)
        while len(records := self._records()) <= len(self.steps):
            if self.process.poll() is not None:
                raise RuntimeError(f"{self.name} ended with {self.process.returncode} after {len(self.steps)} steps")
            time.sleep(0.01)
        seconds = time.perf_counter() - start
        self.process.send_signal(signal.SIGSTOP)
        disk_after, record = self._disk_bytes(), records[-1]
        self.peak_rss_bytes = record["peak_memory_bytes"]
        self.steps.append(
            Step(
                seconds,
                record["loss"],
                record["grad_norm"],
                record["optimizer_seconds"],
                disk_after[0] - disk_before[0],
                disk_after[1] - disk_before[1],
            )
        )

    def end(self) -> None:
        """Kill the process, whose checkpoint is not needed."""
        self.process.kill()
        self.process.wait()

    def _records(self) -> list[dict[str, Any]]:
        file = self.directory / "metrics.jsonl"
        return [json.loads(line) for line in file.read_text().split("\n")[:-1]] if file.exists() else []

    def _disk_bytes(self) -> tuple[int, int]:
        lines = (line.split(": ") for line in Path(f"/proc/{self.process.pid}/io").read_text().splitlines())
        counts = {name: int(value) for name, value in lines}
        return counts["read_bytes"], counts["write_bytes"]


def make_run(out: Path, name: str, tokens: int, steps: int, offload: Path | None, layers: int) -> RunSpec:
    """Return the run with its state in memory or on disk."""
    model = {
        "vocab_size": 257,
        "hidden_size": WIDTH,
        "num_layers": layers,
        "num_heads": 16,
        "num_kv_heads": 16,
        "ffn_hidden_size": FFN,
        "max_seq_len": SEQUENCE,
    }
    offload_fields = {"offload": "nvme", "offload_directory": str(offload)} if offload else {}
    return run_from_table(
        {
            "name": name,
            "output_dir": str(out),
            "model": model,
            "data": {"tokenizer": "bytes"},
            "training": {"steps": steps, "seq_len": SEQUENCE, "tokens_per_step": tokens, "precision": "bf16"},
            "layout": {
                "data_parallel": "zero2",
                "micro_batch_size": 2,
                "activation_checkpointing": "full",
                **offload_fields,
            },
            "optimizer": {"warmup_steps": 1, "learning_rate": 3e-4},
            "evaluation": {"tokens": 1024},
            "checkpoint": {"every": 0},
            "cluster": {"device": "cpu", "nproc_per_node": 1, "peak_flops": 1e12},
        }
    )


def start(run: RunSpec, limit: Limit) -> Run:
    """Start a run."""
    out = Path(run.output_dir)
    file = out / f"{run.name}.toml"
    file.write_text(to_toml(run))
    with (out / f"{run.name}.txt").open("wb") as log:
        command = [*limit.prefix, sys.executable, "-c", TRAIN, "train", str(file)]
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    return Run(run.name, limit, out / run.name, process)


def table(memory: Run, disk: Run, state_bytes: int, limit_bytes: int) -> str:
    """Format both runs as a Markdown table: medians of all steps except the first, which creates the state."""
    lines = [
        "| state | limit, GB | optimizer state, GB | state / limit | peak of the cgroup, GB | seconds per step "
        "| disk, GB read / written per step | GB/s in the update | relative speed |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for run in (memory, disk):
        limited = run is disk
        peak = run.limit.peak_bytes() or run.peak_rss_bytes
        read, written = median_of(run, "read_bytes"), median_of(run, "written_bytes")
        bandwidth = 2 * state_bytes / median_of(run, "optimizer_seconds") / 1e9
        lines.append(
            f"| {'on disk' if limited else 'in memory'} | {limit_bytes / 1e9 if limited else 0:.2f} "
            f"| {state_bytes / 1e9:.2f} | {state_bytes / limit_bytes:.1f} | {peak / 1e9:.2f} "
            f"| {median_of(run, 'seconds'):.1f} | {read / 1e9:.1f} / {written / 1e9:.1f} | {bandwidth:.2f} "
            f"| {ratio(memory, disk):.2f} |"
            if limited
            else f"| in memory | none | {state_bytes / 1e9:.2f} | | {peak / 1e9:.2f} | {median_of(run, 'seconds'):.1f} "
            f"| | | 1 |"
        )
    return "\n".join(lines)


def median_of(run: Run, name: str) -> float:
    """Return the median of a field over the steps."""
    return statistics.median(getattr(step, name) for step in run.steps[1:])


def ratio(memory: Run, disk: Run) -> float:
    """Return the speed on disk relative to that in memory: the median over neighboring steps."""
    pairs = zip(memory.steps[1:], disk.steps[1:], strict=True)
    return statistics.median(memory_step.seconds / disk_step.seconds for memory_step, disk_step in pairs)


def has_equal_losses(memory: Run, disk: Run) -> bool:
    """Return whether the losses and gradient norms of both runs are bitwise equal."""
    results = [[(step.loss, step.grad_norm) for step in run.steps] for run in (memory, disk)]
    return results[0] == results[1]


def page(memory: Run, disk: Run, total: int, limit_bytes: int, tokens: int) -> str:
    """Return the page of the benchmark."""
    share = ratio(memory, disk)
    state_bytes = STATE_BYTES_PER_PARAMETER * total
    seconds = [" / ".join(f"{step.seconds:.1f}" for step in run.steps[1:]) for run in (memory, disk)]
    return f"""# Optimizer state on a local disk, four times the memory limit

{table(memory, disk, state_bytes, limit_bytes)}

The speed with the state on disk is {share:.2f} of that in memory (goal: at least {GOAL}). Losses and gradient norms of
all {len(disk.steps)} steps are bitwise equal: {"yes" if has_equal_losses(memory, disk) else "no"}.

- The model has {total / 1e6:.0f} M parameters and width {WIDTH}. One rank with one thread trains it in bf16 with
  `layout.data_parallel = "zero2"` and recomputed blocks. An update has {tokens:,}
  tokens, in forward passes of {2 * SEQUENCE}. More tokens per update improve the ratio, because the disk traffic per
  update stays constant except for the gradients.
- The limit is that of a {disk.limit.kind}. It covers all memory of the process, including Python and PyTorch (about
  0.25 GB) and the page cache. The bf16 weights (2 bytes per parameter) stay in memory. Optimizer state
  ({STATE_BYTES_PER_PARAMETER} bytes per parameter) and gradients (2 bytes per parameter) are on disk.
- The two runs took turns: one was stopped during a step of the other. Seconds of the steps after the first: in
  memory {seconds[0]}, on disk {seconds[1]}. The ratio is the median over neighboring steps.
- Read and written bytes are the kernel's counts for the process, including gradients once per forward pass. GB/s is the
  size of the state, read and written, divided by the seconds of the update.
- Machine: {platform.machine()}, {os.cpu_count()} cores, torch {version("torch")}, Python {platform.python_version()}.
- Written by `python -m benchmarks.offload --tokens {tokens}`.
"""


def measure(runs: Sequence[Run], steps: int) -> None:
    """Run the steps of all runs in turn."""
    for number in range(steps):
        for run in runs:
            run.step()
            print(f"{run.name} {number + 1}: {run.steps[-1]}", flush=True)


def main() -> None:
    """Measure, print the table and write the page."""
    parser = argparse.ArgumentParser("benchmarks.offload")
    parser.add_argument("--tokens", type=int, default=4096, help="tokens per update")
    parser.add_argument("--steps", type=int, default=4, help="steps per run, including one warm-up step")
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--directory", type=Path, help="folder of the files (default: a temporary directory)")
    parser.add_argument("--no-page", action="store_true", help="only print")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.directory) as directory, ExitStack() as stack:
        out = Path(directory)
        # One more step than is measured, so that no run reaches its end, where it would evaluate and save.
        tokens_and_steps = (args.tokens, args.steps + 1)
        described_memory = make_run(out, "memory", *tokens_and_steps, None, args.layers)
        described_disk = make_run(out, "disk", *tokens_and_steps, out, args.layers)
        total = count_parameters(described_disk.model).total
        limit_bytes = STATE_BYTES_PER_PARAMETER * total // SHARE
        limits = [stack.enter_context(memory_limit(limit)) for limit in (None, limit_bytes)]
        if limits[1].kind != "cgroup":
            sys.exit("benchmarks.offload: RLIMIT_DATA counts unused memory. Run as root, which allows a cgroup.")
        runs = []
        for run, limit in zip((described_memory, described_disk), limits, strict=True):
            runs.append(start(run, limit))
            stack.callback(runs[-1].end)
            runs[-1].step()
            print(f"{run.name}: started, one step done", flush=True)
        measure(runs, args.steps - 1)
        text = page(runs[0], runs[1], total, limit_bytes, args.tokens)
    print(text)
    if not args.no_page:
        write_results(PAGE, text)


if __name__ == "__main__":
    main()
