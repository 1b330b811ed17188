"""Upcycling: a mixture of experts that starts from a dense checkpoint computes what the dense model computes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from phalanx.model.huggingface.export import export_hf
from phalanx.model.init import initial_weight
from phalanx.model.upcycle import replicate_mlp
from phalanx.parallel.expert.partial_experts import TrainedExperts
from phalanx.spec.errors import UserError
from phalanx.spec.model import ModelSpec
from phalanx.spec.run import RunSpec
from phalanx.swarm.pieces import model_pieces
from phalanx.swarm.serve import initial_pieces
from phalanx.testing import rank_pool
from phalanx.train.create_run import create_run
from phalanx.train.trainer import Trainer
from phalanx.train.training_data import initial_weights
from tests.helpers.small_runs import DENSE, make_trainer, small_run

EXPERTS = {"num_experts": 4, "top_k": 2, "expert_ffn_size": 48}
TOKENS = torch.randint(0, 257, (2, 32), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def dense_checkpoint(tmp_path: Path, build_model: Any) -> Path:
    """A dense checkpoint whose every parameter is random."""
    model = build_model(ModelSpec.model_validate(DENSE), torch.float32)
    export_hf(model.spec, dict(model.named_parameters()), tmp_path / "dense")
    return tmp_path / "dense"


def build_run_from_checkpoint(
    source: Path, model: dict[str, Any] | None = None, moe: dict[str, Any] | None = EXPERTS, **more: Any
) -> RunSpec:
    table = {"from_hf": str(source), **({"moe": moe} if moe else {}), **(model or {})}
    return small_run(Path(json.__file__).parent, source.parent, {"model": table, **more})


def compute_logits(run: RunSpec) -> Tensor:
    with torch.no_grad():
        return make_trainer(run).module(TOKENS)[0]


@pytest.mark.parametrize(
    "moe",
    [{}, {"top_k": 1}, {"top_k": 4, "router_score": "sigmoid"}, {"num_leading_dense_layers": 1}],
    ids=str,
)
def test_upcycled_moe_equals_dense_model_with_normalized_scores(dense_checkpoint, moe):
    expected, logits = (
        compute_logits(build_run_from_checkpoint(dense_checkpoint, moe=None)),
        compute_logits(build_run_from_checkpoint(dense_checkpoint, moe={**EXPERTS, **moe})),
    )
    torch.testing.assert_close(logits, expected, rtol=1e-12, atol=1e-12)
    assert expected.std() > 0.1
    assert (
        compute_logits(
            build_run_from_checkpoint(dense_checkpoint, {"upcycle_reinit_fraction": 0.5}, {**EXPERTS, **moe})
        )
        - expected
    ).abs().max() > 0.01


def test_upcycled_moe_scales_mlp_output_by_unnormalized_scores(dense_checkpoint):
    run = build_run_from_checkpoint(dense_checkpoint, moe={**EXPERTS, "normalize_top_k": False})
    layer, mlp = (
        make_trainer(source_run).module.blocks[0].mlp
        for source_run in (run, build_run_from_checkpoint(dense_checkpoint, moe=None))
    )
    x = torch.randn(2, 7, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        total = (x @ layer.router.gate.weight.T).softmax(-1).topk(2).values.sum(-1, keepdim=True)
        torch.testing.assert_close(layer(x)[0], total * mlp(x), rtol=1e-12, atol=1e-12)
    assert total.max() < 0.95


@pytest.mark.parametrize(
    ("model", "moe", "message"),
    [
        ({}, {"dense_branch": True}, "dense_branch = True is not supported for experts that are initialized from a"),
        ({"norm_position": "both"}, {}, "attention_after.weight' is not in the checkpoint"),
    ],
)
def test_upcycling_refuses_parts_that_the_dense_model_lacks(dense_checkpoint, model, moe, message):
    with pytest.raises(UserError, match=message):
        make_trainer(build_run_from_checkpoint(dense_checkpoint, model, {**EXPERTS, **moe}))


def test_replicate_mlp_reinitializes_same_hidden_units_in_all_matrices():
    generator = torch.Generator().manual_seed(0)
    gate, up = (1 + 0.5 * torch.randn(400, 64, generator=generator) for _ in range(2))
    down = 3 + 0.1 * torch.randn(64, 400, generator=generator)
    stacks = [
        replicate_mlp(dense, range(3), 0.25, 7, "blocks.0.mlp", kind)
        for dense, kind in ((gate, "gate"), (up, "up"), (down.T.contiguous().T, "down"))
    ]
    units = [torch.stack([e != dense for e in stack]) for stack, dense in zip(stacks, (gate, up, down), strict=True)]
    changed = [units[0].all(2), units[1].all(2), units[2].all(1)]
    for units_of_matrix, any_changed in zip(changed, (units[0].any(2), units[1].any(2), units[2].any(1)), strict=True):
        assert torch.equal(units_of_matrix, any_changed)
        assert torch.equal(units_of_matrix, changed[0])
    assert changed[0].sum(1).tolist() == [100] * 3
    assert not torch.equal(changed[0][0], changed[0][1])
    for stack, moved, mean, deviation in ((stacks[0], units[0], 1, 0.5), (stacks[2], units[2], 3, 0.1)):
        assert stack[moved].mean().item() == pytest.approx(mean, abs=5 * deviation / 6400**0.5)
        assert stack[moved].std().item() == pytest.approx(deviation, rel=0.05)


def test_replicate_mlp_depends_only_on_seed_layer_and_expert_index():
    dense = torch.randn(48, 32, generator=torch.Generator().manual_seed(0))

    def experts(count: int, seed: int = 7, layer: str = "blocks.0.mlp") -> Tensor:
        return replicate_mlp(dense, range(count), 0.5, seed, layer, "gate")

    assert torch.equal(experts(2), experts(8)[:2])
    others = [experts(2)[1], experts(2, seed=8)[0], experts(2, layer="blocks.1.mlp")[0]]
    assert all(not torch.equal(experts(2)[0], other) for other in others)


def gather_initial_weights(run: RunSpec) -> dict[str, Tensor]:
    """Return the full initial weights, gathered from all ranks."""
    strategy = make_trainer(run).strategy
    parts = {
        name: strategy.model_parallel.as_global_dtensor(name, parameter.detach())
        for name, parameter in strategy.trainable_parameters.items()
    }
    return {name: part.full_tensor() if hasattr(part, "full_tensor") else part for name, part in parts.items()}


@pytest.mark.parametrize(
    "layout", [{"ep": 2}, {"tp": 2}, {"data_parallel": "zero3"}, {"data_parallel": "zero1"}], ids=str
)
def test_upcycled_initial_weights_are_equal_in_every_layout(dense_checkpoint, layout):
    expected = gather_initial_weights(build_run_from_checkpoint(dense_checkpoint, {"upcycle_reinit_fraction": 0.5}))
    changes = {f"layout.{name}": value for name, value in layout.items()}
    for weights in rank_pool(2).run(
        gather_initial_weights, build_run_from_checkpoint(dense_checkpoint, {"upcycle_reinit_fraction": 0.5}, **changes)
    ):
        assert weights.keys() == expected.keys()
        assert all(torch.equal(weights[name], value) for name, value in expected.items())


def test_swarm_initial_pieces_equal_upcycled_weights(dense_checkpoint):
    """A coordinator reads the weights by piece; a node stores the experts that it does not train separately."""
    run = build_run_from_checkpoint(
        dense_checkpoint, {"upcycle_reinit_fraction": 0.5}, **{"training.precision": "fp32"}
    )
    pieces, weights, router = initial_pieces(run), gather_initial_weights(run), "blocks.1.mlp.router.gate.weight"
    for item in model_pieces(run.model):
        tensor = weights[item.name]
        tensor = tensor if item.expert is None else tensor[item.expert]
        rows = slice(None) if item.first_row is None else slice(item.first_row, item.first_row + item.shape[0])
        assert torch.equal(pieces(item), tensor[rows]), item.key
    assert torch.equal(weights[router], initial_weight(run.model, router, weights[router].shape, run.training.seed))
    corpus = make_trainer(run).corpus
    node = Trainer(
        run, corpus, Path(run.output_dir) / run.name, torch.device("cpu"), trained_experts=TrainedExperts((1, 3))
    )
    experts = node.module.blocks[1].mlp.experts
    assert torch.equal(experts.down.detach(), weights["blocks.1.mlp.experts.down"][[1, 3]])
    assert torch.equal(experts.frozen["down"].numbers, weights["blocks.1.mlp.experts.down"][[0, 2]])


def test_untied_head_starts_from_tied_embedding_of_checkpoint(tmp_path, build_model):
    model = build_model(ModelSpec.model_validate({**DENSE, "tie_embeddings": True}), torch.float32)
    export_hf(model.spec, dict(model.named_parameters()), tmp_path / "tie_embeddings")
    run = build_run_from_checkpoint(tmp_path / "tie_embeddings", {"tie_embeddings": False})
    torch.testing.assert_close(
        compute_logits(run),
        compute_logits(build_run_from_checkpoint(tmp_path / "tie_embeddings", moe=None)),
        rtol=1e-12,
        atol=1e-12,
    )
    assert "head.weight" in gather_initial_weights(run)


@pytest.mark.parametrize(
    ("model", "moe", "message"),
    [
        (
            {},
            {"expert_ffn_size": 24},
            (
                r"model\.moe\.expert_ffn_size = 24 differs from the width .*"
                r"\(model\.ffn_hidden_size = 48.*\n.*set model\.moe\.expert_ffn_size = 48"
            ),
        ),
        ({}, {"num_shared_experts": 1}, r"model\.moe\.num_shared_experts = 1 would add a second copy"),
    ],
)
def test_create_run_rejects_incompatible_upcycling_before_writing(dense_checkpoint, model, moe, message):
    run = build_run_from_checkpoint(dense_checkpoint, model, {**EXPERTS, **moe})
    with pytest.raises(UserError, match=message):
        create_run(run, 1, resume=False)
    assert not (Path(run.output_dir) / run.name).exists()


def test_initial_weights_of_moe_checkpoint_are_not_upcycled(tmp_path, build_model):
    model = build_model(
        ModelSpec.model_validate({**DENSE, "moe": {**EXPERTS, "expert_ffn_size": 24, "z_loss_coef": 0.0}}),
        torch.float32,
    )
    export_hf(model.spec, dict(model.named_parameters()), tmp_path / "mixture")
    read = initial_weights(build_run_from_checkpoint(tmp_path / "mixture", moe=None))
    stacked = model.blocks[0].mlp.experts.gate
    assert torch.equal(read("blocks.0.mlp.experts.gate", stacked.shape), stacked)
    with pytest.raises(
        UserError, match=r"model\.upcycle_reinit_fraction = 0\.5 has no effect, because model\.from_hf has experts"
    ):
        initial_weights(build_run_from_checkpoint(tmp_path / "mixture", {"upcycle_reinit_fraction": 0.5}, moe=None))


@pytest.mark.parametrize("missing_key", ["moe", "from_hf"])
def test_run_spec_rejects_upcycle_reinit_fraction_without_upcycling(dense_checkpoint, missing_key):
    model = {**DENSE, "from_hf": str(dense_checkpoint), "moe": EXPERTS, "upcycle_reinit_fraction": 0.5}
    del model[missing_key]
    with pytest.raises(
        UserError,
        match=r"model\.upcycle_reinit_fraction = 0\.5 requires experts that are initialized from a dense model",
    ):
        small_run(Path(json.__file__).parent, dense_checkpoint.parent, {"model": model})
