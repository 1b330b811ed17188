"""Fields of a run that accept more than one spelling."""

from __future__ import annotations

import tomllib
from typing import Any

import pytest

from phalanx.spec.errors import UserError
from phalanx.spec.files.load import run_from_table
from phalanx.spec.files.write import to_toml
from phalanx.spec.layout import Layout
from phalanx.spec.run import KeepSpec, RunSpec


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


def test_settings_have_dotted_names_without_places_machines_and_undecided_steps() -> None:
    run = run_from_table(
        {"training": {"seconds": 60}, "callbacks": {"stop": {"class": "mine:Stop", "named_in": "run.toml"}}}
    )
    settings = run.settings
    assert settings["layout.pp"] == 1
    assert settings["optimizer.learning_rate"] == run.optimizer.learning_rate
    assert settings["callbacks.stop.class"] == "mine:Stop"
    assert not [name for name in settings if name.split(".")[0] in ("name", "output_dir", "cluster")]
    assert not {"training.steps", "callbacks.stop.named_in", "data.cache"} & settings.keys()
    assert run_from_table({"training": {"steps": 7}}).settings["training.steps"] == 7


@pytest.mark.parametrize(
    ("table", "problem"),
    [
        ({"training": {"seq_len": 64, "tokens_per_step": 64}}, "but a step has one sequence"),
        (
            {"model": {"preset": "tiny", "moe": {"num_experts": 4, "top_k": 2, "expert_ffn_size": 8}}},
            "not supported with model.moe",
        ),
        ({"layout": {"gradient_compression": "powersgd"}}, "not supported with layout.gradient_compression"),
        ({"layout": {"data_parallel": "parameter_server"}}, "not supported with layout.data_parallel"),
    ],
    ids=["one sequence", "experts", "powersgd", "server"],
)
def test_gradient_noise_rejects_layouts_without_gradients_of_rows(table: dict[str, Any], problem: str) -> None:
    with pytest.raises(UserError, match=f"metrics.gradient_noise_every = 10 .*{problem}"):
        run_from_table({"model": {"preset": "tiny"}, **table, "metrics": {"gradient_noise_every": 10}})


def checkpoint_run(checkpoint: dict[str, Any], evaluation_every: int = 0) -> RunSpec:
    """Return a run with these checkpoints and evaluations."""
    return run_from_table(
        {"model": {"preset": "tiny"}, "checkpoint": checkpoint, "evaluation": {"every": evaluation_every}}
    )


def test_early_stop_needs_evaluations_during_the_run() -> None:
    problem = r"evaluation.stop_after = 3 counts evaluations .* at its end only\n  fix: set evaluation.every"
    with pytest.raises(UserError, match=problem):
        run_from_table({"model": {"preset": "tiny"}, "evaluation": {"stop_after": 3}})


def test_checkpoint_keep_reads_a_number_as_the_last_ones_and_writes_a_table() -> None:
    run = checkpoint_run({"keep": 3})
    assert run.checkpoint.keep == KeepSpec(last=3, every=0, best=0)
    assert tomllib.loads(to_toml(run))["checkpoint"]["keep"] == {"last": 3, "every": 0, "best": 0}
    assert checkpoint_run({"keep": {"best": 1}}, 250).checkpoint.keep == KeepSpec(last=2, best=1)


@pytest.mark.parametrize(
    ("checkpoint", "evaluation_every", "message"),
    [
        (
            {"keep": {"every": 750}},
            0,
            r"keep.every = 750 is not a multiple of checkpoint.every \(500\)\n  fix: use 1000",
        ),
        ({"keep": {"every": 10}, "every": 0}, 0, "keep.every = 10 needs checkpoints at known steps"),
        ({"keep": {"best": 1}, "every": "auto"}, 100, "keep.best = 1 needs checkpoints at known steps"),
        ({"keep": {"best": 1}}, 0, "the run is evaluated at its end only\n  fix: set evaluation.every = 500"),
        ({"keep": {"best": 1}}, 300, "the run is evaluated every 300 steps\n  fix: set evaluation.every = 500"),
        ({"keep": 0}, 0, "checkpoint.keep.last = 0"),
        ({"keep": "all"}, 0, r"checkpoint.keep = 'all' must be a table\n  fix: write a table: \[checkpoint.keep\]"),
    ],
    ids=str,
)
def test_checkpoint_keep_rejects_what_no_checkpoint_could_meet(
    checkpoint: dict[str, Any], evaluation_every: int, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        checkpoint_run(checkpoint, evaluation_every)
