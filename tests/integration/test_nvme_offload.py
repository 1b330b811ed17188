"""Optimizer state on disk, end to end: a run whose state is larger than its memory limit, and a full disk."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from benchmarks.limit import base_bytes, memory_limit
from phalanx.cost.exact.model_state import checkpoint_bytes
from phalanx.cost.exact.parameters import count_parameters
from phalanx.cost.exact.rank_memory import rank_memory
from phalanx.runs.checkpoints import checkpoints, find_damage
from phalanx.spec.files.load import load_run, run_from_table
from phalanx.spec.files.write import to_toml
from phalanx.spec.resolved_run import ResolvedRun
from phalanx.testing.processes import wait_until

PHALANX = [sys.executable, "-c", "from phalanx.cli.main import main; main()"]
MODEL = {
    "vocab_size": 257,
    "hidden_size": 512,
    "num_layers": 20,
    "num_heads": 8,
    "num_kv_heads": 8,
    "ffn_hidden_size": 1408,
    "max_seq_len": 64,
}
SMALL_MODEL = {**MODEL, "hidden_size": 128, "num_layers": 4, "num_heads": 4, "num_kv_heads": 4, "ffn_hidden_size": 512}
HEADROOM_BYTES = 150 * 2**20
"""Memory for everything except weights and the base of Python and torch: activations, pieces in transfer, and pages
that a busy disk has not written yet."""


def write_run_file(directory: Path, name: str, model: dict[str, int], offload: Path | None, **training: int) -> Path:
    """Write the run file of a short run."""
    offload_fields = {"offload": "nvme", "offload_directory": str(offload)} if offload else {}
    run = run_from_table(
        {
            "name": name,
            "output_dir": str(directory),
            "model": model,
            "data": {"train": [str(Path(json.__file__).parent)], "tokenizer": "bytes", "cache": str(directory)},
            "training": {"steps": 2, "seq_len": 8, "tokens_per_step": 32, **training},
            "layout": {
                "data_parallel": "zero2",
                "micro_batch_size": 2,
                "activation_checkpointing": "full",
                **offload_fields,
            },
            "optimizer": {"warmup_steps": 1},
            "evaluation": {"tokens": 16},
            "cluster": {"device": "cpu", "nproc_per_node": 1, "peak_flops": 1e12},
            "recovery": {"max_restarts": 0},  # no launcher, which would need memory of its own
        }
    )
    file = directory / f"{name}.toml"
    file.write_text(to_toml(run))
    return file


def run_train(file: Path, *options: str, prefix: list[str] | None = None) -> subprocess.CompletedProcess[str]:
    command = [*(prefix or []), *PHALANX, "train", str(file), *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=600)


def recorded_metrics(directory: Path, name: str) -> list[tuple[Any, ...]]:
    """Return the exact losses and gradient norms that a run recorded."""
    records = map(json.loads, (directory / name / "metrics.jsonl").read_text().splitlines())
    return [(record.get("loss"), record.get("grad_norm"), record.get("held_out_loss")) for record in records]


@pytest.mark.timeout(1800)  # four runs, of which two write and read gigabytes
def test_nvme_offload_matches_in_memory_run_under_memory_limit(tmp_path: Path) -> None:
    """The limit is the base of Python and torch, the bf16 weights, and HEADROOM_BYTES. The optimizer state is larger
    than this limit (four times as large in `benchmarks/offload.py`)."""
    if not sys.platform.startswith("linux"):
        pytest.skip("neither cgroups nor a working RLIMIT_DATA on this system")
    total = count_parameters(run_from_table({"model": MODEL}).model).total
    state_bytes = 12 * total
    with memory_limit(None) as probe:
        above_base = 2 * total + HEADROOM_BYTES
        limit_bytes = base_bytes(probe.kind) + above_base
    print(f"limited by {probe.kind} to {limit_bytes / 1e6:.0f} MB, {above_base / 1e6:.0f} MB above the base")
    assert state_bytes > 1.4 * limit_bytes

    with memory_limit(limit_bytes) as limit:
        result = run_train(write_run_file(tmp_path, "disk", MODEL, tmp_path), prefix=limit.prefix)
        assert result.returncode == 0, result.stderr
        peak = limit.peak_bytes()
        assert peak is None or peak <= limit_bytes
    [checkpoint] = checkpoints(tmp_path / "disk" / "checkpoints")
    assert find_damage(checkpoint) is None
    assert len(list(checkpoint.glob("shard-*"))) > 5  # none of which was large

    with memory_limit(limit_bytes) as limit:
        longer = write_run_file(tmp_path, "disk", MODEL, tmp_path, steps=3)
        result = run_train(longer, "--resume", prefix=limit.prefix)
        assert result.returncode == 0, result.stderr
    in_memory = write_run_file(tmp_path, "refused", MODEL, None)
    with memory_limit(limit_bytes) as limit:
        refused = run_train(in_memory, prefix=limit.prefix)
        assert (refused.returncode, "planned memory" in refused.stderr) == (2, True)
        assert run_train(in_memory, "--force", prefix=limit.prefix).returncode not in (0, 2)
    assert run_train(write_run_file(tmp_path, "memory", MODEL, None)).returncode == 0
    assert recorded_metrics(tmp_path, "disk")[:3] == recorded_metrics(tmp_path, "memory")


@contextmanager
def mounted_tmpfs(directory: Path, size_bytes: int) -> Iterator[None]:
    """Mount a file system of this size in memory."""
    directory.mkdir(exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "phalanx-test", str(directory)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("this process may not mount a filesystem")
    try:
        yield
    finally:
        subprocess.run(["umount", str(directory)], check=True)


def start_resume(file: Path) -> subprocess.Popen[str]:
    return subprocess.Popen([*PHALANX, "train", str(file), "--resume"], stderr=subprocess.PIPE, text=True)


def test_nvme_offload_full_disk_stops_run_and_preserves_checkpoint(tmp_path: Path) -> None:
    offload = tmp_path / "offload"
    first = write_run_file(tmp_path, "run", SMALL_MODEL, offload)
    bytes_on_disk = rank_memory(ResolvedRun(load_run(first, environment={}), 1))["rank"].on_disk
    with mounted_tmpfs(offload, 2 * bytes_on_disk):
        assert run_train(first).returncode == 0
    [checkpoint] = checkpoints(tmp_path / "run" / "checkpoints")
    longer = write_run_file(tmp_path, "run", SMALL_MODEL, offload, steps=4)

    with mounted_tmpfs(offload, bytes_on_disk // 2):
        too_small = run_train(longer, "--resume")
    assert too_small.returncode == 2
    assert f"layout.offload_directory = '{offload}'" in too_small.stderr
    assert "for optimizer state" in too_small.stderr

    with mounted_tmpfs(offload, 2 * bytes_on_disk):
        process = start_resume(longer)
        wait_until(  # by then the run is checked, but not built
            lambda: "steps = 4" in (tmp_path / "run" / "run.toml").read_text(), "run.toml has the new steps"
        )
        # Enough space for the checkpoint's state, but not for the gradients of the first step.
        state_bytes = checkpoint_bytes(run_from_table({"model": SMALL_MODEL}))
        (offload / "others").write_bytes(b"0" * (2 * bytes_on_disk - state_bytes - 500_000))
        _, stderr = process.communicate(timeout=200)
    assert process.returncode == 2
    assert "failed after step 2" in stderr
    assert f"{offload}" in stderr
    assert "has no space for" in stderr
    assert "GB free" in stderr
    assert "the last checkpoint is valid" in stderr
    assert checkpoints(tmp_path / "run" / "checkpoints") == [checkpoint]
    assert find_damage(checkpoint) is None
    with mounted_tmpfs(offload, 2 * bytes_on_disk):
        assert run_train(longer, "--resume").returncode == 0
