"""Checkpoints of a run: their order, damage to their files, and manifests that do not fit a run."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest

from phalanx.runs.checkpoints import (
    abandon_newer,
    best_checkpoints,
    check_manifest,
    checkpoints,
    checkpoints_to_keep,
    find_checkpoint,
    find_damage,
    latest_valid,
    quarantine,
    read_manifest,
    require_valid_checkpoint,
    split_checkpoint_path,
    step_of,
)
from phalanx.spec.errors import UserError
from phalanx.spec.run import KeepSpec
from tests.helpers.small_runs import MOE, save_two_checkpoints, small_run


@pytest.fixture(scope="module")
def saved_checkpoints(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_two_checkpoints(text, tmp_path_factory.mktemp("saved"))


def test_checkpoints_are_listed_newest_first_and_valid(saved_checkpoints: Path) -> None:
    assert [path.name for path in checkpoints(saved_checkpoints)] == ["step-00000004", "step-00000002"]
    assert (saved_checkpoints / "latest").read_text() == "step-00000004\n"
    assert latest_valid(saved_checkpoints) == (saved_checkpoints / "step-00000004", {})


@pytest.mark.parametrize("kind", ["shard", "rank", "manifest.json", "SHA256SUMS"])
def test_find_damage_detects_flipped_bit_in_checkpoint_files(
    kind: str, saved_checkpoints: Path, tmp_path: Path
) -> None:
    shutil.copytree(saved_checkpoints, tmp_path / "copy")
    newest = tmp_path / "copy" / "step-00000004"
    (file,) = [path for path in newest.iterdir() if path.name.startswith(kind)]
    intact = file.read_bytes()
    generator = random.Random(kind)
    bits = range(len(intact) * 8) if kind == "SHA256SUMS" else [generator.randrange(len(intact) * 8) for _ in range(40)]
    for bit in bits:
        flipped = bytearray(intact)
        flipped[bit // 8] ^= 1 << bit % 8
        file.write_bytes(bytes(flipped))
        assert find_damage(newest) is not None, f"bit {bit} of {file.name}"
    checkpoint, damaged = latest_valid(tmp_path / "copy")
    assert checkpoint == tmp_path / "copy" / "step-00000002"
    assert list(damaged) == ["step-00000004"]
    file.write_bytes(intact)
    assert find_damage(newest) is None


@pytest.mark.parametrize("damage_kind", ["missing", "extra", "truncated", "empty", "no sums"])
def test_find_damage_detects_missing_extra_and_truncated_files(
    damage_kind: str, saved_checkpoints: Path, tmp_path: Path
) -> None:
    shutil.copytree(saved_checkpoints, tmp_path / "copy")
    newest = tmp_path / "copy" / "step-00000004"
    shard = next(newest.glob("shard-*"))
    if damage_kind == "missing":
        shard.unlink()
    elif damage_kind == "extra":
        (newest / "more").touch()
    elif damage_kind == "truncated":
        shard.write_bytes(shard.read_bytes()[:-1])
    elif damage_kind == "empty":
        shard.write_bytes(b"")
    else:
        (newest / "SHA256SUMS").unlink()
    assert find_damage(newest) is not None


def test_latest_valid_restores_previous_checkpoint_after_interrupted_rewrite(
    saved_checkpoints: Path, tmp_path: Path
) -> None:
    shutil.copytree(saved_checkpoints, tmp_path / "copy")
    newest = tmp_path / "copy" / "step-00000004"
    newest.rename(newest.with_suffix(".before"))
    assert latest_valid(tmp_path / "copy") == (newest, {})


@pytest.mark.parametrize("targets", ["abc", -1, None, 1.5])
def test_read_manifest_rejects_damaged_number_of_targets(
    targets: object, saved_checkpoints: Path, tmp_path: Path
) -> None:
    shutil.copytree(saved_checkpoints / "step-00000004", tmp_path / "copy")
    manifest = read_manifest(tmp_path / "copy")
    assert manifest["targets"] > 0
    (tmp_path / "copy" / "manifest.json").write_text(json.dumps({**manifest, "targets": targets}))
    with pytest.raises(UserError, match="is not a Phalanx checkpoint"):
        read_manifest(tmp_path / "copy")


def test_latest_does_not_write_through_a_link(saved_checkpoints: Path, tmp_path: Path) -> None:
    shutil.copytree(saved_checkpoints, tmp_path / "copy")
    target = tmp_path / "target"
    target.write_text("mine")
    (tmp_path / "copy" / "latest.tmp").symlink_to(target)
    quarantine(tmp_path / "copy", [], intact=tmp_path / "copy" / "step-00000002")
    assert target.read_text() == "mine"
    assert (tmp_path / "copy" / "latest").read_text() == "step-00000002\n"


def test_check_manifest_rejects_fewer_steps_than_already_trained(text: Path, tmp_path: Path) -> None:
    run = small_run(text, tmp_path, {})
    manifest = {"model": run.model.model_dump(mode="json"), "optimizer": "adamw", "step": run.training.steps}
    check_manifest(run, manifest)
    with pytest.raises(UserError, match=r"training.steps = 20 is less than the 21 completed steps of the run"):
        check_manifest(run, {**manifest, "step": run.training.steps + 1})


def test_check_manifest_accepts_a_checkpoint_without_fields_that_came_later(text: Path, tmp_path: Path) -> None:
    run = small_run(text, tmp_path, {})
    saved = run.model.model_dump(mode="json")
    older = {name: value for name, value in saved.items() if name not in ("layers", "kinds", "norm_position")}
    manifest = {"model": older, "optimizer": "adamw", "step": run.training.steps}
    check_manifest(run, manifest)
    with pytest.raises(UserError, match=r"model.norm_position = 'both' differs from the checkpoint's value 'before'"):
        check_manifest(small_run(text, tmp_path, {"model": {**saved, "norm_position": "both"}}), manifest)


def test_check_manifest_accepts_experts_and_kinds_without_fields_that_came_later(text: Path, tmp_path: Path) -> None:
    kinds = {"layers": "sparse dense", "kinds": [{"name": "dense", "moe": False}]}
    run = small_run(text, tmp_path, {"model": {**MOE, **kinds, "num_layers": 2}})
    saved = run.model.model_dump(mode="json")
    saved["kinds"] = [{"name": kind["name"], "moe": kind["moe"]} for kind in saved["kinds"]]
    later = ("shared_gate", "num_groups", "top_groups", "routed_scale", "choice_bias", "dense_branch")
    saved["moe"] = {name: value for name, value in saved["moe"].items() if name not in later}
    check_manifest(run, {"model": saved, "optimizer": "adamw", "step": run.training.steps})


def write_manifests(directory: Path, manifest: Path, evaluations: dict[int, tuple[float, str] | None]) -> list[Path]:
    """Write checkpoints of manifests only, with a held-out loss and its text by step; return them newest first."""
    for step, evaluation in evaluations.items():
        folder = directory / f"step-{step:08d}"
        folder.mkdir(parents=True)
        saved = evaluation and {"held_out_loss": evaluation[0], "held_out_set": evaluation[1]}
        (folder / "manifest.json").write_text(json.dumps({**read_manifest(manifest), "evaluation": saved}))
    return checkpoints(directory)


LOSSES = {100: (4.0, "a"), 200: (1.5, "a"), 300: (2.0, "a"), 350: None, 400: (3.0, "a"), 500: (2.5, "a")}


@pytest.mark.parametrize(
    ("keep", "kept"),
    [
        ({}, {400, 500}),
        ({"last": 1}, {500}),
        ({"last": 1, "every": 200}, {200, 400, 500}),
        ({"last": 1, "best": 1}, {200, 500}),
        ({"last": 1, "best": 3}, {200, 300, 500}),
        ({"last": 1, "best": 9}, {100, 200, 300, 400, 500}),
        ({"last": 9}, {*LOSSES}),
    ],
    ids=str,
)
def test_checkpoints_to_keep_are_the_union_of_last_every_and_best(
    keep: dict[str, int], kept: set[int], saved_checkpoints: Path, tmp_path: Path
) -> None:
    saved = write_manifests(tmp_path, saved_checkpoints / "step-00000004", LOSSES)
    assert {step_of(path) for path in checkpoints_to_keep(saved, KeepSpec(**keep))} == kept


def test_best_checkpoints_compare_losses_on_the_text_of_the_newest_only(
    saved_checkpoints: Path, tmp_path: Path
) -> None:
    saved = write_manifests(
        tmp_path, saved_checkpoints / "step-00000004", {1: (1.0, "old"), 2: (3.0, "new"), 3: (2.0, "new"), 4: None}
    )
    (tmp_path / "step-00000003" / "manifest.json").write_text("{")
    assert [step_of(path) for path in best_checkpoints(saved)] == [2]


def test_find_checkpoint_names_the_existing_steps(saved_checkpoints: Path, tmp_path: Path) -> None:
    directory = tmp_path / "checkpoints"
    write_manifests(directory, saved_checkpoints / "step-00000004", dict.fromkeys(range(10, 400, 10)))
    assert find_checkpoint(tmp_path, 20) == directory / "step-00000020"
    with pytest.raises(
        UserError, match=r"--step = 25 is not a checkpoint of .*\n  fix: use one of 10, 20, 30, .*, 120 "
    ):
        find_checkpoint(tmp_path, 25)
    with pytest.raises(UserError, match=r"use one of 280, 290, .*, 390 \(the nearest of 39\), or set evaluation.every"):
        find_checkpoint(tmp_path, "best")
    (directory / "step-00000030").rename(directory / "step-00000030.damaged")
    with pytest.raises(UserError, match=r"which has step-00000030.damaged"):
        find_checkpoint(tmp_path, 30)


def test_require_valid_checkpoint_refuses_a_damaged_one_that_was_named(saved_checkpoints: Path, tmp_path: Path) -> None:
    shutil.copytree(saved_checkpoints, tmp_path / "checkpoints")
    assert step_of(require_valid_checkpoint(tmp_path, 2)) == 2
    next((tmp_path / "checkpoints" / "step-00000004").glob("shard-*")).write_bytes(b"")
    with pytest.raises(UserError, match=r"is damaged: checksum of shard.*\n  fix: .*use one of 2$"):
        require_valid_checkpoint(tmp_path, 4)
    assert step_of(require_valid_checkpoint(tmp_path)) == 2


def test_split_checkpoint_path_accepts_a_run_or_one_of_its_checkpoints() -> None:
    run = Path("runs/demo")
    assert split_checkpoint_path(run) == (run, None)
    assert split_checkpoint_path(run, "best") == (run, "best")
    for name in ("step-00000008", "step-8"):
        assert split_checkpoint_path(run / "checkpoints" / name) == (run, 8)
        assert split_checkpoint_path(run / "checkpoints" / name, 8) == (run, 8)
    with pytest.raises(UserError, match=r"--step = 4 is not the step of runs/demo/checkpoints/step-8"):
        split_checkpoint_path(run / "checkpoints" / "step-8", 4)
    assert split_checkpoint_path(Path("runs/step-8")) == (Path("runs/step-8"), None)


def test_abandon_newer_makes_the_named_checkpoint_the_latest(saved_checkpoints: Path, tmp_path: Path) -> None:
    directory = tmp_path / "checkpoints"
    shutil.copytree(saved_checkpoints, directory)
    abandon_newer(tmp_path, 2)
    names = ["latest", "step-00000002", "step-00000004.abandoned"]
    assert sorted(path.name for path in directory.iterdir()) == names
    assert (directory / "latest").read_text() == "step-00000002\n"
    assert step_of(require_valid_checkpoint(tmp_path)) == 2
