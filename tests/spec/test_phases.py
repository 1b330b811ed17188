"""Phases of a run: where they start, what they change, and which are refused."""

from __future__ import annotations

from typing import Any

import pytest

from phalanx.spec.errors import UserError
from phalanx.spec.files.load import run_from_table
from phalanx.spec.phases import (
    describe_phases,
    other_phases,
    phase_at,
    phases_of,
    rate_spans,
    run_after,
    source_shares,
    with_fixed_starts,
)
from phalanx.spec.run import RunSpec
from tests.helpers.small_runs import DENSE

SOURCES = [{"name": "code", "path": "code", "weight": 3}, {"name": "prose", "path": "prose", "weight": 1}]


def run_with(*phases: dict[str, Any], **tables: Any) -> RunSpec:
    training = {"steps": 100, "seq_len": 32, "tokens_per_step": 256, **tables.pop("training", {})}
    table = {"model": DENSE, "training": training, "data": {"source": SOURCES}, "phase": list(phases), **tables}
    return run_from_table(table)


def test_run_without_phases_has_one_of_all_steps() -> None:
    run = run_with()
    (phase,) = phases_of(run)
    assert (phase.number, phase.first_step, phase.end, phase.run) == (None, 0, 100, run)
    assert other_phases(run) == []


def test_phases_start_after_steps_tokens_or_share_and_keep_earlier_changes() -> None:
    run = run_with(
        {"from_step": 10, "seq_len": 64, "tokens_per_step": 512},
        {"from_tokens": 10 * 256 + 30 * 512 - 1, "weights": {"prose": 2}},
        {"from_share": 0.7, "rope": {"theta": 5e4}, "tokens_per_step": 1024},
    )
    phases = phases_of(run)
    assert [(phase.number, phase.first_step, phase.end) for phase in phases] == [
        (None, 0, 10),
        (0, 10, 40),
        (1, 40, 70),
        (2, 70, 100),
    ]
    assert [phase.run.training.seq_len for phase in phases] == [32, 64, 64, 64]
    assert [phase.run.training.tokens_per_step for phase in phases] == [256, 512, 512, 1024]
    assert [[source.weight for source in phase.run.data.source] for phase in phases] == [[3, 1], [3, 1], [0, 2], [0, 2]]
    assert [phase.run.model.rope.theta for phase in phases] == [1e4, 1e4, 1e4, 5e4]
    assert phase_at(phases, 39).number == 0
    assert phase_at(phases, 40).number == 1
    assert run_after(run, 70).training.tokens_per_step == 512
    assert run_after(run, 71).training.tokens_per_step == 1024
    assert [phase.number for phase in other_phases(run)] == [0, 2]


def test_description_of_phases_has_all_that_they_change() -> None:
    run = run_with(
        {"from_step": 10, "tokens_per_step": 512, "ramp_steps": 4, "ramp_tokens": 64},
        {"from_step": 40, "weights": {"code": 1, "prose": 3}, "seq_len": 64},
        {"from_step": 90, "lr_schedule": "linear", "min_lr_ratio": 0.0},
        {"from_step": 95, "learning_rate": 1e-4, "rope": {"theta": 5e4}},
    )
    assert describe_phases(run) == {
        0: "phase[0] (from step 11): 256 to 512 tokens per update in sequences of 32",
        1: "phase[1] (from step 41): 512 tokens per update in sequences of 64; shares code 0.25, prose 0.75",
        2: "phase[2] (from step 91): learning rate of the step before, lr_schedule linear, min_lr_ratio 0.0",
        3: "phase[3] (from step 96): learning rate 0.0001; another rotary embedding",
    }


def test_ramp_grows_in_equal_increments() -> None:
    run = run_with({"from_step": 20, "tokens_per_step": 1024, "ramp_steps": 9, "ramp_tokens": 256})
    sizes = [(phase.first_step, phase.run.training.tokens_per_step) for phase in phases_of(run)]
    assert sizes == [(0, 256), (20, 256), (23, 512), (26, 768), (29, 1024)]
    run = run_with({"from_step": 0, "tokens_per_step": 128, "ramp_steps": 4, "ramp_tokens": 64})
    sizes = [(phase.first_step, phase.run.training.tokens_per_step) for phase in phases_of(run)]
    assert sizes == [(0, 256), (2, 192), (4, 128)]


def test_ramp_that_is_longer_than_the_run_ends_with_it() -> None:
    run = run_with({"from_step": 90, "tokens_per_step": 1024, "ramp_steps": 30, "ramp_tokens": 256})
    assert [(phase.first_step, phase.end) for phase in phases_of(run)] == [(0, 90), (90, 100)]
    assert sum(source_shares(run)) == 1


def test_longer_sequences_have_as_many_tokens_in_a_micro_batch_and_the_same_stages() -> None:
    run = run_with({"from_step": 5, "seq_len": 64}, layout={"micro_batch_size": 4, "pp": 2})
    first, second = phases_of(run)
    assert (first.run.layout.micro_batch_size, second.run.layout.micro_batch_size) == (4, 2)
    assert second.run.layout.split_seq_len == 32


def test_learning_rate_schedules_last_until_the_next_one() -> None:
    run = run_with(
        {"from_step": 20, "tokens_per_step": 512},
        {"from_step": 40, "learning_rate": 1e-3, "warmup_steps": 3},
        {"from_share": 0.8, "lr_schedule": "linear", "min_lr_ratio": 0},
        optimizer={"learning_rate": 2e-3, "lr_schedule": "none"},
    )
    spans = rate_spans(run)
    assert [(span.first_step, span.end, span.peak) for span in spans] == [(0, 40, 1.0), (40, 80, 0.5), (80, 100, None)]
    assert [span.optimizer.warmup_steps for span in spans] == [50, 3, 0]
    assert [span.optimizer.lr_schedule for span in spans] == ["none", "none", "linear"]


def test_shorter_run_keeps_the_starts_of_its_phases() -> None:
    run = run_with({"from_share": 0.2, "seq_len": 64}, {"from_share": 0.5, "tokens_per_step": 512})
    assert [spec.from_step for spec in with_fixed_starts(run, 60)] == [20, 50]
    assert [spec.from_step for spec in with_fixed_starts(run, 50)] == [20]


INVALID: list[tuple[list[dict[str, Any]], dict[str, Any], str, str]] = [
    ([{"seq_len": 64}], {}, "phase[0].from_step", "is missing"),
    ([{"from_step": 5, "from_share": 0.5, "seq_len": 64}], {}, "phase[0].from_step", "is not the only start"),
    ([{"from_step": 5}], {}, "phase[0]", "changes nothing"),
    ([{"from_step": 100, "seq_len": 64}], {}, "phase[0].from_step", "begins after the end: the run has 100 steps"),
    ([{"from_tokens": 25_600, "seq_len": 64}], {}, "phase[0].from_tokens", "begins after the end (step 100)"),
    ([{"from_step": 0, "seq_len": 64}], {}, "phase[0].from_step", "is the start of the run"),
    (
        [{"from_step": 9, "seq_len": 64}, {"from_step": 9, "seq_len": 32}],
        {},
        "phase[1].from_step",
        "is not after the phase before it",
    ),
    ([{"from_step": 5, "seq_len": 48}], {}, "phase[0].tokens_per_step", "is not a multiple"),
    ([{"from_step": 5, "weights": {"cod": 1}}], {}, "phase[0].weights.cod", "is not a source"),
    ([{"from_step": 5, "weights": {"code": 0}}], {}, "phase[0].weights", "leaves no source"),
    ([{"from_step": 5, "weights": {"code": -1.0}}], {}, "phase[0].weights.code", "is negative"),
    ([{"from_step": 5, "weights": {"code": 1}}], {"data": {}}, "phase[0].weights", "has no sources to weigh"),
    ([{"from_step": 5, "ramp_steps": 5, "seq_len": 64}], {}, "phase[0].ramp_steps", "is only half of a ramp"),
    (
        [{"from_step": 5, "tokens_per_step": 1024, "ramp_steps": 5, "ramp_tokens": 100}],
        {},
        "phase[0].ramp_tokens",
        "does not divide the difference of 768 tokens",
    ),
    (
        [{"from_step": 5, "tokens_per_step": 1024, "ramp_steps": 2, "ramp_tokens": 256}],
        {},
        "phase[0].ramp_steps",
        "are fewer than the 3 increments",
    ),
    (
        [
            {"from_step": 5, "tokens_per_step": 1024, "ramp_steps": 90, "ramp_tokens": 256},
            {"from_step": 9, "seq_len": 64},
        ],
        {},
        "phase[1].from_step",
        "is not after the phase before it",
    ),
    ([{"from_step": 5, "seq_len": 64}], {"data": {"streaming": True}}, "phase[0].seq_len", "data.streaming"),
    (
        [{"from_step": 5, "seq_len": 64}],
        {"training": {"seconds": 5.0, "steps": 2**31 - 1}},
        "phase",
        "training.seconds",
    ),
    (
        [{"from_step": 5, "rope": {"theta": 5e4}}],
        {"model": {**DENSE, "position_embedding": "learned"}},
        "phase[0].rope",
        "has no effect",
    ),
    (
        [{"from_step": 5, "seq_len": 128}],
        {"model": {**DENSE, "position_embedding": "learned"}},
        "phase[0].seq_len",
        "longer than the model's learned positions",
    ),
    ([], {"data": {"source": [{**source, "weight": 0} for source in SOURCES]}}, "data.source[0].weight", "is 0"),
]


@pytest.mark.parametrize(("phases", "tables", "field", "problem"), INVALID)
def test_invalid_phase_is_refused(
    phases: list[dict[str, Any]], tables: dict[str, Any], field: str, problem: str
) -> None:
    with pytest.raises(UserError) as caught:
        run_with(*phases, **tables)
    assert caught.value.field == field
    assert problem in caught.value.problem
