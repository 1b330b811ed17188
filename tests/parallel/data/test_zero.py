"""Properties of ZeRO that the parity tests do not reach: large models are updated in several pieces, bf16 gradients of
many micro-batches are summed in fp32, and weights are gathered late."""

from __future__ import annotations

import gc
from copy import deepcopy
from itertools import accumulate
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from phalanx.parallel.comm.collectives import all_gather
from phalanx.parallel.data import zero_buckets
from phalanx.parallel.data.offload import CpuOffload, DiskOffload
from phalanx.parallel.data.zero import ZeRO
from phalanx.parallel.data.zero_buckets import Bucket
from phalanx.parallel.dtensor_shards import local_tensor
from phalanx.program import buckets
from phalanx.program.buckets import MAX_BUCKETS_IN_FLIGHT, PIECE_BYTES, chunk_by_bytes
from phalanx.spec.layout import Layout
from phalanx.spec.run import RunSpec
from phalanx.testing import rank_pool
from phalanx.train.callbacks.callback import Callback
from phalanx.train.trainer import Trainer
from tests.helpers.small_runs import (
    MOE,
    TWO_EXPERTS,
    make_trainer,
    small_run,
    train_to_end,
    train_until,
    training_trajectory,
)

CHUNK_BYTES_BY_WORLD_SIZE = {2: 52_000, 4: 26_000}
"""Piece sizes for which, without padding, the last rank would have other pieces than the first."""
INDIVISIBLE_SHAPE = {"head_dim": 10, "hidden_size": 38, "ffn_hidden_size": 49, "vocab_size": 301}
"""Sizes that neither two nor four ranks divide."""


def train_with_small_chunks(run: RunSpec) -> tuple[list[tuple[float, float]], int]:
    """Return the trajectory, and the number of pieces of an update."""
    limit = CHUNK_BYTES_BY_WORLD_SIZE[dist.get_world_size()]
    with patch.dict(PIECE_BYTES, none=limit):
        trainer = make_trainer(run)
        result = train_until(trainer, run.training.steps)
    assert isinstance(trainer.strategy, ZeRO)
    return result, len(chunk_by_bytes(trainer.strategy.buckets, limit))


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("data", ["zero1", "zero2"])
def test_zero_chunked_muon_step_equals_single_process(data: str, world_size: int, text: Path, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"model": {**MOE, **INDIVISIBLE_SHAPE}, "optimizer.name": "muon", "training.steps": 6}
    expected = training_trajectory(small_run(text, tmp_path / "one", changes))
    run = small_run(text, tmp_path, {**changes, "layout.data_parallel": data, "layout.bucket_mb": 0.01})
    for result, pieces in rank_pool(world_size).run(train_with_small_chunks, run):
        assert result == [pytest.approx(step, rel=1e-10) for step in expected]
        assert pieces > 3


def train_few_experts(run: RunSpec) -> tuple[list[tuple[float, float]], set[torch.Size]]:
    """Return the trajectory, and the shapes of this rank's parts of the experts."""
    trainer = make_trainer(run)
    result = train_until(trainer, run.training.steps)
    parts = trainer.strategy.trainable_parameters.items()
    return result, {local_tensor(part).shape for name, part in parts if name.endswith("experts.up")}


@pytest.mark.parametrize(("ep", "local_experts"), [(1, 2), (2, 1)])
@pytest.mark.parametrize("data", ["zero1", "zero2", "zero3"])
def test_all_ranks_train_equal_parts_of_fewer_experts(
    data: str, ep: int, local_experts: int, text: Path, tmp_path: Path
) -> None:
    changes: dict[str, Any] = {"model": TWO_EXPERTS, "training.steps": 3, "layout.micro_batch_size": 1}
    expected = training_trajectory(small_run(text, tmp_path / "one", changes))
    run = small_run(text, tmp_path, {**changes, "layout.data_parallel": data, "layout.ep": ep})
    rows = MOE["moe"]["expert_ffn_size"] // (4 // ep)
    for result, shapes in rank_pool(4).run(train_few_experts, run):
        assert result == [pytest.approx(step, rel=1e-10) for step in expected]
        assert shapes == {torch.Size([local_experts, rows, MOE["hidden_size"]])}


def summed_gradient_errors(stage: str, offload: bool, in_pipeline: bool) -> list[float]:
    """Return the relative errors of a bf16 layer's gradient, summed over 64 micro-batches, in each of two steps."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    torch.manual_seed(0)
    x_NBD = torch.rand(64, ranks, 16, 24).bfloat16()
    layer, cpu = nn.Linear(24, 32, bias=False), torch.device("cpu")
    mesh = init_device_mesh("cpu", (ranks,)) if ranks > 1 else None
    layout = Layout.model_validate({"data_parallel": stage})
    strategy = ZeRO(layer, layout, mesh, cpu, torch.bfloat16, CpuOffload() if offload else None)
    errors = []
    for _ in range(2):
        strategy.zero_grad()
        micro_batches = [x_BD[rank] for x_BD in x_NBD]
        if in_pipeline:
            with strategy.accumulate(last=False):
                for x_BD in micro_batches:
                    layer(x_BD).square().sum().backward()
            strategy.finalize_gradients()
        else:
            for index, x_BD in enumerate(micro_batches):
                with strategy.accumulate(last=index == len(micro_batches) - 1):
                    layer(x_BD).square().sum().backward()
        rows = local_tensor(strategy.gradients()["weight"]).double()
        x_MD = x_NBD.flatten(0, 2).double()
        expected = (2 * (x_MD @ layer.weight.detach().double().T)).T @ x_MD
        own = expected.chunk(ranks)[rank]
        errors.append(((rows - own).norm() / own.norm()).item())
    return errors


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(
    ("stage", "offload", "in_pipeline"),
    [
        ("zero1", False, False),
        ("zero1", False, True),
        ("zero1", True, False),
        ("zero2", False, False),
        ("zero2", True, False),
    ],
)
def test_bf16_gradients_of_many_micro_batches_sum_in_fp32(
    stage: str, offload: bool, in_pipeline: bool, world_size: int
) -> None:
    for errors in rank_pool(world_size).run(summed_gradient_errors, stage, offload, in_pipeline):
        assert max(errors) < 3e-3  # summed in bf16: 8e-3 to 1e-2


def count_files_after_many_micro_batches(directory: Path) -> int:
    """Train two steps of 12 micro-batches with state in files; return the number of files of a weight's rows."""
    layer, cpu = nn.Linear(128, 512, bias=False), torch.device("cpu")
    offload = DiskOffload(directory)
    strategy = ZeRO(layer, Layout(data_parallel="zero2"), None, cpu, torch.bfloat16, offload)
    for _ in range(2):
        strategy.zero_grad()
        for index in range(12):
            with strategy.accumulate(last=index == 11):
                layer(torch.ones(1, 128, dtype=torch.bfloat16)).sum().backward()
    return len(offload.files)


def test_gradient_on_disk_that_widens_to_fp32_leaves_one_file(tmp_path: Path) -> None:
    """The files are those of the master rows and of their gradient; that of the bf16 gradient is gone."""
    assert rank_pool(1).run(count_files_after_many_micro_batches, tmp_path) == [2]


# -- several buckets in flight -----------------------------------------------------------------------------------------


class LateGather:
    """An all-gather that runs when it is waited for, so that nothing is received before."""

    def __init__(self, out: Tensor, rows: Tensor, group: dist.ProcessGroup, async_op: bool) -> None:
        self.arguments = out, rows, group
        assert async_op

    def wait(self) -> None:
        out, rows, group = self.arguments
        all_gather(out, rows, group=group)


class WeightsReader(Callback):
    """A user's callback that copies the weights after the first step."""

    weights: dict[str, Tensor]

    def on_step_end(self, trainer: Trainer, record: Any) -> None:
        if trainer.step == 1:
            self.weights = copy_weights(trainer)


def copy_weights(trainer: Trainer) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in trainer.module.named_parameters()}


def read_weights_after_update(run: RunSpec, path: str) -> dict[str, Tensor]:
    """Return the weights that a reader gets after some steps, or the result of a forward pass with them."""
    with patch.object(zero_buckets, "all_gather", LateGather):
        trainer = make_trainer(run)
        if path == "callback":
            reader = WeightsReader()
            train_to_end(trainer, user_callbacks={"callbacks.reader": reader})
            return reader.weights
        train_until(trainer, run.training.steps)
        strategy = trainer.strategy
        if isinstance(strategy, ZeRO):
            assert len(strategy.gathers.pending) == len(strategy.buckets) > MAX_BUCKETS_IN_FLIGHT
        match path:
            case "forward":
                tokens = torch.arange(32).view(1, 32)
                with torch.no_grad():
                    return {"logits": trainer.strategy.model(tokens)[0]}
            case "evaluation":
                return {"loss": torch.tensor(trainer.evaluate()["held_out_loss"], dtype=torch.float64)}
            case "checkpoint":
                trainer.save()
                trainer.checkpointer.wait()
            case "copy in memory":
                trainer.in_memory_checkpointer = Mock()
                trainer.save_in_memory()
            case "sync":
                for parameter in strategy.trainable_parameters.values():
                    local_tensor(parameter.detach()).mul_(3)
                strategy.sync_model_weights()
            case "wait":
                strategy.wait_for_weights()
        return copy_weights(trainer)


READERS = ("forward", "evaluation", "checkpoint", "copy in memory", "sync", "callback", "wait")


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("path", READERS)
def test_zero_weights_are_gathered_before_they_are_read(path: str, world_size: int, text: Path, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"training.steps": 2, "training.tokens_per_step": 6 * 32, "layout.micro_batch_size": 1}
    expected = read_weights_after_update(small_run(text, tmp_path / "one", changes), path)
    changes |= {"layout.data_parallel": "zero1", "layout.bucket_mb": 0.01}
    run = small_run(text, tmp_path, changes)
    for weights in rank_pool(world_size).run(read_weights_after_update, run, path):
        torch.testing.assert_close(weights, expected, rtol=1e-10, atol=1e-13)


def logits_of_copies(run: RunSpec) -> list[Tensor]:
    """Return logits of a trained module whose trainer is gone, and of its copy."""
    trainer = make_trainer(run)
    train_until(trainer, 1)
    trainer.strategy.wait_for_weights()
    module = trainer.strategy.module
    copied = deepcopy(module)
    del trainer
    gc.collect()
    with torch.no_grad():
        return [model(torch.arange(8)[None])[0] for model in (module, copied)]


def test_zero_module_can_be_copied_and_outlives_its_strategy(text: Path, tmp_path: Path) -> None:
    run = small_run(text, tmp_path, {"layout.data_parallel": "zero1"})
    for logits, logits_of_copy in rank_pool(2).run(logits_of_copies, run):
        assert torch.equal(logits, logits_of_copy)


def record_reductions(run: RunSpec, large_bytes: int) -> list[tuple[str, int]]:
    """Return starts and ends of the reductions of a backward pass, with the index of the bucket."""
    trainer = make_trainer(run)
    events = []
    assert isinstance(trainer.strategy, ZeRO)
    indices = {id(bucket): index for index, bucket in enumerate(trainer.strategy.buckets)}
    start, finish = Bucket.start_reduce, Bucket.finish_reduce

    def record_start(bucket: Bucket, keep_full: bool) -> None:
        start(bucket, keep_full)
        events.append(("start", indices[id(bucket)]))

    def record_finish(bucket: Bucket, keep_full: bool) -> None:
        events.append(("finish", indices[id(bucket)]))
        finish(bucket, keep_full)

    with (
        patch.object(buckets, "LARGE_MESSAGE_BYTES", large_bytes),
        patch.object(Bucket, "start_reduce", record_start),
        patch.object(Bucket, "finish_reduce", record_finish),
    ):
        train_until(trainer, 1)
    return events


@pytest.mark.parametrize(
    ("data", "large_bytes", "at_a_time"), [("zero1", 2**28, 2), ("zero2", 2**28, 2), ("zero1", 0, 1)]
)
def test_zero_reduces_several_buckets_at_a_time_unless_large(
    data: str, large_bytes: int, at_a_time: int, text: Path, tmp_path: Path
) -> None:
    run = small_run(text, tmp_path, {"layout.data_parallel": data, "layout.bucket_mb": 0.01, "training.steps": 1})
    first, *others = rank_pool(2).run(record_reductions, run, large_bytes)
    assert others == [first]  # one order on all ranks
    for kind in ("start", "finish"):
        indices = [index for event, index in first if event == kind]
        assert indices == list(range(len(indices)))
    in_flight = list(accumulate(1 if event == "start" else -1 for event, _ in first))
    assert max(in_flight) == at_a_time < len(first) / 2
    assert in_flight[-1] == 0


@pytest.mark.parametrize(("precision", "computed"), [("bf16", torch.bfloat16), ("fp32", torch.float32)])
def test_single_replica_trains_fp32_weights_of_model_in_its_precision(
    precision: str, computed: torch.dtype, text: Path, tmp_path: Path
) -> None:
    """In bf16, a single replica is ZeRO-1 on one rank, without autocast."""
    strategy = make_trainer(small_run(text, tmp_path, {"training.precision": precision})).strategy
    assert {parameter.dtype for parameter in strategy.module.parameters()} == {computed}
    assert {parameter.dtype for parameter in strategy.trainable_parameters.values()} == {torch.float32}
    assert strategy.autocast == (computed == torch.float32)


class OwnSGD(torch.optim.SGD):
    """An optimizer of a user."""


@pytest.mark.parametrize(("kind", "calls"), [(OwnSGD, 1), (torch.optim.SGD, 4)])
def test_single_rank_steps_optimizer_of_user_once(kind: type[torch.optim.SGD], calls: int) -> None:
    layers = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(4)))
    layout = Layout(data_parallel="zero1", bucket_mb=1e-5)
    with patch.dict(PIECE_BYTES, none=1):
        strategy = ZeRO(layers, layout, None, torch.device("cpu"), torch.bfloat16, None)
    optimizer = kind(strategy.trainable_parameters.values(), lr=0.1)
    with strategy.accumulate():
        layers(torch.ones(2, 8, dtype=torch.bfloat16)).sum().backward()
    with patch.object(kind, "step", autospec=True, side_effect=kind.step) as step:
        strategy.update([optimizer])
    assert step.call_count == calls


def test_stack_without_experts_has_no_rows() -> None:
    """A node of a swarm may train no expert."""
    module = nn.ParameterDict({"experts": torch.empty(0, 4, 8), "norm": torch.ones(8)})
    strategy = ZeRO(module, Layout(data_parallel="zero1"), None, torch.device("cpu"), torch.bfloat16, None)
    assert {name: tuple(p.shape) for name, p in strategy.trainable_parameters.items()} == {
        "experts": (0, 4, 8),
        "norm": (8,),
    }
