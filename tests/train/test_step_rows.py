"""The documents of a step: those whose tokens the loader of a rank returns, after resumes, rollbacks and rescaling."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from phalanx.data.loader import StepLoader
from phalanx.data.object_cache import object_cache
from phalanx.data.prepare import prepare
from phalanx.data.tokenizer import byte_tokenizer
from phalanx.runs.checkpoints import step_name
from phalanx.runs.create import read_run_directory
from phalanx.runs.events import ROLLED_BACK, STARTED, append_event
from phalanx.spec.batch import plan_batch
from phalanx.spec.errors import UserError
from phalanx.spec.run import RunSpec
from phalanx.train.create_run import create_run
from phalanx.train.step_rows import Row, rows_of_step
from phalanx.train.training_data import open_training_data
from tests.helpers.small_runs import make_trainer, small_run, train_until
from tests.integration.test_mixture import mixed_run
from tests.integration.test_phases import phased_run


def open_loader(run: RunSpec, ranks: int = 1) -> StepLoader:
    """Return the loader of all rows of a run on some ranks."""
    sequences = plan_batch(run, ranks).global_batch_size
    return open_training_data(run, prepare(run.data)).loader(run, sequences, 0, 1)


def tokens_of_rows(directory: Path, rows: list[Row]) -> np.ndarray:
    """Return the tokens of rows, read from the token files by the documents that the rows name."""
    run, prepared = read_run_directory(directory)
    corpus = open_training_data(run, prepared)
    names = [source.name for source in run.data.source]
    tokens = []
    for row in rows:
        dataset = corpus.sources[names.index(row.source)] if row.source else corpus.train
        parts = [dataset.document(part.document)[part.first : part.first + part.tokens] for part in row.documents]
        assert [part.position for part in row.documents] == [
            0,
            *np.cumsum([part.tokens for part in row.documents])[:-1],
        ]
        tokens.append(np.concatenate(parts))
    return np.array(tokens)


def start(directory: Path, run: RunSpec, step: int, ranks: int = 1) -> None:
    append_event(directory, STARTED, ranks=ranks, step=step, settings=run.settings)


@pytest.mark.parametrize("step", [1, 4, 6])
def test_rows_of_mixture_are_those_of_loader_with_file_and_line(step: int, documents: Path, tmp_path: Path) -> None:
    run = mixed_run(documents, tmp_path)
    directory = create_run(run, 1, resume=False)
    start(directory, run, 0)
    rows = rows_of_step(directory, step)
    assert np.array_equal(tokens_of_rows(directory, rows), open_loader(run).step(step - 1).tokens)
    lines = (tmp_path / "notes.jsonl").read_text().splitlines()
    located = [(row.source, part) for row in rows for part in row.documents]
    assert {source for source, _ in located} == {"code", "notes"}
    for source, part in located:
        assert part.location is not None
        if source == "notes":
            file, _, line = part.location.rpartition(":")
            assert file == str(tmp_path / "notes.jsonl")
            text = json.loads(lines[int(line) - 1])["content"]
        else:
            text = Path(part.location).read_text()
        ids = [*text.encode(), byte_tokenizer().end][part.first : part.first + min(24, part.tokens)]
        assert part.text == byte_tokenizer().decode(ids)


def test_rows_of_phases_are_those_of_loader(documents: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = phased_run(documents, tmp_path, {})
    directory = create_run(run, 1, resume=False)
    start(directory, run, 0)
    loader = make_trainer(run).loader
    monkeypatch.setattr("phalanx.data.object_cache._default_cache", None)
    for step in range(1, run.training.steps + 1):
        tokens = tokens_of_rows(directory, rows_of_step(directory, step))
        assert np.array_equal(tokens, loader.step(step - 1).tokens)
    assert object_cache().directory == Path(run.data.cache)


def test_rows_follow_rollbacks_and_starts(documents: Path, tmp_path: Path) -> None:
    run = mixed_run(documents, tmp_path, {"training.steps": 20})
    directory = create_run(run, 1, resume=False)
    loader = open_loader(run)
    start(directory, run, 0)
    append_event(directory, ROLLED_BACK, after=5, to=2, reason="spike")
    loader.resume(loader.state(2))
    loader.skip_steps(3)
    expected = loader.step(2).tokens
    assert np.array_equal(tokens_of_rows(directory, rows_of_step(directory, 3)), expected)
    assert not np.array_equal(tokens_of_rows(directory, rows_of_step(directory, 3)), open_loader(run).step(2).tokens)
    assert np.array_equal(tokens_of_rows(directory, rows_of_step(directory, 2)), open_loader(run).step(1).tokens)
    # The run goes back to before the rollback, and reads all text.
    start(directory, run, 1)
    assert np.array_equal(tokens_of_rows(directory, rows_of_step(directory, 3)), open_loader(run).step(2).tokens)


def test_rows_begin_with_a_checkpoint(documents: Path, tmp_path: Path) -> None:
    """The text that was skipped before it is not in the events of this directory."""
    run = mixed_run(documents, tmp_path)
    directory = create_run(run, 1, resume=False)
    trainer = make_trainer(run)
    trainer.loader.skip_steps(7)
    train_until(trainer, 2)
    trainer.save()
    trainer.checkpointer.wait()
    start(directory, run, 0)
    assert np.array_equal(tokens_of_rows(directory, rows_of_step(directory, 4)), trainer.loader.step(3).tokens)
    manifest = directory / "checkpoints" / step_name(2) / "manifest.json"
    content = json.loads(manifest.read_text())
    del content["loader"]["sequences"]
    manifest.write_text(json.dumps(content))
    with pytest.raises(UserError, match=r"checkpoint = .* has a damaged position in manifest.json"):
        rows_of_step(directory, 4)


def test_rows_follow_steps_of_another_size(documents: Path, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"training.batch_scaling": "linear", "training.base_dp_size": 1}
    run = small_run(documents, tmp_path, changes)
    directory = create_run(run, 1, resume=False)
    start(directory, run, 0, ranks=1)
    start(directory, run, 3, ranks=2)
    loader = open_loader(run, ranks=2)
    loader.resume(open_loader(run, ranks=1).state(3))
    rows = rows_of_step(directory, 5)
    assert len(rows) == 16
    assert np.array_equal(tokens_of_rows(directory, rows), loader.step(4).tokens)
    assert len(rows_of_step(directory, 3)) == 8


def test_rows_of_steps_before_another_order_of_text_are_refused(documents: Path, tmp_path: Path) -> None:
    run = small_run(documents, tmp_path, {})
    directory = create_run(run, 1, resume=False)
    start(directory, small_run(documents, tmp_path, {"training.seed": 5}), 0)
    start(directory, run, 3)
    with pytest.raises(UserError, match=r"--step = 5 was trained after a start with training.seed = 5, which is 1234"):
        rows_of_step(directory, 5)


def test_rows_that_do_not_follow_from_the_step_are_refused(documents: Path, tmp_path: Path) -> None:
    run = small_run(documents, tmp_path, {"data.streaming": True})
    directory = create_run(run, 1, resume=False)
    with pytest.raises(UserError, match=r"data.streaming = True reads text forward only"):
        rows_of_step(directory, 1)
    with pytest.raises(UserError, match="--step = 21 is not a step of the run, which has 20"):
        rows_of_step(directory, 21)
