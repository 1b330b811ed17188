"""Programs that hang on NCCL also hang on the null GPU, which names the
ranks, the call, and the waits of their hosts."""

from __future__ import annotations

from pathlib import Path

import pytest

from phalanx.spec.files.write import to_toml
from tests.helpers.small_runs import small_run
from tests.null_gpu.layouts import BF16, PIPELINES
from tests.null_gpu.ranks import run_ranks

EXPECTED = {
    "messages_in_another_order": "is sent with 32 bytes and received with 64",
    "sums_in_another_order": "rank 0 calls all_reduce of 8 fp32, rank 1 all_reduce of 16 fp32",
    "groups_in_another_order": "all_reduce of 8 fp32, waits for rank 1; its host is in cudaDeviceSynchronize",
    "tensor_of_cpu": "No backend type associated with device type cpu",
}
EXPECTED_OF_PIPELINE = {
    "one_group_for_both_directions": "recv of 1024 fp32, waits for rank 1; its host is in the loading of a kernel",
    "peers_that_never_met": "waits in ncclCommInitRank for rank 1",
    "kernels_loaded_late": "recv of 1024 fp32, waits for rank 1; its host is in the loading of a kernel",
}


@pytest.mark.parametrize("fault", EXPECTED)
def test_planted_fault_is_named(fault: str, tmp_path: Path) -> None:
    results = run_ranks("tests.null_gpu.faulty_rank", [fault], 2, tmp_path)
    assert all(result.exit_code != 0 for result in results)
    assert EXPECTED[fault] in results[0].output


@pytest.mark.parametrize("fault", EXPECTED_OF_PIPELINE)
def test_planted_fault_of_pipeline_is_named(fault: str, documents: Path, tmp_path: Path) -> None:
    world_size, changes = PIPELINES["1f1b-pp2-ddp"]
    file = tmp_path / "run.toml"
    file.write_text(to_toml(small_run(documents, tmp_path, {**BF16, "training.steps": 1, **changes})))
    results = run_ranks("tests.null_gpu.faulty_rank", [fault, str(file)], world_size, tmp_path)
    assert all(result.exit_code != 0 for result in results)
    assert EXPECTED_OF_PIPELINE[fault] in results[0].output
