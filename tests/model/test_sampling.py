"""Draws of tokens: frequencies, and the logits that transformers' own processors keep."""

import pytest
import torch
from torch.testing import assert_close
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from phalanx.model.sampling import Sampling, sample_tokens

DRAWS = 4000
LOGITS = torch.tensor([0.0, 1.0, 2.0, -1.0, 1.5, -3.0])
SEEN = torch.tensor([[1, 2, 5]])


def frequencies(sampling: Sampling) -> torch.Tensor:
    """Return how often each token is drawn after the tokens `SEEN`."""
    generator = torch.Generator().manual_seed(0)
    seen = torch.zeros(DRAWS, len(LOGITS), dtype=torch.bool)
    seen[:, SEEN[0]] = True
    drawn = sample_tokens(LOGITS.expand(DRAWS, -1), sampling, generator, seen)
    return torch.bincount(drawn, minlength=len(LOGITS)) / DRAWS


@pytest.mark.parametrize(
    ("sampling", "processor"),
    [
        (Sampling(), None),
        (Sampling(top_k=3), TopKLogitsWarper(3)),
        (Sampling(top_p=0.7), TopPLogitsWarper(0.7)),
        (Sampling(min_p=0.3), MinPLogitsWarper(0.3)),
        (Sampling(repetition_penalty=1.5), RepetitionPenaltyLogitsProcessor(1.5)),
        (Sampling(suppress_tokens=(2, 4)), SuppressTokensLogitsProcessor([2, 4], device="cpu")),
    ],
    ids=["all", "top_k", "top_p", "min_p", "repetition_penalty", "suppress_tokens"],
)
def test_draws_have_the_probabilities_of_transformers(sampling, processor):
    logits = LOGITS[None].clone() if processor is None else processor(SEEN, LOGITS[None].clone())
    expected = logits.softmax(-1)[0]
    drawn = frequencies(sampling)
    assert_close(drawn, expected, rtol=0, atol=0.025)
    assert ((drawn > 0) <= (expected > 0)).all()


def test_most_likely_token_is_never_left_out():
    assert frequencies(Sampling(top_p=0.0))[2] == 1
    assert frequencies(Sampling(min_p=1.0))[2] == 1


def test_temperature_divides_and_zero_is_greedy():
    assert_close(frequencies(Sampling(temperature=0.5)), (LOGITS / 0.5).softmax(-1), rtol=0, atol=0.025)
    assert frequencies(Sampling(temperature=0))[2] == 1
