"""Checkpoints of a real run in a server of S3: uploaded, found from an empty run directory, hidden, removed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from phalanx.data import places
from phalanx.launch.preflight import preflight
from phalanx.runs.checkpoint_store import remove_stored, stored_checkpoints
from phalanx.runs.checkpoints import abandon_newer, checkpoints, find_damage, latest_valid
from phalanx.runs.events import UPLOAD_FAILED, describe_failed_uploads, read_events
from phalanx.runs.stored_shards import OBJECTS_FILE
from phalanx.spec.errors import UserError
from phalanx.spec.resolved_run import ResolvedRun
from phalanx.spec.run import RunSpec
from phalanx.train.checkpoint.load_model import list_stored_checkpoints
from phalanx.train.checkpoint.stored_reader import StoredCheckpointReader, open_checkpoint
from tests.helpers.faulty_proxy import Fault, Proxy
from tests.helpers.small_runs import make_trainer, small_run, train_until
from tests.helpers.stored_runs import directory_of, forget_run_directory, stored_steps, train_and_save

pytest.importorskip("moto", reason="moto is not installed: make test-cloud")
from tests.helpers.s3_server import client, list_keys, make_bucket, s3_server

BUCKET = "checkpoints"
"""Each run has its checkpoints in a folder "team" of this bucket."""


@pytest.fixture(scope="module")
def server() -> Iterator[Proxy]:
    with s3_server() as proxy:
        yield proxy


@pytest.fixture
def run(server: Proxy, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunSpec:
    """Return a run with checkpoints in an empty bucket."""
    monkeypatch.setattr(places, "FIRST_DELAY_SECONDS", 0.001)
    server.plant()
    folder = make_bucket(BUCKET)
    return small_run(text, tmp_path, {"checkpoint.directory": f"{folder}/team", "checkpoint.every": 2})


def test_run_resumes_from_store_with_the_losses_of_an_uninterrupted_one(
    run: RunSpec, text: Path, tmp_path: Path
) -> None:
    expected = train_until(make_trainer(small_run(text, tmp_path / "whole", {})), 8)
    first, missing = train_and_save(run, [2, 4])
    assert missing == []
    assert stored_steps(run) == [2, 4]
    forget_run_directory(run)
    saved = checkpoints(directory_of(run) / "checkpoints")
    assert isinstance(open_checkpoint(saved[0]), StoredCheckpointReader)
    assert not list(saved[0].glob("*.safetensors"))
    second, _ = train_and_save(run, [8])
    assert first + second == expected
    assert stored_steps(run) == [4, 8]


def test_only_newest_shards_remain_on_disk(run: RunSpec) -> None:
    train_and_save(run, [2, 4, 6])
    saved = checkpoints(directory_of(run) / "checkpoints")
    assert [bool(list(path.glob("*.safetensors"))) for path in saved] == [True, False]
    assert [find_damage(path) for path in saved] == [None, None]


def test_failed_upload_does_not_stop_training_and_is_made_up_for(run: RunSpec, server: Proxy) -> None:
    server.plant(Fault("denied", r"PUT .*step-00000002", times=1000))
    _, missing = train_and_save(run, [2])
    assert missing == ["step-00000002"]
    assert stored_steps(run) == []
    events = read_events(directory_of(run))
    assert {event["checkpoint"] for event in events if event["kind"] == UPLOAD_FAILED} == {"step-00000002"}
    assert "Access Denied" in describe_failed_uploads(events)[-1]
    server.plant()
    _, missing = train_and_save(run, [4])
    assert (missing, stored_steps(run)) == ([], [2, 4])


@pytest.mark.parametrize("kind", ["error", "corrupt_upload", "cut", "skewed"])
def test_upload_is_correct_after_faults(run: RunSpec, server: Proxy, kind: str) -> None:
    fault = Fault(kind, r"PUT .*\.safetensors", times=2)  # type: ignore[arg-type]
    server.plant(fault)
    _, missing = train_and_save(run, [2])
    if kind == "skewed":  # is not transient: uploaded by the second request
        missing = train_and_save(run, [4])[1]
    assert (missing, fault.hits) == ([], 2)
    forget_run_directory(run)
    assert all(find_damage(path) is None for path in checkpoints(directory_of(run) / "checkpoints"))
    assert make_trainer(run).resume()[0]


def test_interrupted_upload_is_no_checkpoint(run: RunSpec) -> None:
    train_and_save(run, [2, 4])
    client().delete_object(Bucket=BUCKET, Key=f"team/{run.name}/step-00000004/SHA256SUMS")
    forget_run_directory(run)
    assert [path.name for path in checkpoints(directory_of(run) / "checkpoints")] == ["step-00000002"]
    trainer = make_trainer(run)
    assert trainer.resume() == (1, {})
    assert trainer.step == 2


@pytest.mark.parametrize("damage", ["truncated", "changed", "missing"])
def test_damaged_shard_in_store_is_noticed_before_it_is_read(run: RunSpec, damage: str) -> None:
    train_and_save(run, [2, 4])
    key = next(key for key in list_keys(BUCKET) if "step-00000004" in key and key.endswith(".safetensors"))
    content = client().get_object(Bucket=BUCKET, Key=key)["Body"].read()
    client().delete_object(Bucket=BUCKET, Key=key)
    if damage != "missing":
        damaged = content[:-8] if damage == "truncated" else content[:-1] + bytes([content[-1] ^ 1])
        client().put_object(Bucket=BUCKET, Key=key, Body=damaged)
    forget_run_directory(run)
    intact, problems = latest_valid(directory_of(run) / "checkpoints")
    assert intact is not None
    assert (intact.name, list(problems)) == ("step-00000002", ["step-00000004"])
    assert ".safetensors" in problems["step-00000004"]


def test_files_of_an_earlier_checkpoint_of_the_step_do_no_harm(run: RunSpec) -> None:
    prefix = f"team/{run.name}/step-00000002"
    client().put_object(Bucket=BUCKET, Key=f"{prefix}/rank-00001.json", Body=b"before the upload")
    train_and_save(run, [2])
    assert f"{prefix}/rank-00001.json" not in list_keys(BUCKET)
    client().put_object(Bucket=BUCKET, Key=f"{prefix}/rank-00001.json", Body=b"after the upload")
    forget_run_directory(run)
    (checkpoint,) = checkpoints(directory_of(run) / "checkpoints")
    assert find_damage(checkpoint) is None


def test_copied_bucket_is_read_although_its_versions_differ(run: RunSpec) -> None:
    train_and_save(run, [2])
    file = f"team/{run.name}/step-00000002/{OBJECTS_FILE}"
    records = json.loads(client().get_object(Bucket=BUCKET, Key=file)["Body"].read())
    for shard in records["shards"].values():
        shard["version"] = "of another bucket"
    client().put_object(Bucket=BUCKET, Key=file, Body=json.dumps({**records, "url": "s3://other/place"}).encode())
    forget_run_directory(run)
    assert make_trainer(run).resume()[0]


def test_unreachable_store_is_an_error_and_no_damage(run: RunSpec, server: Proxy) -> None:
    train_and_save(run, [2])
    forget_run_directory(run)
    server.plant(Fault("error", times=1000))
    with pytest.raises(UserError, match=r"checkpoint.directory = 's3://checkpoints/team/.*cannot be accessed"):
        latest_valid(directory_of(run) / "checkpoints")
    assert len(checkpoints(directory_of(run) / "checkpoints")) == 1


def test_reading_repeats_damaged_blocks(run: RunSpec, server: Proxy) -> None:
    train_and_save(run, [2])
    forget_run_directory(run)
    faults = [Fault(kind, r"GET .*\.safetensors") for kind in ("corrupt", "truncated", "cut", "error")]
    server.plant(*faults)
    assert make_trainer(run).resume()[0]
    assert [fault.hits for fault in faults] == [1, 1, 1, 1]


def test_abandoned_checkpoints_are_hidden_in_store(run: RunSpec) -> None:
    train_and_save(run, [2, 4])
    abandon_newer(directory_of(run), 2)
    assert stored_steps(run) == [2]
    forget_run_directory(run)
    assert [path.name for path in checkpoints(directory_of(run) / "checkpoints")] == ["step-00000002"]


def test_old_checkpoints_are_removed_with_parts_of_incomplete_ones(run: RunSpec) -> None:
    train_and_save(run, [2, 4, 6])
    folder = f"s3://{BUCKET}/team/{run.name}"
    client().delete_object(Bucket=BUCKET, Key=f"team/{run.name}/step-00000004/SHA256SUMS")
    assert sorted(stored_checkpoints(folder)) == [4, 6]
    remove_stored(folder, kept={6}, newest=6)
    assert sorted(stored_checkpoints(folder)) == [6]


def test_run_with_the_name_of_a_stored_one_is_refused(run: RunSpec) -> None:
    train_and_save(run, [2])
    shutil.rmtree(directory_of(run))
    with pytest.raises(
        UserError, match=r"name = 'parity' belongs to a run, whose checkpoints are in s3://checkpoints/team"
    ):
        preflight(ResolvedRun(run, 1), resume=False)


def test_missing_bucket_and_missing_permission_are_errors_before_the_start(
    run: RunSpec, server: Proxy, text: Path, tmp_path: Path
) -> None:
    other = small_run(text, tmp_path / "other", {"checkpoint.directory": "s3://no-bucket/team"})
    with pytest.raises(UserError, match=r"checkpoint.directory = 's3://no-bucket/team/parity' does not exist"):
        preflight(ResolvedRun(other, 1), resume=False)
    server.plant(Fault("denied", "PUT", times=1000))
    with pytest.raises(UserError, match=r"(?s)team/parity' may not be accessed: .*check the credentials"):
        preflight(ResolvedRun(run, 1), resume=False)


def test_commands_use_checkpoints_of_this_machine_if_store_is_unreachable(
    run: RunSpec, server: Proxy, caplog: pytest.LogCaptureFixture
) -> None:
    train_and_save(run, [2])
    server.plant(Fault("error", times=1000))
    list_stored_checkpoints(run, directory_of(run))
    assert "only checkpoints on this machine are used" in caplog.text
    for shard in directory_of(run).rglob("*.safetensors"):
        shard.unlink()
    with pytest.raises(UserError, match="cannot be accessed"):
        list_stored_checkpoints(run, directory_of(run))
