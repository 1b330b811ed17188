"""The pieces of a model: every number once, and what each node tells of them."""

from math import prod

import pytest
import torch

from phalanx.cost.parameters import parameters
from phalanx.cost.shapes import parameter_shapes
from phalanx.cost.swarm import node_of
from phalanx.spec.load import build_run, load_model
from phalanx.swarm.items import PIECE, in_fragment, items_of, told_by
from phalanx.swarm.leading import first_weights
from phalanx.swarm.ownership import assign
from phalanx.swarm.tensors import TensorFile
from tests.cost.test_swarm_cost import TINY

MODELS = [TINY, TINY.replace(moe=None), load_model("spes-1b"), load_model("spes-9b")]


@pytest.mark.parametrize("model", MODELS)
def test_every_number_is_in_one_piece(model):
    items = items_of(model)
    assert sum(item.numbers for item in items) == parameters(model).total
    assert len({item.key for item in items}) == len(items)
    shapes = parameter_shapes(model)
    for name, shape in shapes.items():
        assert sum(prod(item.shape) for item in items if item.name == name) == prod(shape)
    most = max(prod(shape[1:]) for shape in shapes.values())
    assert all(prod(item.shape) <= max(PIECE, most) for item in items)


def test_parts_of_a_large_tensor_are_its_rows(tmp_path):
    model = TINY.replace(vocab=10_000)
    parts = [item for item in items_of(model) if item.name == "embedding.weight"]
    assert [(item.first, item.shape) for item in parts] == [(0, (4096, 64)), (4096, (4096, 64)), (8192, (1808, 64))]
    whole = torch.randn(10_000, 64)
    with TensorFile.create(tmp_path / "x", {"embedding.weight": (10_000, 64)}) as file:
        for item in parts:
            file.write(item, whole[item.first : item.first + len(torch.empty(item.shape))])
        assert torch.equal(file.whole("embedding.weight"), whole)
        assert torch.equal(file.read(parts[2]), whole[8192:])
    drawn = first_weights(build_run({"model": model.model_dump(mode="json"), "training": {"sequence": 64}}))
    assert drawn(parts[2]).shape == (1808, 64)


@pytest.mark.parametrize("fragments", [1, 2, 3])
def test_fragments_are_the_whole(fragments):
    parts = [in_fragment(TINY, fragment, fragments) for fragment in range(fragments)]
    assert sorted(item.key for part in parts for item in part) == sorted(item.key for item in items_of(TINY))
    embedding = [place for place, part in enumerate(parts) if any(item.name.startswith("embedding") for item in part)]
    assert embedding == [0]


def test_nodes_tell_what_they_train():
    owners = assign(8, dict.fromkeys("abcd", 1.0))
    told = [told_by(items_of(TINY), owners, node) for node in "abcd"]
    assert all(sum(item.numbers for item in of_node) == node_of(TINY, "spes", 2).trained for of_node in told)
    alone = [{item.key for item in of_node if item.expert is not None} for of_node in told]
    assert not set.intersection(*alone)
    assert len(set.union(*alone)) == sum(item.expert is not None for item in items_of(TINY))
    assert told_by(items_of(TINY), None, "a") == items_of(TINY)
