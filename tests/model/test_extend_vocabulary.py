"""Weights of a model with more tokens than their source has."""

import pytest
import torch

from phalanx.model.extend_vocabulary import extend_vocabulary
from phalanx.spec.errors import UserError

TABLES = ("embedding.weight", "per_layer_inputs.embedding.weight", "head.weight")
EMBEDDING_VD = torch.arange(12.0, dtype=torch.bfloat16).view(4, 3)


def read_weight(name: str, shape: torch.Size) -> torch.Tensor:
    weight = EMBEDDING_VD if name in TABLES else torch.ones(6, 3)
    assert weight.shape == shape
    return weight


@pytest.mark.parametrize("name", TABLES)
def test_extend_vocabulary_gives_new_tokens_the_mean_of_others(name):
    weight_VD = extend_vocabulary(read_weight, 4, 6)(name, torch.Size([6, 3]))
    assert torch.equal(weight_VD[:4], EMBEDDING_VD)
    assert weight_VD[4:].tolist() == [[4.5, 5.5, 6.5]] * 2
    assert weight_VD.dtype == torch.bfloat16


@pytest.mark.parametrize("rows", [(0, 2), (1, 4), (3, 5), (4, 6), (5, 6), (2, 2), (5, 5)])
def test_part_of_extended_vocabulary_is_that_of_the_whole(rows):
    weights = extend_vocabulary(read_weight, 4, 6)
    shape = torch.Size([6, 3])
    part = (slice(*rows), slice(1, 3))
    assert torch.equal(weights.part("head.weight", shape, part), weights("head.weight", shape)[part])


def test_extend_vocabulary_leaves_other_weights_and_equal_vocabularies():
    assert extend_vocabulary(read_weight, 4, 4) is read_weight
    # A matrix with as many rows as there are tokens is not an embedding.
    assert extend_vocabulary(read_weight, 4, 6)("blocks.0.mlp.up.weight", torch.Size([6, 3])).shape == (6, 3)


def test_extend_vocabulary_rejects_fewer_tokens():
    with pytest.raises(UserError, match=r"model\.vocab_size = 3 is less than the 4 tokens of model\.from_hf"):
        extend_vocabulary(read_weight, 4, 3)
