"""Weights from which a node continues after a round: the common ones with its own progress since the update, or a
mixture of both. Quantization errors are sent exactly once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from phalanx.data.prepare import prepare
from phalanx.parallel.expert.partial_experts import TrainedExperts, partially_trained_layers
from phalanx.runs.metrics import MetricsRecord
from phalanx.spec.parameter_shapes import parameter_shapes
from phalanx.spec.run import RunSpec
from phalanx.swarm.codec import decode
from phalanx.swarm.pieces import model_pieces, round_pieces
from phalanx.swarm.tensor_files import TensorFile
from phalanx.swarm.worker.replica import read_weights
from phalanx.swarm.worker.worker import SwarmWorker
from phalanx.train.trainer import Trainer
from phalanx.train.training_data import open_training_data
from tests.helpers.local_swarm import NODES, LocalSwarm, WorkerThreads, read_pieces, serve_local_swarm, tiny_swarm_run
from tests.helpers.quantization import quantization_error_bound

Weights = dict[str, Tensor]


def read_trained_pieces(run: RunSpec, trainer: Trainer, local_experts: tuple[int, ...]) -> Weights:
    """Return the weights that a node trains, by piece."""
    pieces = {}
    for item in model_pieces(run.model):
        stacked = trainer.strategy.trainable_parameters[item.name].detach()
        if item.expert is None:
            pieces[item.key] = stacked.clone()
        elif item.expert in local_experts:
            pieces[item.key] = stacked[local_experts.index(item.expert)].clone()
    return pieces


def write_random_model(run: RunSpec, path: Path, seed: int) -> TensorFile:
    """Write random weights."""
    generator = torch.Generator().manual_seed(seed)
    file = TensorFile.create(path, parameter_shapes(run.model))
    for item in model_pieces(run.model):
        file.write(item, torch.randn(item.shape, generator=generator))
    return file


# -- weights of a round ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("blend_factor", [0.0, 0.25, 0.75, 1.0])
@pytest.mark.parametrize("trained_experts", [(1, 3), (0, 1, 2, 3)], ids=["some experts", "all experts"])
def test_read_weights_blends_local_weights_with_base_by_factor(tmp_path, trained_experts, blend_factor):
    """Parameters without a factor, and experts that the node does not train, get the base's values."""
    run = tiny_swarm_run(tmp_path)
    trainer = Trainer(
        run,
        open_training_data(run, prepare(run.data)),
        tmp_path,
        torch.device("cpu"),
        trained_experts=TrainedExperts(trained_experts),
    )
    factors = {name: blend_factor for name in parameter_shapes(run.model) if not name.startswith("blocks.1.")}
    with write_random_model(run, tmp_path / "base", 1) as base:
        before = read_trained_pieces(run, trainer, trained_experts)
        read_weights(trainer.strategy, TrainedExperts(trained_experts), 4, base.read, factors)
        after = read_trained_pieces(run, trainer, trained_experts)
        for item in (item for item in model_pieces(run.model) if item.key in after):
            local, common, factor = before[item.key], base.read(item), factors.get(item.name, 0.0)
            if factor in (0, 1):
                assert torch.equal(after[item.key], local if factor else common)
            else:
                torch.testing.assert_close(after[item.key], factor * local + (1 - factor) * common)
        for name, part in partially_trained_layers(trainer.module):
            for kind, frozen in part.frozen.items():
                assert torch.equal(frozen.numbers, base.read_tensor(f"{name}.{kind}")[list(part.frozen_on_rank)])


def test_read_weights_adds_training_progress_since_last_update_to_base(tmp_path):
    """Parameters with a factor of 1 keep their values. Nothing is rounded where the base is that of the update."""
    run = tiny_swarm_run(tmp_path)
    trainer = Trainer(
        run,
        open_training_data(run, prepare(run.data)),
        tmp_path,
        torch.device("cpu"),
        trained_experts=TrainedExperts((1, 3)),
    )
    factors = {name: 1.0 for name in parameter_shapes(run.model) if name.startswith("blocks.1.")}
    with write_random_model(run, tmp_path / "base", 1) as base, write_random_model(run, tmp_path / "since", 2) as since:
        for received in (base, since):
            before = read_trained_pieces(run, trainer, (1, 3))
            read_weights(trainer.strategy, TrainedExperts((1, 3)), 4, received.read, factors, since.read)
            after = read_trained_pieces(run, trainer, (1, 3))
            for item in (item for item in model_pieces(run.model) if item.key in after):
                change = torch.zeros(()) if item.name in factors else received.read(item) - since.read(item)
                assert torch.equal(after[item.key], change + before[item.key])


# -- a running swarm ---------------------------------------------------------------------------------------------------


@dataclass
class RoundSnapshot:
    """Weights of a node around a round, by piece."""

    number: int
    before: Weights
    """Trained weights after the last step."""
    after: Weights
    """Trained weights after the result of the round was received."""
    live: Weights
    """Trained weights when the update was sent."""
    base: Weights
    """Common weights after the round."""
    update: dict[str, bytearray]


class RecordingWorkerThreads(WorkerThreads):
    """Worker threads whose rounds are recorded."""

    def __init__(self, swarm: LocalSwarm, folder: Path, names: tuple[str, ...]) -> None:
        self.seen: dict[str, list[RoundSnapshot]] = {name: [] for name in names}
        super().__init__(swarm, folder, names)

    def _learn(self, name: str) -> None:
        try:
            recorder = RoundRecorder(self.nodes[name], self.seen[name])
            self.nodes[name].participate([recorder], recorder)
        except BaseException as error:
            self.failed.append(error)


class RoundRecorder:
    """A logger of steps and rounds that records its node's weights."""

    def __init__(self, node: SwarmWorker, seen: list[RoundSnapshot]) -> None:
        self.node, self.seen, self.before = node, seen, {}

    def write(self, record: MetricsRecord) -> None:
        node, run = self.node, self.node.run
        after = read_trained_pieces(run, node.trainer, node.exchange.local_experts)
        if "round" in record:
            live, base = (read_pieces(run, node.directory / f"{kind}.safetensors") for kind in ("live", "base"))
            with TensorFile(node.directory / "update") as update:
                update_pieces = {key: update.raw(key) for key in update.shapes}
            self.seen.append(RoundSnapshot(record["round"], self.before, after, live, base, update_pieces))
        self.before = after

    def close(self, failed: bool = False) -> None:
        pass


def run_recorded_swarm(run: RunSpec, folder: Path) -> tuple[Weights, dict[str, list[RoundSnapshot]]]:
    """Train a swarm; return its initial weights, and the rounds of each node."""
    with serve_local_swarm(run, folder) as swarm:
        first, members = swarm.base(), RecordingWorkerThreads(swarm, folder, NODES[:2])
        members.wait_all()
    assert all(len(rounds) == 4 for rounds in members.seen.values())
    return first, members.seen


CASES: list[dict[str, Any]] = [
    {},
    {"fragments": 2, "every": 6},
    {"delay": 2},
    {"delay": 2, "mixing": 0.0},
    {"delay": 2, "mixing": 0.25},
    {"delay": 1, "mixing": 0.75},
    {"fragments": 2, "every": 6, "delay": 1, "mixing": 0.25},
    {"delay": 2, "mixing": 0.25, "replication": 2},
    {"delay": 1, "mixing": 0.25, "method": "diloco"},
]


@pytest.mark.parametrize("swarm", CASES, ids=str)
def test_swarm_worker_weights_after_round_equal_mix_of_base_and_local(tmp_path, swarm):
    """Pieces outside the round's fragment stay as they are; so do, with a delay, experts that no other node trains. To
    the others, a node adds its progress since the update, or mixes its own weights into them."""
    run = tiny_swarm_run(tmp_path, codec="int4", **swarm)
    owns_experts_alone = run.swarm.method == "spes+" and run.swarm.replication == 1
    for snapshot in (snapshot for rounds in run_recorded_swarm(run, tmp_path)[1].values() for snapshot in rounds):
        round_keys = {item.key for item in round_pieces(run, snapshot.number)}
        for item in (item for item in model_pieces(run.model) if item.key in snapshot.after):
            before, after, base = snapshot.before[item.key], snapshot.after[item.key], snapshot.base[item.key]
            assert not torch.equal(before, base)
            if item.key not in round_keys or (run.swarm.delay and owns_experts_alone and item.expert is not None):
                assert torch.equal(after, before)
            elif run.swarm.delay and run.swarm.mixing is None:
                assert torch.equal(after, base - snapshot.live[item.key] + before)
            elif run.swarm.mixing:
                torch.testing.assert_close(after, run.swarm.mixing * before + (1 - run.swarm.mixing) * base)
            else:
                assert torch.equal(after, base)


@pytest.mark.parametrize(
    "swarm", [{"delay": 2}, {"delay": 1, "mixing": 0.5}, {"fragments": 2, "every": 6, "delay": 1}], ids=str
)
def test_swarm_worker_does_not_resend_quantization_error_of_own_experts(tmp_path, swarm):
    """The node's own experts still contain the error: other nodes have the weights as sent, up to one quantization
    error."""
    run = tiny_swarm_run(tmp_path, codec="int4", **swarm)
    for snapshot in (snapshot for rounds in run_recorded_swarm(run, tmp_path)[1].values() for snapshot in rounds):
        sent_experts = [
            item
            for item in round_pieces(run, snapshot.number)
            if item.expert is not None and item.key in snapshot.update
        ]
        assert sent_experts
        for item in sent_experts:
            error = (snapshot.base[item.key] - snapshot.live[item.key]).abs()
            assert (error <= quantization_error_bound(snapshot.update[item.key], item, "int4") + 1e-7).all()


@pytest.mark.parametrize("swarm", [{}, {"fragments": 2, "every": 6}, {"delay": 2}], ids=str)
def test_swarm_worker_sends_quantization_error_in_later_rounds(tmp_path, swarm):
    """The sum of a node's updates is its progress over all rounds, up to one quantization error."""
    run = tiny_swarm_run(tmp_path, codec="int4", **swarm)
    first, nodes = run_recorded_swarm(run, tmp_path)
    for rounds in nodes.values():
        for item in (item for item in model_pieces(run.model) if item.expert is None or not run.swarm.delay):
            before, sent, progress = first[item.key], torch.zeros(item.shape), torch.zeros(item.shape)
            for snapshot in (snapshot for snapshot in rounds if item.key in snapshot.update):
                sent += decode(snapshot.update[item.key], item.shape, "int4")
                progress += snapshot.live[item.key] - before
                before = snapshot.base[item.key]
                assert (
                    (sent - progress).abs() <= quantization_error_bound(snapshot.update[item.key], item, "int4") + 1e-6
                ).all()
