"""A run of three phases (lengths, batches, mixtures, rotary embedding) in other layouts equals one process, also if it
stops in each phase and resumes in another layout."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from phalanx.data.loader import prefetch
from phalanx.runs.create import claim_run_directory, run_directory
from phalanx.spec.run import RunSpec
from phalanx.testing import rank_pool
from tests.helpers.small_runs import MOE, make_trainer, small_run, train_until, training_trajectory

PHASES = [
    {"from_step": 2, "seq_len": 32, "tokens_per_step": 1024, "weights": {"code": 1, "notes": 3}},
    {
        "from_step": 4,
        "tokens_per_step": 512,
        "weights": {"notes": 1},
        "rope": {"theta": 50_000.0},
        "lr_schedule": "linear",
        "min_lr_ratio": 0.0,
    },
]
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "ddp": (2, {"layout.data_parallel": "ddp"}),
    "zero1-tp": (4, {"layout.data_parallel": "zero1", "layout.tp": 2}),
    "zero3": (2, {"layout.data_parallel": "zero3"}),
    "pp": (2, {"layout.pp": 2}),
    "zb-h1-zero1": (4, {"layout.pp": 2, "layout.schedule": "zb-h1", "layout.data_parallel": "zero1"}),
    "ring": (2, {"layout.cp": 2}),
    "ulysses-zero2": (4, {"layout.cp": 2, "layout.cp_method": "ulysses", "layout.data_parallel": "zero2"}),
    "ep": (2, {"layout.ep": 2}),
}
RESUMED = [("ddp", 1), ("zero1-tp", 3), ("pp", 5), ("zero3", 6)]
"""Layouts of a run that is stopped after a step of each phase, and the step to which each of them trains."""


def phased_run(text: Path, out: Path, changes: dict[str, Any]) -> RunSpec:
    rows = [json.dumps({"text": f"note {number} of {number * 7} says hello\n" * 3}) for number in range(60)]
    (out / "notes.jsonl").write_text("\n".join(rows))
    sources = [
        {"name": "code", "path": str(text), "weight": 5},
        {"name": "notes", "path": str(out / "notes.jsonl"), "weight": 3},
    ]
    data = {"source": sources, "tokenizer": "bytes", "cache": str(out / "cache"), "held_out_fraction": 0.2}
    training = {"training.steps": 6, "training.seq_len": 16, "training.tokens_per_step": 512}
    optimizer = {"optimizer.lr_schedule": "none", "optimizer.warmup_steps": 1}
    model = {"model": {**MOE, "num_layers": 2}}
    return small_run(text, out, {"data": data, "phase": PHASES, **model, **training, **optimizer, **changes})


def continue_until(run: RunSpec, last: int) -> list[tuple[float, float]]:
    """Continue from the newest checkpoint, if there is one, up to a step, and save; return losses and norms."""
    trainer = make_trainer(run)
    trainer.resume()
    result = train_until(trainer, last)
    trainer.save()
    trainer.checkpointer.wait()
    return result


@pytest.fixture(scope="module")
def reference(documents: Path, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[float, float]]:
    run = phased_run(documents, tmp_path_factory.mktemp("reference"), {})
    losses: list[tuple[float, float]] = rank_pool(1).run(training_trajectory, run)[0]
    assert all(math.isfinite(loss) for loss, _ in losses)
    return losses


@pytest.mark.parametrize("layout", LAYOUTS)
def test_phases_equal_one_process(
    layout: str, reference: list[tuple[float, float]], documents: Path, tmp_path: Path
) -> None:
    ranks, changes = LAYOUTS[layout]
    run = phased_run(documents, tmp_path, changes)
    for on_rank in rank_pool(ranks).run(training_trajectory, run):
        assert on_rank == [pytest.approx(values, rel=1e-10) for values in reference]


def test_run_stopped_in_each_phase_and_resumed_in_other_layouts_equals_one_process(
    reference: list[tuple[float, float]], documents: Path, tmp_path: Path
) -> None:
    steps: list[tuple[float, float]] = []
    for layout, last in RESUMED:
        ranks, changes = LAYOUTS[layout]
        run = phased_run(documents, tmp_path, changes)
        if not steps:
            claim_run_directory(run_directory(run))
        steps += rank_pool(ranks).run(continue_until, run, last)[0]
    assert steps == [pytest.approx(values, rel=1e-10) for values in reference]


def losses_by_source(run: RunSpec) -> list[dict[str, float]]:
    """Return the loss of the first four steps, and that of each source in it."""
    trainer = make_trainer(run)
    batches = prefetch(trainer.loader, 0, 4)
    records = [trainer.train_step(batches) for _ in range(4)]
    batches.close()
    return [{name: record[name] for name in record if name.partition("/")[0] == "loss"} for record in records]


@pytest.mark.parametrize("layout", ["one process", "zero1-tp", "zb-h1-zero1", "ring", "ep"])
def test_loss_of_each_source_equals_one_process(layout: str, documents: Path, tmp_path: Path) -> None:
    """Also in phases with other shares. With `tp`, ranks have some columns of the logits."""
    ranks, changes = LAYOUTS.get(layout, (1, {}))
    alone = rank_pool(1).run(losses_by_source, phased_run(documents, tmp_path, {}))[0]
    sizes = [(20, 12), (20, 12), (8, 24), (8, 24)]
    for step, (code, notes) in zip(alone, sizes, strict=True):
        # Each sequence has as many targets.
        mean = (code * step["loss/code"] + notes * step["loss/notes"]) / 32
        assert mean == pytest.approx(step["loss"], rel=1e-12)
    for on_rank in rank_pool(ranks).run(losses_by_source, phased_run(documents, tmp_path, changes)):
        assert on_rank == [pytest.approx(step, rel=1e-10) for step in alone]


def test_phases_change_what_they_name(documents: Path, tmp_path: Path) -> None:
    """Without the other phases' changes, losses differ from the first changed step on."""
    run = phased_run(documents, tmp_path, {})
    trainer = make_trainer(run)
    train_until(trainer, 6)
    assert trainer.tokens == 2 * 512 + 2 * 1024 + 2 * 512
    assert trainer.phase.number == 1
    assert {block.attention.rope.theta for block in trainer.module.blocks} == {50_000.0}
    rates = [group["lr"] for optimizer in trainer.optimizers for group in optimizer.param_groups]
    assert rates == [pytest.approx(run.optimizer.learning_rate / 2)] * len(rates)
