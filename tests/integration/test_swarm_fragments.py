"""Streaming DiLoCo: fragments that are exchanged in turn, and updates that are exchanged while nodes train."""

from __future__ import annotations

import pytest
import torch

from phalanx.swarm.pieces import fragment_index, fragment_pieces, model_pieces
from phalanx.swarm.tensor_files import TensorFile
from tests.helpers.local_swarm import (
    NODES,
    WorkerThreads,
    read_pieces,
    serve_local_swarm,
    tiny_swarm_run,
    train_local_swarm,
)
from tests.helpers.swarm_updates import join_and_wait_for_round, write_node_update


def test_swarm_round_changes_only_pieces_of_its_fragment(tmp_path):
    run = tiny_swarm_run(tmp_path, codec="fp32", every=4, fragments=2)
    with serve_local_swarm(run, tmp_path) as swarm:
        links = join_and_wait_for_round(run, swarm)
        before = swarm.base()
        for number in range(2):
            for name, link in links.items():
                path = write_node_update(swarm, tmp_path, name, 0.5)
                _filter_update(path, {item.key for item in fragment_pieces(run.model, number, 2)})
                link.upload_update(path, number, 100, 2)
            links["ann"].wait(committed=number + 1)
            after = swarm.base()
            changed = {key for key, value in after.items() if not torch.equal(value, before[key])}
            fragment_keys = {item.key for item in model_pieces(run.model) if fragment_index(item, 2) == number}
            assert changed == fragment_keys
            before = after
            links["ann"].wait(round=number + 1)


def _filter_update(path, keys):
    """Remove all pieces from an update except these."""
    with TensorFile(path) as file:
        kept = {key: file.raw(key) for key in file.shapes if key in keys}
    with TensorFile.create(path, {key: (len(data),) for key, data in kept.items()}, "U8") as file:
        for key, data in kept.items():
            file.write_raw(key, data)


@pytest.mark.parametrize(
    "swarm",
    [
        {"fragments": 3},
        {"delay": 1},
        {"delay": 2, "mixing": 0.5},
        {"fragments": 3, "delay": 1, "every": 6},
        {"delay": 1, "codec": "fp32", "method": "diloco"},
        {"delay": 1, "replication": 2, "mixing": 0.25},
    ],
    ids=str,
)
def test_swarm_with_fragments_or_delay_reduces_loss_and_syncs_base_models(tmp_path, swarm):
    run = tiny_swarm_run(tmp_path, **swarm)
    base, members = train_local_swarm(run, tmp_path, NODES[:2])
    for node in members.nodes.values():
        node_base = read_pieces(run, node.directory / "base.safetensors")
        assert all(torch.equal(node_base[key], value) for key, value in base.items())
    for name in NODES[:2]:
        losses = [record["loss"] for record in members.steps[name]]
        assert len(losses) == run.training.steps
        assert losses[-1] < losses[0]
        assert [record["step"] for record in members.steps[name]] == list(range(1, run.training.steps + 1))


def test_swarm_with_delay_assigns_every_data_step_exactly_once(tmp_path):
    run = tiny_swarm_run(tmp_path, delay=2)
    with serve_local_swarm(run, tmp_path) as swarm:
        WorkerThreads(swarm, tmp_path, NODES[:2]).wait_all()
        opened = swarm.events("opened")
    read = [step for event in opened for first, count in event["text"].values() for step in range(first, first + count)]
    assert sorted(read) == list(range(len(read)))
    assert [sum(count for _, count in event["text"].values()) for event in opened] == [10, 6, 6, 6]
