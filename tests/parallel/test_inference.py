"""Ranks that share a model choose the tokens of one process, and keep what they need of earlier ones."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch

from phalanx.model.generation import Predictor, generate_batch
from phalanx.model.sampling import Sampling
from phalanx.parallel.apply import apply_layout
from phalanx.parallel.inference import SharedModel
from phalanx.parallel.mesh import build_mesh
from phalanx.spec import chunks
from phalanx.spec.layout import Layout
from phalanx.spec.model import ModelSpec
from phalanx.testing import rank_pool
from tests.helpers.random_models import random_weight
from tests.helpers.small_runs import BIASED_EXPERTS, CONVOLUTIONS, DELTA, DENSE, KIMI, LATENT, MAMBAS, SIDE_BY_SIDE

GPT2_LIKE = {**DENSE, "qk_norm": "none", "position_embedding": "learned", "tie_embeddings": True, "logits_softcap": 2.0}
MODELS = {
    "llama": {**DENSE, "num_layers": 4},
    "gpt-oss": BIASED_EXPERTS,
    "deepseek": LATENT,
    "learned positions": {**GPT2_LIKE, "num_layers": 4},
    "delta": DELTA,
    "kimi": KIMI,
    "mamba": MAMBAS,
    "side by side": SIDE_BY_SIDE,
    "convolutions": CONVOLUTIONS,
}
LAYOUTS = {
    "tp": Layout(tp=2),
    "pp": Layout(pp=2),
    "tp x pp": Layout(tp=2, pp=2),
    "zero3": Layout(data_parallel="zero3"),
    "tp x zero3": Layout(tp=2, data_parallel="zero3"),
    "V": Layout(pp=2, tp=2, sequence_parallel=False, schedule="zb-v"),
}
PROMPTS = [torch.arange(length) * 7 % 250 for length in (3, 21, 9)]
GREEDY = Sampling(temperature=0)
VOCAB = 250
RANDOM = Sampling(temperature=2.0, top_p=0.95, repetition_penalty=1.2)


def tokens_and_scores(predictor, targets):
    """Return greedy tokens, drawn ones, and the scores of tokens in a smaller vocabulary, a few at a time."""
    tokens = [
        generate_batch(predictor, PROMPTS, 16, sampling, torch.Generator().manual_seed(5))
        for sampling in (GREEDY, RANDOM)
    ]
    ids = PROMPTS[1].view(1, -1)
    places = torch.zeros(19, dtype=torch.long), torch.arange(2, 21)
    with patch.object(chunks, "LOGITS_CHUNK_BYTES", 5 * 257 * 4):
        return *tokens, predictor.score_targets(ids, places, targets, VOCAB)


def plain_scores(model):
    """Return targets, of which every third is the most likely one, and their scores from all logits."""
    logits = model(PROMPTS[1][None])[0][0, 2:, :VOCAB].detach()
    best = logits.argmax(1)
    targets = torch.where(torch.arange(19) % 3 == 0, best, torch.arange(19) * 13 % VOCAB)
    log_probs = logits.log_softmax(1).gather(1, targets[:, None])[:, 0]
    return targets, torch.stack([log_probs, (best == targets).double()], dim=1)


def shared_by(table, layout, world_size=None):
    """Return a strategy of a model with random weights."""
    mesh = build_mesh(layout, world_size, "cpu")
    stages = 4 if layout.schedule == "zb-v" else 2
    layers = [range(4 * stage // stages, 4 * (stage + 1) // stages) for stage in range(stages)] if layout.pp > 1 else []
    return apply_layout(ModelSpec(**table), layout, mesh, torch.device("cpu"), random_weight, "fp64", layers=layers)


def run_in_ranks(table, layout, targets):
    """Return `tokens_and_scores` of this rank, and the numbers of positions in the passes of its first block."""
    strategy = shared_by(table, layout)
    positions = []
    first_block = next(iter(strategy.module.blocks.children()))
    first_block.register_forward_pre_hook(lambda _, inputs: positions.append(inputs[0].shape[1]))
    return *tokens_and_scores(SharedModel(strategy), targets), positions


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", MODELS)
def test_tokens_in_ranks_equal_those_of_one_process(model, layout):
    table = MODELS[model]
    module = shared_by(table, Layout(), 1).module
    targets, expected = plain_scores(module)
    greedy, drawn, scores = tokens_and_scores(Predictor(module), targets)
    torch.testing.assert_close(scores, expected, rtol=0, atol=1e-12)
    assert len({token for row in greedy for token in row}) > 3
    for in_ranks in rank_pool(4).run(run_in_ranks, table, LAYOUTS[layout], targets):
        assert in_ranks[:2] == (greedy, drawn)
        torch.testing.assert_close(in_ranks[2], scores, rtol=0, atol=1e-10)
        # The pass of the prompts is followed by passes of one position, twice; then come the scores.
        assert in_ranks[3] == [*(2 * [21, *(15 * [1])]), 21]
