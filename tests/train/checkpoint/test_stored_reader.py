"""Shards in a server of S3 are read by ranges: no more than a layout needs, and only with correct checksums."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict_loader import load

from phalanx.data import places
from phalanx.runs.checkpoints import checkpoints
from phalanx.runs.stored_shards import BLOCK_BYTES
from phalanx.spec.run import KeepSpec, RunSpec
from phalanx.testing import rank_pool
from phalanx.train.checkpoint.checkpointer import Checkpointer
from phalanx.train.checkpoint.stored_reader import StoredCheckpointReader, open_checkpoint
from tests.helpers.faulty_proxy import Fault, Proxy
from tests.helpers.small_runs import MOE, make_trainer, small_run, train_until
from tests.helpers.stored_runs import forget_run_directory, train_and_save

pytest.importorskip("moto", reason="moto is not installed: make test-cloud")
from tests.helpers.s3_server import make_bucket, s3_server

MIB = 2**20


@pytest.fixture(scope="module")
def server() -> Iterator[Proxy]:
    with s3_server() as proxy:
        yield proxy


@pytest.fixture
def stored(server: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, dict[str, torch.Tensor]]:
    """Return a checkpoint whose shards are in the store only, and its tensors of 16 MiB."""
    monkeypatch.setattr(places, "FIRST_DELAY_SECONDS", 0.001)
    server.plant()
    tensors = {name: torch.randn(4 * MIB // 1024, 1024) for name in ("first", "second", "third")}
    tensors |= {"scalar": torch.tensor(3.0), "bytes": torch.arange(7, dtype=torch.uint8), "empty": torch.zeros(0, 4)}
    checkpointer = Checkpointer(tmp_path / "run" / "checkpoints", KeepSpec(), make_bucket("reader"))
    checkpointer.save(1, tensors, {})
    checkpointer.wait()
    assert checkpointer.finish_uploads(60) == []
    checkpoint = checkpoints(checkpointer.directory)[0]
    for shard in checkpoint.glob("*.safetensors"):
        shard.unlink()
    server.bytes_read = 0
    return checkpoint, tensors


def read(checkpoint: Path, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    result = {name: torch.empty_like(tensor) for name, tensor in tensors.items()}
    load(result, storage_reader=open_checkpoint(checkpoint), no_dist=True)
    return result


def test_tensors_of_all_shapes_are_read(stored: tuple[Path, dict[str, torch.Tensor]], server: Proxy) -> None:
    checkpoint, tensors = stored
    loaded = read(checkpoint, tensors)
    assert all(torch.equal(loaded[name], tensors[name]) for name in tensors)
    # The first block has the header too.
    assert server.bytes_read <= 48 * MIB + 2 * BLOCK_BYTES


def test_only_blocks_of_wanted_tensors_are_read(stored: tuple[Path, dict[str, torch.Tensor]], server: Proxy) -> None:
    checkpoint, tensors = stored
    loaded = read(checkpoint, {"second": tensors["second"]})
    assert torch.equal(loaded["second"], tensors["second"])
    assert server.bytes_read <= 16 * MIB + 2 * BLOCK_BYTES


def test_wrong_content_is_never_returned(stored: tuple[Path, dict[str, torch.Tensor]], server: Proxy) -> None:
    checkpoint, tensors = stored
    fault = Fault("corrupt", r"GET .*\.safetensors", times=1000)
    reader = StoredCheckpointReader(checkpoint)
    server.plant(fault)
    result = {"second": torch.zeros_like(tensors["second"])}
    with pytest.raises(BaseException, match="wrong checksum"):
        load(result, storage_reader=reader, no_dist=True)
    assert not result["second"].any()


def resume_and_train(run: RunSpec, environment: dict[str, str]) -> list[tuple[float, float]]:
    """Resume from the store and train to step 8."""
    os.environ |= environment
    trainer = make_trainer(run)
    assert trainer.resume()[0]
    return train_until(trainer, 8)


@pytest.mark.parametrize(
    ("world_size", "changes"),
    [
        (2, {"layout.tp": 2}),
        (2, {"layout.data_parallel": "zero3"}),
        (2, {"layout.pp": 2, "layout.micro_batch_size": 1}),
        (4, {"layout.ep": 2, "layout.tp": 2}),
    ],
    ids=["tp", "zero3", "pp", "ep-tp"],
)
def test_checkpoint_is_read_in_another_layout(
    world_size: int, changes: dict[str, Any], server: Proxy, text: Path, tmp_path: Path
) -> None:
    server.plant()
    model = {**MOE, "num_layers": 4}
    whole = train_until(make_trainer(small_run(text, tmp_path / "whole", {"model": model})), 8)
    store = {"model": model, "checkpoint.directory": f"{make_bucket('layouts')}/team"}
    run = small_run(text, tmp_path, store)
    train_and_save(run, [4])
    forget_run_directory(run)
    variables = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    resumed = rank_pool(world_size).run(resume_and_train, small_run(text, tmp_path, {**store, **changes}), variables)[0]
    assert resumed == [pytest.approx(step, rel=1e-10) for step in whole[4:]]
