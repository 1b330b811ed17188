"""The default learning rate: that of published runs, or of published fine-tuning."""

import tomllib
from collections.abc import Callable

import pytest

from phalanx.spec.errors import UserError
from phalanx.spec.files.load import load_model_spec, run_from_table
from phalanx.spec.files.template import run_file_template
from phalanx.spec.files.write import to_toml
from phalanx.spec.learning_rate import describe_learning_rate, learning_rate_note
from phalanx.spec.model import ModelSpec
from phalanx.spec.run import OptimizerSpec, RunSpec, require_settings_of_weights
from phalanx.train.time_budget import with_decided_steps


def run_of(model: dict[str, object], **optimizer: object) -> RunSpec:
    return run_from_table({"model": model, "optimizer": optimizer})


@pytest.mark.parametrize(
    ("preset", "rate", "source"),
    [
        ("tiny", 3e-3, "Phalanx's default for small models"),
        ("gpt2-124m", 6e-4, "GPT-3 125M"),
        ("llama3-8b", 3e-4, "Llama 3 8B"),
        ("llama3-70b", 1.5e-4, "Llama 3 70B"),
        ("gpt3-175b", 6e-5, "GPT-3 175B"),
        ("llama3-405b", 8e-5, "Llama 3 405B"),
        ("olmoe-1b-7b", 4e-4, "OLMoE"),
        ("mixtral-8x7b", 4.2e-4, "DeepSeekMoE 16B"),
    ],
)
def test_default_learning_rate_is_that_of_published_runs_of_this_size(preset: str, rate: float, source: str) -> None:
    run = run_of({"preset": preset})
    assert run.optimizer.learning_rate == rate
    assert source in describe_learning_rate(run)
    assert (learning_rate_note(run) is None) == (preset == "tiny")
    assert RunSpec(model=load_model_spec(preset)).optimizer.learning_rate == rate


def test_default_learning_rate_of_pretrained_weights_is_that_of_fine_tuning() -> None:
    run = run_of({**load_model_spec("tiny").model_dump(mode="json"), "from_hf": "weights"})
    assert run.optimizer.learning_rate == 2e-5
    assert "arXiv 2307.09288" in describe_learning_rate(run)
    assert "optimizer.learning_rate = 2e-05" in (learning_rate_note(run) or "")


def test_set_learning_rate_is_kept() -> None:
    run = run_of({"preset": "llama3-70b"}, learning_rate=3e-3)
    assert (run.optimizer.learning_rate, learning_rate_note(run)) == (3e-3, None)
    assert describe_learning_rate(run) == "optimizer.learning_rate = 0.003: as set"


def test_default_learning_rate_survives_toml_and_is_not_written_by_init() -> None:
    run = run_of({"preset": "llama3-70b"})
    assert "learning_rate = 0.00015\n" in to_toml(run)
    assert "\nlearning_rate" not in run_file_template("run.toml", "schema")


def replace_model(run: RunSpec, model: ModelSpec) -> RunSpec:
    return run.replace(model=model)


def replace_model_by_table(run: RunSpec, model: ModelSpec) -> RunSpec:
    return run.replace(model=model.model_dump(mode="json"))


@pytest.mark.parametrize("change", [replace_model, replace_model_by_table])
def test_default_learning_rate_follows_the_model_of_a_copy(change: Callable[[RunSpec, ModelSpec], RunSpec]) -> None:
    other_model = load_model_spec("llama3-8b")
    changed = change(run_of({"preset": "llama3-70b"}), other_model)
    assert changed.optimizer.learning_rate == 3e-4
    assert describe_learning_rate(changed) == describe_learning_rate(run_of({"preset": "llama3-8b"}))
    explicit = change(run_of({"preset": "llama3-70b"}, learning_rate=1e-5), other_model)
    assert describe_learning_rate(explicit) == "optimizer.learning_rate = 1e-05: as set"


def test_learning_rate_remains_unset_when_the_steps_of_a_time_budget_are_decided() -> None:
    run = run_from_table({"model": {"preset": "llama3-8b"}, "training": {"seconds": 60}})
    assert describe_learning_rate(with_decided_steps(run, 10)) == describe_learning_rate(run)


def test_learning_rate_of_another_optimizer_is_that_of_the_model() -> None:
    run = run_of({"preset": "llama3-8b"}).replace(optimizer=OptimizerSpec(name="muon"))
    assert run.optimizer.learning_rate == 3e-4


def test_muon_learning_rate_is_required_to_train_pretrained_weights() -> None:
    table = {**load_model_spec("tiny").model_dump(mode="json"), "from_hf": "weights"}
    run = run_of(table, name="muon").replace(data={"tokenizer": "bytes"})
    reread = run_from_table(tomllib.loads(to_toml(run)))  # as `phalanx plan --out` writes it
    for unset in (run, reread):
        with pytest.raises(
            UserError, match=r"optimizer.muon_learning_rate = 0.02 is a rate for new weights"
        ) as error_info:
            require_settings_of_weights(unset)
        assert error_info.value.fix == "set optimizer.muon_learning_rate"
    require_settings_of_weights(run.replace(optimizer={"name": "muon", "muon_learning_rate": 1e-3}))
    require_settings_of_weights(run.replace(optimizer={"name": "adamw"}))
    require_settings_of_weights(run_of({"preset": "tiny"}, name="muon"))
