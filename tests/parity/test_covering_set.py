"""Layouts in which any two compatible choices occur together: losses, gradient norms, and the held-out loss after
training equal those of one process in fp64 to 1e-10 relative. `make test-all` has many more (test_layouts.py)."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from unittest import mock

import pytest

from phalanx.program.buckets import PIECE_BYTES
from phalanx.spec.run import RunSpec
from phalanx.testing import rank_pool
from tests.helpers.small_runs import (
    BIASED_EXPERTS,
    DELTA,
    DENSE,
    KINDS,
    LATENT,
    MODELS_OF_KINDS,
    MOE,
    PARALLEL,
    SHARED_KEYS,
    Table,
    small_run,
    train_and_evaluate,
)
from tests.parity.covering_set import (
    FACTORS,
    FILE,
    MAX_RANKS,
    PAIRED,
    SCHEDULE_KINDS,
    all_pairs,
    is_valid,
    pairs,
    run_changes,
    world_size,
)

LAYOUTS: list[dict[str, str]] = json.loads(FILE.read_text())
STEPS = 2
"""The second loss shows the first update, and the held-out loss the second."""
FOUR_RANKS: dict[str, Table] = {
    "tp": {"layout.tp": 4, "layout.data_parallel": "zero1"},
    "ring": {"layout.cp": 4},
    "ulysses": {"layout.cp": 4, "layout.cp_method": "ulysses"},
    "1f1b": {"layout.pp": 4, "layout.micro_batch_size": 1},
    "zb-v": {"layout.pp": 4, "layout.schedule": "zb-v", "layout.micro_batch_size": 1},
    "ep": {"layout.ep": 4, "model": MOE},
    "zero1": {"layout.data_parallel": "zero1"},
    "zero2": {"layout.data_parallel": "zero2"},
    "zero3": {"layout.data_parallel": "zero3", "optimizer.name": "muon"},
}
"""Each axis on four ranks: with two, the next rank is also the previous one."""
WINDOWS: Table = {"sliding_window": 7, "full_attention_layers": [1]}
SINKS: Table = {"attention_sinks": True}
CAPPED: Table = {"attention_softcap": 2.0}
ATTENTION_CASES: dict[str, tuple[int, Table, Table]] = {
    "zero3": (2, WINDOWS | SINKS, {"layout.data_parallel": "zero3"}),
    "tp-zero1": (4, WINDOWS | SINKS | CAPPED, {"layout.tp": 2, "layout.data_parallel": "zero1"}),
    "gathered": (
        2,
        {**WINDOWS, **SINKS, **CAPPED, "num_heads": 3, "num_kv_heads": 3, "hidden_size": 36},
        {"layout.tp": 2, "layout.tp_attention": "gathered"},
    ),
    "ulysses-tp": (4, WINDOWS | SINKS | CAPPED, {"layout.cp": 2, "layout.cp_method": "ulysses", "layout.tp": 2}),
    "ring": (2, SINKS, {"layout.cp": 2}),
    "zb-v": (2, {**WINDOWS, **SINKS, "num_layers": 4}, {"layout.pp": 2, "layout.schedule": "zb-v"}),
    "recompute": (1, WINDOWS | SINKS | CAPPED, {"layout.activation_checkpointing": "selective"}),
}
"""Ranks, model and layout of windows, sinks and caps of scores."""
KIND_CASES: dict[str, tuple[int, Table]] = {
    "zero3": (2, {"layout.data_parallel": "zero3", "layout.activation_checkpointing": "norms"}),
    "tp-ep": (4, {"layout.tp": 2, "layout.ep": 2, "layout.data_parallel": "zero1"}),
    "tp-whole-tokens": (2, {"layout.tp": 2, "layout.sequence_parallel": False}),
    "ulysses": (2, {"layout.cp": 2, "layout.cp_method": "ulysses", "layout.activation_checkpointing": "full"}),
    "zb-v": (2, {"layout.pp": 2, "layout.schedule": "zb-v", "layout.micro_batch_size": 1}),
}
"""Ranks and layout of a model with several kinds of layers."""
IN_PLACE_OF_PIPELINE: tuple[int, Table] = (
    4,
    {"layout.tp": 4, "layout.activation_checkpointing": "selective", "layout.data_parallel": "zero2"},
)
"""Ranks and layout of a model whose layers read tensors of others, which a pipeline cannot have."""
SAMPLES = 40
"""Number of random layouts for each pair that no valid layout should have."""


def layout_id(choices: Mapping[str, str]) -> str:
    defaults = {factor: values[0] for factor, values in FACTORS.items()}
    named = "-".join(value for factor, value in choices.items() if value != defaults[factor])
    return f"{named.replace(', ', '-').replace(' ', '-')}-x{world_size(choices)}"


@cache
def single_process_trajectory(text: Path, settings: str) -> list[tuple[float, float]]:
    return train_and_evaluate(small_run(text, text.parent / "reference", json.loads(settings)))


@pytest.mark.parametrize("choices", [pytest.param(choices, id=layout_id(choices)) for choices in LAYOUTS])
def test_layout_equals_single_process_training(choices: dict[str, str], documents: Path, tmp_path: Path) -> None:
    check_parity(world_size(choices), run_changes(choices), documents, tmp_path)


@pytest.mark.parametrize("axis", FOUR_RANKS)
def test_axis_of_four_ranks_equals_single_process_training(axis: str, documents: Path, tmp_path: Path) -> None:
    check_parity(
        4, {"model": {**DENSE, "num_layers": 8 if axis == "zb-v" else 4}, **FOUR_RANKS[axis]}, documents, tmp_path
    )


def test_gradients_in_several_groups_are_summed_in_one_order_on_all_ranks(documents: Path, tmp_path: Path) -> None:
    """With offload, each rank had its gradients in an order of its own, and six ranks deadlocked in different
    groups."""
    model = {**MOE, "hidden_size": 30, "num_heads": 6, "num_kv_heads": 3, "head_dim": 16}
    layout = {"tp": 6, "ep": 2, "data_parallel": "zero3", "offload": "cpu"}
    changes = {"model": model, **{f"layout.{field}": value for field, value in layout.items()}}
    check_parity(6, {**changes, "training.seq_len": 24, "training.tokens_per_step": 8 * 24}, documents, tmp_path)


@pytest.mark.parametrize(("ranks", "data", "piece_bytes"), [(2, "zero1", 68_000), (4, "zero3", 38_000)])
def test_offloaded_state_is_stepped_in_the_same_pieces_on_all_ranks(
    ranks: int, data: str, piece_bytes: int, documents: Path, tmp_path: Path
) -> None:
    """The last of two tensor-parallel ranks has fewer rows of the vocabulary, so its pieces had room for another
    parameter, and the all-to-alls of Muon did not match."""
    changes = {
        "model": {**DENSE, "vocab_size": 263},
        "layout.tp": 2,
        "layout.data_parallel": data,
        "layout.offload": "cpu",
        "optimizer.name": "muon",
        "training.steps": STEPS,
        "optimizer.warmup_steps": 1,
    }
    run = small_run(documents, tmp_path, changes)
    in_one_piece, in_pieces = (rank_pool(ranks).run(train_in_pieces, run, limit) for limit in (2**28, piece_bytes))
    assert in_pieces == in_one_piece


def train_in_pieces(run: RunSpec, piece_bytes: int) -> list[tuple[float, float]]:
    with mock.patch.dict(PIECE_BYTES, cpu=piece_bytes):
        return train_and_evaluate(run)


@pytest.mark.parametrize("case", ATTENTION_CASES)
def test_windows_sinks_and_caps_equal_single_process_training(case: str, documents: Path, tmp_path: Path) -> None:
    ranks, model, layout = ATTENTION_CASES[case]
    micro_batch = {"layout.micro_batch_size": 1} if "layout.pp" in layout else {}
    check_parity(ranks, {"model": {**DENSE, **model}, **layout, **micro_batch}, documents, tmp_path)


@pytest.mark.parametrize("model", MODELS_OF_KINDS)
@pytest.mark.parametrize("name", KIND_CASES)
def test_layout_of_several_kinds_of_layers_equals_single_process(
    name: str, model: str, documents: Path, tmp_path: Path
) -> None:
    table = MODELS_OF_KINDS[model]
    has_pipeline = "layout.pp" in KIND_CASES[name][1]
    ranks, layout = IN_PLACE_OF_PIPELINE if has_pipeline and table is SHARED_KEYS else KIND_CASES[name]
    layout = {field: value for field, value in layout.items() if field != "layout.ep" or "moe" in table}
    check_parity(ranks, {"model": table, **layout}, documents, tmp_path)


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        ({"norm_parameters": "none"}, {"layout.tp": 2}),
        ({"parallel_residual": "two_norms"}, {"layout.pp": 2, "layout.schedule": "zb-v", "layout.micro_batch_size": 1}),
        ({"norm_parameters": "none", "norm": "rmsnorm"}, {"layout.data_parallel": "zero3"}),
    ],
    ids=["layernorm-without-parameters", "two-norms", "rmsnorm-without-weight"],
)
def test_forms_of_norms_equal_single_process(model: Table, layout: Table, documents: Path, tmp_path: Path) -> None:
    check_parity(2, {"model": PARALLEL | model, **layout}, documents, tmp_path)


RINGS: dict[str, Table] = {
    "norms before": {**KINDS, "sliding_window": None, "norm_position": "before"},
    "norms after": {**KINDS, "sliding_window": None, "norm_position": "after"},
    "latent": LATENT,
    "biased experts": {**BIASED_EXPERTS, "sliding_window": None},
    "shared keys": {**SHARED_KEYS, "sliding_window": None, "tie_embeddings": False},
}
"""Models with several kinds of layers that a ring supports."""


@pytest.mark.parametrize("name", RINGS)
def test_ring_of_several_kinds_of_layers_equals_single_process(name: str, documents: Path, tmp_path: Path) -> None:
    model = RINGS[name]
    check_parity(2, {"model": model, "layout.cp": 2}, documents, tmp_path)


@pytest.mark.parametrize(
    "layout", [{"layout.tp": 4}, {"layout.cp": 4, "layout.cp_method": "ulysses"}], ids=["tp", "cp"]
)
def test_copies_of_key_heads_of_several_kinds_equal_single_process(
    layout: Table, documents: Path, tmp_path: Path
) -> None:
    """Four ranks have four copies of the key head of attention, and two of those of Gated DeltaNet."""
    check_parity(4, {"model": DELTA, **layout}, documents, tmp_path)


def check_parity(ranks: int, changes: Table, documents: Path, folder: Path) -> None:
    """Train two steps on `ranks` ranks, and compare each of them with one process."""
    changes = {**changes, "training.steps": STEPS, "optimizer.warmup_steps": 1, "evaluation.tokens": 128}
    single_process_changes = {key: value for key, value in changes.items() if not key.startswith("layout.")}
    expected = single_process_trajectory(documents, json.dumps(single_process_changes, sort_keys=True))
    run = small_run(documents, folder, changes)
    results = [train_and_evaluate(run)] if ranks == 1 else rank_pool(ranks).run(train_and_evaluate, run)
    for rank, result in enumerate(results):
        assert result == [pytest.approx(step, rel=1e-10) for step in expected], f"rank {rank}"


def test_covering_set_has_each_pair_of_valid_layouts(text: Path) -> None:
    """Random layouts with a pair that is in no layout of the set must be invalid."""
    covered = {pair for choices in LAYOUTS for pair in pairs(choices)}
    dice = random.Random(0)
    for pair in all_pairs():
        if pair in covered:
            continue
        for _ in range(SAMPLES):
            choices = {factor: dice.choice(values) for factor, values in FACTORS.items()} | dict(pair)
            if (kind := choices["schedule"]) in PAIRED["schedule"]:
                choices["schedule"] = dice.choice([name for name, other in SCHEDULE_KINDS.items() if other == kind])
            if world_size(choices) <= MAX_RANKS:
                assert not is_valid(choices, text), f"{pair} is in no layout: python -m tests.parity.covering_set"
