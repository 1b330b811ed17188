"""Run files for the planner."""

from __future__ import annotations

from phalanx.spec.files.load import run_from_table
from phalanx.spec.run import RunSpec


def make_run(
    model: str = "llama3-8b", machine: str = "h100", sequence: int = 4096, sequences: int = 64, **sections
) -> RunSpec:
    training = {"seq_len": sequence, "tokens_per_step": sequence * sequences, **sections.pop("training", {})}
    cluster = {"preset": machine, "nproc_per_node": 8, **sections.pop("cluster", {})}
    return run_from_table({"model": {"preset": model}, "training": training, "cluster": cluster, **sections})
