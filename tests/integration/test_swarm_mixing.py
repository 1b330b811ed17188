"""The weights from which a node continues after a round: the common ones, with what it learned since its update,
or a mixture; nothing that coding left out is sent twice."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from phalanx.cost.exact.parameter_shapes import parameter_shapes
from phalanx.data.prepare import prepare
from phalanx.parallel.expert.partial_experts import TrainedExperts, partially_trained_layers
from phalanx.runs.metrics import MetricsRecord
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


def read_trained_pieces(run: RunSpec, under_way: Trainer, own: tuple[int, ...]) -> Weights:
    """What a node trains, piece by piece, as it is now."""
    found = {}
    for item in model_pieces(run.model):
        stacked = under_way.strategy.trainable_parameters[item.name].detach()
        if item.expert is None:
            found[item.key] = stacked.clone()
        elif item.expert in own:
            found[item.key] = stacked[own.index(item.expert)].clone()
    return found


def write_random_model(run: RunSpec, path: Path, seed: int) -> TensorFile:
    """A model that is drawn."""
    generator = torch.Generator().manual_seed(seed)
    file = TensorFile.create(path, parameter_shapes(run.model))
    for item in model_pieces(run.model):
        file.write(item, torch.randn(item.shape, generator=generator))
    return file


# -- weights that are taken --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("blend_factor", [0.0, 0.25, 0.75, 1.0])
@pytest.mark.parametrize("trained_experts", [(1, 3), (0, 1, 2, 3)], ids=["some experts", "all experts"])
def test_read_weights_blends_local_weights_with_base_by_factor(tmp_path, trained_experts, blend_factor):
    """Of parameters of which nothing is said, nothing; experts that rest are taken whole."""
    run = tiny_swarm_run(tmp_path)
    under_way = Trainer(
        run,
        open_training_data(run, prepare(run.data)),
        tmp_path,
        torch.device("cpu"),
        trained_experts=TrainedExperts(trained_experts),
    )
    kept = {name: blend_factor for name in parameter_shapes(run.model) if not name.startswith("blocks.1.")}
    with write_random_model(run, tmp_path / "base", 1) as base:
        was = read_trained_pieces(run, under_way, trained_experts)
        read_weights(under_way.strategy, TrainedExperts(trained_experts), 4, base.read, kept)
        now = read_trained_pieces(run, under_way, trained_experts)
        for item in (item for item in model_pieces(run.model) if item.key in now):
            mine, taken, of_mine = was[item.key], base.read(item), kept.get(item.name, 0.0)
            if of_mine in (0, 1):
                assert torch.equal(now[item.key], mine if of_mine else taken)
            else:
                torch.testing.assert_close(now[item.key], of_mine * mine + (1 - of_mine) * taken)
        for name, part in partially_trained_layers(under_way.module):
            for kind, resting in part.frozen.items():
                assert torch.equal(resting.numbers, base.read_tensor(f"{name}.{kind}")[list(part.frozen_on_rank)])


def test_read_weights_adds_training_progress_since_last_update_to_base(tmp_path):
    """But where it is said how much of the parameter stays; and where both are the same, nothing is rounded."""
    run = tiny_swarm_run(tmp_path)
    under_way = Trainer(
        run,
        open_training_data(run, prepare(run.data)),
        tmp_path,
        torch.device("cpu"),
        trained_experts=TrainedExperts((1, 3)),
    )
    kept = {name: 1.0 for name in parameter_shapes(run.model) if name.startswith("blocks.1.")}
    with write_random_model(run, tmp_path / "base", 1) as base, write_random_model(run, tmp_path / "since", 2) as since:
        for taken in (base, since):
            was = read_trained_pieces(run, under_way, (1, 3))
            read_weights(under_way.strategy, TrainedExperts((1, 3)), 4, taken.read, kept, since.read)
            now = read_trained_pieces(run, under_way, (1, 3))
            for item in (item for item in model_pieces(run.model) if item.key in now):
                learned = torch.zeros(()) if item.name in kept else taken.read(item) - since.read(item)
                assert torch.equal(now[item.key], learned + was[item.key])


# -- a swarm under way -------------------------------------------------------------------------------------------------


@dataclass
class RoundSnapshot:
    """A round of a node, piece by piece."""

    number: int
    was: Weights
    """What it trains, after its last step,"""
    now: Weights
    """and after it heard what came of the round."""
    live: Weights
    """When it sent its update."""
    base: Weights
    """What all have then."""
    update: dict[str, bytearray]


class RecordingWorkerThreads(WorkerThreads):
    """Nodes of which every round is kept."""

    def __init__(self, swarm: LocalSwarm, folder: Path, names: tuple[str, ...]) -> None:
        self.seen: dict[str, list[RoundSnapshot]] = {name: [] for name in names}
        super().__init__(swarm, folder, names)

    def _learn(self, name: str) -> None:
        try:
            watch = RoundRecorder(self.nodes[name], self.seen[name])
            self.nodes[name].participate([watch], watch, lambda said: None)
        except BaseException as error:
            self.failed.append(error)


class RoundRecorder:
    """A log that looks at its node: of steps, and of rounds."""

    def __init__(self, node: SwarmWorker, seen: list[RoundSnapshot]) -> None:
        self.node, self.seen, self.was = node, seen, {}

    def write(self, record: MetricsRecord) -> None:
        node, run = self.node, self.node.run
        now = read_trained_pieces(run, node.trainer, node.exchange.local_experts)
        if "round" in record:
            live, base = (read_pieces(run, node.directory / f"{kind}.safetensors") for kind in ("live", "base"))
            with TensorFile(node.directory / "update") as update:
                told = {key: update.raw(key) for key in update.shapes}
            self.seen.append(RoundSnapshot(record["round"], self.was, now, live, base, told))
        self.was = now

    def close(self, failed: bool = False) -> None:
        pass


def run_recorded_swarm(run: RunSpec, folder: Path) -> tuple[Weights, dict[str, list[RoundSnapshot]]]:
    """What the nodes of a swarm began with, and made of every round."""
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
    """Of parameters whose turn it was not, all of its own, bit for bit; so of experts that it alone trains, where it
    learned on; what it learned since it sent its update is added to the shared part, or its own part is mixed in."""
    run = tiny_swarm_run(tmp_path, codec="int4", **swarm)
    alone = run.swarm.method == "spes+" and run.swarm.replication == 1
    for seen in (seen for rounds in run_recorded_swarm(run, tmp_path)[1].values() for seen in rounds):
        turn = {item.key for item in round_pieces(run, seen.number)}
        for item in (item for item in model_pieces(run.model) if item.key in seen.now):
            was, now, base = seen.was[item.key], seen.now[item.key], seen.base[item.key]
            assert not torch.equal(was, base)
            if item.key not in turn or (run.swarm.delay and alone and item.expert is not None):
                assert torch.equal(now, was)
            elif run.swarm.delay and run.swarm.mixing is None:
                assert torch.equal(now, base - seen.live[item.key] + was)
            elif run.swarm.mixing:
                torch.testing.assert_close(now, run.swarm.mixing * was + (1 - run.swarm.mixing) * base)
            else:
                assert torch.equal(now, base)


@pytest.mark.parametrize(
    "swarm", [{"delay": 2}, {"delay": 1, "mixing": 0.5}, {"fragments": 2, "every": 6, "delay": 1}], ids=str
)
def test_swarm_worker_does_not_resend_quantization_error_of_own_experts(tmp_path, swarm):
    """Its weights still have it: all nodes have them as sent, except for one coding error."""
    run = tiny_swarm_run(tmp_path, codec="int4", **swarm)
    for seen in (seen for rounds in run_recorded_swarm(run, tmp_path)[1].values() for seen in rounds):
        mine = [item for item in round_pieces(run, seen.number) if item.expert is not None and item.key in seen.update]
        assert mine
        for item in mine:
            error = (seen.base[item.key] - seen.live[item.key]).abs()
            assert (error <= quantization_error_bound(seen.update[item.key], item, "int4") + 1e-7).all()


@pytest.mark.parametrize("swarm", [{}, {"fragments": 2, "every": 6}, {"delay": 2}], ids=str)
def test_swarm_worker_sends_quantization_error_in_later_rounds(tmp_path, swarm):
    """The sum of a node's updates is what it learned in all rounds, except for one coding."""
    run = tiny_swarm_run(tmp_path, codec="int4", **swarm)
    first, nodes = run_recorded_swarm(run, tmp_path)
    for rounds in nodes.values():
        for item in (item for item in model_pieces(run.model) if item.expert is None or not run.swarm.delay):
            before, told, learned = first[item.key], torch.zeros(item.shape), torch.zeros(item.shape)
            for seen in (seen for seen in rounds if item.key in seen.update):
                told += decode(seen.update[item.key], item.shape, "int4")
                learned += seen.live[item.key] - before
                before = seen.base[item.key]
                assert (
                    (told - learned).abs() <= quantization_error_bound(seen.update[item.key], item, "int4") + 1e-6
                ).all()
