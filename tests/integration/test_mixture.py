"""Training on a mixture of two sources: equal on one and two ranks, and after a resume on other ranks."""

from __future__ import annotations

import json
import math
import tomllib
from pathlib import Path
from typing import Any

import pytest

from phalanx.data.indexed_dataset import IndexedDataset
from phalanx.runs.create import RUN_FILE, claim_run_directory, read_run_directory, run_directory
from phalanx.spec.errors import UserError
from phalanx.spec.run import UNDECIDED_STEPS, RunSpec
from phalanx.testing import rank_pool
from phalanx.train.create_run import create_run
from tests.helpers.small_runs import make_trainer, small_run, train_until, training_trajectory


def mixed_run(text: Path, out: Path, changes: dict[str, Any] | None = None, **prose: Any) -> RunSpec:
    """Return a run of six steps on the Python files of a folder, 5/8, and on records of another field, 3/8."""
    rows = [json.dumps({"content": f"note {number} of {number * 7} says hello\n" * 3}) for number in range(40)]
    (out / "notes.jsonl").write_text("\n".join(rows))
    code = {"name": "code", "path": str(text), "weight": 5}
    notes = {"name": "notes", "path": str(out / "notes.jsonl"), "weight": 3, "text_key": "content", **prose}
    data = {"source": [code, notes], "tokenizer": "bytes", "cache": str(out / "cache"), "held_out_fraction": 0.2}
    return small_run(text, out, {"data": data, "training.steps": 6, **(changes or {})})


def continue_until(run: RunSpec, last: int) -> list[tuple[float, float]]:
    """Continue from the newest checkpoint, if there is one, up to a step, and save; return losses and norms."""
    trainer = make_trainer(run)
    trainer.resume()
    result = train_until(trainer, last)
    trainer.save()
    trainer.checkpointer.wait()
    return result


def evaluate(run: RunSpec) -> dict[str, Any]:
    """Return the evaluation of a new model."""
    return make_trainer(run).evaluate()


@pytest.mark.parametrize("data_parallel", ["ddp", "zero3"])
def test_mixture_trains_equally_on_two_ranks(data_parallel: str, documents: Path, tmp_path: Path) -> None:
    run = mixed_run(documents, tmp_path, {"layout.data_parallel": data_parallel})
    on_one_rank = rank_pool(1).run(training_trajectory, run)[0]
    for on_rank in rank_pool(2).run(training_trajectory, run):
        assert on_rank == [pytest.approx(values, rel=1e-10) for values in on_one_rank]


def test_mixture_resumed_on_other_ranks_equals_uninterrupted_run(documents: Path, tmp_path: Path) -> None:
    run = mixed_run(documents, tmp_path)
    claim_run_directory(run_directory(run))
    uninterrupted = rank_pool(1).run(training_trajectory, run)[0]
    first = rank_pool(2).run(continue_until, run, 3)[0]
    then = rank_pool(1).run(continue_until, run, 6)[0]
    assert [*first, *then] == [pytest.approx(values, rel=1e-10) for values in uninterrupted]


def test_evaluation_has_loss_of_each_source_and_divides_limit_by_shares(documents: Path, tmp_path: Path) -> None:
    run = mixed_run(documents, tmp_path, {"evaluation.tokens": 160})
    on_one_rank = rank_pool(1).run(evaluate, run)[0]
    on_two_ranks = rank_pool(2).run(evaluate, run)[0]
    losses = [on_one_rank["held_out_loss/code"], on_one_rank["held_out_loss/notes"]]
    assert on_one_rank["held_out_tokens"] == 160
    assert on_one_rank["held_out_loss"] == pytest.approx((100 * losses[0] + 60 * losses[1]) / 160, rel=1e-12)
    assert on_two_ranks["held_out_set"] == on_one_rank["held_out_set"]
    for name in ("held_out_loss", "held_out_loss/code", "held_out_loss/notes"):
        assert on_two_ranks[name] == pytest.approx(on_one_rank[name], rel=1e-10)
    data = run.data.model_dump() | {"source": [], "train": run.data.source[0].path}
    alone = make_trainer(small_run(documents, tmp_path, {"data": data, "evaluation.tokens": 100}))
    assert alone.evaluate()["held_out_loss"] == pytest.approx(losses[0], rel=1e-12)


def test_created_run_lists_shares_and_reads_its_files_again(documents: Path, tmp_path: Path, capsys: Any) -> None:
    run = mixed_run(documents, tmp_path)
    directory = create_run(run, 1, resume=False)
    assert "source code: 0.625 of the tokens of the run" in capsys.readouterr().err
    saved_run, prepared = read_run_directory(directory)
    assert saved_run.data.source == run.data.source
    assert len(prepared.sources) == len(prepared.held_out_sources) == 2
    assert [table["name"] for table in tomllib.loads((directory / RUN_FILE).read_text())["data"]["source"]] == [
        "code",
        "notes",
    ]


def test_run_with_too_few_epochs_is_not_created(documents: Path, tmp_path: Path) -> None:
    run = mixed_run(documents, tmp_path, epochs=0.05)
    message = r"data.source\[1\].epochs = 0.05 is too low for 6 steps: source 'notes' has .* and step \d needs more"
    with pytest.raises(UserError, match=message):
        create_run(run, 1, resume=False)
    assert not run_directory(run).exists()


def test_source_that_fills_no_sequence_is_named(documents: Path, tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("a text of 23 characters")
    run = mixed_run(documents, tmp_path, path=str(tmp_path / "short.txt"), text_key=None)
    with pytest.raises(UserError, match=r"data.source\[1\].path = .* has \d+ tokens, but a sequence"):
        create_run(run, 1, resume=False)


def test_resume_with_other_weights_says_what_continues(documents: Path, tmp_path: Path, capsys: Any) -> None:
    run = mixed_run(documents, tmp_path)
    create_run(run, 1, resume=False)
    trainer = make_trainer(run)
    train_until(trainer, 1)
    trainer.save()
    trainer.checkpointer.wait()
    changes = {"training.tokens_per_step": 1024, "optimizer.name": "muon"}
    changed = mixed_run(documents, tmp_path, changes, weight=1)
    create_run(changed, 1, resume=True)
    notes = capsys.readouterr().err
    assert "data.source has other shares: each source continues after what the run has read of it" in notes
    assert "sequences per update: the text continues after the last sequence of the checkpoint" in notes
    assert "optimizer.name adamw -> muon: the weights are kept" in notes
    assert all(math.isfinite(loss) for loss, _ in continue_until(changed, 4))


def test_epochs_become_steps_when_the_text_is_counted(documents: Path, tmp_path: Path, capsys: Any) -> None:
    run = mixed_run(documents, tmp_path, {"training.steps": UNDECIDED_STEPS, "training.epochs": 0.5})
    assert not run.training.has_decided_steps
    directory = create_run(run, 1, resume=False)
    recorded, data = read_run_directory(directory)
    sizes = [IndexedDataset(prefix).size for prefix in data.sources]
    # The source whose half is read first decides: 5/8 or 3/8 of the tokens of a step are its own.
    expected = min(0.5 * size / share for size, share in zip(sizes, (5 / 8, 3 / 8), strict=True))
    assert abs(recorded.training.steps - expected / run.training.tokens_per_step) <= 1
    assert f"training.epochs = 0.5: {recorded.training.steps} steps" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"training.epochs": 2, "training.seconds": 5},
            "training.seconds = 5 cannot be combined with training.epochs",
        ),
        ({"training.epochs": 2, "data": {"streaming": True}}, "training.epochs = 2.0 cannot be combined with data.str"),
        (
            {"training.epochs": 2, "phase": [{"from_step": 2, "seq_len": 64}]},
            "phase cannot be combined with training.epochs",
        ),
    ],
)
def test_epochs_exclude_other_lengths(changes: dict[str, Any], message: str, documents: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        small_run(documents, tmp_path, {"training.steps": UNDECIDED_STEPS, **changes})


@pytest.mark.parametrize("is_mixture", [True, False])
def test_evaluation_has_loss_of_each_named_set(is_mixture: bool, documents: Path, tmp_path: Path) -> None:
    texts = {"first": "one two three " * 30, "second": "four five six " * 50}
    for name, text in texts.items():
        (tmp_path / f"{name}.txt").write_text(text)
    run = mixed_run(documents, tmp_path, {"evaluation.tokens": 0})
    paths = {name: str(tmp_path / f"{name}.txt") for name in texts}
    changes: dict[str, Any] = {"held_out_sets": paths}
    if not is_mixture:
        changes |= {"source": [], "train": [str(documents)]}
    data = run.data.replace(**changes)
    record = evaluate(run.replace(data=data))
    alone = {
        name: evaluate(run.replace(data=data.replace(held_out_sets={}, held_out=[path])))
        for name, path in paths.items()
    }
    for name in texts:
        assert record[f"held_out_loss/{name}"] == pytest.approx(alone[name]["held_out_loss"], rel=1e-12)
    sizes = [alone[name]["held_out_tokens"] for name in texts]
    mean = sum(size * alone[name]["held_out_loss"] for name, size in zip(texts, sizes, strict=True)) / sum(sizes)
    assert record["held_out_loss"] == pytest.approx(mean, rel=1e-12)
    assert record["held_out_tokens"] == sum(sizes)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"held_out_sets": {"a": []}}, r"data.held_out_sets.a = \[\] is empty"),
        ({"held_out_sets": {"a b": "x.txt"}}, "data.held_out_sets.a b = 'x.txt' is not a name"),
        ({"held_out_sets": {"a": "x.txt"}, "held_out": ["y.txt"]}, "data.held_out = .* cannot be combined with"),
    ],
)
def test_invalid_set_is_refused(data: dict[str, Any], message: str, documents: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        small_run(documents, tmp_path, {f"data.{name}": value for name, value in data.items()})


def test_limit_of_epochs_counts_phases_that_change_the_rate_only(documents: Path, tmp_path: Path) -> None:
    phase = [{"from_step": 2, "learning_rate": 1e-4}]
    create_run(mixed_run(documents, tmp_path, {"phase": phase}, epochs=50), 1, resume=False)
    with pytest.raises(UserError, match=r"data.source\[1\].epochs = 0.15 is too low for 6 steps"):
        create_run(mixed_run(documents, tmp_path, {"phase": phase, "name": "other"}, epochs=0.15), 1, resume=False)
