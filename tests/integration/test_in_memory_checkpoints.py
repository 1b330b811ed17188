"""In-memory checkpoints: a lost rank costs at most one step, and its state is restored from a rank that has a copy."""

from __future__ import annotations

import json
import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from phalanx.data.prepare import prepare
from phalanx.launch.shared_memory import SLOTS_ENV, allocate_slots
from phalanx.spec.run import RunSpec
from phalanx.testing import rank_pool
from phalanx.testing.processes import WAIT_SECONDS, rank_pids, wait_until
from phalanx.train.checkpoint.in_memory import latest_common_step
from phalanx.train.guards.divergence import record_rollback
from tests.helpers.multi_node_runs import TRAINING_CHANGES, multi_node_run
from tests.helpers.small_runs import MOE, make_trainer, shared_data_cache, small_run, train_until
from tests.helpers.training_processes import (
    SHORT,
    events_of_kind,
    has_reached_step,
    recorded_losses,
    single_process_losses,
    training_run,
)

TEXT = Path(json.__file__).parent
IN_MEMORY_CHECKPOINTS_ONLY = {"recovery.in_memory_checkpoint_every": 1, "checkpoint.every": 0}
NUM_KILLS = 2


@given(st.data())
def test_latest_common_step_is_newest_step_available_for_all_ranks(data: st.DataObject) -> None:
    """For any distribution of copies, each rank gets its state from a rank that has it, itself if possible."""
    world = data.draw(st.integers(1, 5))
    copies = st.tuples(st.integers(0, 3), st.integers(0, world - 1))
    copies_by_rank = data.draw(st.lists(st.lists(copies, max_size=4), min_size=world, max_size=world))
    complete_steps = [
        step
        for step in range(4)
        if all(any((step, rank) in available for available in copies_by_rank) for rank in range(world))
    ]
    latest = latest_common_step(copies_by_rank)
    if latest is None:
        assert not complete_steps
        return
    step, holders = latest
    assert step == max(complete_steps)
    for rank, holder in enumerate(holders):
        assert (step, rank) in copies_by_rank[holder]
        assert holder == rank or (step, rank) not in copies_by_rank[rank]


def train_and_restore(run: RunSpec, memory: str, lost: int | None, last: int) -> list[tuple[float, float]]:
    """Train, lose a rank's own copies, and continue in another trainer from the copies that are left."""
    os.environ[SLOTS_ENV], os.environ["LOCAL_WORLD_SIZE"] = memory, "1"  # each rank is a node
    trainer = make_trainer(run)
    losses = []
    for step in range(1, last + 1):
        losses += train_until(trainer, step)
        trainer.save_in_memory()
    assert trainer.in_memory_checkpointer is not None
    if lost is not None and trainer.mesh.rank == lost:
        for slot in trainer.in_memory_checkpointer._slots:
            slot.invalidate()
    resumed = make_trainer(run)
    resumed.resume()
    assert resumed.step == last
    return losses + train_until(resumed, 2 * last)


@pytest.mark.parametrize(
    ("changes", "count"),
    [
        ({}, 2),
        ({"layout.data_parallel": "zero1", "training.precision": "bf16"}, 2),
        ({"layout.data_parallel": "zero3"}, 2),
        ({"layout.data_parallel": "zero2", "layout.offload": "cpu"}, 2),
        ({"layout.tp": 2, "optimizer.name": "muon"}, 2),
        ({"layout.ep": 2, "layout.data_parallel": "zero1", "model": MOE}, 2),
        ({"layout.pp": 2, "layout.data_parallel": "zero1"}, 4),
    ],
    ids=["ddp", "zero1-bf16", "zero3", "zero2-offload", "tp-muon", "ep-zero1", "pp-zero1"],
)
def test_in_memory_checkpoint_restore_is_bit_exact(changes: dict[str, Any], count: int, tmp_path: Path) -> None:
    """A rank that has lost its copy restores it from its neighbor."""
    shared_data_cache()
    run = small_run(TEXT, tmp_path, {**IN_MEMORY_CHECKPOINTS_ONLY, **changes})
    prepare(run.data)
    allocate_slots(count)
    memory = os.environ.pop(SLOTS_ENV)
    last = 3
    for lost in (None, 1):
        for losses in rank_pool(count).run(train_and_restore, run, memory, lost, last):
            uninterrupted = rank_pool(count).run(train_uninterrupted, small_run(TEXT, tmp_path, changes), 2 * last)[0]
            assert losses == uninterrupted


def train_uninterrupted(run: RunSpec, last: int) -> list[tuple[float, float]]:
    return train_until(make_trainer(run), last)


def test_in_memory_checkpoint_loses_at_most_one_step_per_killed_rank(tmp_path: Path) -> None:
    directory, kills = tmp_path / "parity", random.Random(7)
    with training_run(TEXT, tmp_path, {**SHORT, **IN_MEMORY_CHECKPOINTS_ONLY, "training.steps": 60}) as process:
        for number in range(NUM_KILLS):
            start_step = (events_of_kind(directory, "started") or [{"step": 0}])[-1]["step"]
            wait_until(has_reached_step(directory, start_step + kills.randint(4, 9)), "some steps")
            os.kill(rank_pids(directory)[kills.randint(0, 1)], signal.SIGKILL)
            wait_until(lambda number=number: len(events_of_kind(directory, "started")) > number + 1, "a start")
        _, stderr = process.communicate(timeout=WAIT_SECONDS)
    assert process.returncode == 0, stderr
    failed, (_, *restarts) = events_of_kind(directory, "failed"), events_of_kind(directory, "started")
    assert len(failed) == len(restarts) == NUM_KILLS
    assert all(0 <= before["step"] - after["step"] <= 1 for before, after in zip(failed, restarts, strict=True))
    with training_run(TEXT, tmp_path / "whole", {**SHORT, "training.steps": 60}) as process:
        process.communicate(timeout=WAIT_SECONDS)
    assert recorded_losses(directory) == recorded_losses(tmp_path / "whole" / "parity")


def test_in_memory_checkpoint_of_lost_node_is_restored_from_peer(tmp_path: Path) -> None:
    """No checkpoint is written to disk."""
    directory = tmp_path / "parity"
    with multi_node_run(tmp_path, IN_MEMORY_CHECKPOINTS_ONLY, "2") as nodes:
        nodes.start("first")
        nodes.start("second")
        wait_until(has_reached_step(directory, 5), "some steps")
        nodes.kill("second")
        losses_before = recorded_losses(directory)
        nodes.start("second")
        wait_until(lambda: len(events_of_kind(directory, "started")) > 1, "a start of both")
        first, restarted = events_of_kind(directory, "started")
        assert (first["ranks"], restarted["ranks"]) == (4, 4)
        assert restarted["step"] >= len(losses_before) - 1
        wait_until(has_reached_step(directory, restarted["step"] + 3), "some more steps")
    losses = recorded_losses(directory)
    assert losses == single_process_losses(tmp_path, TRAINING_CHANGES, len(losses))


def test_in_memory_checkpoint_recovers_single_rank_run_after_sigkill(tmp_path: Path) -> None:
    """The launcher restarts the rank where it was, and losses equal those of an uninterrupted run."""
    directory = tmp_path / "parity"
    with training_run(TEXT, tmp_path, {**SHORT, **IN_MEMORY_CHECKPOINTS_ONLY}, 1) as process:
        wait_until(has_reached_step(directory, 4), "some steps")
        os.kill(rank_pids(directory)[0], signal.SIGKILL)
        _, stderr = process.communicate(timeout=WAIT_SECONDS)
    assert process.returncode == 0, stderr
    assert "rank 0 was killed by SIGKILL" in stderr
    [failed], (_, restarted) = events_of_kind(directory, "failed"), events_of_kind(directory, "started")
    assert failed["step"] - restarted["step"] <= 1
    assert recorded_losses(directory) == train_until(
        make_trainer(small_run(TEXT, tmp_path / "whole", SHORT)), SHORT["training.steps"]
    )


def test_in_memory_checkpoint_works_with_one_rank_and_no_restarts(tmp_path: Path) -> None:
    """Copies are in the launcher's memory, and such a run otherwise has no launcher."""
    with training_run(
        TEXT, tmp_path, {**IN_MEMORY_CHECKPOINTS_ONLY, "training.steps": 4, "recovery.max_restarts": 0}, 1
    ) as process:
        _, stderr = process.communicate(timeout=WAIT_SECONDS)
    assert process.returncode == 0, stderr
    assert len(recorded_losses(tmp_path / "parity")) == 4


def save_and_permute_ranks(run: RunSpec, memories: list[str], last: int) -> list[int]:
    """Move ranks to other nodes between starts, twice before a step is trained, and give one node new memory; return
    the steps that were restored."""
    rank = int(os.environ["RANK"])
    os.environ["LOCAL_WORLD_SIZE"], os.environ["LOCAL_RANK"] = "1", "0"
    os.environ[SLOTS_ENV] = memories[rank]
    trainer = make_trainer(run)
    for step in range(1, last + 1):
        train_until(trainer, step)
        trainer.save_in_memory()
    steps = []
    for moved in (1, 2, 3):
        os.environ[SLOTS_ENV] = memories[-1] if rank == 3 else memories[(rank + moved) % 3]
        resumed = make_trainer(run)
        resumed.resume()
        steps.append(resumed.step)
    return steps


@pytest.mark.parametrize("last", [3, 4])
def test_in_memory_checkpoint_is_found_when_ranks_change_nodes(last: int, tmp_path: Path) -> None:
    """Three of four nodes move up by one rank, and the last is new. A copy may be in either of its two slots, depending
    on `last`."""
    shared_data_cache()
    run = small_run(TEXT, tmp_path, {**IN_MEMORY_CHECKPOINTS_ONLY, "layout.data_parallel": "zero3"})
    prepare(run.data)
    memories = []
    for _ in range(5):
        allocate_slots(1)
        memories.append(os.environ.pop(SLOTS_ENV))
    assert rank_pool(4).run(save_and_permute_ranks, run, memories, last) == [[last] * 3] * 4


def test_in_memory_checkpoint_is_ignored_when_saved_before_rollback(tmp_path: Path) -> None:
    shared_data_cache()
    run = small_run(TEXT, tmp_path, {**IN_MEMORY_CHECKPOINTS_ONLY, "recovery.max_rollbacks": 1})
    prepare(run.data)
    allocate_slots(2)
    memory = os.environ.pop(SLOTS_ENV)
    assert rank_pool(2).run(save_and_roll_back, run, memory) == [0, 0]


def save_and_roll_back(run: RunSpec, memory: str) -> int:
    os.environ[SLOTS_ENV], os.environ["LOCAL_WORLD_SIZE"] = memory, "2"
    trainer = make_trainer(run)
    train_until(trainer, 3)
    trainer.save_in_memory()
    if trainer.is_main:
        record_rollback(trainer.directory, 3, 0, "a spike")
    dist.barrier()
    resumed = make_trainer(run)
    resumed.resume()
    return resumed.step
