"""The ranks of `phalanx bench` and `phalanx doctor` finish over ProcessGroupNCCL."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from phalanx.spec.files.write import to_toml
from tests.helpers.small_runs import Table, small_run
from tests.null_gpu.layouts import BF16, PIPELINES, SINGLE_AXES
from tests.null_gpu.rank import HOST_PER_RANK
from tests.null_gpu.ranks import describe_failures, run_ranks

MEASURED = {name: SINGLE_AXES[name] for name in ("zero1", "zero3", "tp", "ring", "moe-ep")} | {
    name: PIPELINES[name] for name in ("1f1b-pp2-ddp", "zb-v-pp4-alone")
}


def write_run(documents: Path, folder: Path, changes: Table) -> Path:
    file = folder / "run.toml"
    file.write_text(to_toml(small_run(documents, folder, {**BF16, **changes})))
    return file


@pytest.mark.parametrize("name", MEASURED)
def test_bench_measures_collectives_of_layout(name: str, documents: Path, tmp_path: Path) -> None:
    world_size, changes = MEASURED[name]
    out = tmp_path / "bench.json"
    arguments = [str(write_run(documents, tmp_path, changes)), "--out", str(out), "--iterations", "2"]
    results = run_ranks("tests.null_gpu.rank", ["phalanx.bench.ranks", *arguments], world_size, tmp_path)
    assert all(result.exit_code == 0 for result in results), describe_failures(results)
    assert json.loads(out.read_text())["collectives"]


@pytest.mark.parametrize("hosts", [2, 3])
def test_doctor_measures_pairs_of_hosts(hosts: int, documents: Path, tmp_path: Path) -> None:
    """One of three hosts has no partner when NCCL creates the communicator."""
    arguments = [str(write_run(documents, tmp_path, {"layout.data_parallel": "zero1"})), "--out", str(tmp_path / "out")]
    results = run_ranks(
        "tests.null_gpu.rank",
        ["phalanx.doctor.multi_node_benchmark", *arguments],
        hosts,
        tmp_path,
        {HOST_PER_RANK: "1", "LOCAL_WORLD_SIZE": "1"},
    )
    assert all(result.exit_code == 0 for result in results), describe_failures(results)
    findings = json.loads((tmp_path / "out" / "collectives.json").read_text())
    assert findings
