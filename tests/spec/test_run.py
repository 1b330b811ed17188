"""Fields of a run that accept more than one spelling."""

from __future__ import annotations

import pytest

from phalanx.spec.errors import UserError
from phalanx.spec.files.load import run_from_table


def test_data_accepts_one_source_without_a_list() -> None:
    data = run_from_table({"data": {"train": "mine.txt", "held_out": "other.txt"}}).data
    assert (data.train, data.held_out) == (["mine.txt"], ["other.txt"])


def test_unknown_precision_is_refused_with_all_known_ones() -> None:
    with pytest.raises(
        UserError, match=r"training\.precision = 'fp4': must be 'auto', 'bf16', 'fp8', 'fp32' or 'fp64'"
    ):
        run_from_table({"training": {"precision": "fp4"}})


def test_callbacks_are_kept_by_replace() -> None:
    run = run_from_table({"callbacks": {"a": "module:A", "b": {"class": "module:B", "patience": 3}}})
    assert run.replace(name="other").callbacks == run.callbacks
    assert run.callbacks["b"].arguments == {"patience": 3}
    with pytest.raises(UserError, match=r"callbacks\.a\.class = 'module': is not a valid import path"):
        run_from_table({"callbacks": {"a": "module"}})
