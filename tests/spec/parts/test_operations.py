"""Shares of widths, and the modules inside a part."""

from __future__ import annotations

from dataclasses import replace

import pytest

from phalanx.spec.base import parse_table
from phalanx.spec.model import ModelSpec
from phalanx.spec.parts.block import blocks
from phalanx.spec.parts.model import model_parameters
from phalanx.spec.parts.operations import Cut, Norm, Part, Value
from tests.helpers.small_runs import MOE


@pytest.mark.parametrize(
    ("cut", "ranks", "width"),
    [
        (Cut("heads", 8, unit=4), 4, 8),
        (Cut("heads", 2, unit=4, copied_below=True), 4, 4),
        (Cut("heads", 5), 2, 3),
        (Cut("heads", 3, unit=8, share="columns"), 2, 16),  # 12 columns each: a head and half of the second
        (Cut("heads", 4, unit=8, share="columns"), 2, 16),
        (Cut("heads", 3, unit=8, share="all"), 2, 24),
    ],
)
def test_rank_has_whole_units_of_its_share(cut: Cut, ranks: int, width: int) -> None:
    assert cut.width_on_rank(ranks) == width
    assert replace(cut, share="units").width_on_rank(1) == cut.width


def test_products_have_the_roles_of_their_cuts() -> None:
    x = Value(32, tokens="residual", numbers="residual")
    part = Part("attention", "attention", x)
    latent = part.linear("wa", x, width=8)
    heads = part.linear("wb", latent, Cut("heads", 4, unit=6))
    part.linear("wo", heads, init="output")
    assert [linear.role for linear in part.linears] == ["copied", "column", "row"]
    assert [linear.writes.tokens for linear in part.linears] == ["residual", "all", "residual"]
    assert {name: each.shape for name, each in part.parameters.items()} == {
        "wa.weight": (8, 32),
        "wb.weight": (24, 8),
        "wo.weight": (32, 24),
    }


def test_modules_of_a_part_have_its_parameters() -> None:
    experts = blocks(parse_table(ModelSpec, MOE))[0][-1].part
    inner = {
        f"{module}.{name}": parameter
        for module in ("router", "experts", "shared")
        for name, parameter in experts.within(module).parameters.items()
    }
    assert inner == experts.parameters


def test_layers_of_one_kind_are_one_block() -> None:
    moe = {**MOE["moe"], "num_leading_dense_layers": 1}
    spec = parse_table(
        ModelSpec, {**MOE, "num_layers": 5, "moe": moe, "sliding_window": 4, "full_attention_layers": [2]}
    )
    kinds = blocks(spec)
    assert kinds[1] is kinds[3] is kinds[4]
    assert len(set(kinds)) == 3
    assert [name.split(".")[1] for name in model_parameters(spec) if name.endswith("wq.weight")] == list("01234")


@pytest.mark.parametrize(("qk_norm", "crossing"), [("head", []), ("full", ["q_norm"])])
def test_norm_of_one_head_crosses_no_ranks(qk_norm: str, crossing: list[str]) -> None:
    spec = parse_table(ModelSpec, {**MOE, "num_kv_heads": 1, "qk_norm": qk_norm})
    norms = [operation for operation in blocks(spec)[0][0].part.operations if isinstance(operation, Norm)]
    assert [norm.name for norm in norms if norm.crosses_ranks] == crossing
