"""Ranks that share a model choose the tokens of one process, and keep what they need of earlier ones."""

from __future__ import annotations

import pytest
import torch

from phalanx.model.generation import generate_batch
from phalanx.model.sampling import Sampling
from phalanx.parallel.apply import apply_layout
from phalanx.parallel.inference import SharedModel
from phalanx.parallel.mesh import build_mesh
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
RANDOM = Sampling(temperature=2.0, top_p=0.95, repetition_penalty=1.2)


def tokens_and_logits(model):
    """Return greedy tokens, drawn ones, and logits."""
    tokens = [
        generate_batch(model, PROMPTS, 16, sampling, torch.Generator().manual_seed(5)) for sampling in (GREEDY, RANDOM)
    ]
    logits = model.logits if isinstance(model, SharedModel) else lambda ids: model(ids)[0]
    return *tokens, logits(PROMPTS[1][None]).detach()


def shared_by(table, layout, world_size=None):
    """Return a strategy of a model with random weights."""
    mesh = build_mesh(layout, world_size, "cpu")
    stages = 4 if layout.schedule == "zb-v" else 2
    layers = [range(4 * stage // stages, 4 * (stage + 1) // stages) for stage in range(stages)] if layout.pp > 1 else []
    return apply_layout(ModelSpec(**table), layout, mesh, torch.device("cpu"), random_weight, "fp64", layers=layers)


def run_in_ranks(table, layout):
    """Return `tokens_and_logits` of this rank, and the numbers of positions in the passes of its first block."""
    strategy = shared_by(table, layout)
    positions = []
    first_block = next(iter(strategy.module.blocks.children()))
    first_block.register_forward_pre_hook(lambda _, inputs: positions.append(inputs[0].shape[1]))
    return *tokens_and_logits(SharedModel(strategy)), positions


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", MODELS)
def test_tokens_in_ranks_equal_those_of_one_process(model, layout):
    table = MODELS[model]
    greedy, drawn, logits = tokens_and_logits(shared_by(table, Layout(), 1).module)
    assert len({token for row in greedy for token in row}) > 3
    for in_ranks in rank_pool(4).run(run_in_ranks, table, LAYOUTS[layout]):
        assert in_ranks[:2] == (greedy, drawn)
        torch.testing.assert_close(in_ranks[2], logits, rtol=0, atol=1e-10)
        # The pass of the prompts is followed by passes of one position, twice; then come the logits.
        assert in_ranks[3] == [*(2 * [21, *(15 * [1])]), 21]
