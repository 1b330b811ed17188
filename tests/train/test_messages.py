"""The messages at the start and at the end of a run."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from phalanx.cost.exact.parameters import count_parameters
from phalanx.spec.files.load import run_from_table
from phalanx.spec.parallel_dims import parallel_dims
from phalanx.spec.phases import phases_of
from phalanx.spec.resolved_run import ResolvedRun
from phalanx.train.messages import end_message, start_message

MODEL = {"preset": "tiny", "num_layers": 2, "num_heads": 4}


def make_trainer(layout: dict[str, Any], ranks: int, warmup_steps: int = 10, **training: Any) -> Any:
    """Return what the messages read of a trainer."""
    training = {"seq_len": 64, "tokens_per_step": 64 * 12, "precision": "fp32", **training}
    if "seconds" not in training:
        training["steps"] = 200
    optimizer = {"warmup_steps": warmup_steps}
    layout = {"micro_batch_size": 1, **layout}
    run = run_from_table({"model": MODEL, "layout": layout, "optimizer": optimizer, "training": training})
    return SimpleNamespace(
        run=run,
        phase=SimpleNamespace(run=run),
        mesh=SimpleNamespace(dims=parallel_dims(run.layout, ranks)),
        device=SimpleNamespace(type="cpu"),
        compiles=False,
        num_parameters=count_parameters(run.model).total,
        batch=ResolvedRun(run, ranks).batch,
        corpus=SimpleNamespace(num_train_tokens=1234, held_out_sources=()),
        step=0,
        should_stop=False,
        is_complete=True,
        directory=Path("runs/small"),
    )


@pytest.mark.parametrize(
    ("ranks", "layout", "expected"),
    [
        (1, {}, "1 rank (cpu)"),
        (2, {}, "2 ranks (cpu), ddp"),
        (2, {"data_parallel": "zero2", "offload": "cpu"}, "2 ranks (cpu), zero2, state in CPU memory"),
        (
            1,
            {"data_parallel": "zero1", "offload": "nvme", "offload_directory": "/scratch"},
            "1 rank (cpu), state in files",
        ),
        (2, {"data_parallel": "parameter_server"}, "2 ranks (cpu), parameter_server"),
        (2, {"tp": 2}, "2 ranks (cpu), tensor x 2"),
        (4, {"cp": 2, "data_parallel": "zero3"}, "4 ranks (cpu), ring x 2, zero3"),
        (4, {"pp": 2, "tp": 2}, "4 ranks (cpu), pipeline (1f1b) x 2, tensor x 2"),
    ],
)
def test_start_message_names_ranks_and_every_kind_of_parallelism(
    ranks: int, layout: dict[str, Any], expected: str
) -> None:
    trainer = make_trainer(layout, ranks)
    first_line = start_message(trainer, resumed=0).splitlines()[0]
    assert first_line == f"{trainer.num_parameters:,} parameters on {expected}, fp32"


def test_start_message_describes_batch_and_says_if_shares_are_uneven() -> None:
    even = "768 tokens per update = 1 sequences of 64 x 2 ranks x 6 accumulated; the text is 1,234 tokens"
    assert start_message(make_trainer({}, 2), resumed=0).splitlines()[1:] == [even]
    uneven = "768 tokens per update = 1 sequences of 64 x 5 ranks x 3 accumulated, shared unevenly"
    assert start_message(make_trainer({}, 5), resumed=0).splitlines()[1].startswith(uneven)


def test_start_message_names_each_surprising_setting() -> None:
    longest = make_trainer({}, 1, seq_len=1024, tokens_per_step=1024)
    assert longest.run.model.max_seq_len == 1024
    assert len(start_message(longest, resumed=0).splitlines()) == 2
    for surprise, changes in {
        "sequences of 8,192 are longer than model.max_seq_len": {"seq_len": 8192, "tokens_per_step": 8192},
        "warms up in 100 steps, half of the run": {"warmup_steps": 200},
        "trains for 90 s, until": {"seconds": 90},
        "CPUs emulate fp8": {"precision": "fp8"},
    }.items():
        lines = start_message(make_trainer({}, 1, **changes), resumed=0).splitlines()
        assert any(line.startswith(surprise) for line in lines), lines
    trainer = make_trainer({}, 1)
    trainer.compiles = True
    trainer.num_parameters *= 2
    lines = start_message(trainer, resumed=0).splitlines()
    assert lines[0].endswith("fp32, compiled")
    assert [line.split(" ")[0] for line in lines[2:]] == ["[model]", "blocks"]


def test_start_message_names_checkpoint_and_its_other_number_of_ranks() -> None:
    trainer = make_trainer({}, 2)
    trainer.step = 150
    assert start_message(trainer, resumed=2).splitlines()[-1] == "resumed after step 150"
    assert start_message(trainer, resumed=4).splitlines()[-1] == "resumed after step 150 of 4 ranks"
    trainer.step = 200
    assert start_message(trainer, resumed=2).splitlines()[-1].startswith("this was the last step")


def test_start_message_lists_held_out_sets_and_phases_that_have_not_ended() -> None:
    trainer = make_trainer({}, 1)
    sets = {"code": ["a.py"], "prose": ["b.txt"]}
    phases = [{"from_step": 50, "learning_rate": 1e-4}, {"from_step": 90, "lr_schedule": "linear"}]
    trainer.run = run_from_table(
        {"model": MODEL, "training": {"steps": 200}, "data": {"held_out_sets": sets}, "phase": phases}
    )
    trainer.phases = phases_of(trainer.run)
    trainer.corpus.held_out_sources = (SimpleNamespace(size=1200), SimpleNamespace(size=34))
    trainer.step = 95
    lines = start_message(trainer, resumed=1).splitlines()
    assert "held-out text (validation set): code 1,200 tokens, prose 34 tokens" in lines
    assert [line for line in lines if line.startswith("phase")] == [
        "phase[1] (from step 91): learning rate of the step before, lr_schedule linear"
    ]


def test_end_message_names_signal_only_if_steps_remain() -> None:
    trainer = make_trainer({}, 1)
    trainer.step, trainer.should_stop = 200, True
    assert end_message(trainer, {}, "") == "run directory: runs/small"
    trainer.step, trainer.is_complete = 150, False
    assert end_message(trainer, {}, "once").splitlines() == [
        "stopped by a signal after step 150; continue with --resume",
        "sample after step 150:",
        "  once",
        "run directory: runs/small",
    ]
    evaluation = {"held_out_loss": 6.0, "held_out_bits_per_byte": 3.0, "held_out_tokens": 4096}
    assert end_message(trainer, {**evaluation, "step": 150}, "").startswith("stopped by a signal")  # printed before
    trainer.step, trainer.is_complete = 200, True
    for step, prefix in ((200, "held-out loss"), (140, "step 140: held-out loss")):
        assert end_message(trainer, {**evaluation, "step": step}, "").startswith(prefix)
