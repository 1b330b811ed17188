"""Offload: training is the same with its state in CPU memory or on disk, and no files are left behind."""

from __future__ import annotations

import errno
import os
import resource
from pathlib import Path
from typing import Any

import pytest
import torch

from phalanx.parallel.data import offload
from phalanx.parallel.data.offload import MIN_OFFLOAD_BYTES, DiskOffload, MappedFile
from phalanx.program.buckets import PIECE_BYTES
from phalanx.spec.errors import UserError
from phalanx.spec.run import RunSpec
from phalanx.testing import rank_pool
from tests.helpers.small_runs import MOE, make_trainer, small_run, train_until, training_trajectory

OPTIMIZERS = {"adamw": {}, "sgd": {"optimizer.name": "sgd"}, "muon": {"optimizer.name": "muon"}}


def train_with_disk_offload(run: RunSpec) -> tuple[list[tuple[float, float]], int]:
    """Train with every tensor in a file, in pieces of a few tensors; return the trajectory and the number of files."""
    offload.MIN_OFFLOAD_BYTES, PIECE_BYTES["nvme"] = 1, 20_000
    trainer = make_trainer(run)
    result = train_until(trainer, run.training.steps)
    disk_offload = trainer.strategy.offload  # type: ignore[attr-defined]
    assert len(disk_offload.pieces) > 2
    return result, len(disk_offload.files)


@pytest.mark.parametrize("changes", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("precision", ["bf16", "fp64"])
@pytest.mark.parametrize("data", ["zero1", "zero2", "zero3"])
def test_nvme_offload_is_bitwise_equal_to_no_offload(
    data: str, precision: str, changes: Any, text: Path, tmp_path: Path
) -> None:
    common = {
        "model": MOE,
        "layout.data_parallel": data,
        "training.precision": precision,
        "training.steps": 6,
        **changes,
    }
    common |= {"layout.micro_batch_size": 2, "layout.bucket_mb": 0.01} if data != "zero3" else {}
    in_memory = rank_pool(2).run(training_trajectory, small_run(text, tmp_path, common))
    disk = {"layout.offload": "nvme", "layout.offload_directory": str(tmp_path)}
    on_disk = rank_pool(2).run(train_with_disk_offload, small_run(text, tmp_path, {**common, **disk}))
    assert [result for result, _ in on_disk] == in_memory
    states = {"adamw": 2, "sgd": 1, "muon": 1}[changes.get("optimizer.name", "adamw")]
    assert all(files >= 20 * states for _, files in on_disk)


@pytest.mark.parametrize("data", ["zero1", "zero2", "zero3"])
def test_cpu_offload_is_bitwise_equal_to_no_offload(data: str, text: Path, tmp_path: Path) -> None:
    common = {"model": MOE, "layout.data_parallel": data, "training.precision": "bf16", "training.steps": 6}
    in_memory = rank_pool(2).run(training_trajectory, small_run(text, tmp_path, common))
    assert (
        rank_pool(2).run(training_trajectory, small_run(text, tmp_path, {**common, "layout.offload": "cpu"}))
        == in_memory
    )


def train_and_save_first_half(run: RunSpec) -> None:
    trainer = make_trainer(run)
    train_until(trainer, 3)
    trainer.save()
    trainer.checkpointer.wait()


def resume_second_half(run: RunSpec) -> list[tuple[float, float]]:
    trainer = make_trainer(run)
    assert trainer.resume()[0]
    return train_until(trainer, 6)


def test_nvme_offload_run_resumes_identically_from_checkpoint(text: Path, tmp_path: Path) -> None:
    disk = {"layout.data_parallel": "zero1", "layout.offload": "nvme", "layout.offload_directory": str(tmp_path)}
    run = small_run(text, tmp_path, {"training.steps": 6, **disk})
    uninterrupted = training_trajectory(run)
    train_and_save_first_half(run)
    assert resume_second_half(run) == uninterrupted[3:]


def test_mapped_file_is_unlinked_and_preallocated(tmp_path: Path) -> None:
    like = torch.empty(1000, dtype=torch.float64, device="meta")
    mapped = MappedFile(tmp_path, like)
    assert not list(tmp_path.iterdir())
    assert os.fstat(mapped.file.fileno()).st_blocks * 512 >= 8000
    mapped.tensor.fill_(3.0)
    mapped.write()
    mapped.read()
    assert mapped.tensor.sum() == 3000


def test_disk_offload_raises_user_error_at_open_file_limit(tmp_path: Path, monkeypatch: Any) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        disk_offload = DiskOffload(tmp_path)  # raises the limit as far as it may
        assert len([disk_offload.to_host(torch.ones(MIN_OFFLOAD_BYTES)) for _ in range(300)]) == 300
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
        with pytest.raises(UserError, match="more open files than the limit of this process"):
            disk_offload.to_host(torch.ones(MIN_OFFLOAD_BYTES))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize(("code", "message"), [(errno.ENOSPC, "has no space"), (errno.EACCES, "cannot be written")])
def test_mapped_file_raises_user_error_when_disk_is_full_or_not_writable(
    code: int, message: str, tmp_path: Path, monkeypatch: Any
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(UserError, match=message) as caught:
        MappedFile(tmp_path, torch.empty(10))
    assert caught.value.field == "layout.offload_directory"
