"""Tables [[data.source]] of a run file, and errors in them."""

import tomllib

import pytest

from phalanx.spec.errors import UserError
from phalanx.spec.files.load import run_from_table
from phalanx.spec.files.write import to_toml

CODE = {"name": "code", "path": "stdlib", "weight": 0.7}
PROSE = {"name": "prose", "path": ["a.txt", "b/*.txt"], "weight": 0.3, "epochs": 4, "text_key": "content"}
MODEL = {"preset": "tiny"}


def load_mixture(*sources, training=None, **data):
    return run_from_table({"model": MODEL, "data": {"source": list(sources), **data}, "training": training or {}})


def test_mixture_replaces_default_of_train_and_round_trips_its_file():
    run = load_mixture(CODE, PROSE)
    assert run.data.train == []
    assert run.data.source[0].path == ["stdlib"]
    assert run_from_table(tomllib.loads(to_toml(run))) == run


def test_settings_name_the_sources():
    settings = load_mixture(CODE, PROSE).settings
    assert settings["data.source.prose.weight"] == 0.3
    assert settings["data.source.prose.epochs"] == 4
    assert not any(name.startswith("data.source") for name in run_from_table({"model": MODEL}).settings)


def test_run_without_sources_trains_on_the_default():
    assert run_from_table({"model": MODEL}).data.train == ["stdlib"]


@pytest.mark.parametrize(
    ("sources", "data", "message"),
    [
        (
            [CODE],
            {"train": ["a.txt"]},
            r"data.train = \['a.txt'\] cannot be combined .*\n  fix: make it a",
        ),
        ([CODE], {"streaming": True}, "data.streaming = True cannot be combined with data.source"),
        ([CODE], {"dataset": "a:B"}, "data.dataset = 'a:B' cannot be combined with data.source"),
        ([CODE, CODE], {}, r"data.source\[1\].name = 'code' is the name of two sources"),
        ([{**CODE, "name": "a b"}], {}, r"data.source\[0\].name = 'a b' is invalid"),
        ([CODE, {**PROSE, "weight": -1}], {}, r"data.source\[1\].weight = -1 must be greater than or equal to 0"),
        ([{**CODE, "weight": 0}], {}, r"data.source\[0\].weight = 0.0 is 0, as that of every source"),
        ([{**CODE, "epochs": 0}], {}, r"data.source\[0\].epochs = 0 must be greater than 0"),
        ([{**CODE, "path": []}], {}, r"data.source\[0\].path = \[\] is empty\n  fix: use a file"),
        ([{**CODE, "path": "s4://a/b"}], {}, r"data.source\[0\].path\[0\] = 's4://a/b' has an unknown scheme"),
        ([{"name": "code", "weight": 1}], {}, r"data.source\[0\].path is missing"),
        ([{**CODE, "epoch": 2}], {}, r"data.source\[0\].epoch = 2 is not a known field\n  fix: did you mean 'epochs'"),
    ],
)
def test_invalid_source_is_named(sources, data, message):
    with pytest.raises(UserError, match=message):
        load_mixture(*sources, **data)


def test_single_table_needs_two_brackets():
    with pytest.raises(UserError, match=r"data.source is a single table\n  fix: write \[\[data.source\]\]"):
        run_from_table({"model": MODEL, "data": {"source": CODE}})


def test_weights_with_too_many_digits_are_rounded_in_the_fix():
    sources = [{**CODE, "weight": 0.12345678}, {**PROSE, "weight": 0.87654321}]
    with pytest.raises(UserError, match=r"data.source = .* have shares with the common denominator") as caught:
        load_mixture(*sources)
    assert caught.value.fix == "round the weights: 0.1235, 0.8765"
    load_mixture({**CODE, "weight": 0.1235}, {**PROSE, "weight": 0.8765})
    load_mixture({**CODE, "weight": 1 / 3}, {**PROSE, "weight": 2 / 3})


def test_epochs_need_a_known_number_of_steps():
    with pytest.raises(UserError, match=r"data.source\[1\].epochs = 4.0 cannot be checked .* training.seconds"):
        load_mixture(CODE, PROSE, training={"seconds": 10})
    load_mixture(CODE, training={"seconds": 10})
