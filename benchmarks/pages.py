"""Pages of docs/results: each ends with the commit of its figures, and `MEASURED` says which sources they depend on."""

from __future__ import annotations

import subprocess
from datetime import date
from pathlib import Path

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs" / "results"
TRAINING = ("program", "model", "parallel", "train")
RECOVERY = ("launch", "train/checkpoint", "train/guards", "train/session.py", "runs")
SWARM = ("swarm",)
MEASURED: dict[str, tuple[str, ...]] = {
    "accuracy.md": ("cost/estimate", "plan/tables", "plan/search"),
    "parity.md": (*TRAINING, "schedule", "data"),
    "benchmarks/calibration.md": ("cost/estimate", "plan/calibrate", "bench"),
    "benchmarks/copies.md": ("train/checkpoint", "launch"),
    "benchmarks/data_parallel.md": ("program", "parallel/data", "model", "train/trainer.py"),
    "benchmarks/dryrun.md": ("verify", "cost/exact", *TRAINING),
    "benchmarks/explorer.md": ("report/explorer", "plan/search"),
    "benchmarks/faults.md": RECOVERY,
    "benchmarks/fp8.md": ("model",),
    "benchmarks/generation.md": (
        "model/generation.py",
        "model/token_cache.py",
        "model/cached_attention.py",
        "model/mixers",
    ),
    "benchmarks/goodput.md": RECOVERY,
    "benchmarks/gpu-attention.md": ("model",),
    "benchmarks/gpu-host.md": TRAINING,
    "benchmarks/gpu-kernels.md": ("model", "parallel"),
    "benchmarks/gpu-parity.md": TRAINING,
    "benchmarks/gpu-rank0.md": TRAINING,
    "benchmarks/gpu-runs.md": ("train", "launch", "cli/commands/train.py"),
    "benchmarks/gpu-speed.md": TRAINING,
    "benchmarks/gpu-state.md": TRAINING,
    "benchmarks/guards.md": ("train/guards", "train/trainer.py"),
    "benchmarks/hf_import.md": ("model/huggingface", "parallel/init_parameters.py", "train/checkpoint"),
    "benchmarks/host-syncs.md": TRAINING,
    "benchmarks/learning.md": ("model", "train", "data"),
    "benchmarks/loader.md": ("data",),
    "benchmarks/mixture_reading.md": ("data",),
    "benchmarks/model_parallel.md": ("parallel", "model"),
    "benchmarks/model_parts.md": ("model", "spec/parts"),
    "benchmarks/object_storage.md": ("data/places.py", "data/object_cache.py", "runs", "train/checkpoint"),
    "benchmarks/offload.md": ("program", "parallel/data", "train/optim"),
    "benchmarks/overhead.md": TRAINING,
    "benchmarks/pipeline.md": ("schedule", "program", "parallel/pipeline"),
    "benchmarks/recomputation.md": ("cost/estimate", "plan/calibrate", "model"),
    "benchmarks/recording.md": ("train/profiling", "train/callbacks", "train/trainer.py", "runs"),
    "benchmarks/restart.md": ("launch", "train/worker.py"),
    "benchmarks/swarm.md": SWARM,
    "benchmarks/swarm_kills.md": SWARM,
    "benchmarks/swarm_round.md": SWARM,
    "benchmarks/swarm_soak.md": SWARM,
    "benchmarks/tuning.md": TRAINING,
    "benchmarks/weights.md": ("model",),
}
"""Paths in src/phalanx whose change may change the figures of a page, by page in docs/results."""


def write_results(page: Path, text: str) -> None:
    """Write a page of results, and the commit of its figures below."""
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(f"{text.rstrip()}\n\n{commit_line()}\n")


def commit_line() -> str:
    """Return the last line of a page whose figures were measured now."""
    commit = git("rev-parse", "--short=8", "HEAD").strip() or "unknown"
    changes = " with uncommitted changes" if git("status", "--porcelain", "--", "src", "benchmarks") else ""
    return f"Figures of commit {commit}{changes}, {date.today().isoformat()}."


def git(*arguments: str) -> str:
    """Return the output of a git command; nothing where there is no repository."""
    return subprocess.run(["git", "-C", ROOT, *arguments], capture_output=True, text=True, check=False).stdout
