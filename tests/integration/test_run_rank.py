"""`run_rank`: a run on ranks that another program has started."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch.distributed as dist

import phalanx
from phalanx.runs.create import run_directory
from phalanx.runs.events import read_events
from phalanx.runs.metrics import read_metrics
from phalanx.spec.errors import UserError
from phalanx.spec.log import LEVELS_VARIABLE
from phalanx.spec.run import RunSpec
from phalanx.testing import rank_pool
from phalanx.train import worker
from tests.helpers.small_runs import make_trainer, small_run, train_until

CHANGES = {"training.steps": 3, "layout.data_parallel": "zero3"}


def train_in_thread(*runs: RunSpec) -> list[tuple[str, float]]:
    """Train runs in the process group of the pool, as a worker of Ray Train does; return exit reasons and losses."""
    with ThreadPoolExecutor(1) as threads:
        results = [threads.submit(phalanx.run_rank, run).result() for run in runs]
    assert dist.is_initialized(), "the group is the caller's"
    return [(result.exit_reason, result.metrics["loss"]) for result in results]


def test_run_rank_trains_twice_in_thread_and_group_of_caller(text: Path, tmp_path: Path) -> None:
    runs = [small_run(text, tmp_path, {**CHANGES, "name": name}) for name in ("one", "two")]
    results = rank_pool(2).run(train_in_thread, *runs)
    single_process = train_until(make_trainer(small_run(text, tmp_path / "alone", CHANGES)), 3)
    assert results == [[("finished", pytest.approx(single_process[-1][0], rel=1e-10))] * 2] * 2
    for name in ("one", "two"):
        trained = [record for record in read_metrics(tmp_path / name) if "loss" in record]
        steps = [(record["loss"], record["grad_norm"]) for record in trained]
        assert steps == [pytest.approx(step, rel=1e-10) for step in single_process]


def train_and_go_back(run: RunSpec) -> list[tuple[str, int]]:
    """Train a run, resume it when it is complete, and go back to step 2; return each exit reason and last step."""
    with pytest.raises(UserError, match="--step = 2 has no effect without --resume"):
        phalanx.run_rank(run, step=2)
    starts: list[dict[str, Any]] = [{}, {"resume": True}, {"resume": True, "step": 2}]
    results = [phalanx.run_rank(run, **options) for options in starts]
    return [(result.exit_reason, result.metrics["step"]) for result in results]


def test_run_rank_goes_back_to_step_and_does_not_start_complete_run(text: Path, tmp_path: Path) -> None:
    run = small_run(text, tmp_path, {**CHANGES, "training.steps": 4, "checkpoint": {"every": 2, "keep": {"last": 3}}})
    assert rank_pool(2).run(train_and_go_back, run) == [[("finished", 4)] * 3] * 2
    directory = run_directory(run)
    started = [event for event in read_events(directory) if event["kind"] == "started"]
    assert [event["step"] for event in started] == [0, 2]
    names = [path.name for path in directory.glob("checkpoints/step-*")]
    assert sorted(names) == ["step-00000002", "step-00000004", "step-00000004.abandoned"]


def refuse_data(*_: Any) -> NoReturn:
    raise UserError("data.train", "text", "is missing on this node", fix="copy it")


def raise_error(run: RunSpec, in_training: bool) -> tuple[str, str]:
    """Return the UserError of a run, and what this rank has printed."""
    if in_training:
        setattr(worker, "open_training_data", refuse_data)  # noqa: B010 - mypy knows no such name of the module
    with redirect_stderr(StringIO()) as printed, pytest.raises(UserError) as raised:
        phalanx.run_rank(run)
    return str(raised.value), printed.getvalue()


@pytest.mark.parametrize("in_training", [False, True], ids=["start", "training"])
def test_user_error_is_raised_on_all_ranks_and_printed_once(in_training: bool, text: Path, tmp_path: Path) -> None:
    changes = CHANGES if in_training else {**CHANGES, "training.tokens_per_step": 3 * 32}
    try:
        first, second = rank_pool(2).run(raise_error, small_run(text, tmp_path, changes), in_training)
    finally:
        rank_pool(2).close()  # its ranks keep the replaced function
    message = first[0]
    assert message.startswith("data.train" if in_training else "training.tokens_per_step")
    assert second[0] == message
    printed = first[1] + second[1]
    assert printed.count("phalanx: ") == printed.count(message) == 1
    assert "Traceback" not in printed


def train_and_capture(run: RunSpec, levels: str | None) -> str:
    """Return what a rank of a program that configures no logging prints."""
    with pytest.MonkeyPatch.context() as patch, redirect_stderr(StringIO()) as printed:
        logger = logging.getLogger("phalanx")
        patch.setattr(logger, "handlers", [])
        patch.delenv(LEVELS_VARIABLE, raising=False)
        if levels is not None:
            patch.setenv(LEVELS_VARIABLE, levels)
        phalanx.run_rank(run)
    return printed.getvalue()


def test_run_rank_prints_messages_if_the_environment_sets_their_level(text: Path, tmp_path: Path) -> None:
    run = small_run(text, tmp_path, {"training.steps": 2})
    assert train_and_capture(run.replace(name="silent"), None) == ""
    assert "step 2" in train_and_capture(run.replace(name="info"), "info")


def test_run_rank_without_other_ranks_leaves_no_process_group(text: Path, tmp_path: Path) -> None:
    result = phalanx.run_rank(small_run(text, tmp_path, {"training.steps": 2}))
    assert (result.exit_reason, result.metrics["step"], dist.is_initialized()) == ("finished", 2, False)
