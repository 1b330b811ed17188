"""Batch scripts of `phalanx launch --to slurm`, run by a real Slurm on this machine."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from phalanx.runs.checkpoints import checkpoints, find_damage, step_of
from phalanx.runs.events import read_events
from phalanx.spec.files.load import run_from_table
from phalanx.spec.files.write import to_toml
from phalanx.testing.local_slurm import LocalSlurm, SlurmUnavailable, local_slurm
from phalanx.testing.processes import wait_until
from tests.helpers.cli_runner import command_output

JOB_TIMEOUT_SECONDS = 150.0
"""Limit for a job on a busy machine."""
MODEL = {
    "vocab_size": 257,
    "hidden_size": 64,
    "num_layers": 2,
    "num_heads": 4,
    "ffn_hidden_size": 128,
    "max_seq_len": 64,
}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalSlurm]:
    path = os.environ["PATH"]
    os.environ["PATH"] = f"{Path(sys.executable).parent}:{path}"  # where `phalanx` is
    try:
        with local_slurm(tmp_path_factory.mktemp("slurm"), nodes=2) as slurm:
            yield slurm
    except SlurmUnavailable as unavailable:
        pytest.skip(f"there is no Slurm: {unavailable}")
    finally:
        os.environ["PATH"] = path


def write_run_file(directory: Path, name: str, steps: int) -> Path:
    run = run_from_table(
        {
            "name": name,
            "output_dir": str(directory),
            "model": MODEL,
            "data": {"train": [str(Path(json.__file__).parent)], "tokenizer": "bytes", "cache": str(directory)},
            "training": {"steps": steps, "seq_len": 64, "tokens_per_step": 256},
            "optimizer": {"warmup_steps": 1, "lr_schedule": "none"},
            "evaluation": {"tokens": 128},
            "recovery": {"rendezvous_timeout_seconds": JOB_TIMEOUT_SECONDS, "last_call_timeout_seconds": 3},
            "cluster": {"device": "cpu", "peak_flops": 1e12},
        }
    )
    file = directory / f"{name}.toml"
    file.write_text(to_toml(run))
    return file


def write_batch_script(
    directory: Path, name: str, steps: int, options: Sequence[str] = ("--nproc", "2"), check: bool = False
) -> Path:
    """Write a run file and its batch script."""
    file = write_run_file(directory, name, steps)
    batch = directory / f"{name}.sbatch"
    command_output("launch", file, "--to", "slurm", *options, "--check" if check else "--no-check", "--out", batch)
    return batch


@contextmanager
def mounted_shared_memory(cluster: LocalSlurm, node: str, size: str) -> Iterator[list[str]]:
    """Mount another /dev/shm that only the daemon of a node sees; yield the prefix of commands that see it too."""
    prefix = ["nsenter", "--mount", "--target", (cluster.directory / f"slurmd-{node}.pid").read_text().strip()]
    subprocess.run([*prefix, "mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", "/dev/shm"], check=True)
    try:
        yield prefix
    finally:
        subprocess.run([*prefix, "umount", "/dev/shm"], check=True)


def recorded_losses(directory: Path, name: str) -> dict[int, float]:
    """Return the loss of each step."""
    file = directory / name / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.is_file() else []
    return {record["step"]: record["loss"] for record in map(json.loads, lines) if "loss" in record}


def recorded_steps(directory: Path, name: str) -> list[int]:
    return list(recorded_losses(directory, name))


def is_finished(job: dict[str, str]) -> bool:
    return job["JobState"] in ("COMPLETED", "FAILED", "CANCELLED", "NODE_FAIL", "TIMEOUT")


@pytest.mark.timeout(400)
def test_slurm_job_trains_to_completion(cluster: LocalSlurm, tmp_path: Path) -> None:
    """`phalanx doctor` reports a warning for the node, and no failure."""
    with mounted_shared_memory(cluster, cluster.nodes[0], "8g") as prefix:
        subprocess.run(
            [*prefix, "dd", "if=/dev/zero", "of=/dev/shm/left", "bs=1M", "count=16", "status=none"], check=True
        )
        job = cluster.submit(write_batch_script(tmp_path, "whole", steps=4, check=True))
        info = cluster.wait(job, is_finished, JOB_TIMEOUT_SECONDS)
    log = (tmp_path / f"whole-{job}.log").read_text()
    assert (info["JobState"], info["ExitCode"]) == ("COMPLETED", "0:0"), log
    assert re.search(r"^WARN +host.shm_free ", log, re.MULTILINE)
    assert "on 2 ranks (cpu)" in log
    assert recorded_steps(tmp_path, "whole") == [1, 2, 3, 4]
    [last] = checkpoints(tmp_path / "whole" / "checkpoints")
    assert (last.name, find_damage(last)) == ("step-00000004", None)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("command", ["phalanx train", "python -m phalanx.train"])
@pytest.mark.parametrize("nodes", [1, 2])
def test_each_task_of_srun_is_a_rank(nodes: int, command: str, cluster: LocalSlurm, tmp_path: Path) -> None:
    """Tasks of srun without a launcher have the losses of `phalanx train --nproc 2`."""
    for name in ("launcher", "srun"):
        write_run_file(tmp_path, name, steps=4)
    command_output("train", tmp_path / "launcher.toml", "--nproc", "2")
    batch = tmp_path / "srun.sbatch"
    batch.write_text(f"#!/bin/bash\n#SBATCH --nodes={nodes} --ntasks=2 --output=srun.log\nsrun {command} srun.toml\n")
    info = cluster.wait(cluster.submit(batch), is_finished, JOB_TIMEOUT_SECONDS)
    log = (tmp_path / "srun.log").read_text()
    assert (info["JobState"], info["NumNodes"]) == ("COMPLETED", str(nodes)), log
    assert started_rank_counts(tmp_path, "srun") == [2]
    assert recorded_losses(tmp_path, "srun") == pytest.approx(recorded_losses(tmp_path, "launcher"), rel=1e-6)


@pytest.mark.timeout(400)
def test_tasks_of_srun_print_user_error_once(cluster: LocalSlurm, tmp_path: Path) -> None:
    file = write_run_file(tmp_path, "wrong", steps=4)
    file.write_text(file.read_text().replace("vocab_size = 257", "vocab_size = 200"))
    batch = tmp_path / "wrong.sbatch"
    batch.write_text("#!/bin/bash\n#SBATCH --nodes=2 --ntasks=2 --output=wrong.log\nsrun phalanx train wrong.toml\n")
    info = cluster.wait(cluster.submit(batch), is_finished, JOB_TIMEOUT_SECONDS)
    log = (tmp_path / "wrong.log").read_text()
    assert (info["JobState"], info["ExitCode"]) == ("FAILED", "2:0"), log
    assert log.count("phalanx: ") == log.count("phalanx: model.vocab_size") == 1, log
    assert "Traceback" not in log


@pytest.mark.timeout(400)
def test_slurm_job_excludes_node_that_fails_check(cluster: LocalSlurm, tmp_path: Path) -> None:
    failing_node = cluster.nodes[1]
    batches = [
        write_batch_script(tmp_path, name, steps=4, options=("--nodes", nodes, "--nproc", "1"), check=True)
        for name, nodes in (("one", "1:2"), ("both", "2"))
    ]
    with mounted_shared_memory(cluster, cluster.nodes[0], "16g"), mounted_shared_memory(cluster, failing_node, "64m"):
        one, both = (cluster.wait(cluster.submit(batch), is_finished, JOB_TIMEOUT_SECONDS) for batch in batches)
    logs = [(tmp_path / f"{job['JobName']}-{job['JobId']}.log").read_text() for job in (one, both)]
    assert (one["NumNodes"], one["JobState"], one["ExitCode"]) == ("2", "COMPLETED", "0:0"), logs[0]
    assert started_rank_counts(tmp_path, "one") == [1]
    assert (both["JobState"], both["ExitCode"]) == ("FAILED", "1:0"), logs[1]
    assert f"phalanx: healthy nodes: 1, required: 2. Submit with --exclude={failing_node}\n" in logs[1]
    assert all(len(re.findall(r"^FAIL +host.shm ", log, re.MULTILINE)) == 1 for log in logs)
    assert not (tmp_path / "both").exists()


@pytest.mark.timeout(400)
def test_slurm_job_excludes_node_whose_check_hangs(cluster: LocalSlurm, tmp_path: Path) -> None:
    """A node whose disk hangs does not answer. The check's time limit is a minute, the shortest that Slurm has."""
    batch = write_batch_script(tmp_path, "hangs", steps=4, options=("--nodes", "1:2", "--nproc", "1"), check=True)
    real, hung = Path(sys.executable).with_name("phalanx"), f'[ "$1 $SLURMD_NODENAME" = "doctor {cluster.nodes[1]}" ]'
    (tmp_path / "phalanx").write_text(f'#!/bin/bash\n{hung} && exec sleep 600\nexec {real} "$@"\n')
    (tmp_path / "phalanx").chmod(0o755)
    text = batch.read_text().replace("--time=5", "--time=1").replace("set -u", f"PATH={tmp_path}:$PATH\nset -u")
    batch.write_text(text)
    with mounted_shared_memory(cluster, cluster.nodes[0], "16g"):
        info = cluster.wait(job := cluster.submit(batch), is_finished, 2 * JOB_TIMEOUT_SECONDS)
    log = (tmp_path / f"hangs-{job}.log").read_text()
    assert (info["NumNodes"], info["JobState"], info["ExitCode"]) == ("2", "COMPLETED", "0:0"), log
    assert f"phalanx: excluded nodes, which failed phalanx doctor or did not answer: {cluster.nodes[1]}\n" in log
    assert started_rank_counts(tmp_path, "hangs") == [1]


@pytest.mark.timeout(400)
def test_slurm_job_does_not_blame_nodes_when_run_file_is_missing(cluster: LocalSlurm, tmp_path: Path) -> None:
    batch = write_batch_script(tmp_path, "elsewhere", steps=4, check=True)
    batch.with_suffix(".toml").unlink()
    info = cluster.wait(job := cluster.submit(batch), is_finished, JOB_TIMEOUT_SECONDS)
    log = (tmp_path / f"elsewhere-{job}.log").read_text()
    assert (info["JobState"], info["ExitCode"]) == ("FAILED", "2:0"), log
    assert "elsewhere.toml in " in log
    assert "--exclude" not in log


@pytest.mark.timeout(600)
def test_slurm_job_saves_on_scancel_and_resumes_when_resubmitted(cluster: LocalSlurm, tmp_path: Path) -> None:
    batch = write_batch_script(tmp_path, "stopped", steps=100_000)
    job = cluster.submit(batch)
    wait_until(lambda: len(recorded_steps(tmp_path, "stopped")) > 2, "it trains", JOB_TIMEOUT_SECONDS)
    cluster.run("scancel", job)
    info = cluster.wait(job, is_finished, JOB_TIMEOUT_SECONDS)
    assert info["JobState"] == "CANCELLED", "it is not requeued"
    wait_until(lambda: bool(checkpoints(tmp_path / "stopped" / "checkpoints")), "it has saved", JOB_TIMEOUT_SECONDS)
    [saved] = checkpoints(tmp_path / "stopped" / "checkpoints")
    assert find_damage(saved) is None
    step = int(saved.name.removeprefix("step-"))

    batch = write_batch_script(tmp_path, "stopped", steps=step + 2)
    job = cluster.submit(batch)
    assert cluster.wait(job, is_finished, JOB_TIMEOUT_SECONDS)["JobState"] == "COMPLETED"
    assert f"resumed after step {step}" in (tmp_path / f"stopped-{job}.log").read_text()
    assert recorded_steps(tmp_path, "stopped") == list(range(1, step + 3))


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("right", "wrong", "message"),
    [("vocab_size = 257", "vocab_size = 200", "model.vocab_size"), ("steps = 4", "step = 4", "training.step")],
)
def test_slurm_job_exits_with_2_on_user_error(
    cluster: LocalSlurm, tmp_path: Path, right: str, wrong: str, message: str
) -> None:
    """The error is found at the start of training, or before the check of the nodes, none of which is healthy."""
    batch = write_batch_script(tmp_path, "wrong", steps=4, check="step" in wrong)
    file = batch.with_suffix(".toml")
    file.write_text(file.read_text().replace(right, wrong))
    with mounted_shared_memory(cluster, cluster.nodes[0], "64m"):
        info = cluster.wait(job := cluster.submit(batch), is_finished, JOB_TIMEOUT_SECONDS)
    log = (tmp_path / f"wrong-{job}.log").read_text()
    assert (info["JobState"], info["ExitCode"], info["Restarts"]) == ("FAILED", "2:0", "0"), log
    assert message in log
    assert "--exclude" not in log


def is_requeued(job: dict[str, str]) -> bool:
    return job["JobState"] == "PENDING" and job["Reason"] == "BeginTime"


@pytest.mark.timeout(600)
def test_slurm_job_saves_and_is_requeued_on_sigterm(cluster: LocalSlurm, tmp_path: Path) -> None:
    """`#SBATCH --signal` sends SIGTERM before the time limit, to the steps and not to the script."""
    job = cluster.submit(write_batch_script(tmp_path, "again", steps=100_000))
    wait_until(lambda: len(recorded_steps(tmp_path, "again")) > 2, "it trains", JOB_TIMEOUT_SECONDS)
    cluster.run("scancel", "--signal=TERM", job)
    cluster.wait(job, is_requeued, JOB_TIMEOUT_SECONDS)
    [saved] = checkpoints(tmp_path / "again" / "checkpoints")
    step = step_of(saved)

    write_batch_script(tmp_path, "again", steps=step + 2)
    cluster.run("scontrol", "update", f"JobId={job}", "StartTime=now+3")  # rather than two minutes later
    info = cluster.wait(job, is_finished, JOB_TIMEOUT_SECONDS)
    assert (info["JobState"], info["ExitCode"], info["Restarts"]) == ("COMPLETED", "0:0", "1")
    assert f"resumed after step {step}" in (tmp_path / f"again-{job}.log").read_text()
    assert recorded_steps(tmp_path, "again") == list(range(1, step + 3))


@pytest.mark.timeout(600)
def test_slurm_job_continues_when_one_of_two_nodes_goes_down(cluster: LocalSlurm, tmp_path: Path) -> None:
    """The remaining node decides how the job ends, not srun's status of the other."""
    job = cluster.submit(write_batch_script(tmp_path, "two", steps=100_000, options=("--nodes", "1:2", "--nproc", "1")))
    wait_until(lambda: len(recorded_steps(tmp_path, "two")) > 2, "it trains", JOB_TIMEOUT_SECONDS)
    assert cluster.job_info(job)["NumNodes"] == "2"
    cluster.run("scontrol", "update", f"NodeName={cluster.nodes[1]}", "State=down", "Reason=test")
    wait_until(lambda: started_rank_counts(tmp_path, "two") == [2, 1], "it continues alone", JOB_TIMEOUT_SECONDS)
    wait_until(lambda: len(recorded_steps(tmp_path, "two")) > 2, "it trains alone", JOB_TIMEOUT_SECONDS)
    cluster.run("scancel", "--signal=TERM", job)
    cluster.wait(job, is_requeued, JOB_TIMEOUT_SECONDS)
    cluster.run("scancel", job)
    done = len(recorded_steps(tmp_path, "two"))
    assert recorded_steps(tmp_path, "two") == list(range(1, done + 1))
    assert step_of(checkpoints(tmp_path / "two" / "checkpoints")[0]) == done


def started_rank_counts(directory: Path, name: str) -> list[int]:
    return [event["ranks"] for event in read_events(directory / name) if event["kind"] == "started"]
