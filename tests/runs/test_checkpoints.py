"""Checkpoints of a run: their order, damage to their files, and manifests that do not fit a run."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest

from phalanx.runs.checkpoints import check_manifest, checkpoints, find_damage, latest_valid, quarantine, read_manifest
from phalanx.spec.errors import UserError
from tests.helpers.small_runs import save_two_checkpoints, small_run


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
