"""A rank that runs out of GPU memory writes the allocation history of PyTorch's own allocator."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

from phalanx.runs.hang_dumps import memory_snapshot_file, read_failures
from phalanx.spec.files.write import to_toml
from tests.helpers.small_runs import small_run
from tests.null_gpu.layouts import BF16
from tests.null_gpu.ranks import RankResult, run_ranks

LIMIT = {"PYTORCH_ALLOC_CONF": "per_process_memory_fraction:0.001"}
"""Memory of this process: 85 MB, less than the logits of the step need."""


def train_out_of_memory(documents: Path, folder: Path, is_recorded: bool) -> tuple[RankResult, dict[str, Any]]:
    """Train until memory runs out in the first step; return the rank's exit and its failure record."""
    large = {"training.tokens_per_step": 2**16, "layout.micro_batch_size": 2**11}
    run = small_run(documents, folder, {**BF16, **large, "metrics.allocation_history": is_recorded})
    file = folder / "run.toml"
    file.write_text(to_toml(run))
    result = run_ranks("tests.null_gpu.rank", ["phalanx.train", str(file)], 1, folder, LIMIT)[0]
    print(result.output)
    return result, read_failures(folder / run.name)[0]


def test_out_of_memory_leaves_snapshot_with_lines_of_allocations(documents: Path, tmp_path: Path) -> None:
    result, failure = train_out_of_memory(documents, tmp_path, is_recorded=True)
    file = memory_snapshot_file(tmp_path / "parity", 0)
    assert result.exit_code == 1
    assert failure["out_of_memory"]
    assert failure["snapshot"] == str(file)
    assert failure["reason"].endswith(f"open {file} at https://pytorch.org/memory_viz")
    assert failure["reason"] in result.output
    snapshot = pickle.loads(file.read_bytes())  # written by the line above
    (events,) = [trace for trace in snapshot["device_traces"] if trace]
    (shortage,) = [event for event in events if event["action"] == "oom"]
    assert 0 < shortage["size"] <= failure["wanted_bytes"]  # the allocator asks for blocks of 20 MiB
    lines = [frame["filename"] for event in events if event["action"] == "alloc" for frame in event["frames"]]
    assert any("phalanx/model" in line for line in lines)
    assert any("phalanx/train" in line for line in lines)


def test_out_of_memory_without_history_says_how_to_record_it(documents: Path, tmp_path: Path) -> None:
    _, failure = train_out_of_memory(documents, tmp_path, is_recorded=False)
    assert failure["snapshot"] is None
    assert failure["reason"].endswith("train with --set metrics.allocation_history=true")
    assert not memory_snapshot_file(tmp_path / "parity", 0).exists()
