"""Frozen parameters and adapters: which names they have, and errors before any process starts."""

from __future__ import annotations

from typing import Any

import pytest

from phalanx.spec.errors import UserError
from phalanx.spec.files.load import run_from_table
from phalanx.spec.parts.model import model_parameters, num_forward_only_blocks
from phalanx.spec.run import RunSpec
from tests.helpers.small_runs import DENSE, MOE

WIDE = {**DENSE, "hidden_size": 64, "ffn_hidden_size": 128}


def frozen_run(freeze: list[str], **tables: Any) -> RunSpec:
    return run_from_table({"model": DENSE, "training": {"freeze": freeze}, **tables})


def test_pattern_freezes_the_parameters_that_it_matches() -> None:
    run = frozen_run(["blocks.1.attention.*", "head.*"])
    frozen = [name for name, parameter in model_parameters(run.model).items() if parameter.is_frozen]
    assert frozen == [name for name in model_parameters(run.model) if name.startswith(("blocks.1.attention.", "head."))]


@pytest.mark.parametrize(
    ("freeze", "num_blocks"),
    [(["embedding.*", "blocks.0.*"], 1), (["blocks.0.*"], 0), (["embedding.*"], 0), (["embedding.*", "blocks.*"], 2)],
)
def test_blocks_before_trained_parameters_need_no_backward_pass(freeze: list[str], num_blocks: int) -> None:
    model = frozen_run(freeze).model
    assert num_forward_only_blocks(model) == num_blocks
    assert num_forward_only_blocks(model, has_pipeline=True) == 0


@pytest.mark.parametrize(
    ("freeze", "tables", "message"),
    [
        (["block.0.*"], {}, "matches no parameter of the model"),
        (["head.weigth"], {}, r"(?s)training.freeze\[0\].*did you mean 'head.weight'"),
        (["*"], {}, "nothing is left to train"),
        (["head.*"], {"swarm": {}}, "is not supported with a swarm"),
    ],
)
def test_wrong_pattern_is_refused(freeze: list[str], tables: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        frozen_run(freeze, **tables)


@pytest.mark.parametrize(
    ("adapter", "tables", "message"),
    [
        ({"targets": ["wz"]}, {}, r"adapter.targets\[0\] = 'wz' names none of the products"),
        ({"targets": ["mlp.dwon"]}, {}, "names none of the products"),
        ({"targets": []}, {}, "adapter.targets.* is empty"),
        ({"rank": 0}, {}, "adapter.rank"),
        ({"rank": 100_000}, {}, "adapter.rank = 100000 is more than the width of the model"),
        ({"train": ["haed.*"]}, {}, r"adapter.train\[0\].*matches no parameter"),
        ({"alpha": 0.0}, {}, "adapter.alpha"),
        ({"targets": ["experts.up"], "dora": True}, {"model": MOE}, "adapter.dora.*no effect on routed experts"),
        ({"targets": ["experts.up"], "dropout": 0.1}, {"model": MOE}, "adapter.dropout.*no effect on routed experts"),
        ({"dropout": 1.0}, {}, "adapter.dropout.*less than 1"),
        ({"base_dtype": "int4"}, {}, "adapter.base_dtype"),
        ({"base_dtype": "nf4"}, {}, r"blocks of 64 numbers, but the rows of blocks\.0\.attention\.wq\.weight have 32"),
        (
            {"base_dtype": "nf4", "train": ["blocks.1.*"]},
            {"model": WIDE},
            r"has no effect on blocks\.1\.attention\.wq\.weight, which adapter.train contains",
        ),
        ({"from_peft": "folder"}, {}, "(?s)needs the model that it adapts.*set model.from_hf"),
        ({}, {"swarm": {}}, r"adapter.rank.*is not supported with a swarm"),
    ],
)
def test_wrong_adapter_is_refused(adapter: dict[str, Any], tables: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        run_from_table({"model": DENSE, **tables, "adapter": {"rank": 2, "alpha": 4.0, **adapter}})


def test_adapters_of_all_products_leave_everything_else_frozen() -> None:
    model = run_from_table({"model": MOE, "adapter": {"rank": 2, "alpha": 4.0}}).model
    trained = {name for name, parameter in model_parameters(model).items() if not parameter.is_frozen}
    assert all("_lora_" in name for name in trained)
    products = ["attention.wq", "attention.wk", "attention.wv", "attention.wo"]
    products += [f"mlp.shared.{name}" for name in ("gate", "up", "down")]
    names = [
        f"blocks.{layer}.{name}_lora_{letter}.weight" for layer in range(2) for name in products for letter in "AB"
    ]
    assert trained == set(names)


def test_matrices_of_blocks_but_for_routers_are_quantized() -> None:
    adapter = {"rank": 2, "alpha": 4.0, "targets": ["wq"], "base_dtype": "nf4"}
    moe = {**WIDE, "moe": {"num_experts": 4, "top_k": 2, "expert_ffn_size": 64}}
    parameters = model_parameters(run_from_table({"model": moe, "adapter": adapter}).model)
    quantized = {name.removeprefix("blocks.1."): each for name, each in parameters.items() if each.is_quantized}
    leaves = ["attention.wq.weight", "attention.wk.weight", "attention.wv.weight", "attention.wo.weight"]
    leaves += [f"mlp.experts.{name}" for name in ("gate", "up", "down")]
    assert [name for name in quantized if not name.startswith("blocks.")] == leaves
    assert quantized["mlp.experts.up"].stored_shape == (4, 64, 36)


def test_magnitudes_are_trained_beside_their_adapters() -> None:
    adapter = {"rank": 2, "alpha": 4.0, "targets": ["wq", "shared.down"], "dora": True}
    parameters = model_parameters(run_from_table({"model": MOE, "adapter": adapter}).model)
    magnitudes = {name: each.shape for name, each in parameters.items() if "magnitude" in name and not each.is_frozen}
    expected = [
        (f"blocks.{layer}.{name}_lora_magnitude.weight", parameters[f"blocks.{layer}.{name}.weight"].shape[:1])
        for layer in range(2)
        for name in ("attention.wq", "mlp.shared.down")
    ]
    assert magnitudes == dict(expected)


def test_run_keeps_its_frozen_parameters_when_it_is_written_and_changed() -> None:
    run = frozen_run(["head.*"])
    assert "tuning" not in run.model_dump(mode="json")["model"]
    assert run.replace(name="other").model.tuning.freeze == ("head.*",)
    assert run.replace(training=run.training.replace(freeze=())).model == run_from_table({"model": DENSE}).model


def test_model_table_has_no_field_for_frozen_parameters() -> None:
    with pytest.raises(UserError, match="is not a known field"):
        run_from_table({"model": {**DENSE, "tuning": {"freeze": ["head.*"]}}})
