"""Runs with a teacher: losses, divergences, gradient norms, and the held-out loss equal those of one process in fp64 to
1e-10 relative."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from phalanx.data.loader import prefetch
from phalanx.spec.run import RunSpec
from phalanx.testing import rank_pool
from tests.helpers.small_runs import DENSE, MOE, Table, make_trainer, small_run

STEPS = 3
TEACHER: Table = {**DENSE, "hidden_size": 48, "num_layers": 4, "num_heads": 8, "num_kv_heads": 4, "logits_softcap": 2.0}
MODELS: dict[str, Table] = {
    "dense": {**DENSE, "num_layers": 4},
    "tied": {**DENSE, "num_layers": 2, "tie_embeddings": True, "logits_softcap": 3.0},
    "moe": {**MOE, "num_layers": 2},
}
TEACHERS: dict[str, Table] = {
    "dense": TEACHER,
    "tied": {**TEACHER, "tie_embeddings": True},
    "moe": {**MOE, "num_layers": 4},
}
CASES: dict[str, tuple[int, str, Table]] = {
    "ddp": (2, "dense", {}),
    "zero1": (2, "moe", {"layout.data_parallel": "zero1", "layout.bucket_mb": 0.01}),
    "zero3": (2, "dense", {"layout.data_parallel": "zero3"}),
    "zero3-tied": (2, "tied", {"layout.data_parallel": "zero3", "layout.activation_checkpointing": "full"}),
    "hsdp": (4, "dense", {"layout.data_parallel": "hsdp", "layout.dp_shard": 2}),
    "offload": (2, "dense", {"layout.data_parallel": "zero2", "layout.offload": "cpu"}),
    "tp": (2, "tied", {"layout.tp": 2}),
    "tp-whole-tokens": (2, "dense", {"layout.tp": 2, "layout.sequence_parallel": False}),
    "tp-zero3": (4, "dense", {"layout.tp": 2, "layout.data_parallel": "zero3"}),
    "ring": (2, "dense", {"layout.cp": 2}),
    "ulysses-tp": (4, "dense", {"layout.cp": 2, "layout.cp_method": "ulysses", "layout.tp": 2}),
    "ep": (2, "moe", {"layout.ep": 2}),
    "1f1b": (2, "dense", {"layout.pp": 2, "layout.micro_batch_size": 1}),
    "zb-v-zero3": (
        4,
        "dense",
        {"layout.pp": 2, "layout.schedule": "zb-v", "layout.data_parallel": "zero3", "layout.micro_batch_size": 1},
    ),
    "tp-pp": (4, "dense", {"layout.tp": 2, "layout.pp": 2, "layout.micro_batch_size": 1}),
}


@pytest.fixture(scope="module")
def teachers(documents: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run directory of each teacher, after a step."""
    folder = tmp_path_factory.mktemp("teachers")
    for name, model in TEACHERS.items():
        make_teacher(documents, folder, name, model)
    return folder


def make_teacher(documents: Path, folder: Path, name: str, model: Table) -> Path:
    """Write a run directory with a checkpoint."""
    from phalanx.train.create_run import create_run

    run = small_run(documents, folder, {"name": name, "model": model, "training.precision": "fp64"})
    create_run(run, 1, resume=False)
    trainer = make_trainer(run)
    trainer.save()
    trainer.checkpointer.wait()
    return folder / name


def distilled_trajectory(run: RunSpec) -> list[Table]:
    """Return loss, divergence and gradient norm of each step, and the held-out loss."""
    trainer = make_trainer(run)
    batches = prefetch(trainer.loader, 0, STEPS)
    records = [trainer.train_step(batches) for _ in range(STEPS)]
    evaluation = trainer.evaluate()
    names = ("loss", "kl_loss", "grad_norm")
    return [*({name: record[name] for name in names} for record in records), {"held_out": evaluation["held_out_loss"]}]


def distilled_run(documents: Path, out: Path, teachers: Path, model: str, layout: Table) -> RunSpec:
    distillation = {"teacher": str(teachers / model), "temperature": 1.7, "weight": 0.6}
    changes = {"model": MODELS[model], "distillation": distillation, "training.steps": STEPS, **layout}
    return small_run(documents, out, changes)


@cache
def single_process_trajectory(documents: Path, teachers: Path, model: str) -> Any:
    return distilled_trajectory(distilled_run(documents, documents.parent / "one", teachers, model, {}))


@pytest.mark.parametrize("case", CASES)
def test_layout_with_teacher_equals_single_process(case: str, documents: Path, teachers: Path, tmp_path: Path) -> None:
    ranks, model, layout = CASES[case]
    expected = single_process_trajectory(documents, teachers, model)
    assert expected[0]["kl_loss"] > 1e-3
    run = distilled_run(documents, tmp_path, teachers, model, layout)
    for rank, result in enumerate(rank_pool(ranks).run(distilled_trajectory, run)):
        assert result == [pytest.approx(step, rel=1e-10) for step in expected], f"rank {rank}"
