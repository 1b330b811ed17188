"""Weights of a model with more tokens than their source has."""

import pytest
import torch

from phalanx.model.extend_vocabulary import extend_vocabulary
from phalanx.spec.errors import UserError

EMBEDDING_VD = torch.arange(12.0, dtype=torch.bfloat16).view(4, 3)


def read_weight(name: str, shape: torch.Size) -> torch.Tensor:
    weight = EMBEDDING_VD if name in ("embedding.weight", "head.weight") else torch.ones(6, 3)
    assert weight.shape == shape
    return weight


@pytest.mark.parametrize("name", ["embedding.weight", "head.weight"])
def test_extend_vocabulary_gives_new_tokens_the_mean_of_others(name):
    weight_VD = extend_vocabulary(read_weight, 4, 6)(name, torch.Size([6, 3]))
    assert torch.equal(weight_VD[:4], EMBEDDING_VD)
    assert weight_VD[4:].tolist() == [[4.5, 5.5, 6.5]] * 2
    assert weight_VD.dtype == torch.bfloat16


def test_extend_vocabulary_leaves_other_weights_and_equal_vocabularies():
    assert extend_vocabulary(read_weight, 4, 4) is read_weight
    # A matrix with as many rows as there are tokens is not an embedding.
    assert extend_vocabulary(read_weight, 4, 6)("blocks.0.mlp.up.weight", torch.Size([6, 3])).shape == (6, 3)


def test_extend_vocabulary_rejects_fewer_tokens():
    with pytest.raises(UserError, match=r"model\.vocab_size = 3 is less than the 4 tokens of model\.from_hf"):
        extend_vocabulary(read_weight, 4, 3)
