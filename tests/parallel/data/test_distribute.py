"""Modules other than Phalanx's transformer under every data-parallel strategy: a ResNet of `transformers`, and the
example."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import ResNetConfig, ResNetForImageClassification

from phalanx.parallel.data.ddp import DDP
from phalanx.parallel.data.distribute import distribute
from phalanx.parallel.mesh import Mesh, build_mesh
from phalanx.parallel.strategy import Strategy
from phalanx.spec.errors import UserError
from phalanx.spec.layout import Layout
from phalanx.testing import rank_pool

EXAMPLE = Path(__file__).parents[3] / "examples" / "resnet_digits.py"
CPU = torch.device("cpu")
BATCH = 16
STEPS = 6
HSDP = {"data_parallel": "hsdp", "dp_shard": 2}
LAYOUTS: list[tuple[int, dict[str, Any]]] = [
    *((n, {"data_parallel": data}) for data in ("ddp", "zero1", "zero2", "zero3") for n in (2, 4)),
    (2, {"data_parallel": "ddp", "bucket_mb": 0.01, "ddp_static_graph": True}),
    (2, {"data_parallel": "zero1", "bucket_mb": 0.005}),
    (4, {"data_parallel": "zero2", "bucket_mb": 0.005}),
    (4, {"data_parallel": "zero3", "fsdp_unit": "sublayer", "fsdp_prefetch": 2}),
    (4, {"data_parallel": "zero3", "fsdp_unit": "model", "reshard_after_forward": False}),
    (4, HSDP),
    (4, {**HSDP, "fsdp_unit": "sublayer"}),
    (3, {"data_parallel": "parameter_server"}),
    (4, {"data_parallel": "parameter_server", "num_servers": 2}),
    (4, {"data_parallel": "parameter_server", "num_servers": 2, "max_staleness": 0}),
    (2, {"data_parallel": "zero1", "offload": "cpu"}),
    (2, {"data_parallel": "zero2", "offload": "nvme", "offload_directory": tempfile.gettempdir()}),
    (2, {"data_parallel": "zero3", "offload": "cpu"}),
]
CASES = [
    pytest.param(n, layout, parts, id=f"{'-'.join(map(str, layout.values()))}-x{n}-acc{parts}")
    for n, layout in LAYOUTS
    for parts in (1, 2)
    if not (parts > 1 and layout.get("ddp_static_graph"))
]
SUPPORTS_FIRST_BUCKET_SIZE = (
    "bucket_cap_mb_list" in inspect.signature(nn.parallel.DistributedDataParallel.__init__).parameters
)
Trajectory = list[tuple[float, float]]


def resnet(train: bool) -> ResNetForImageClassification:
    """Return a ResNet with two small stages in fp64. Four ranks divide none of its numbers of channels, and one of them
    owns none of five. BatchNorm uses statistics of the batch if `train`, and otherwise computes each image alone, so
    that results do not depend on the number of ranks."""
    torch.manual_seed(0)
    config = ResNetConfig(
        num_channels=1, embedding_size=5, hidden_sizes=[10, 14], depths=[1, 2], layer_type="basic", num_labels=10
    )
    model = ResNetForImageClassification(config).double()
    for part in model.modules():
        if isinstance(part, nn.BatchNorm2d):
            part.train(train)
    return model


def build_cpu_mesh(layout: Layout) -> Mesh:
    return build_mesh(layout, dist.get_world_size() if dist.is_initialized() else 1, "cpu")


def residual_blocks(model: ResNetForImageClassification) -> list[nn.Module]:
    return [block for stage in model.resnet.encoder.stages for block in stage.layers]


def make_global_batch(step: int) -> tuple[Tensor, Tensor]:
    """Return the images and labels of a step, over all ranks."""
    random = torch.Generator().manual_seed(step)
    images = torch.randn(BATCH, 1, 24, 24, generator=random, dtype=torch.float64)
    return images, torch.randint(10, (BATCH,), generator=random)


def local_batch(global_batch: tuple[Tensor, Tensor], mesh: Mesh) -> tuple[Tensor, Tensor]:
    """Return this rank's images and labels."""
    images, labels = global_batch
    return images[mesh.dp_rank :: mesh.dims.dp_size], labels[mesh.dp_rank :: mesh.dims.dp_size]


def make_adamw(strategy: Strategy) -> list[torch.optim.Optimizer]:
    """Return optimizers of the parameters that this rank trains; a worker of a parameter server trains none."""
    trained = list(strategy.trainable_parameters.values())
    return [torch.optim.AdamW(trained, lr=0.01, weight_decay=0.1)] if trained else []


def summed_loss(strategy: Strategy, images: Tensor, labels: Tensor) -> Tensor:
    """Return the loss summed over images."""
    return F.cross_entropy(strategy.model(images).logits, labels, reduction="sum")


def train_resnet(choices: dict[str, Any], train: bool = False, micro_batches: int = 1) -> Trajectory:
    """Return mean loss and gradient norm of every step, with clipping."""
    layout = Layout(**choices)
    mesh, model = build_cpu_mesh(layout), resnet(train)
    strategy = distribute(model, layout, mesh, CPU, residual_blocks(model), "fp64")
    return train_on_batches(
        strategy, [local_batch(make_global_batch(step), mesh) for step in range(STEPS)], micro_batches
    )


def train_on_batches(strategy: Strategy, batches: list[tuple[Tensor, Tensor]], micro_batches: int = 1) -> Trajectory:
    """Return the mean loss over ranks and the gradient norm of every step."""
    optimizers, result = make_adamw(strategy), []
    for images, labels in batches:
        loss_sum = torch.zeros((), dtype=torch.float64)
        for part in (slice(index, None, micro_batches) for index in range(micro_batches * strategy.runs_model)):
            with strategy.accumulate(last=part.start == micro_batches - 1):
                loss = summed_loss(strategy, images[part], labels[part])
                loss.backward()
            loss_sum += loss.detach()
        step = strategy.step(optimizers, loss_sum, len(labels) * strategy.runs_model, max_grad_norm=1.0)
        result.append((float(step.loss), float(step.grad_norm)))
    strategy.drain_pending_updates()
    return result


@cache
def single_process_trajectory() -> Trajectory:
    return train_resnet({})


def approx_trajectory(expected: Trajectory) -> list[Any]:
    return [pytest.approx(step, rel=1e-10) for step in expected]


@pytest.mark.parametrize(("world_size", "layout", "micro_batches"), CASES)
def test_distribute_resnet_equals_single_process(world_size: int, layout: dict[str, Any], micro_batches: int) -> None:
    for result in rank_pool(world_size).run(train_resnet, layout, micro_batches=micro_batches):
        assert result == approx_trajectory(single_process_trajectory())


def compute_bf16_grad_norm(data: str) -> float:
    """Return the gradient norm of a module in bf16."""
    torch.manual_seed(0)
    layers = [nn.Linear(6, 6, dtype=torch.bfloat16) for _ in range(4)]
    layout = Layout(data_parallel=data)
    mesh = build_cpu_mesh(layout)
    strategy = distribute(nn.Sequential(*layers), layout, mesh, CPU, layers, "bf16")
    with strategy.accumulate(last=True):
        strategy.model(torch.ones(2, 6, dtype=torch.bfloat16)).square().sum().backward()
    return float(strategy.reduce(torch.tensor([1.0], dtype=torch.float64)).norm)


@pytest.mark.parametrize("data", ["zero1", "zero2", "zero3"])
def test_zero_grad_norm_of_bf16_module_matches_single_process(data: str) -> None:
    assert rank_pool(2).run(compute_bf16_grad_norm, data) == pytest.approx(
        [compute_bf16_grad_norm("ddp")] * 2, rel=0.02
    )


@pytest.mark.parametrize("data", ["zero1", "zero2", "zero3"])
def test_zero_strategies_on_single_rank_equal_plain_training(data: str) -> None:
    assert train_resnet({"data_parallel": data}) == approx_trajectory(single_process_trajectory())


@pytest.mark.parametrize("world_size", [2, 4])
def test_data_parallel_strategies_agree_with_per_rank_batchnorm(world_size: int) -> None:
    """Statistics of a rank's images differ from those of a single process, but are the same for all strategies."""
    layouts = [layout for n, layout in LAYOUTS if n == world_size and layout["data_parallel"] != "parameter_server"]
    first, *others = [rank_pool(world_size).run(train_resnet, layout, train=True) for layout in layouts]
    assert first[0] != approx_trajectory(train_resnet({}, train=True))
    for other in others:
        assert other == [approx_trajectory(result) for result in first]


def gather_full_parameters(parameters: dict[str, nn.Parameter]) -> dict[str, Tensor]:
    """Return copies of the full parameters, gathered from all ranks."""
    full = {name: p.full_tensor() if isinstance(p, DTensor) else p for name, p in parameters.items()}
    return {name: parameter.detach().clone() for name, parameter in full.items()}


def assert_parameters_close(some: dict[str, Tensor], others: dict[str, Tensor]) -> None:
    torch.testing.assert_close(some, others, rtol=1e-10, atol=1e-13)


class PartlyFrozenModule(nn.Module):
    """A module with a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(6, 5).double(), nn.Linear(5, 3).double()
        self.body.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).tanh())


def train_partly_frozen_module(choices: dict[str, Any]) -> dict[str, Tensor]:
    """Return all weights of the model after some steps."""
    layout = Layout(**choices)
    mesh = build_cpu_mesh(layout)
    strategy = distribute(PartlyFrozenModule(), layout, mesh, CPU, precision="fp64")
    optimizers = make_adamw(strategy)
    for step in range(STEPS):
        x = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        with strategy.accumulate(last=True):
            loss = strategy.model(x[mesh.dp_rank :: mesh.dims.dp_size]).square().sum()
            (strategy.loss_scale * loss).backward()
        strategy.update(optimizers)
    return gather_full_parameters(dict(strategy.module.named_parameters()))


@pytest.mark.parametrize("data", ["ddp", "zero1", "zero2", "zero3"])
def test_distribute_module_with_frozen_layer_equals_single_process(data: str) -> None:
    expected = train_partly_frozen_module({})
    assert torch.equal(expected["body.weight"], PartlyFrozenModule().body.weight)
    for result in rank_pool(2).run(train_partly_frozen_module, {"data_parallel": data}):
        assert_parameters_close(result, expected)


@pytest.mark.parametrize("data", ["zero1", "zero2", "zero3", "hsdp"])
def test_distribute_rejects_scalar_and_channels_last_parameters(data: str) -> None:
    layout = Layout(data_parallel=data, dp_shard=1 if data == "hsdp" else None)
    module = nn.Module()
    module.scale = nn.Parameter(torch.tensor(1.0))
    with pytest.raises(UserError, match="cannot shard scale, a scalar"):
        distribute(module, layout, build_cpu_mesh(layout), CPU)
    channels_last = nn.Conv2d(3, 10, 3).to(memory_format=torch.channels_last)
    with pytest.raises(UserError, match="cannot shard weight, whose rows"):
        distribute(channels_last, layout, build_cpu_mesh(layout), CPU)


@pytest.mark.parametrize(
    "changes",
    [{"tp": 2}, {"pp": 2}, {"cp": 2}, {"ep": 2}, {"activation_checkpointing": "full"}],
    ids=lambda c: next(iter(c)),
)
def test_distribute_rejects_what_only_the_transformer_can_have(changes: dict[str, Any]) -> None:
    mesh = build_cpu_mesh(Layout())
    (field,) = changes
    with pytest.raises(UserError, match=f"layout.{field} = .*is supported for Phalanx's transformer only"):
        distribute(nn.Linear(2, 2), Layout(**changes), mesh, CPU)


def test_distribute_rejects_automatic_activation_checkpointing() -> None:
    with pytest.raises(UserError, match=r"layout\.activation_checkpointing = 'auto' is supported"):
        distribute(nn.Linear(2, 2), Layout(auto_checkpointing=True), build_cpu_mesh(Layout()), CPU)


OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]] = {
    "LBFGS": torch.optim.LBFGS,
    "SparseAdam": lambda parameters: torch.optim.SparseAdam(list(parameters)),
    "Adafactor": torch.optim.Adafactor,
    "Rprop": torch.optim.Rprop,
}


def assert_step_rejects_optimizer(name: str, data: str) -> None:
    layout = Layout(data_parallel=data)
    strategy = distribute(nn.Linear(6, 5), layout, build_cpu_mesh(layout), CPU)
    optimizer = OPTIMIZERS[name](strategy.trainable_parameters.values())
    before = gather_full_parameters(strategy.trainable_parameters)
    with strategy.accumulate(last=True):
        strategy.model(torch.ones(2, 6)).sum().backward()
    with pytest.raises(UserError, match=f"optimizer = '{name}' .* cannot train parameters that ZeRO shards over ranks"):
        strategy.update([optimizer])
    assert_parameters_close(gather_full_parameters(strategy.trainable_parameters), before)


@pytest.mark.parametrize("data", ["zero1", "zero2", "zero3"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_zero_rejects_optimizers_that_cannot_be_sharded(name: str, data: str) -> None:
    rank_pool(2).run(assert_step_rejects_optimizer, name, data)


# -- what only DDP offers ----------------------------------------------------------------------------------------------


def train_with_uneven_batches(batches: list[int]) -> dict[str, Tensor]:
    """Return the weights after each rank has trained on its own number of batches."""
    layout = Layout()
    mesh, model = build_cpu_mesh(layout), resnet(train=False)
    strategy = distribute(model, layout, mesh, CPU, precision="fp64")
    assert isinstance(strategy, DDP)
    optimizers = make_adamw(strategy)
    with strategy.join():
        for step in range(batches[mesh.dp_rank]):
            with strategy.accumulate(last=True):
                loss = summed_loss(strategy, *local_batch(make_global_batch(step), mesh)) / BATCH
                (strategy.loss_scale * loss).backward()
            strategy.update(optimizers)  # not `reduce`: a rank that is done does not join its sum
    return gather_full_parameters(strategy.trainable_parameters)


def train_single_process_on_uneven_batches(batches: list[int]) -> dict[str, Tensor]:
    """Do the same in one process, with the sum of the gradients that exist."""
    model = resnet(train=False)
    strategy = Strategy(model)
    optimizers = make_adamw(strategy)
    for step in range(max(batches)):
        images, labels = make_global_batch(step)
        for rank, count in enumerate(batches):
            if step < count:
                share = slice(rank, None, len(batches))
                (summed_loss(strategy, images[share], labels[share]) / BATCH).backward()
        strategy.update(optimizers)
    return gather_full_parameters(strategy.trainable_parameters)


@pytest.mark.parametrize("batches", [[2, 4], [4, 2], [3, 1, 4, 1]], ids=str)
def test_ddp_join_supports_uneven_batch_counts_per_rank(batches: list[int]) -> None:
    expected = train_single_process_on_uneven_batches(batches)
    for result in rank_pool(len(batches)).run(train_with_uneven_batches, batches, timeout=60):
        assert_parameters_close(result, expected)


def train_on_one_batch(choices: dict[str, Any], steps: int) -> tuple[list[float], dict[str, Tensor]]:
    """Return the losses of steps on one batch, and the final weights."""
    layout = Layout(**choices)
    mesh = build_cpu_mesh(layout)
    strategy = distribute(resnet(train=False), layout, mesh, CPU, precision="fp64")
    result = train_on_batches(strategy, [local_batch(make_global_batch(0), mesh)] * steps)
    return [loss for loss, _ in result], gather_full_parameters(strategy.trainable_parameters)


def test_powersgd_reduces_loss_and_keeps_replicas_identical() -> None:
    compressed = {"gradient_compression": "powersgd", "powersgd_rank": 1}
    (losses, weights), (_, others) = rank_pool(2).run(train_on_one_batch, compressed, 40)
    for name, weight in weights.items():
        assert torch.equal(weight, others[name]), name
    exact = rank_pool(2).run(train_on_one_batch, {}, 40)[0][0]
    assert losses[:10] == pytest.approx(exact[:10], rel=1e-10)  # it starts with uncompressed gradients
    assert losses[-1] != pytest.approx(exact[-1], rel=1e-6)  # and compresses later
    assert losses[-1] < 0.5 * losses[10] < 0.5 * losses[0]


class TwoHeads(nn.Module):
    """A module with a part that a step may leave unused."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head, self.other = (nn.Linear(n, m, dtype=torch.float64) for n, m in [(6, 5), (5, 3), (5, 3)])

    def forward(self, x: Tensor, both: bool) -> Tensor:
        x = self.body(x).tanh()
        return self.head(x) + self.other(x) if both else self.head(x)


def train_with_unused_head(choices: dict[str, Any], on_all: bool) -> dict[str, Tensor]:
    """Return the weights after steps of which every second one uses one head only, on all ranks or on odd ones."""
    layout = Layout(**choices)
    mesh = build_cpu_mesh(layout)
    strategy = distribute(TwoHeads(), layout, mesh, CPU, precision="fp64")
    optimizers = make_adamw(strategy)
    shares = 2 if mesh.dims.dp_size == 1 else 1
    for step in range(STEPS):
        x = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        for share in range(shares):  # one process stands for both ranks
            rank = mesh.dp_rank + share
            both = step % 2 == 0 or (rank % 2 == 0 and not on_all)
            with strategy.accumulate(last=share == shares - 1):
                (strategy.loss_scale * strategy.model(x[rank::2], both).square().sum()).backward()
        strategy.update(optimizers)
    return gather_full_parameters(strategy.trainable_parameters)


@pytest.mark.parametrize("unused_on_all_ranks", [True, False], ids=["on-all-ranks", "on-one-rank"])
def test_ddp_find_unused_parameters_equals_single_process(unused_on_all_ranks: bool) -> None:
    expected = train_with_unused_head({}, unused_on_all_ranks)
    for result in rank_pool(2).run(train_with_unused_head, {"ddp_find_unused_parameters": True}, unused_on_all_ranks):
        assert_parameters_close(result, expected)


def train_and_get_bucket_sizes(choices: dict[str, Any]) -> tuple[Trajectory, list[int]]:
    """Return the trajectory, and the bytes of DDP's buckets."""
    layout = Layout(**choices)
    mesh = build_cpu_mesh(layout)
    strategy = distribute(resnet(train=False), layout, mesh, CPU, precision="fp64")
    assert isinstance(strategy, DDP)
    result = train_on_batches(strategy, [local_batch(make_global_batch(step), mesh) for step in range(STEPS)])
    sizes = strategy.model._get_ddp_logging_data()["rebuilt_bucket_sizes"]
    return result, [int(size) for size in sizes.split(",")]


@pytest.mark.skipif(not SUPPORTS_FIRST_BUCKET_SIZE, reason="this torch cannot size the first bucket")
def test_ddp_first_bucket_is_smaller_when_first_bucket_mb_is_set() -> None:
    result, sizes = rank_pool(2).run(train_and_get_bucket_sizes, {"first_bucket_mb": 0.002, "bucket_mb": 0.02})[0]
    assert result == approx_trajectory(single_process_trajectory())
    _, even_sizes = rank_pool(2).run(train_and_get_bucket_sizes, {"bucket_mb": 0.02})[0]
    assert sizes[0] < even_sizes[0], (sizes, even_sizes)


# -- the example -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("data", ["zero2", "zero3"])
def test_resnet_digits_example_trains_under_torchrun(data: str) -> None:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    result = subprocess.run(
        [sys.executable, *torchrun, str(EXAMPLE), data, "--steps", "16"],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert result.returncode == 0, result.stderr
    losses = [float(loss) for loss in re.findall(r"training loss ([\d.]+)", result.stdout)]
    assert len(losses) == 2, result.stdout
    assert losses[1] < 0.7 * losses[0], result.stdout
    assert result.stdout.count("test accuracy") == 1, result.stdout
