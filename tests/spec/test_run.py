"""Fields of a run that accept more than one spelling."""

from __future__ import annotations

import pytest

from phalanx.spec.errors import UserError
from phalanx.spec.files.load import run_from_table
from phalanx.spec.layout import Layout


def test_data_accepts_one_source_without_a_list() -> None:
    data = run_from_table({"data": {"train": "mine.txt", "held_out": "other.txt"}}).data
    assert (data.train, data.held_out) == (["mine.txt"], ["other.txt"])


def test_unknown_precision_is_refused_with_all_known_ones() -> None:
    with pytest.raises(UserError, match=r"training\.precision = 'fp4' must be 'auto', 'bf16', 'fp8', 'fp32' or 'fp64'"):
        run_from_table({"training": {"precision": "fp4"}})


def test_callbacks_are_kept_by_replace() -> None:
    run = run_from_table({"callbacks": {"a": "module:A", "b": {"class": "module:B", "patience": 3}}})
    assert run.replace(name="other").callbacks == run.callbacks
    assert run.callbacks["b"].arguments == {"patience": 3}
    with pytest.raises(UserError, match=r"callbacks\.a\.class = 'module' is not a valid import path"):
        run_from_table({"callbacks": {"a": "module"}})


def test_replace_refuses_a_wrong_value_with_its_field_and_fix() -> None:
    run = run_from_table({})
    for changes, message in (
        ({"layout": {"tp": 0}}, r"layout\.tp = 0 must be greater than 0\n  fix: increase tp"),
        ({"layot": Layout()}, r"layot.* is not a known field\n  fix: did you mean 'layout'\?"),
        ({"training": run.training.replace(seq_len=1000)}, r"training\.tokens_per_step = 16384 is not a multiple"),
    ):
        with pytest.raises(UserError, match=message):
            run.replace(**changes)


def test_replace_keeps_parts_and_unset_fields_and_accepts_lists() -> None:
    run = run_from_table({"cluster": {"nodes": 2}})
    layout = Layout(tp=2)
    changed = run.replace(layout=layout)
    assert changed.layout is layout
    assert changed.cluster.replace(cores=4).model_fields_set == {"nodes", "cores"}
    assert "learning_rate" not in changed.optimizer.model_fields_set
    assert layout.replace(pp=2, recomputed_blocks=[1, 2]).recomputed_blocks == (1, 2)
