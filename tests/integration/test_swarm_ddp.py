"""Data parallelism over the network: nodes send gradients, and the coordinator runs the optimizer as one process
would."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.cost.exact.swarm import node_share, round_bytes, state_bytes
from phalanx.data.prepare import prepare
from phalanx.parallel.module_tensors import optimizer_state_tensors
from phalanx.spec.run import RunSpec
from phalanx.swarm.codec import encode
from phalanx.swarm.pieces import model_pieces
from phalanx.swarm.rpc.client import SwarmClient
from phalanx.swarm.tensor_files import TensorFile
from phalanx.swarm.worker.worker import SwarmWorker
from phalanx.testing import rank_pool
from phalanx.testing.processes import wait_until
from phalanx.train.optim.optimizers import learning_rate_factor
from phalanx.train.training_data import open_training_data
from tests.helpers.local_swarm import (
    NODES,
    LocalSwarm,
    WorkerThreads,
    certificates,
    read_pieces,
    serve_local_swarm,
    tiny_swarm_run,
    train_local_swarm,
    train_without_swarm,
)

ROUNDS = 6
CLIP_NORM = 0.05
"""Far below the norm of any gradient here: every step is clipped."""
EPS = 1e-4
"""Where terms of a gradient cancel, AdamW would scale the remaining rounding error to a full step. This prevents it."""


def swarm_ddp_run(folder: Path, nodes: int, changes: dict[str, Any] | None = None, **swarm: Any) -> RunSpec:
    table = {"training.steps": ROUNDS, "optimizer.warmup_steps": 2, "optimizer.max_grad_norm": 0.0, **(changes or {})}
    return tiny_swarm_run(folder, table, method="ddp", every=1, nodes=nodes, **swarm)


def max_difference_is_within(weights: dict[str, Tensor], expected: dict[str, Tensor], limit: float) -> bool:
    return max(float((weights[key] - value).abs().max()) for key, value in expected.items()) <= limit


def test_single_node_swarm_ddp_equals_plain_training_bitwise(tmp_path):
    """The coordinator divides gradients by the same number of tokens and runs the same optimizer, piece by piece."""
    run = swarm_ddp_run(tmp_path, 1)
    weights, _ = train_local_swarm(run, tmp_path, NODES[:1])
    expected = train_without_swarm(run, tmp_path)
    assert all(torch.equal(weights[key], value) for key, value in expected.items())


def test_single_node_swarm_ddp_gradient_clipping_matches_plain_training(tmp_path):
    """Results agree up to rounding: a trainer divides by tokens and clips in one operation, with a norm that it sums in
    fp32."""
    run = swarm_ddp_run(tmp_path, 1, {"optimizer.max_grad_norm": CLIP_NORM, "optimizer.eps": EPS})
    weights, members = train_local_swarm(run, tmp_path, NODES[:1])
    assert min(record["grad_norm"] for record in members.steps["ann"]) > 10 * CLIP_NORM
    assert max_difference_is_within(weights, train_without_swarm(run, tmp_path), 1e-6)
    unclipped = swarm_ddp_run(tmp_path, 1, {"optimizer.eps": EPS})
    assert not max_difference_is_within(weights, train_without_swarm(unclipped, tmp_path), 1e-4)


@pytest.mark.parametrize("clip_norm", [0.0, CLIP_NORM])
@pytest.mark.parametrize("nodes", [2, 3])
def test_swarm_ddp_matches_single_process_with_n_times_the_batch_size(tmp_path, nodes, clip_norm):
    changes = {"optimizer.max_grad_norm": clip_norm, "optimizer.eps": EPS}
    run = swarm_ddp_run(tmp_path, nodes, changes)
    weights, _ = train_local_swarm(run, tmp_path, NODES[:nodes])
    larger_batch = {**changes, "training.tokens_per_step": nodes * run.training.tokens_per_step}
    assert max_difference_is_within(
        weights, train_without_swarm(swarm_ddp_run(tmp_path, 1, larger_batch), tmp_path), 1e-6
    )
    assert not max_difference_is_within(
        weights, train_without_swarm(swarm_ddp_run(tmp_path, 1, changes), tmp_path), 1e-4
    )


LAYOUTS: list[dict[str, Any]] = [
    {"micro_batch_size": 1},
    {"data_parallel": "zero1"},
    {"data_parallel": "zero2", "offload": "cpu"},
    {"data_parallel": "zero3"},
    {"tp": 2},
    {"ep": 2},
    {"cp": 2},
    {"pp": 2, "micro_batch_size": 2},
]


def run_worker_rank(run: RunSpec, folder: Path, port: int, certificate: Path) -> list[int]:
    """Run a rank of a node, and return the sizes of the optimizer state that it has at the end."""
    link = None
    if dist.get_rank() == 0:
        link = SwarmClient(f"127.0.0.1:{port}", certificate)
        link.join_message = {"capacity": 4, "text": "text"}
        link.join(**link.join_message)
    node = SwarmWorker(run, open_training_data(run, prepare(run.data)), folder, torch.device("cpu"), "ann", link)
    node.participate([], None)
    return [tensor.numel() for tensor in optimizer_state_tensors(node.trainer.optimizers)]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_swarm_ddp_node_with_any_layout_matches_single_process(tmp_path, layout):
    """The gathered gradients equal those of one process, and no rank has optimizer state."""
    changes = {
        "training.precision": "fp64",
        "training.steps": 3,
        "optimizer.max_grad_norm": CLIP_NORM,
        "optimizer.eps": EPS,
    }
    with serve_local_swarm(swarm_ddp_run(tmp_path, 1, changes), tmp_path) as swarm:
        run = swarm_ddp_run(tmp_path, 1, changes | {f"layout.{name}": value for name, value in layout.items()})
        (tmp_path / "ann").mkdir()
        state_sizes = rank_pool(2).run(run_worker_rank, run, tmp_path / "ann", swarm.port, certificates() / "ann")
        assert state_sizes == [[], []]
        assert max_difference_is_within(
            swarm.base(), train_without_swarm(swarm_ddp_run(tmp_path, 1, changes), tmp_path), 1e-6
        )


def test_swarm_ddp_traffic_equals_round_bytes_formula(tmp_path):
    """Both directions have 4 bytes per parameter; an upload adds only the names of the tensors."""
    run = swarm_ddp_run(tmp_path, 2)
    _, members = train_local_swarm(run, tmp_path, NODES[:2])
    expected = round_bytes(node_share(run.model, "ddp"), "ddp")
    assert expected.up == expected.down == 4 * sum(item.num_elements for item in model_pieces(run.model))
    for name, node in members.nodes.items():
        path = node.directory / "update"
        with TensorFile(path) as update:
            assert sum(update.locate(key)[1] for key in update.shapes) == expected.up
        for record in members.rounds[name][1:]:  # the first round downloads the whole model
            assert (record["sent_bytes"], record["received_bytes"]) == (path.stat().st_size, expected.down)


def test_swarm_ddp_node_memory_equals_weights_and_gradients(tmp_path):
    run = swarm_ddp_run(tmp_path, 1)
    _, members = train_local_swarm(run, tmp_path, NODES[:1])
    trainer = members.nodes["ann"].trainer
    assert not optimizer_state_tensors(trainer.optimizers)
    trainer.forward_backward(trainer.micro_batches(trainer.loader.step(0)))
    held = trainer.strategy.resident_tensors(trainer.optimizers)
    storages = {tensor.untyped_storage().data_ptr(): tensor.nbytes for part in held.values() for tensor in part}
    assert sum(storages.values()) == state_bytes(node_share(run.model, "ddp"))


def test_swarm_ddp_coordinator_restores_adamw_moments_after_restart(tmp_path):
    """Weights are bitwise those of plain training."""
    run = swarm_ddp_run(tmp_path, 1, {"training.steps": 30})
    swarm = LocalSwarm(run, tmp_path / "lead")
    members = WorkerThreads(swarm, tmp_path, NODES[:1])
    wait_until(lambda: swarm.coordinator.state.committed >= 3, "three rounds are committed")
    swarm.stop()
    assert not swarm.coordinator.state.done
    swarm = LocalSwarm(run, tmp_path / "lead", swarm.port)
    try:
        members.wait_all()
        weights = swarm.base()
    finally:
        swarm.stop()
    expected = train_without_swarm(run, tmp_path)
    assert all(torch.equal(weights[key], value) for key, value in expected.items())


def test_swarm_ddp_skips_optimizer_step_when_all_nodes_report_zero_tokens(tmp_path):
    """A node without tokens does not hold up the others. If all have none, the round is skipped as a trainer skips a
    step: weights, moments and AdamW's count of steps stay, but the schedule advances."""
    run = swarm_ddp_run(tmp_path, 2)
    items = model_pieces(run.model)
    with serve_local_swarm(run, tmp_path) as swarm:
        links = {name: swarm.joined_client(name) for name in NODES[:2]}

        def exchange(number: int, tokens: dict[str, int]) -> dict[str, Tensor]:
            for name, link in links.items():
                link.wait(round=number)
                path, value = tmp_path / f"{name}.update", float(tokens[name])
                with TensorFile.create(path, {item.key: (4 * item.num_elements,) for item in items}, "U8") as file:
                    for item in items:
                        file.write_raw(item.key, encode(torch.full(item.shape, value), "fp32"))
                link.upload_update(path, number, tokens[name], 1)
            links["ann"].wait(committed=number + 1)
            return swarm.base()

        key, spec = items[0].key, run.optimizer
        parameter = torch.nn.Parameter(swarm.base()[key])
        reference = torch.optim.AdamW([parameter], 0.0, spec.betas, spec.eps, spec.weight_decay)
        for number, (ann, bob, mean) in enumerate([(100, 0, 100), (0, 0, None), (100, 50, 250 / 3)]):
            weights = exchange(number, {"ann": ann, "bob": bob})
            if mean is not None:
                reference.param_groups[0]["lr"] = spec.learning_rate * learning_rate_factor(spec, number, ROUNDS)
                parameter.grad = torch.full_like(parameter, mean)
                reference.step()
            torch.testing.assert_close(weights[key], parameter.detach(), rtol=1e-6, atol=1e-8)
        moments = read_pieces(run, swarm.folder / "model" / "exp_avg.safetensors")[key]
        torch.testing.assert_close(moments, reference.state[parameter]["exp_avg"])


def test_swarm_ddp_node_reports_zero_tokens_when_gradient_is_nonfinite(tmp_path):
    """A weight of the model is NaN: updates have no tokens, and the other weights stay."""
    run = swarm_ddp_run(tmp_path, 1, {"training.steps": 4})
    with serve_local_swarm(run, tmp_path) as swarm:
        before = swarm.base()
        broken = model_pieces(run.model)[0]
        with TensorFile(swarm.coordinator.store.base, writable=True) as base:
            base.write(broken, torch.full(broken.shape, math.nan))
        swarm.coordinator.state.initial_digests = swarm.coordinator.store.base_digests()
        members = WorkerThreads(swarm, tmp_path, NODES[:1])
        members.wait_all()
        after = swarm.base()
        assert [record["tokens"] for record in members.rounds["ann"]] == [0] * 4
        assert not any(record["refused"] for record in members.rounds["ann"])
        assert all(torch.equal(after[key], value) for key, value in before.items() if key != broken.key)
