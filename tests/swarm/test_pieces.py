"""Pieces of a model: they cover each number once, and each node sends those that it trains."""

from math import prod

import pytest
import torch

from phalanx.cost.exact.parameters import count_parameters
from phalanx.cost.exact.swarm import node_share
from phalanx.spec.files.load import load_model_spec, run_from_table
from phalanx.spec.parameter_shapes import parameter_shapes
from phalanx.swarm.expert_ownership import assign_experts
from phalanx.swarm.pieces import MAX_PIECE_ELEMENTS, fragment_pieces, model_pieces, pieces_sent_by
from phalanx.swarm.serve import initial_pieces
from phalanx.swarm.tensor_files import TensorFile
from tests.helpers.tiny_models import TINY_MOE

MODELS = [TINY_MOE, TINY_MOE.replace(moe=None), load_model_spec("spes-1b"), load_model_spec("spes-9b")]


@pytest.mark.parametrize("model", MODELS)
def test_model_pieces_cover_every_parameter_exactly_once(model):
    items = model_pieces(model)
    assert sum(item.num_elements for item in items) == count_parameters(model).total
    assert len({item.key for item in items}) == len(items)
    shapes = parameter_shapes(model)
    for name, shape in shapes.items():
        assert sum(prod(item.shape) for item in items if item.name == name) == prod(shape)
    most = max(prod(shape[1:]) for shape in shapes.values())
    assert all(prod(item.shape) <= max(MAX_PIECE_ELEMENTS, most) for item in items)


def test_model_pieces_split_large_tensors_by_rows(tmp_path):
    model = TINY_MOE.replace(vocab_size=10_000)
    parts = [item for item in model_pieces(model) if item.name == "embedding.weight"]
    assert [(item.first_row, item.shape) for item in parts] == [(0, (4096, 64)), (4096, (4096, 64)), (8192, (1808, 64))]
    embedding = torch.randn(10_000, 64)
    with TensorFile.create(tmp_path / "x", {"embedding.weight": (10_000, 64)}) as file:
        for item in parts:
            file.write(item, embedding[item.first_row : item.first_row + len(torch.empty(item.shape))])
        assert torch.equal(file.read_tensor("embedding.weight"), embedding)
        assert torch.equal(file.read(parts[2]), embedding[8192:])
    drawn = initial_pieces(run_from_table({"model": model.model_dump(mode="json"), "training": {"seq_len": 64}}))
    assert drawn(parts[2]).shape == (1808, 64)


@pytest.mark.parametrize("fragments", [1, 2, 3])
def test_fragment_pieces_partition_the_model(fragments):
    parts = [fragment_pieces(TINY_MOE, fragment, fragments) for fragment in range(fragments)]
    assert sorted(item.key for part in parts for item in part) == sorted(item.key for item in model_pieces(TINY_MOE))
    fragments_with_embedding = [
        index for index, part in enumerate(parts) if any(item.name.startswith("embedding") for item in part)
    ]
    assert fragments_with_embedding == [0]


def test_pieces_sent_by_node_equal_its_trained_parameters():
    owners = assign_experts(8, dict.fromkeys("abcd", 1.0))
    sent = [pieces_sent_by(model_pieces(TINY_MOE), owners, node) for node in "abcd"]
    assert all(sum(item.num_elements for item in pieces) == node_share(TINY_MOE, "spes", 2).trained for pieces in sent)
    expert_keys = [{item.key for item in pieces if item.expert is not None} for pieces in sent]
    assert not set.intersection(*expert_keys)
    assert len(set.union(*expert_keys)) == sum(item.expert is not None for item in model_pieces(TINY_MOE))
    assert pieces_sent_by(model_pieces(TINY_MOE), None, "a") == model_pieces(TINY_MOE)
