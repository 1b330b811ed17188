"""Checkpoints are complete or absent, damage is noticed, and training resumes exactly in any layout."""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from phalanx.data.loader import prefetch
from phalanx.launch.preflight import preflight
from phalanx.model.init import initial_weight
from phalanx.parallel.comm.objects import rank_and_world_size
from phalanx.runs import checkpoints as manifest
from phalanx.runs.checkpoints import checkpoints, find_damage, latest_valid, require_valid_checkpoint
from phalanx.runs.lock import is_running
from phalanx.runs.metrics import read_metrics
from phalanx.spec.errors import UserError
from phalanx.spec.files.write import to_toml
from phalanx.spec.parts.model import carried_tensors
from phalanx.spec.resolved_run import ResolvedRun
from phalanx.spec.run import RunSpec
from phalanx.testing import rank_pool
from phalanx.testing.fault_injection import truncate_file
from phalanx.testing.processes import POLL_SECONDS, run_python, start_python
from phalanx.train.checkpoint import checkpointer
from phalanx.train.checkpoint.checkpointer import latest_valid_checkpoint
from phalanx.train.checkpoint.state import load_full_tensors
from phalanx.train.checkpoint.stored_tensors import open_tensors
from phalanx.train.create_run import create_run
from tests.helpers.small_runs import (
    INDEXERS,
    MOE,
    TWO_EXPERTS,
    make_trainer,
    save_two_checkpoints,
    small_run,
    train_to_end,
    train_until,
    training_trajectory,
)

HALF = 5
SHORT = {"training.steps": 2 * HALF}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    shutil.copytree(Path(json.__file__).parent, folder / "json", ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def train_first_half(run: RunSpec) -> None:
    """Train to the middle, evaluate there (which must change nothing), and save."""
    trainer = make_trainer(run)
    train_until(trainer, HALF)
    trainer.evaluate()
    trainer.save()
    trainer.checkpointer.wait()


def resume_second_half(run: RunSpec) -> list[tuple[float, float]]:
    """Resume from the newest checkpoint and train to the end."""
    trainer = make_trainer(run)
    resumed, damaged = trainer.resume()
    assert resumed
    assert not damaged
    assert (trainer.step, trainer.tokens) == (HALF, HALF * run.training.tokens_per_step)
    result = train_until(trainer, run.training.steps)
    trainer.strategy.drain_pending_updates()
    return result


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    **{
        f"{data}x{n}": (n, {"layout.data_parallel": data})
        for data in ("ddp", "zero1", "zero2", "zero3")
        for n in (2, 4)
    },
    "hsdpx4": (4, {"layout.data_parallel": "hsdp", "layout.dp_shard": 2}),
    "serverx2": (2, {"layout.data_parallel": "parameter_server"}),
    "pipelinex2": (2, {"layout.pp": 2, "layout.micro_batch_size": 1}),
    "pipelinex4-zero1": (4, {"layout.pp": 2, "layout.schedule": "zb-h1", "layout.data_parallel": "zero1"}),
    "pipelinex4-zero3": (4, {"layout.pp": 2, "layout.data_parallel": "zero3"}),
    "tensorx2": (2, {"layout.tp": 2}),
    "tensorx4": (4, {"layout.tp": 4}),
    "tensorx4-zero1": (4, {"layout.tp": 2, "layout.data_parallel": "zero1"}),
    "tensorx4-zero3": (4, {"layout.tp": 2, "layout.data_parallel": "zero3"}),
    "tensorx4-pipeline": (4, {"layout.tp": 2, "layout.pp": 2, "layout.micro_batch_size": 1}),
    "contextx4-zero3": (4, {"layout.cp": 2, "layout.data_parallel": "zero3"}),
    "expertx2": (2, {"layout.ep": 2}),
    "expertx4-zero3": (4, {"layout.ep": 2, "layout.data_parallel": "zero3"}),
    "expertx4-tensor": (4, {"layout.ep": 2, "layout.tp": 2, "layout.data_parallel": "zero1"}),
    "tensorx4-offload": (4, {"layout.tp": 2, "layout.data_parallel": "zero2", "layout.offload": "cpu"}),
    "serversx4": (4, {"layout.data_parallel": "parameter_server", "layout.num_servers": 2, "layout.max_staleness": 0}),
}


@pytest.fixture(scope="module")
def uninterrupted(text: Path, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[float, float]]:
    return training_trajectory(small_run(text, tmp_path_factory.mktemp("whole"), {"model": MOE, **SHORT}))


@pytest.fixture(scope="module")
def half_trained_run(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a run that was trained to the middle in a layout, and saved."""

    @cache
    def train_run(name: str) -> Path:
        folder, (world_size, changes) = tmp_path_factory.mktemp(name), LAYOUTS[name]
        rank_pool(world_size).run(train_first_half, small_run(text, folder, {"model": MOE, **SHORT, **changes}))
        return folder

    return train_run


LAYOUT_NAMES = list(LAYOUTS)
LAYOUT_TRANSITIONS = [
    (name, LAYOUT_NAMES[(index + apart) % len(LAYOUT_NAMES)])
    for index, name in enumerate(LAYOUT_NAMES)
    for apart in (1, 4, 11)
]


@pytest.mark.parametrize("name", LAYOUT_NAMES[1:])
def test_checkpoint_tensors_match_single_process_in_every_layout(
    name: str, half_trained_run: Callable[[str], Path]
) -> None:
    """The tensors are parameters, router biases and optimizer state after some updates."""
    last = Path("parity", "checkpoints", f"step-{HALF:08d}")
    expected_tensors, tensors = (load_full_tensors(half_trained_run(layout) / last) for layout in ("one", name))
    assert expected_tensors.keys() == tensors.keys()
    stored = open_tensors(half_trained_run(name) / last)
    assert stored.keys() == tensors.keys()
    for tensor, expected in expected_tensors.items():
        assert (tensors[tensor] - expected).norm() <= 1e-10 * expected.norm(), tensor
        assert torch.equal(stored[tensor][...], tensors[tensor])
        if expected.ndim:
            assert torch.equal(stored[tensor][1:3], tensors[tensor][1:3])


@pytest.mark.parametrize(("before", "after"), LAYOUT_TRANSITIONS)
def test_resume_across_layouts_matches_uninterrupted_run(
    before: str,
    after: str,
    half_trained_run: Callable[[str], Path],
    text: Path,
    uninterrupted: list[tuple[float, float]],
) -> None:
    world_size, changes = LAYOUTS[after]
    run = small_run(text, half_trained_run(before), {"model": MOE, **SHORT, **changes})
    result = rank_pool(world_size).run(resume_second_half, run)[0]
    assert result == [pytest.approx(step, rel=1e-10) for step in uninterrupted[HALF:]]


DDP2, ZERO4, ZERO2 = (
    (2, {"layout.data_parallel": "ddp"}),
    (4, {"layout.data_parallel": "zero3"}),
    (2, {"layout.data_parallel": "zero3"}),
)
ZERO1_OF_4 = (4, {"layout.data_parallel": "zero1"})
FEW_EXPERTS = {"model": TWO_EXPERTS}
HSDP4 = (4, {"layout.data_parallel": "hsdp", "layout.dp_shard": 2})
LAYOUT_CHANGES = {
    "zero3x4-ddpx2-muon": (ZERO4, DDP2, {"optimizer.name": "muon"}),
    "hsdpx4-zero3x2-sgd": (HSDP4, ZERO2, {"optimizer.name": "sgd"}),
    "zero1x4-zero3x2-few-experts": (ZERO1_OF_4, ZERO2, FEW_EXPERTS),
    "zero3x4-ddpx2-few-experts-sgd": (ZERO4, DDP2, {**FEW_EXPERTS, "optimizer.name": "sgd"}),
    "zero3x2-ddpx2-recompute": (ZERO2, DDP2, {"layout.activation_checkpointing": "full"}),
}


@pytest.mark.parametrize(("before", "after", "common"), LAYOUT_CHANGES.values(), ids=LAYOUT_CHANGES)
def test_resume_across_layouts_matches_for_optimizers_recomputation_and_few_experts(
    before: Any, after: Any, common: Any, text: Path, tmp_path: Path
) -> None:
    common = {"model": MOE, **SHORT, **common}
    uninterrupted = training_trajectory(small_run(text, tmp_path / "whole", common))
    rank_pool(before[0]).run(train_first_half, small_run(text, tmp_path, {**common, **before[1]}))
    result = rank_pool(after[0]).run(resume_second_half, small_run(text, tmp_path, {**common, **after[1]}))[0]
    assert result == [pytest.approx(step, rel=1e-10) for step in uninterrupted[HALF:]]


def test_carried_tensors_are_saved_as_they_were(text: Path, tmp_path: Path) -> None:
    layout = {"layout.tp": 2, "layout.data_parallel": "zero3", "training.precision": "bf16"}
    run = small_run(text, tmp_path, {"model": INDEXERS, **SHORT, **layout})
    rank_pool(4).run(train_first_half, run)
    saved = load_full_tensors(tmp_path / "parity" / "checkpoints" / f"step-{HALF:08d}")
    carried = carried_tensors(run.model)
    assert len(carried) == 5 * run.model.num_layers
    for name, tensor in carried.items():
        expected = initial_weight(run.model, name, torch.Size(tensor.shape), run.training.seed)
        assert torch.equal(saved[f"model.{name}"], expected), name
        assert not [other for other in saved if other.startswith("optimizer") and other.endswith(name)]


def test_resume_in_the_same_layout_is_bit_exact(text: Path, tmp_path: Path) -> None:
    run = small_run(text, tmp_path, {"training.precision": "bf16", "layout.data_parallel": "zero3", **SHORT})
    uninterrupted = rank_pool(2).run(training_trajectory, run)
    rank_pool(2).run(train_first_half, run)
    assert rank_pool(2).run(resume_second_half, run) == [result[HALF:] for result in uninterrupted]


def rates_and_tokens(run: RunSpec) -> list[tuple[float, int]]:
    trainer = make_trainer(run)
    trainer.resume()
    batches = prefetch(trainer.loader, trainer.step, run.training.steps)
    records = [trainer.train_step(batches) for _ in range(trainer.step, run.training.steps)]
    return [(record["learning_rate"], record["tokens"]) for record in records]


def test_learning_rate_rewarms_when_run_resumes_with_more_ranks(text: Path, tmp_path: Path) -> None:
    """With linear scaling, 4 ranks instead of 2 train twice the tokens per step, and the learning rate rises to twice
    its value over the steps of a warm-up."""
    training = {"training.batch_scaling": "linear", "training.base_dp_size": 2, **SHORT}
    run = small_run(text, tmp_path, {**training, "optimizer.warmup_steps": 4, "optimizer.lr_schedule": "none"})
    rank_pool(2).run(train_first_half, run)
    rates, tokens = zip(*rank_pool(4).run(rates_and_tokens, run)[0], strict=True)
    assert rates == pytest.approx([0.01 * factor for factor in (1.25, 1.5, 1.75, 2, 2)])
    assert [after - before for before, after in pairwise(tokens)] == [2 * run.training.tokens_per_step] * (HALF - 1)
    assert tokens[0] == HALF * run.training.tokens_per_step + 2 * run.training.tokens_per_step


def three_steps_and_save(run: RunSpec) -> None:
    trainer = make_trainer(run)
    trainer.resume()
    train_until(trainer, trainer.step + 3)
    trainer.save()
    trainer.checkpointer.wait()


def test_learning_rate_rewarmup_continues_after_restart(text: Path, tmp_path: Path) -> None:
    changes = {"training.batch_scaling": "sqrt", "training.base_dp_size": 1, "optimizer.warmup_steps": 6}
    uninterrupted, killed = (small_run(text, tmp_path / name, changes) for name in ("whole", "killed"))
    for run in (uninterrupted, killed):
        three_steps_and_save(run)
    rank_pool(2).run(three_steps_and_save, killed)
    rates = rank_pool(2).run(rates_and_tokens, uninterrupted)[0]
    assert rank_pool(2).run(rates_and_tokens, killed)[0] == rates[3:]


def train_command(run: RunSpec, file: Path, *more: str) -> list[str]:
    file.write_text(to_toml(run))
    return [sys.executable, "-m", "phalanx", "train", str(file), "--nproc", "2", *more]


def recorded_losses(directory: Path) -> list[tuple[int, float, float]]:
    records = read_metrics(directory)
    return [(record["step"], record["loss"], record["grad_norm"]) for record in records if "loss" in record]


def test_resume_after_launcher_sigkill_repeats_uninterrupted_losses(text: Path, tmp_path: Path) -> None:
    """The launcher is killed at a random step after a checkpoint, and its ranks end with it."""
    changes = {"training.steps": 40, "training.precision": "fp32", "checkpoint": {"every": 4}, "model": MOE}
    uninterrupted = small_run(text, tmp_path / "whole", changes)
    killed = small_run(text, tmp_path / "killed", changes)
    run_python(train_command(uninterrupted, tmp_path / "whole.toml"), check=True, timeout=120)
    directory = tmp_path / "killed" / "parity"
    stop_at = random.Random().randint(8, 20)
    process = start_python(
        train_command(killed, tmp_path / "killed.toml"),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 100
    while not (
        directory.exists() and len(recorded_losses(directory)) >= stop_at and checkpoints(directory / "checkpoints")
    ):
        assert process.poll() is None, "the run ended before it was killed"
        assert time.monotonic() < deadline, "the run did not reach the step"
        time.sleep(POLL_SECONDS)
    process.kill()
    process.wait(timeout=30)
    while is_running(directory):
        assert time.monotonic() < deadline, "a rank outlives its launcher"
        time.sleep(POLL_SECONDS)
    assert len(recorded_losses(directory)) < 40
    resumed = run_python(
        train_command(killed, tmp_path / "killed.toml", "--resume"),
        check=True,
        text=True,
        timeout=120,
    )
    assert "resumed after step" in resumed.stderr
    assert recorded_losses(directory) == recorded_losses(tmp_path / "whole" / "parity")


@pytest.fixture(scope="module")
def saved_checkpoints(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_two_checkpoints(text, tmp_path_factory.mktemp("saved"))


def find_latest_and_hashed_files(directory: Path) -> tuple[Path | None, dict[str, str], set[str]]:
    """Return the latest valid checkpoint, the damaged ones, and the names of the files that this rank hashed."""
    hashed: set[str] = set()
    sha256 = manifest.sha256
    manifest.sha256 = lambda path: (hashed.add(path.name), sha256(path))[1]
    try:
        return *latest_valid_checkpoint(directory), hashed
    finally:
        manifest.sha256 = sha256


def test_latest_valid_checkpoint_splits_checksum_work_among_ranks(saved_checkpoints: Path, tmp_path: Path) -> None:
    """All ranks learn of damage, whichever rank hashes the file."""
    shutil.copytree(saved_checkpoints, tmp_path / "copy")
    older, newest = (tmp_path / "copy" / name for name in ("step-00000002", "step-00000004"))
    files = {file.name for file in newest.iterdir()} - {"SHA256SUMS"}
    results = rank_pool(2).run(find_latest_and_hashed_files, tmp_path / "copy")
    assert [result[:2] for result in results] == [(newest, {})] * 2
    assert results[0][2] | results[1][2] == files
    assert not results[0][2] & results[1][2]
    for name in sorted(files):
        shutil.rmtree(tmp_path / "copy")
        shutil.copytree(saved_checkpoints, tmp_path / "copy")
        file = newest / name
        file.write_bytes(file.read_bytes()[:-1] + b"?")
        for checkpoint, damaged, _ in rank_pool(2).run(find_latest_and_hashed_files, tmp_path / "copy"):
            assert checkpoint == older
            assert damaged == {newest.name: f"checksum of {name} is wrong"}


def message_when_store_fails(directory: Path, failing: str) -> str:
    """Return the error of this rank if a function of rank 1, or of rank 0, cannot reach the store."""

    def fail(*_: Any) -> None:
        raise UserError("checkpoint.directory", "s3://bucket", "cannot be accessed")

    rank_of_function = {"find_damaged_files": 1, "quarantine": 0}
    with pytest.MonkeyPatch.context() as patch:
        if rank_and_world_size()[0] == rank_of_function[failing]:
            patch.setattr(checkpointer, failing, fail)
        with pytest.raises(UserError) as caught:
            latest_valid_checkpoint(directory)
    return str(caught.value)


@pytest.mark.parametrize("failing", ["find_damaged_files", "quarantine"])
def test_latest_valid_checkpoint_raises_error_of_one_rank_on_all(saved_checkpoints: Path, failing: str) -> None:
    messages = rank_pool(2).run(message_when_store_fails, saved_checkpoints, failing)
    assert messages == ["checkpoint.directory = 's3://bucket' cannot be accessed"] * 2


def test_checkpointer_raises_when_shards_of_a_rank_are_missing(text: Path, tmp_path: Path) -> None:
    trainer = make_trainer(small_run(text, tmp_path, {}))
    trainer.checkpointer.world_size = 2  # the other one has gone
    trainer.save()
    with pytest.raises(UserError, match="2 ranks wrote their parts, but the number of parts is 1"):
        trainer.checkpointer.wait()
    assert not list(trainer.checkpointer.directory.iterdir())


def test_checkpointer_save_succeeds_when_old_checkpoint_cannot_be_removed(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On NFS, a folder whose deleted files are still open is not empty."""
    trainer = make_trainer(small_run(text, tmp_path, {"checkpoint.keep": 1}))
    rmdir = os.rmdir

    def fail_as_on_nfs(path: Any, *more: Any, **named: Any) -> None:
        if str(path).endswith("step-00000001"):
            raise OSError(errno.ENOTEMPTY, "Directory not empty")
        rmdir(path, *more, **named)

    monkeypatch.setattr(os, "rmdir", fail_as_on_nfs)
    for step in (1, 2, 3):
        train_until(trainer, step)
        trainer.save()
        trainer.checkpointer.wait()
    kept = [path.name for path in checkpoints(trainer.checkpointer.directory)]
    assert kept == ["step-00000003", "step-00000001"]


def test_resume_falls_back_to_previous_checkpoint_when_latest_is_damaged(
    text: Path, saved_checkpoints: Path, tmp_path: Path
) -> None:
    shutil.copytree(saved_checkpoints.parent, tmp_path / "parity")
    shard = next((tmp_path / "parity" / "checkpoints" / "step-00000004").glob("shard-*"))
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(bytes(content))
    run = small_run(text, tmp_path, {"model": MOE})
    trainer = make_trainer(run)
    resumed, damaged = trainer.resume()
    assert (resumed, trainer.step) == (1, 2)
    assert list(damaged) == ["step-00000004"]
    assert "checksum" in damaged["step-00000004"]
    assert train_until(trainer, 4) == training_trajectory(small_run(text, tmp_path / "whole", {"model": MOE}))[2:4]
    trainer.save()  # the same step once more
    trainer.checkpointer.wait()
    directory = tmp_path / "parity" / "checkpoints"
    assert sorted(path.name for path in directory.iterdir()) == [
        "latest",
        "step-00000002",
        "step-00000004",
        "step-00000004.damaged",
    ]
    assert (directory / "latest").read_text() == "step-00000004\n"
    assert latest_valid(directory) == (directory / "step-00000004", {})
    for step, is_kept in ((5, True), (6, False)):  # it stays until there are two newer ones
        train_until(trainer, step)
        trainer.save()
        trainer.checkpointer.wait()
        assert (directory / "step-00000004.damaged").exists() == is_kept


def test_resume_raises_when_all_checkpoints_are_damaged(text: Path, saved_checkpoints: Path, tmp_path: Path) -> None:
    """The second attempt finds them quarantined, and fails too. The launcher's checks find it as well."""
    directory = tmp_path / "parity" / "checkpoints"
    shutil.copytree(saved_checkpoints.parent, directory.parent)
    for shard in directory.glob("step-*/shard-*"):
        truncate_file(shard)
    run = small_run(text, tmp_path, {"model": MOE})
    for _ in range(2):
        with pytest.raises(UserError, match=r"no intact checkpoint: step-00000002.damaged, step-00000004.damaged"):
            make_trainer(run).resume()
    with pytest.raises(UserError, match="no intact checkpoint"):
        preflight(ResolvedRun(run, 1), resume=True)
    for quarantined in directory.glob("*.damaged"):
        shutil.rmtree(quarantined)
    assert make_trainer(run).resume() == (0, {})


def test_resume_ignores_and_removes_unfinished_checkpoint(text: Path, saved_checkpoints: Path, tmp_path: Path) -> None:
    shutil.copytree(saved_checkpoints.parent, tmp_path / "parity")
    (tmp_path / "parity" / "checkpoints" / "step-00000009.tmp").mkdir()
    trainer = make_trainer(small_run(text, tmp_path, {"model": MOE}))
    assert trainer.resume()[0]
    assert trainer.step == 4
    assert not list((tmp_path / "parity" / "checkpoints").glob("*.tmp"))


def test_checkpoint_retention_does_not_count_damaged_checkpoints(
    text: Path, saved_checkpoints: Path, tmp_path: Path
) -> None:
    shutil.copytree(saved_checkpoints.parent, tmp_path / "parity")
    (tmp_path / "parity" / "checkpoints" / "step-00000004" / "manifest.json").write_text("{")
    trainer = make_trainer(small_run(text, tmp_path, {"model": MOE, "checkpoint": {"keep": 1}}))
    assert trainer.resume()[0]
    train_until(trainer, 3)
    trainer.save()
    trainer.checkpointer.wait()
    saved = checkpoints(tmp_path / "parity" / "checkpoints")
    assert [path.name for path in saved] == ["step-00000003"]
    assert find_damage(saved[0]) is None


def test_run_keeps_its_best_checkpoint_by_held_out_loss(text: Path, tmp_path: Path) -> None:
    """The losses of its evaluations are given, and are lowest after step 4."""
    losses = {2: 3.0, 4: 1.0, 6: math.nan, 8: 2.0, 10: 2.5}
    kept = {"every": 2, "keep": {"last": 1, "best": 1}}
    trainer = make_trainer(small_run(text, tmp_path, {**SHORT, "evaluation.every": 2, "checkpoint": kept}))
    evaluate = trainer.evaluate
    trainer.evaluate = lambda: evaluate() | {"held_out_loss": losses[trainer.step]}  # type: ignore[method-assign]
    train_to_end(trainer)
    assert [path.name for path in checkpoints(trainer.checkpointer.directory)] == ["step-00000010", "step-00000004"]
    assert require_valid_checkpoint(trainer.directory, "best").name == "step-00000004"


def resume_error(run: RunSpec) -> UserError:
    """Return the error of a resume that cannot work, and check that the run directory stays as it is."""
    directory = Path(run.output_dir) / run.name
    before = {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}
    with pytest.raises(UserError) as caught:
        create_run(run, 1, resume=True)
    assert {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()} == before
    return caught.value


def test_checkpointer_prunes_old_checkpoints(text: Path, tmp_path: Path) -> None:
    trainer = make_trainer(small_run(text, tmp_path, {"checkpoint": {"keep": 2}}))
    for last in (1, 2, 3):
        train_until(trainer, last)
        trainer.save()
    trainer.checkpointer.wait()
    saved = checkpoints(tmp_path / "parity" / "checkpoints")
    assert [path.name for path in saved] == ["step-00000003", "step-00000002"]


INCOMPATIBLE_CHANGES = {
    "model.hidden_size": {"model": {**MOE, "hidden_size": 64}},
    "model.moe.num_experts": {"model": {**MOE, "moe": {**MOE["moe"], "num_experts": 8}}},
    "training.seed": {"model": MOE, "training.seed": 7},
    "data": {"model": MOE, "data.train": [str(Path(logging.__file__).parent)]},
}


@pytest.mark.parametrize(("field", "changes"), INCOMPATIBLE_CHANGES.items(), ids=INCOMPATIBLE_CHANGES)
def test_resume_rejects_checkpoint_of_incompatible_run(
    field: str, changes: Any, text: Path, saved_checkpoints: Path, tmp_path: Path
) -> None:
    """The run is rejected before anything is written, and also by a trainer alone."""
    shutil.copytree(saved_checkpoints.parent, tmp_path / "parity")
    run = small_run(text, tmp_path, changes)
    assert resume_error(run).field == field
    with pytest.raises(UserError) as caught:
        make_trainer(run).resume()
    assert caught.value.field == field


@pytest.mark.parametrize("name", ["muon", "sgd"])
def test_resume_with_another_optimizer_keeps_weights_and_common_state(
    name: str, text: Path, saved_checkpoints: Path, tmp_path: Path
) -> None:
    shutil.copytree(saved_checkpoints.parent, tmp_path / "parity")
    before = make_trainer(small_run(text, tmp_path, {"model": MOE}))
    after = make_trainer(small_run(text, tmp_path, {"model": MOE, "optimizer.name": name}))
    for trainer in (before, after):
        trainer.resume()
    for own, saved in zip(after.module.parameters(), before.module.parameters(), strict=True):
        assert torch.equal(own, saved)
    states = {type(optimizer): list(optimizer.state.values()) for optimizer in after.optimizers}
    assert all(set(state) == {"step", "exp_avg", "exp_avg_sq"} for state in states.get(torch.optim.AdamW, []))
    assert bool(states.get(torch.optim.AdamW)) == (name == "muon")
    assert math.isfinite(train_until(after, after.step + 1)[0][0])


def test_create_run_accepts_resume_with_unreadable_manifest(
    text: Path, saved_checkpoints: Path, tmp_path: Path
) -> None:
    shutil.copytree(saved_checkpoints.parent, tmp_path / "parity")
    (tmp_path / "parity" / "checkpoints" / "step-00000004" / "manifest.json").write_text("{")
    create_run(small_run(text, tmp_path, {"model": MOE}), 1, resume=True)
