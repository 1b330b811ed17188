"""Hooks of callbacks: when they run, on which ranks, and what happens to errors and to state."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from phalanx.runs.checkpoints import read_manifest, step_name
from phalanx.runs.errors import CallbackError
from phalanx.runs.metrics import read_metrics
from phalanx.spec.components import ComponentSpec
from phalanx.spec.errors import UserError
from phalanx.spec.run import RunSpec
from phalanx.testing import rank_pool
from phalanx.train import worker
from phalanx.train.callbacks.callback import Callback, build_callbacks
from phalanx.train.create_run import create_run
from phalanx.train.rank_options import RankOptions
from tests.helpers.small_runs import make_trainer, small_run, train_to_end

HERE = f"{__name__}:"


class RecordHooks(Callback):
    """A callback that writes the name of each hook, and the trainer's step, to a file of its rank."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)

    def _write(self, trainer: Any, hook: str) -> None:
        with (self.folder / f"rank-{trainer.mesh.rank}").open("a") as file:
            file.write(f"{hook} {trainer.step}\n")

    def on_train_start(self, trainer: Any) -> None:
        self._write(trainer, "start")

    def on_step_end(self, trainer: Any, record: Any) -> None:
        assert record["step"] == trainer.step
        self._write(trainer, "step")

    def on_evaluation_end(self, trainer: Any, record: Any) -> None:
        assert record["held_out_loss"] > 0
        self._write(trainer, "evaluation")

    def on_checkpoint_saved(self, trainer: Any, directory: Path) -> None:
        assert (directory / "manifest.json").is_file() or trainer.mesh.rank > 0
        self._write(trainer, f"saved {directory.name}")

    def on_exception(self, trainer: Any, error: BaseException) -> None:
        self._write(trainer, f"exception {type(error).__name__}")

    def on_train_end(self, trainer: Any, record: Any) -> None:
        self._write(trainer, "end")


class FailAt(Callback):
    """A callback that raises an error after a step, on rank 0."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, trainer: Any, record: Any) -> None:
        if trainer.step == self.step and trainer.is_main:
            raise ZeroDivisionError("by design")


class FinishAt(Callback):
    """A callback that finishes the run from one rank, and counts the steps that it saw."""

    def __init__(self, step: int, rank: int) -> None:
        self.step = step
        self.rank = rank
        self.seen = 0

    def on_step_end(self, trainer: Any, record: Any) -> None:
        self.seen += 1
        if trainer.step == self.step and trainer.mesh.rank == self.rank:
            trainer.finish("enough")

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"]


def train_with_callbacks(run: RunSpec, resume: bool = False) -> tuple[int, int]:
    """Train with the run's callbacks; return the last step of the trainer and of its run."""
    trainer = make_trainer(run)
    if resume:
        trainer.resume()
    train_to_end(trainer, user_callbacks=build_callbacks(run.callbacks))
    return trainer.step, trainer.run.training.steps


def test_hooks_run_on_every_rank_in_one_order(text: Path, tmp_path: Path) -> None:
    changes = {
        "training.steps": 4,
        "evaluation": {"every": 2},
        "checkpoint": {"every": 2},
        "callbacks": {"record": {"class": HERE + "RecordHooks", "folder": str(tmp_path)}},
    }
    run = small_run(text, tmp_path, changes)
    create_run(run, 2, resume=False)
    rank_pool(2).run(train_with_callbacks, run)
    first, second = ((tmp_path / f"rank-{rank}").read_text().splitlines() for rank in range(2))
    assert first == second
    saved = [line for line in first if line.startswith("saved")]
    assert [line.split()[1] for line in saved] == [step_name(2), step_name(4)]
    assert [line for line in first if line not in saved] == [
        "start 0",
        "step 1",
        "step 2",
        "evaluation 2",
        "step 3",
        "step 4",
        "evaluation 4",
        "end 4",
    ]


def test_callback_that_raises_ends_run_with_its_name(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    callbacks = {
        "record": {"class": HERE + "RecordHooks", "folder": str(tmp_path)},
        "bad": {"class": HERE + "FailAt", "step": 2},
    }
    directory = create_run(small_run(text, tmp_path, {"callbacks": callbacks}), 1, resume=False)
    assert worker.run_rank(directory, RankOptions(resume=True, trust=True)) == 1
    assert "callbacks.bad: on_step_end raised ZeroDivisionError: by design" in capsys.readouterr().err
    assert (tmp_path / "rank-0").read_text().splitlines()[-1] == "exception CallbackError 2"
    failures = [json.loads(file.read_text()) for file in (directory / "failures").glob("*.json")]
    assert [failure["final"] for failure in failures] == [True]


class FailTwice(FailAt):
    """A callback that raises an error after a step, and another one in `on_exception`."""

    def on_exception(self, trainer: Any, error: BaseException) -> None:
        raise OSError("second")


def test_error_in_on_exception_does_not_hide_first(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = small_run(text, tmp_path, {"callbacks": {"bad": HERE + "FailTwice"}})
    with pytest.raises(CallbackError, match=r"callbacks\.bad: on_step_end raised ZeroDivisionError: by design"):
        train_to_end(make_trainer(run), user_callbacks={"callbacks.bad": FailTwice(1)})
    assert "callbacks.bad: on_exception raised OSError: second" in capsys.readouterr().err


@pytest.mark.parametrize("rank", [0, 1])
def test_finish_on_one_rank_ends_all_ranks_after_next_step(rank: int, text: Path, tmp_path: Path) -> None:
    callbacks = {"finish": {"class": HERE + "FinishAt", "step": 2, "rank": rank}}
    run = small_run(text, tmp_path, {"training.steps": 50, "callbacks": callbacks})
    directory = create_run(run, 2, resume=False)
    assert rank_pool(2).run(train_with_callbacks, run) == [(3, 3), (3, 3)]
    assert read_manifest(directory / "checkpoints" / step_name(3))["callbacks"] == {"callbacks.finish": {"seen": 3}}
    assert "steps = 3\n" in (directory / "run.toml").read_text()


@pytest.mark.parametrize("name", ["metrics", "evaluation", "checkpoints"])
def test_callback_of_user_may_have_name_of_a_standard_callback(name: str, text: Path, tmp_path: Path) -> None:
    callbacks = {name: {"class": HERE + "RecordHooks", "folder": str(tmp_path)}}
    changes = {"training.steps": 2, "evaluation": {"tokens": 64}, "callbacks": callbacks}
    directory = create_run(small_run(text, tmp_path, changes), 1, resume=False)
    assert worker.run_rank(directory, RankOptions(resume=True, trust=True)) == 0
    lines = (tmp_path / "rank-0").read_text().splitlines()
    assert lines[:4] == ["start 0", "step 1", "step 2", "evaluation 2"]
    assert lines[-1] == "end 2"
    assert [record["step"] for record in read_metrics(directory)] == [1, 2, 2]
    assert (directory / "checkpoints" / step_name(2)).is_dir()


def test_finish_after_last_step_is_not_announced(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    callbacks = {"finish": {"class": HERE + "FinishAt", "step": 2, "rank": 0}}
    run = small_run(text, tmp_path, {"training.steps": 2, "evaluation": {"tokens": 64}, "callbacks": callbacks})
    assert worker.run_rank(create_run(run, 1, resume=False), RankOptions(resume=True, trust=True)) == 0
    assert "finishing the run" not in "".join(capsys.readouterr())


class SavesState(Callback):
    """A callback that returns its state itself, not a copy."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        if isinstance(self.state, Exception):
            raise self.state
        return {"state": self.state}


@pytest.mark.parametrize(
    ("state", "problem"),
    [
        (ZeroDivisionError("by design"), "state_dict raised ZeroDivisionError: by design"),
        ({1, 2}, "dumps raised TypeError: Object of type set is not JSON serializable"),
    ],
)
def test_state_that_cannot_be_saved_ends_run_with_name_of_callback(
    state: Any, problem: str, text: Path, tmp_path: Path
) -> None:
    run = small_run(text, tmp_path, {"training.steps": 1})
    create_run(run, 1, resume=False)
    with pytest.raises(CallbackError, match=rf"callbacks\.mine: {problem}"):
        train_to_end(make_trainer(run), user_callbacks={"callbacks.mine": SavesState(state)})


def test_saved_state_is_a_copy(text: Path, tmp_path: Path) -> None:
    run = small_run(text, tmp_path, {"training.steps": 1})
    create_run(run, 1, resume=False)
    trainer = make_trainer(run)
    state = [1]
    trainer.callbacks = {"callbacks.mine": SavesState(state)}
    manifest = trainer._build_manifest()
    state.append(2)
    assert manifest["callbacks"] == {"callbacks.mine": {"state": [1]}}


def test_checkpoint_is_not_reported_by_sums_from_before_it(text: Path, tmp_path: Path) -> None:
    """An asynchronous worker receives such sums."""
    run = small_run(text, tmp_path, {"callbacks": {}})
    create_run(run, 1, resume=False)
    trainer = make_trainer(run)
    trainer.callbacks = {"record": RecordHooks(str(tmp_path))}
    trainer.unreported_checkpoint = tmp_path / step_name(3)
    (tmp_path / step_name(3)).mkdir()
    (tmp_path / step_name(3) / "manifest.json").write_text("")
    reported = []
    for step in (2, 3, 4, 5):
        trainer.step = step
        trainer.launched.append(lambda step=step: {"step": step})
        trainer.read_launched(keep=0)
        reported.append(trainer.unreported_checkpoint is None)
    assert reported == [False, False, True, True]


def test_state_of_callback_is_restored_from_checkpoint(text: Path, tmp_path: Path) -> None:
    callbacks = {"finish": {"class": HERE + "FinishAt", "step": 0, "rank": 0}}
    run = small_run(text, tmp_path, {"training.steps": 3, "callbacks": callbacks})
    directory = create_run(run, 1, resume=False)
    train_with_callbacks(run)
    longer = small_run(text, tmp_path, {"training.steps": 5, "callbacks": callbacks})
    assert train_with_callbacks(longer, resume=True) == (5, 5)
    assert read_manifest(directory / "checkpoints" / step_name(5))["callbacks"] == {"callbacks.finish": {"seen": 5}}


def test_run_that_finished_early_exits_with_0_and_is_complete(text: Path, tmp_path: Path) -> None:
    callbacks = {"finish": {"class": HERE + "FinishAt", "step": 2, "rank": 0}}
    run = small_run(text, tmp_path, {"training.steps": 50, "evaluation": {"tokens": 64}, "callbacks": callbacks})
    directory = create_run(run, 1, resume=False)
    assert worker.run_rank(directory, RankOptions(resume=True, trust=True)) == 0
    assert worker.run_rank(directory, RankOptions(resume=True, trust=True)) == 0, "nothing is left to do"
    records = read_metrics(directory)
    assert [record["step"] for record in records if "loss" in record] == [1, 2, 3]
    assert [record["step"] for record in records if "held_out_loss" in record] == [3]


@pytest.mark.parametrize(
    ("path", "arguments", "problem"),
    [
        ("no_such_module:C", {}, "cannot be imported: No module named 'no_such_module'"),
        (HERE + "NoSuchClass", {}, "cannot be imported"),
        ("json:JSONDecoder", {}, "is not a subclass of phalanx.Callback"),
        (
            HERE + "FailAt",
            {"step": 1, "stop": 3},
            "does not accept these arguments: got an unexpected keyword",
        ),
    ],
)
def test_build_callbacks_raises_user_error_for_class_that_cannot_be_used(
    path: str, arguments: dict[str, Any], problem: str
) -> None:
    spec = ComponentSpec.model_validate({"class": path, **arguments})
    with pytest.raises(UserError, match=rf"callbacks\.mine = '{path}' {problem}"):
        build_callbacks({"mine": spec})


def test_call_hook_passes_errors_of_phalanx_through(text: Path, tmp_path: Path) -> None:
    class Refuse(Callback):
        def on_train_start(self, trainer: Any) -> None:
            raise UserError("mine", 3, "is wrong", fix="use 4")

    run = small_run(text, tmp_path, {"callbacks": {"mine": HERE + "FailAt"}})
    with pytest.raises(UserError, match="mine = 3"):
        train_to_end(make_trainer(run), user_callbacks={"callbacks.mine": Refuse()})
    with pytest.raises(CallbackError, match=r"callbacks\.mine"):
        train_to_end(make_trainer(run), user_callbacks={"callbacks.mine": FailAt(1)})
