"""Optimizer state on disk, end to end: a run whose state is larger than its memory, and a disk that is full."""

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
"""For activations, the pieces under way, what a busy disk has not taken yet, and whatever else is neither weights nor
the base of Python and torch."""


def write_run_file(directory: Path, name: str, model: dict[str, int], offload: Path | None, **training: int) -> Path:
    """The file of a short run."""
    rests = {"offload": "nvme", "offload_directory": str(offload)} if offload else {}
    run = run_from_table(
        {
            "name": name,
            "output_dir": str(directory),
            "model": model,
            "data": {"train": [str(Path(json.__file__).parent)], "tokenizer": "bytes", "cache": str(directory)},
            "training": {"steps": 2, "seq_len": 8, "tokens_per_step": 32, **training},
            "layout": {"data_parallel": "zero2", "micro_batch_size": 2, "activation_checkpointing": "full", **rests},
            "optimizer": {"warmup_steps": 1},
            "evaluation": {"tokens": 16},
            "cluster": {"device": "cpu", "nproc_per_node": 1, "peak_flops": 1e12},
            "recovery": {"max_restarts": 0},  # no launcher, which would take a base of its own
        }
    )
    file = directory / f"{name}.toml"
    file.write_text(to_toml(run))
    return file


def run_train(file: Path, *options: str, prefix: list[str] | None = None) -> subprocess.CompletedProcess[str]:
    command = [*(prefix or []), *PHALANX, "train", str(file), *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=600)


def recorded_metrics(directory: Path, name: str) -> list[tuple[Any, ...]]:
    """What a run learned, to the last bit."""
    records = map(json.loads, (directory / name / "metrics.jsonl").read_text().splitlines())
    return [(record.get("loss"), record.get("grad_norm"), record.get("held_out_loss")) for record in records]


@pytest.mark.timeout(1800)  # four runs, of which two write and read gigabytes
def test_nvme_offload_matches_in_memory_run_under_memory_limit(tmp_path: Path) -> None:
    """The limit is the base of Python and torch, the bf16 weights, and HEADROOM_BYTES. The optimizer state is larger
    than all of that; four times as large in `benchmarks/offload.py`, where the base weighs less."""
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
        ended = run_train(write_run_file(tmp_path, "disk", MODEL, tmp_path), prefix=limit.prefix)
        assert ended.returncode == 0, ended.stderr
        peak = limit.peak_bytes()
        assert peak is None or peak <= limit_bytes
    [checkpoint] = checkpoints(tmp_path / "disk" / "checkpoints")
    assert find_damage(checkpoint) is None
    assert len(list(checkpoint.glob("shard-*"))) > 5  # none of which was large

    with memory_limit(limit_bytes) as limit:
        more = write_run_file(tmp_path, "disk", MODEL, tmp_path, steps=3)
        ended = run_train(more, "--resume", prefix=limit.prefix)
        assert ended.returncode == 0, ended.stderr
    in_memory = write_run_file(tmp_path, "refused", MODEL, None)
    with memory_limit(limit_bytes) as limit:
        refused = run_train(in_memory, prefix=limit.prefix)
        assert (refused.returncode, "planned memory" in refused.stderr) == (2, True)
        assert run_train(in_memory, "--force", prefix=limit.prefix).returncode not in (0, 2)
    assert run_train(write_run_file(tmp_path, "memory", MODEL, None)).returncode == 0
    assert recorded_metrics(tmp_path, "disk")[:3] == recorded_metrics(tmp_path, "memory")


@contextmanager
def mounted_tmpfs(place: Path, size_bytes: int) -> Iterator[None]:
    """A filesystem of its own, in memory."""
    place.mkdir(exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "phalanx-test", str(place)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("this process may not mount a filesystem")
    try:
        yield
    finally:
        subprocess.run(["umount", str(place)], check=True)


def start_resume(file: Path) -> subprocess.Popen[str]:
    return subprocess.Popen([*PHALANX, "train", str(file), "--resume"], stderr=subprocess.PIPE, text=True)


def test_nvme_offload_full_disk_stops_run_and_preserves_checkpoint(tmp_path: Path) -> None:
    offload = tmp_path / "offload"
    first = write_run_file(tmp_path, "run", SMALL_MODEL, offload)
    in_files = rank_memory(load_run(first, environment={}), 1)["rank"].on_disk
    with mounted_tmpfs(offload, 2 * in_files):
        assert run_train(first).returncode == 0
    [checkpoint] = checkpoints(tmp_path / "run" / "checkpoints")
    more = write_run_file(tmp_path, "run", SMALL_MODEL, offload, steps=4)

    with mounted_tmpfs(offload, in_files // 2):
        too_small = run_train(more, "--resume")
    assert too_small.returncode == 2
    assert f"layout.offload_directory = '{offload}'" in too_small.stderr
    assert "for optimizer state" in too_small.stderr

    with mounted_tmpfs(offload, 2 * in_files):
        begun = start_resume(more)
        wait_until(  # the run is checked then, and not built
            lambda: "steps = 4" in (tmp_path / "run" / "run.toml").read_text(), "run.toml has the new steps"
        )
        # Room for the state that the checkpoint brings, and not for the gradients of the first step.
        state_bytes = checkpoint_bytes(run_from_table({"model": SMALL_MODEL}))
        (offload / "others").write_bytes(b"0" * (2 * in_files - state_bytes - 500_000))
        _, said = begun.communicate(timeout=200)
    assert begun.returncode == 2
    assert "failed after step 2" in said
    assert f"{offload}" in said
    assert "has no space for" in said
    assert "GB free" in said
    assert "the last checkpoint is valid" in said
    assert checkpoints(tmp_path / "run" / "checkpoints") == [checkpoint]
    assert find_damage(checkpoint) is None
    with mounted_tmpfs(offload, 2 * in_files):
        assert run_train(more, "--resume").returncode == 0
