"""Layouts in which every two choices that go together meet: each gives one process's losses and gradient norms, and the
held-out loss of what was trained, in fp64 to 1e-10 relative. `make test-all` has many more (test_layouts.py)."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from phalanx.testing import rank_pool
from tests.helpers.small_runs import small_run, train_and_evaluate
from tests.parity.covering_set import FACTORS, FILE, MAX_RANKS, all_pairs, is_valid, pairs, run_changes, world_size

LAYOUTS: list[dict[str, str]] = json.loads(FILE.read_text())
STEPS = 3
SAMPLES = 40
"""Of layouts with a pair that no valid one should have."""


def layout_id(choices: Mapping[str, str]) -> str:
    defaults = {factor: values[0] for factor, values in FACTORS.items()}
    named = "-".join(value for factor, value in choices.items() if value != defaults[factor])
    return f"{named.replace(', ', '-').replace(' ', '-')}-x{world_size(choices)}"


@cache
def single_process_trajectory(text: Path, settings: str) -> list[tuple[float, float]]:
    return train_and_evaluate(small_run(text, text.parent / "reference", json.loads(settings)))


@pytest.mark.parametrize("choices", [pytest.param(choices, id=layout_id(choices)) for choices in LAYOUTS])
def test_layout_equals_single_process_training(choices: dict[str, str], documents: Path, tmp_path: Path) -> None:
    changes: dict[str, Any] = {**run_changes(choices), "training.steps": STEPS, "optimizer.warmup_steps": 1}
    alone = {key: value for key, value in changes.items() if not key.startswith("layout.")}
    expected = single_process_trajectory(documents, json.dumps(alone, sort_keys=True))
    run = small_run(documents, tmp_path, changes)
    ranks = world_size(choices)
    results = [train_and_evaluate(run)] if ranks == 1 else rank_pool(ranks).run(train_and_evaluate, run)
    for rank, result in enumerate(results):
        assert result == [pytest.approx(step, rel=1e-10) for step in expected], f"rank {rank}"


def test_covering_set_has_each_pair_of_valid_layouts(text: Path) -> None:
    """No valid layout is found with a pair that none of these has."""
    covered = {pair for choices in LAYOUTS for pair in pairs(choices)}
    dice = random.Random(0)
    for pair in all_pairs():
        if pair in covered:
            continue
        for _ in range(SAMPLES):
            choices = {factor: dice.choice(values) for factor, values in FACTORS.items()} | dict(pair)
            if world_size(choices) <= MAX_RANKS:
                assert not is_valid(choices, text), f"{pair} is in no layout: python -m tests.parity.covering_set"
