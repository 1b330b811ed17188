"""Swarms over real connections: coordinator and nodes have bitwise equal weights, which match data-parallel
training."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from phalanx.cost.exact.swarm import node_share, round_bytes
from phalanx.swarm.pieces import model_pieces
from phalanx.swarm.tensor_files import TensorFile
from tests.helpers.local_swarm import NODES, read_pieces, tiny_swarm_run, train_local_swarm, train_without_swarm


@pytest.mark.parametrize("method", ["fedavg", "spes", "spes+"])
def test_single_node_swarm_equals_plain_training_bitwise(tmp_path, method):
    run = tiny_swarm_run(tmp_path, method=method, nodes=1, codec="fp32")
    weights, _ = train_local_swarm(run, tmp_path, NODES[:1])
    expected = train_without_swarm(run, tmp_path)
    assert all(torch.equal(weights[key], value) for key, value in expected.items())
    assert not list(tmp_path.rglob("*error_feedback*")), "fp32 has no quantization error"


CASES: list[dict[str, Any]] = [
    {"method": "fedavg"},
    {"method": "diloco"},
    {"method": "spes"},
    {"method": "spes+"},
    {"method": "spes+", "codec": "int4"},
    {"method": "spes+", "codec": "bf16", "frozen_expert_codec": "bf16"},
    {"method": "spes+", "replication": 2},
    {"method": "spes+", "rotate_every": 1},
    {"method": "spes", "merge": {"every": 3, "alpha": 0.05, "steps": 9}},
    {"method": "spes+", "robust": "trimmed"},
    {"method": "ddp", "every": 1},
    {"method": "ddp", "every": 1, "codec": "int8"},
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case.values())))
def test_swarm_coordinator_and_nodes_have_equal_weights_after_training(tmp_path, case):
    """The parameters of the nodes' trainers are compared too, except experts, of which a node trains only some."""
    names = NODES[:3] if "robust" in case else NODES[:2]
    run = tiny_swarm_run(tmp_path, **{**case, "nodes": len(names)})
    base, members = train_local_swarm(run, tmp_path, names)
    for name, node in members.nodes.items():
        node_base = read_pieces(run, node.directory / "base.safetensors")
        assert all(torch.equal(node_base[key], value) for key, value in base.items()), name
        for key, parameter in node.trainer.strategy.trainable_parameters.items():
            if ".experts." not in key:
                assert torch.equal(parameter.detach(), base[key]), (name, key)
    losses = [evaluation["held_out_loss"] for evaluation in members.evaluations.values()]
    frozen_differ = case.get("frozen_expert_codec", "fp32") != "fp32"  # each node has other experts in fewer bits
    assert max(losses) - min(losses) < (1e-2 if frozen_differ else 1e-6)
    first = members.steps[names[0]]
    assert first[-1]["loss"] < first[0]["loss"]


def test_spes_experts_equal_last_update_of_their_owner(tmp_path):
    run = tiny_swarm_run(tmp_path, method="spes")
    base, members = train_local_swarm(run, tmp_path, NODES[:2])
    seen = set()
    for node in members.nodes.values():
        with TensorFile(node.directory / "live.safetensors") as live:
            for item in model_pieces(run.model):
                if item.expert in node.exchange.local_experts:
                    assert torch.equal(live.read(item), base[item.key])
                    seen.add(item.expert)
    assert seen == {0, 1, 2, 3}


@pytest.mark.parametrize(("method", "steps"), [("fedavg", 6), ("spes", 1)])
def test_swarm_with_one_sgd_step_per_round_matches_data_parallel_training(tmp_path, method, steps):
    """Two nodes that average after every step equal one process with twice the batch. With spes, this holds for shared
    parameters, whose gradients come from the text of all nodes, because routing is not masked."""
    changes = {
        "optimizer": {"name": "sgd", "learning_rate": 0.1, "warmup_steps": 0, "max_grad_norm": 0.0},
        "training.precision": "fp64",
        "training.steps": steps,
    }
    run = tiny_swarm_run(tmp_path, changes, method=method, every=1)
    weights, _ = train_local_swarm(run, tmp_path, NODES[:2])
    doubled = {**changes, "training.tokens_per_step": 2 * run.training.tokens_per_step}
    expected = train_without_swarm(tiny_swarm_run(tmp_path, doubled, method="fedavg", every=1), tmp_path)
    for item in model_pieces(run.model):
        if item.expert is None or method == "fedavg":
            torch.testing.assert_close(weights[item.key], expected[item.key], rtol=1e-4, atol=1e-6)


def test_swarm_nodes_read_disjoint_data_and_traffic_matches_formulas(tmp_path):
    run = tiny_swarm_run(tmp_path, method="spes+", codec="fp32", nodes=4)
    _, members = train_local_swarm(run, tmp_path, NODES)
    read: list[int] = []
    for event in members.swarm.events("opened"):
        for first, count in event["text"].values():
            read += range(first, first + count)
    assert sorted(read) == list(range(4 * run.training.steps))
    node = node_share(run.model, "spes+", 1)
    expected = round_bytes(node, "spes+", "fp32")
    for rounds in members.rounds.values():
        for record in rounds[1:]:  # the first round downloads the whole model
            assert record["sent_bytes"] == pytest.approx(expected.up, abs=6000)  # names and offsets of tensors
            assert record["received_bytes"] == pytest.approx(expected.down, abs=1)
