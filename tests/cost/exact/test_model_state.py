import pytest

from phalanx.cost.exact.model_state import (
    PUBLISHED_MIXED_PRECISION_ADAM,
    StateBytes,
    checkpoint_bytes,
    checkpoint_space_needed_bytes,
    model_state_bytes,
    state_bytes,
)
from phalanx.cost.exact.parameters import count_parameters
from phalanx.spec.files.load import load_model_spec, run_from_table

ALEXNET, GPT3 = 61_000_000, 175_000_000_000


@pytest.mark.parametrize(("optimizer", "megabytes"), [("sgd", 488), ("sgd-momentum", 732), ("adamw", 976)])
def test_state_bytes_match_worked_example_of_alexnet(optimizer, megabytes):
    state = state_bytes(optimizer, "fp32") * ALEXNET
    assert state.parameters == 244_000_000
    assert state.total == megabytes * 1_000_000


def test_state_bytes_match_worked_example_of_gpt3():
    state = state_bytes("adamw", "fp32") * GPT3
    assert state.parameters == 700e9
    assert state.total == 2.8e12


def test_state_bytes_are_equal_in_bf16_and_fp32_and_double_in_fp64():
    assert state_bytes("adamw", "bf16") == state_bytes("adamw", "fp32") == StateBytes(4, 4, 8)
    assert state_bytes("adamw", "fp64") == StateBytes(8, 8, 16)


def test_mixed_precision_adamw_state_is_16_bytes_per_parameter():
    assert PUBLISHED_MIXED_PRECISION_ADAM.total == 16 == state_bytes("adamw", "bf16").total


def test_muon_state_is_one_moment_for_block_matrices_and_two_otherwise():
    count = count_parameters(load_model_spec("olmoe-1b-7b"))
    other = count.embedding + count.head + count.norms
    assert model_state_bytes(count, "muon", "bf16").optimizer == 4 * (count.total - other) + 8 * other
    assert model_state_bytes(count, "adamw", "bf16").total == 16 * count.total


def test_checkpoint_space_needed_decreases_with_existing_checkpoints():
    """Three checkpoints are kept, and a fourth is written before the oldest is deleted."""
    run = run_from_table({"model": {"preset": "tiny"}, "checkpoint": {"keep": 3}})
    room = [checkpoint_space_needed_bytes(run, existing) / checkpoint_bytes(run) for existing in (0, 1, 3, 9)]
    assert room == [4, 3, 1, 1]


def test_checkpoint_space_needed_includes_those_kept_besides_the_last():
    table = {"model": {"preset": "tiny"}, "evaluation": {"every": 100}, "training": {"steps": 1000}}
    run = run_from_table({**table, "checkpoint": {"every": 100, "keep": {"last": 2, "every": 300, "best": 1}}})
    assert checkpoint_space_needed_bytes(run, 0) == (2 + 1 + 3 + 1) * checkpoint_bytes(run)
    undecided = run.replace(training={"seconds": 60.0})
    assert checkpoint_space_needed_bytes(undecided, 0) == (2 + 1 + 1) * checkpoint_bytes(run)
