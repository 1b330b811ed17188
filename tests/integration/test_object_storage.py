"""`phalanx train` with data and checkpoints in a server of S3, whose requests fail, on several ranks."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from phalanx.runs.checkpoint_store import drop_shards
from phalanx.runs.checkpoints import checkpoints
from phalanx.runs.metrics import read_metrics
from phalanx.spec.files.write import to_toml
from phalanx.spec.run import RunSpec
from phalanx.testing.processes import run_python, start_python, wait_until
from tests.helpers.faulty_proxy import Fault, Proxy
from tests.helpers.small_runs import small_run

pytest.importorskip("moto", reason="moto is not installed: make test-cloud")
from tests.helpers.s3_server import SECRET, client, list_keys, make_bucket, s3_server

STEPS = 6
CORPUS, CHECKPOINTS = "corpus", "checkpoints"


@pytest.fixture(scope="module")
def server() -> Iterator[Proxy]:
    with s3_server() as proxy:
        yield proxy


@pytest.fixture
def run(server: Proxy, text: Path, tmp_path: Path) -> RunSpec:
    """Return a run of two ranks with data and checkpoints in buckets."""
    server.plant()
    folder = make_bucket(CORPUS)
    for file in sorted(text.glob("*.py")):
        client().put_object(Bucket=CORPUS, Key=f"text/{file.name}", Body=file.read_bytes())
    make_bucket(CHECKPOINTS)
    changes: dict[str, Any] = {
        "name": "cloud",
        "training.steps": STEPS,
        "data.train": [f"{folder}/text/*.py"],
        "data.held_out": [],
        "data.held_out_fraction": 0.3,
        "data.cache": str(tmp_path / "cache"),
        "checkpoint.directory": f"s3://{CHECKPOINTS}/team",
        "checkpoint.every": 2,
        "optimizer.lr_schedule": "none",
        "cluster.device": "cpu",
    }
    return small_run(text, tmp_path, changes)


def command(run: RunSpec, tmp_path: Path, *options: str) -> list[str]:
    file = tmp_path / "run.toml"
    file.write_text(to_toml(run))
    return [sys.executable, "-m", "phalanx", "train", str(file), "--nproc", "2", *options]


def train(run: RunSpec, tmp_path: Path, *options: str) -> str:
    """Train by the command line, and return its output."""
    result = run_python(command(run, tmp_path, *options), text=True, timeout=200)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    return result.stdout + result.stderr


def losses(directory: Path) -> dict[int, float]:
    return {record["step"]: record["loss"] for record in read_metrics(directory) if "loss" in record}


def complete_steps() -> list[int]:
    return [int(key.split("step-")[1][:8]) for key in list_keys(CHECKPOINTS) if key.endswith("SHA256SUMS")]


def run_elsewhere(run: RunSpec, tmp_path: Path, **changes: Any) -> RunSpec:
    """Return the run for another machine, whose output directory and cache are empty."""
    data = run.data.replace(cache=str(tmp_path / "other-cache"))
    return run.replace(output_dir=str(tmp_path / "elsewhere"), data=data, **changes)


@pytest.mark.timeout(600)
def test_run_with_faults_has_the_losses_of_one_on_local_files(
    run: RunSpec, server: Proxy, text: Path, tmp_path: Path
) -> None:
    local_text = tmp_path / "text"
    shutil.copytree(text, local_text, ignore=shutil.ignore_patterns("__pycache__"))
    local_data = run.data.replace(train=[f"{local_text}/*.py"])
    local = run.replace(name="local", data=local_data, checkpoint=run.checkpoint.replace(directory=None))
    train(local, tmp_path)
    kinds = ("error", "cut", "truncated")
    reads = [Fault(kind, r"GET /corpus/text/") for kind in kinds]
    writes = [Fault(kind, r"PUT .*\.safetensors") for kind in ("error", "cut", "corrupt_upload")]
    server.plant(*reads, *writes)
    train(run, tmp_path)
    assert [fault.hits for fault in (*reads, *writes)] == [1] * 6
    assert losses(tmp_path / "cloud") == losses(tmp_path / "local")
    assert complete_steps() == [STEPS - 2, STEPS]
    assert SECRET not in "".join(
        file.read_text(errors="replace") for file in (tmp_path / "cloud").rglob("*") if file.is_file()
    )

    # An export reads slices of the store, and is copied there.
    for checkpoint in checkpoints(tmp_path / "cloud" / "checkpoints"):
        drop_shards(checkpoint)
    exported = {}
    for name in ("local", "cloud"):
        upload = ["--upload", f"s3://{CORPUS}/models"] if name == "cloud" else []
        export = [
            sys.executable,
            "-m",
            "phalanx",
            "export",
            str(tmp_path / name),
            str(tmp_path / f"{name}-hf"),
            *upload,
        ]
        result = run_python(export, text=True, timeout=100)
        assert result.returncode == 0, result.stderr[-3000:]
        exported[name] = {file.name: file.read_bytes() for file in (tmp_path / f"{name}-hf").glob("*.safetensors")}
    assert exported["local"] == exported["cloud"]
    assert len(exported["cloud"]) == 1
    (weights,) = exported["cloud"].values()
    assert client().get_object(Bucket=CORPUS, Key="models/model.safetensors")["Body"].read() == weights

    # On another machine, in another layout, from ranged reads that fail.
    longer = run.training.replace(steps=STEPS + 2)
    elsewhere = run_elsewhere(run, tmp_path, training=longer, layout=run.layout.replace(data_parallel="zero3"))
    slices = [Fault(kind, r"GET .*\.safetensors") for kind in ("error", "cut", "truncated", "corrupt")]
    server.plant(*slices)
    output = train(elsewhere, tmp_path, "--resume")
    assert f"resumed after step {STEPS}" in output
    assert [fault.hits for fault in slices] == [1] * 4
    server.plant()
    whole = local.replace(name="whole", training=longer)
    train(whole, tmp_path)
    resumed = losses(Path(elsewhere.output_dir) / "cloud")
    assert resumed == {
        step: pytest.approx(loss, rel=1e-10) for step, loss in losses(tmp_path / "whole").items() if step > STEPS
    }
    assert complete_steps() == [STEPS, STEPS + 2]


@pytest.mark.timeout(600)
def test_kill_between_upload_and_manifest_keeps_earlier_one(run: RunSpec, server: Proxy, tmp_path: Path) -> None:
    train(run.replace(training=run.training.replace(steps=2)), tmp_path)
    # The shards of the next checkpoint are uploaded, and its manifest never is.
    held = Fault("slow", "PUT .*/manifest", times=1000, seconds=300)
    server.plant(held)
    longer = run.replace(training=run.training.replace(steps=4))
    with start_python(command(longer, tmp_path, "--resume"), start_new_session=True) as process:
        wait_until(lambda: held.hits, "the upload of the manifest", 120)
        os.killpg(process.pid, signal.SIGKILL)
    names = [key.rpartition("/")[2] for key in list_keys(CHECKPOINTS) if "step-00000004" in key]
    assert sum(name.endswith(".safetensors") for name in names) == 2
    assert not {"manifest.json", "SHA256SUMS"} & set(names)
    server.plant()
    output = train(run_elsewhere(run, tmp_path), tmp_path, "--resume")
    assert "resumed after step 2" in output
    assert complete_steps() == [STEPS - 2, STEPS]
    # The first machine still has what was not uploaded.
    assert [path.name for path in checkpoints(tmp_path / "cloud" / "checkpoints")] == ["step-00000004", "step-00000002"]


@pytest.mark.timeout(600)
def test_run_ends_and_names_missing_checkpoints_if_store_hangs(run: RunSpec, server: Proxy, tmp_path: Path) -> None:
    short = run.replace(checkpoint=run.checkpoint.replace(upload_timeout_seconds=2.0))
    server.plant(Fault("slow", r"PUT .*step-", times=1000, seconds=300))
    output = train(short, tmp_path)
    assert re.search(r"step-00000006, step-00000004.*: not in s3://checkpoints/team/cloud, but only in", output)
    assert complete_steps() == []
    assert json.loads((tmp_path / "cloud" / "events.jsonl").read_text().splitlines()[-1])["kind"] == "finished"
