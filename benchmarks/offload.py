"""Optimizer state on a local disk, four times as large as the memory that the run may use.

    python -m benchmarks.offload        # prints the table and writes docs/results/benchmarks/offload.md

The same run of `phalanx train` twice: in memory without a limit, and with layout.offload = "nvme" in a cgroup whose
limit is a quarter of the optimizer state. One rests (SIGSTOP) while the other does a step, in turn, so that whoever
else uses the machine slows both alike. Needs root (for the cgroup), 20 bytes of disk and 16 of memory per parameter.
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
from phalanx.cost.exact.parameters import count_parameters
from phalanx.spec.files.load import run_from_table
from phalanx.spec.files.write import to_toml
from phalanx.spec.run import RunSpec

LAYERS, WIDTH, FFN, SEQUENCE = 36, 1024, 2816, 256
STATE_BYTES_PER_PARAMETER = 12
"""The fp32 parameters that are trained, and Adam's two moments."""
SHARE = 4
"""State as a multiple of the limit."""
GOAL = 0.5
TRAIN = "from phalanx.cli.main import main; main()"
PAGE = Path(__file__).parents[1] / "docs" / "results" / "benchmarks" / "offload.md"


@dataclass(frozen=True)
class Step:
    """One step of one run."""

    seconds: float
    loss: float
    grad_norm: float
    optimizer_seconds: float
    read_bytes: int
    written_bytes: int


@dataclass
class Run:
    """A training run under way, which is let on step by step."""

    name: str
    limit: Limit
    directory: Path
    process: subprocess.Popen[bytes]
    steps: list[Step] = field(default_factory=list)
    peak_rss_bytes: int = 0

    def step(self) -> None:
        """Let it do one step more."""
        before, begun = self._disk_bytes(), time.perf_counter()
        self.process.send_signal(signal.SIGCONT)
        while len(records := self._records()) <= len(self.steps):
            if self.process.poll() is not None:
                raise RuntimeError(f"{self.name} ended with {self.process.returncode} after {len(self.steps)} steps")
            time.sleep(0.01)
        seconds = time.perf_counter() - begun
        self.process.send_signal(signal.SIGSTOP)
        after, record = self._disk_bytes(), records[-1]
        self.peak_rss_bytes = record["peak_memory_bytes"]
        self.steps.append(
            Step(
                seconds,
                record["loss"],
                record["grad_norm"],
                record["optimizer_seconds"],
                after[0] - before[0],
                after[1] - before[1],
            )
        )

    def end(self) -> None:
        """Its checkpoint is of no use."""
        self.process.kill()
        self.process.wait()

    def _records(self) -> list[dict[str, Any]]:
        file = self.directory / "metrics.jsonl"
        return [json.loads(line) for line in file.read_text().split("\n")[:-1]] if file.exists() else []

    def _disk_bytes(self) -> tuple[int, int]:
        lines = (line.split(": ") for line in Path(f"/proc/{self.process.pid}/io").read_text().splitlines())
        counts = {name: int(value) for name, value in lines}
        return counts["read_bytes"], counts["write_bytes"]


def described(out: Path, name: str, tokens: int, steps: int, offload: Path | None, layers: int) -> RunSpec:
    """The run, in memory or on disk."""
    model = {
        "vocab_size": 257,
        "hidden_size": WIDTH,
        "num_layers": layers,
        "num_heads": 16,
        "num_kv_heads": 16,
        "ffn_hidden_size": FFN,
        "max_seq_len": SEQUENCE,
    }
    rests = {"offload": "nvme", "offload_directory": str(offload)} if offload else {}
    return run_from_table(
        {
            "name": name,
            "output_dir": str(out),
            "model": model,
            "data": {"tokenizer": "bytes"},
            "training": {"steps": steps, "seq_len": SEQUENCE, "tokens_per_step": tokens, "precision": "bf16"},
            "layout": {"data_parallel": "zero2", "micro_batch_size": 2, "activation_checkpointing": "full", **rests},
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
    """Both runs in Markdown; medians of all steps but the first, which makes the state."""
    lines = [
        "| state rests | limit, GB | optimizer state, GB | state / limit | peak of the cgroup, GB | seconds per step "
        "| disk, GB read / written per step | GB/s in the update | speed |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for run in (memory, disk):
        limited = run is disk
        peak = run.limit.peak_bytes() or run.peak_rss_bytes
        read, written = middle(run, "read_bytes"), middle(run, "written_bytes")
        bandwidth = 2 * state_bytes / middle(run, "optimizer_seconds") / 1e9
        lines.append(
            f"| {'on disk' if limited else 'in memory'} | {limit_bytes / 1e9 if limited else 0:.2f} "
            f"| {state_bytes / 1e9:.2f} | {state_bytes / limit_bytes:.1f} | {peak / 1e9:.2f} "
            f"| {middle(run, 'seconds'):.1f} | {read / 1e9:.1f} / {written / 1e9:.1f} | {bandwidth:.2f} "
            f"| {ratio(memory, disk):.2f} |"
            if limited
            else f"| in memory | none | {state_bytes / 1e9:.2f} | | {peak / 1e9:.2f} | {middle(run, 'seconds'):.1f} "
            f"| | | 1 |"
        )
    return "\n".join(lines)


def middle(run: Run, name: str) -> float:
    """The median of one of its steps' figures."""
    return statistics.median(getattr(step, name) for step in run.steps[1:])


def ratio(memory: Run, disk: Run) -> float:
    """The speed on disk as a share of that in memory: the median over neighbouring steps."""
    pairs = zip(memory.steps[1:], disk.steps[1:], strict=True)
    return statistics.median(ours.seconds / theirs.seconds for ours, theirs in pairs)


def same(memory: Run, disk: Run) -> bool:
    """Whether both learned the same to the last bit."""
    learned = [[(step.loss, step.grad_norm) for step in run.steps] for run in (memory, disk)]
    return learned[0] == learned[1]


def page(memory: Run, disk: Run, total: int, limit_bytes: int, tokens: int) -> str:
    """What is written to docs/."""
    share = ratio(memory, disk)
    state_bytes = STATE_BYTES_PER_PARAMETER * total
    seconds = [" / ".join(f"{step.seconds:.1f}" for step in run.steps[1:]) for run in (memory, disk)]
    return f"""# Optimizer state on a local disk, four times the memory limit

{table(memory, disk, state_bytes, limit_bytes)}

Speed on disk: {share:.2f} of that in memory (goal: at least {GOAL}). Losses and gradient norms of all
{len(disk.steps)} steps identical to the last bit: {"yes" if same(memory, disk) else "no"}.

- {total / 1e6:.0f} M parameters ({WIDTH} wide), bf16, `layout.data_parallel = "zero2"`, \
one rank of one thread; {tokens:,}
  tokens per update in forward passes of {2 * SEQUENCE}, blocks recomputed. More tokens per update make the ratio
  better: what is read and written per update stays the same but for the gradients.
- The limit is of {disk.limit.kind}: all memory of the process, Python and PyTorch (about 0.25 GB) and its page cache
  included. The bf16 weights (2 bytes per parameter) stay in memory; {STATE_BYTES_PER_PARAMETER} bytes of state and 2 of
  gradients per parameter rest on disk.
- The two runs did their steps in turn, one stopped while the other worked; seconds of the steps after the first: in
  memory {seconds[0]}, on disk {seconds[1]}. The ratio is the median over neighbouring steps.
- Read and written: what the kernel counted for the process (gradients too: once per forward pass). GB/s: the state,
  read and written, over the seconds of the update.
- Machine: {platform.machine()}, {os.cpu_count()} cores, torch {version("torch")}, Python {platform.python_version()}.
- Again: `python -m benchmarks.offload --tokens {tokens}`.
"""


def measure(runs: Sequence[Run], steps: int) -> None:
    """A step of each in turn. They start one after the other: the first step includes that."""
    for number in range(steps):
        for run in runs:
            run.step()
            print(f"{run.name} {number + 1}: {run.steps[-1]}", flush=True)


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser("benchmarks.offload")
    parser.add_argument("--tokens", type=int, default=4096, help="tokens per update")
    parser.add_argument("--steps", type=int, default=4, help="steps of each run, the first to warm up")
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--directory", type=Path, help="where files lie (default: a temporary directory)")
    parser.add_argument("--no-page", action="store_true", help="only print")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=asked.directory) as place, ExitStack() as stack:
        out = Path(place)
        # One step more than is measured: neither reaches its end, where it would evaluate and save.
        cut = (asked.tokens, asked.steps + 1)
        described_memory = described(out, "memory", *cut, None, asked.layers)
        described_disk = described(out, "disk", *cut, out, asked.layers)
        total = count_parameters(described_disk.model).total
        limit_bytes = STATE_BYTES_PER_PARAMETER * total // SHARE
        limits = [stack.enter_context(memory_limit(limit)) for limit in (None, limit_bytes)]
        if limits[1].kind != "cgroup":
            sys.exit("benchmarks.offload: RLIMIT_DATA counts memory that is never used; run as root, for a cgroup")
        runs = []
        for run, limit in zip((described_memory, described_disk), limits, strict=True):
            runs.append(start(run, limit))
            stack.callback(runs[-1].end)
            runs[-1].step()
            print(f"{run.name}: started, one step done", flush=True)
        measure(runs, asked.steps - 1)
        text = page(runs[0], runs[1], total, limit_bytes, asked.tokens)
    print(text)
    if not asked.no_page:
        PAGE.parent.mkdir(parents=True, exist_ok=True)
        PAGE.write_text(text)


if __name__ == "__main__":
    main()
