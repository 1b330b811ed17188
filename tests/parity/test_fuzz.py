"""The random layouts contain every value of every choice: a value that is never drawn is never tested."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, get_args

import pytest

from phalanx.spec.layout import Layout
from tests.helpers.small_runs import Table, small_run
from tests.parity import fuzz

SEED = 1
DRAWS = 900


@pytest.fixture(scope="module")
def layouts(text: Path) -> list[Layout]:
    """Layouts that training accepts."""
    drawn = fuzz.draw_valid_layouts(SEED, DRAWS, text)
    return [
        small_run(text, text.parent, fuzz.run_settings(model, layers, changes)).layout
        for _, model, layers, changes in drawn
    ]


@pytest.mark.parametrize("field", fuzz.CHOICES)
def test_random_layouts_contain_every_value_of_choice(field: str, layouts: list[Layout]) -> None:
    assert {getattr(layout, field) for layout in layouts} == set(fuzz.CHOICES[field])


@pytest.mark.parametrize("axis", fuzz.DEGREES)
def test_random_layouts_contain_every_degree(axis: str, layouts: list[Layout]) -> None:
    assert {getattr(layout, axis) for layout in layouts} == {1, *fuzz.DEGREES[axis]}


def test_random_layouts_contain_partial_recomputation_and_many_micro_batches(text: Path) -> None:
    drawn = fuzz.draw_valid_layouts(SEED, DRAWS, text)
    assert {world_size for world_size, *_ in drawn} == set(fuzz.WORLD_SIZES)
    assert {model for _, model, _, _ in drawn} == set(fuzz.MODELS)
    blocks = [changes.get("layout.recomputed_blocks") for *_, changes in drawn]
    assert {type(count) for count in blocks} == {type(None), int, list}
    micro_batches = [_micro_batches(world_size, changes) for world_size, _, _, changes in drawn]
    assert max(micro_batches) > 8


def _micro_batches(world_size: int, changes: Table) -> int:
    """Return the micro-batches of a step on a rank, without parameter servers."""
    replicas = world_size // (changes["layout.pp"] * changes["layout.tp"] * changes["layout.cp"])
    sequences = changes["training.tokens_per_step"] // changes["training.seq_len"]
    return int(sequences // replicas // changes["layout.micro_batch_size"])


def test_choices_are_all_values_of_type_but_those_with_reason() -> None:
    """A new value of the type must be drawn or have a reason; a value that was removed has none."""
    for name, drawn in fuzz.CHOICES.items():
        annotation = Layout.model_fields[name].annotation
        values = {False, True} if annotation is bool else set(get_args(annotation))
        reasons = {value for field, value in fuzz.UNDRAWN if field == name}
        assert set(drawn) == values - reasons
        assert reasons <= values
    assert {field for field, _ in fuzz.UNDRAWN} <= set(fuzz.CHOICES)
    assert {"rank_order", "schedule", "fsdp_unit", "offload"} <= set(fuzz.CHOICES)


@pytest.mark.parametrize(
    ("key", "value"), [("layout.rank_order", "pipeline"), ("layout.tp", 0), ("layout.pipeline", 2)]
)
def test_drawing_of_invalid_value_is_error(key: str, value: Any, text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def draw(dice: random.Random) -> tuple[int, str, int, Table]:
        return 2, "dense", 2, {key: value}

    monkeypatch.setattr(fuzz, "draw_layout", draw)
    with pytest.raises(ValueError, match=f"{key} = {value} is drawn, but is never valid"):
        fuzz.draw_valid_layouts(SEED, 1, text)
