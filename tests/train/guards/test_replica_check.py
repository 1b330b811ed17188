"""Replicas are compared bit by bit: one changed bit is found in every layout, and nothing else is reported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from phalanx.parallel.dtensor_shards import local_tensor
from phalanx.spec.errors import UserError
from phalanx.spec.parallel_dims import ParallelDims
from phalanx.testing import rank_pool
from phalanx.train.checkpoint.state import checkpoint_tensors
from phalanx.train.guards.replica_check import (
    CHUNK_ELEMENTS,
    _gather_hashes,
    _hash_tensors,
    check_replica_consistency,
    describe_mismatch,
    find_mismatch,
    shard_id,
    tensor_hash,
)
from phalanx.train.trainer import Trainer
from tests.helpers.cli_runner import command_json
from tests.helpers.faulty_runs import create_run_directory, start_faulty_run, wait_for_failure
from tests.helpers.small_runs import DENSE, MOE, make_trainer, small_run, train_until

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool]


@given(st.sampled_from(DTYPES[:4]), st.integers(1, 40), st.data())
def test_tensor_hash_changes_with_any_single_bit(dtype: torch.dtype, count: int, data: Any) -> None:
    tensor = torch.arange(count).to(dtype)
    before = int(tensor_hash(tensor))
    assert int(tensor_hash(tensor.clone())) == before
    flip_bit(tensor, data.draw(st.integers(0, 8 * tensor.nbytes - 1)))
    assert int(tensor_hash(tensor)) != before


def test_tensor_hash_depends_on_element_order_not_on_strides() -> None:
    for dtype in DTYPES:
        tensor = (torch.arange(6) > 2).to(dtype).view(2, 3)
        assert int(tensor_hash(tensor.t())) == int(tensor_hash(tensor.t().contiguous()))
        assert int(tensor_hash(tensor)) != int(tensor_hash(tensor.flip(0)))
    long = torch.zeros(CHUNK_ELEMENTS + 3)
    before = int(tensor_hash(long))
    flip_bit(long, 32 * (CHUNK_ELEMENTS + 1))
    assert int(tensor_hash(long)) != before
    assert int(tensor_hash(torch.empty(0))) == 0


def flip_bit(tensor: torch.Tensor, bit: int) -> None:
    tensor.view(-1).view(torch.uint8)[bit // 8] ^= 1 << bit % 8


def test_find_mismatch_names_minority_ranks_or_both_of_two() -> None:
    assert find_mismatch([{1: 5, 2: 6}, {1: 5}, {2: 6}]) is None
    mismatch = find_mismatch([{1: 5, 2: 6}, {1: 5, 2: 7, 3: 0}, {1: 4, 2: 7, 3: 1}])
    assert mismatch is not None
    assert (mismatch.key, mismatch.ranks, mismatch.holders, mismatch.num_tensors) == (1, (2,), (0, 1, 2), 3)
    text = describe_mismatch(mismatch, "model.head.weight", ParallelDims(dp_replicate=3), 40, 10)
    assert "step 40: model.head.weight differs on rank 2 (dp=2) from the 2 other ranks" in text
    assert "and 2 more tensors; it was equal after step 30" in text
    mismatch_of_two = find_mismatch([{1: 5}, {1: 6}])
    assert mismatch_of_two is not None
    assert "between rank 0 (dp=0), rank 1 (dp=1)" in describe_mismatch(
        mismatch_of_two, "x", ParallelDims(dp_replicate=2), 10, 10
    )


LAYOUTS: list[tuple[int, dict[str, Any]]] = [
    (2, {}),
    (2, {"layout.data_parallel": "zero1"}),
    (2, {"layout.data_parallel": "zero2", "training.precision": "bf16"}),
    (2, {"layout.tp": 2}),
    (2, {"layout.cp": 2}),
    (2, {"layout.ep": 2, "model": MOE}),
    (4, {"layout.data_parallel": "hsdp", "layout.dp_shard": 2, "training.precision": "bf16"}),
    (4, {"layout.tp": 4, "model": {**DENSE, "vocab_size": 263}}),
    (4, {"layout.tp": 2, "layout.data_parallel": "zero1", "optimizer.name": "muon"}),
    (4, {"layout.pp": 2, "layout.tp": 2, "layout.micro_batch_size": 1, "model": {**DENSE, "tie_embeddings": True}}),
    (4, {"layout.ep": 2, "layout.tp": 2, "model": MOE}),
]
"""Layouts that together replicate every kind of tensor in every way."""


@pytest.mark.parametrize(("count", "changes"), LAYOUTS)
def test_replica_check_finds_one_flipped_bit_in_every_layout(
    count: int, changes: dict[str, Any], text: Path, tmp_path: Path
) -> None:
    run = small_run(text, tmp_path, {"training.precision": "fp32", **changes})
    results = rank_pool(count).run(check_after_corruption, run)
    assert {message for message, _, _, _ in results} == {results[0][0]}, "all ranks report the same"
    message, name, _, holders = results[-1]
    # A trained parameter and the one that computes may share memory, which then has two names.
    assert message.startswith((f"step 3: {name} differs ", f"step 3: computing.{name.removeprefix('model.')} differs "))
    named_ranks = [rank for rank in range(count) if f"rank {rank} (" in message]
    assert named_ranks == (holders if " differs between " in message else [count - 1])
    print(message)


def check_after_corruption(run: Any) -> tuple[str, str, int, list[int]]:
    """Return the message after the last rank changed a bit of a replicated tensor, with the tensor's name, key and
    holders. Before the change, there is no message."""
    trainer = make_trainer(run)
    for step in (1, 2):
        train_until(trainer, step)
        assert replica_check_message(trainer, step) == ""
    hashes = list(_hash_tensors(trainer.strategy, trainer.optimizers))
    tables = _gather_hashes({key: value for key, _, value in hashes})
    last = len(tables) - 1
    key = [key for key in tables[last] if any(key in table for table in tables[:last])][-1 if last == 1 else 0]
    name = next((name for known, name, _ in hashes if known == key), "")
    if trainer.mesh.rank == last:
        flip_bit(local_tensor(tensor_by_name(trainer, name)), 3)
    return replica_check_message(trainer, 3), name, key, [rank for rank, table in enumerate(tables) if key in table]


def replica_check_message(trainer: Trainer, step: int) -> str:
    return str(check_replica_consistency(trainer.strategy, trainer.optimizers, trainer.mesh.dims, step, 1) or "")


def tensor_by_name(trainer: Trainer, name: str) -> torch.Tensor:
    """Return the tensor that is compared under a name."""
    if name.startswith("computing."):
        return trainer.module.get_parameter(name.removeprefix("computing.")).detach()
    return checkpoint_tensors(trainer.strategy, trainer.optimizers)[name]


def test_shard_id_depends_on_name_not_on_values() -> None:
    assert shard_id("a", torch.zeros(2)) == shard_id("a", torch.ones(2))
    assert shard_id("a", torch.zeros(2)) != shard_id("b", torch.zeros(2))


def test_replica_check_is_rejected_for_parameter_server(text: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="replica_check_interval = 5 cannot be combined"):
        small_run(text, tmp_path, {"training.replica_check_interval": 5, "layout.data_parallel": "parameter_server"})


def test_replica_check_stops_run_and_names_rank_tensor_and_step(text: Path, tmp_path: Path) -> None:
    """The ranks are real processes, as `phalanx train` starts them."""
    changes = {"training.replica_check_interval": 2}
    directory = create_run_directory(text, tmp_path, 3, {**changes, "training.tokens_per_step": 288})
    stderr = wait_for_failure(start_faulty_run(directory, 3, "bit"))
    print(stderr)
    assert "phalanx: CorruptionError: step 4: model." in stderr
    assert "differs on rank 1 (dp=1) from the 2 other ranks, where it must be equal" in stderr
    assert "; it was equal after step 2" in stderr
    assert "why:" not in stderr
    assert not list((directory / "hangs").glob("*.json"))
    verdict = command_json("debug", directory)["verdict"]
    assert (verdict["kind"], verdict["ranks"]) == ("error", [1])
    assert verdict["summary"].startswith("CorruptionError: step 4: model.")
