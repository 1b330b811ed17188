"""Each evaluation records which text it measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from phalanx.runs.metrics import have_same_held_out_text
from tests.helpers.small_runs import make_trainer, small_run


@pytest.mark.parametrize(
    ("changes", "is_same"),
    [
        ({}, True),
        ({"training.seed": 5, "layout.micro_batch_size": 2}, True),
        ({"evaluation": {"tokens": 100}}, False),
        ({"evaluation": {"tokens": 10**9}}, True),
        ({"data.mask_documents": False}, False),
        ({"training.seq_len": 64}, False),
    ],
    ids=["same", "seed and micro-batch", "fewer tokens", "more tokens than there are", "no mask", "longer sequences"],
)
def test_evaluation_names_its_held_out_text(
    changes: dict[str, Any], is_same: bool, documents: Path, tmp_path: Path
) -> None:
    first, second = (make_trainer(small_run(documents, tmp_path, fields)).evaluate() for fields in ({}, changes))
    assert have_same_held_out_text(first, second) == is_same
    assert (first["held_out_set"] == second["held_out_set"]) == is_same


def test_evaluations_of_different_held_out_texts_of_equal_length_differ(documents: Path, tmp_path: Path) -> None:
    other = sorted(map(str, documents.rglob("*.py")), key=lambda path: -Path(path).stat().st_size)[0]
    runs = [small_run(documents, tmp_path, {"evaluation": {"tokens": 64}})]
    train = [path for path in [*runs[0].data.train, *runs[0].data.held_out] if path != other]
    runs.append(
        small_run(documents, tmp_path, {"evaluation": {"tokens": 64}, "data.held_out": [other], "data.train": train})
    )
    first, second = (make_trainer(run).evaluate() for run in runs)
    assert first["held_out_tokens"] == second["held_out_tokens"] == 64
    assert not have_same_held_out_text(first, second)
