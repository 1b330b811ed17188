"""Time the training steps of torchtitan on one GPU, started from its command line, with the same model and batch."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.gpu.harness import COMMAND_SECONDS, NotRunError, real_or_dry
from benchmarks.gpu.shapes import STEPS, WARM_UP, Shape
from phalanx.plan.export.export import export
from phalanx.spec.resolved_run import ResolvedRun

CONFIG_MODULE, CONFIG_FUNCTION = "phalanx_run", "run"
STEP_LINE = re.compile(r"step: +(\d+) .* memory: +([\d.]+)GiB.* tps: ([\d,]+) ")
"""Line of a step in the log of torchtitan 0.3.0, without colors."""
ERROR_LINE = re.compile(r"^(?:\[rank\d+\]: ?)?((?:\w+\.)*\w*(?:Error|Exception|Exhausted)\b.*)", re.MULTILINE)
"""Last line of a Python traceback."""
LAUNCHER_ERROR = "ChildFailedError"
"""Error of torchrun, which only reports that a rank failed."""


@dataclass(frozen=True)
class StepMetrics:
    """Metrics of a step in the log of torchtitan."""

    step: int
    tokens_per_second: float
    reserved_gib: float
    """Peak GPU memory that PyTorch's allocator reserved."""


def time_torchtitan(shape: Shape) -> dict[str, Any]:
    """Return the times and memory of torchtitan's steps, under the names that `one_speed` prints.

    Raises NotRunError where torchtitan is not installed, fails or takes longer than COMMAND_SECONDS.
    """
    if find_spec("torchtitan") is None:
        raise NotRunError("torchtitan is not installed")
    with tempfile.TemporaryDirectory() as folder:
        write_inputs(Path(folder), shape)
        steps = parse_log(run_torchtitan(Path(folder)))
    if len(steps) < WARM_UP + STEPS:
        raise NotRunError(f"torchtitan's log has {len(steps)} steps of {WARM_UP + STEPS}")
    return {
        "seconds": shape.tokens / median(step.tokens_per_second for step in steps[-STEPS:]),
        "first": shape.tokens / steps[0].tokens_per_second,
        "peak_bytes": max(step.reserved_gib for step in steps) * 2**30,
    }


def write_inputs(folder: Path, shape: Shape) -> None:
    """Write the exported configuration, a tokenizer whose tokens are numbers, and rows of random tokens.

    Each row is one document, because torchtitan masks documents.
    """
    (folder / f"{CONFIG_MODULE}.py").write_text(export(ResolvedRun(shape.run(compile=True), 1), "torchtitan").text)
    vocabulary = {str(token): token for token in range(shape.model.vocab_size)}
    tokenizer = {
        "version": "1.0",
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "0"},
        "pre_tokenizer": {"type": "WhitespaceSplit"},
    }
    (folder / "tokenizer").mkdir()
    (folder / "tokenizer" / "tokenizer.json").write_text(json.dumps(tokenizer))
    dice = np.random.default_rng(0)
    (folder / "data").mkdir()
    with (folder / "data" / "rows.jsonl").open("w") as file:
        for _ in range(shape.tokens // shape.seq_len * (WARM_UP + STEPS + 1)):
            tokens = dice.integers(0, shape.model.vocab_size, shape.seq_len + 1)
            file.write(json.dumps({"text": " ".join(map(str, tokens.tolist()))}) + "\n")


def command(folder: Path) -> list[str]:
    """Return the command line of torchtitan for the files of `write_inputs`."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
    data = ["--dataloader.dataset", "c4_test", "--dataloader.dataset_path", str(folder / "data")]
    return [
        *launcher,
        *("-m", "torchtitan.train", "--module", CONFIG_MODULE, "--config", CONFIG_FUNCTION),
        *data,
        *("--dataloader.num_workers", "2", "--dataloader.pin_memory"),
        *("--hf_assets_path", str(folder / "tokenizer"), "--dump_folder", str(folder / "outputs")),
        *("--metrics.log_freq", "1", "--metrics.disable_color_printing"),
        *real_or_dry((), ("--training.disable_cuda_graphs",)),  # not supported by the null GPU
    ]


def run_torchtitan(folder: Path) -> str:
    """Train in `folder`, and return the log. Raises NotRunError."""
    offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "huggingface")}
    with subprocess.Popen(
        command(folder),
        cwd=folder,
        env=os.environ | offline,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            log, _ = process.communicate(timeout=COMMAND_SECONDS)
        except subprocess.TimeoutExpired:
            process.terminate()  # torchrun then stops its rank, which would stay on the GPU after a kill
            process.communicate()
            raise NotRunError(f"torchtitan took longer than {COMMAND_SECONDS:.0f} s") from None
    if process.returncode:
        print(log[-1500:], file=sys.stderr, flush=True)
        raise NotRunError(f"torchtitan failed: {failure_reason(log)}")
    return log


def parse_log(log: str) -> list[StepMetrics]:
    """Return the metrics of each step in torchtitan's log."""
    return [
        StepMetrics(int(step), float(rate.replace(",", "")), float(memory))
        for step, memory, rate in STEP_LINE.findall(log)
    ]


def failure_reason(log: str) -> str:
    """Return the last error of a rank in a log of torchrun; without one, the last line."""
    errors = [error for error in ERROR_LINE.findall(log) if LAUNCHER_ERROR not in error]
    return (errors or log.strip().splitlines() or ["it printed nothing"])[-1][:200]
