"""`phalanx train --print-config`, and the imports and CPU time of commands before they start their work."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from functools import partial
from importlib import import_module
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from phalanx.cli.commands.auto_layout import replan_layout
from phalanx.cli.main import app
from phalanx.launch.process import select_nproc
from phalanx.spec.errors import LocalNodeError
from phalanx.spec.files.load import load_run, run_from_table
from phalanx.spec.files.write import to_toml
from phalanx.spec.run import RunSpec
from phalanx.testing.processes import run_python

train_command = import_module("phalanx.cli.commands.train")

RUN = """
name = "first"
[model]
preset = "tiny"
moe = {num_experts = 4, top_k = 2, expert_ffn_size = 96}
[training]
steps = 30
seq_len = 64
tokens_per_step = 4096
seed = 2
[layout]
data_parallel = "zero3"
micro_batch_size = 8
[optimizer]
warmup_steps = 3
"""


@pytest.fixture
def run_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text(RUN)
    return tmp_path / "run.toml"


def print_config_output(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["train", "run.toml", "--print-config", *arguments], catch_exceptions=False)
    assert (result.exit_code, result.stderr) == (0, "")
    return result.stdout


def test_train_print_config_round_trips_run_and_writes_no_files(run_file: Path) -> None:
    run_spec = load_run(run_file, ["training.steps=7", "cluster.nproc_per_node=4"], environment={})
    text = print_config_output("--nproc", "4", "--set", "training.steps=7")
    assert run_from_table(tomllib.loads(text)) == run_spec
    assert [path.name for path in run_file.parent.iterdir()] == ["run.toml"]
    second_file = run_file.with_name("again.toml")
    second_file.write_text(text)
    assert load_run(second_file, environment={}) == run_spec


def test_train_print_config_shows_batch_plan(run_file: Path) -> None:
    for nproc, batch_plan in (
        (1, "8 sequences x 1 ranks x 8 accumulated"),
        (4, "8 sequences x 4 ranks x 2 accumulated"),
    ):
        assert print_config_output("--nproc", str(nproc)).splitlines()[0] == f"# per update: {batch_plan}"
    assert print_config_output("--set", "cluster.nproc_per_node=2", "--set", "cluster.nodes=4").startswith(
        "# per update: 8 sequences x 8 "
    )


def test_train_print_config_names_origin_of_learning_rate(run_file: Path) -> None:
    text = print_config_output("--set", "model.vocab_size=150000")
    assert (
        "\n# optimizer.learning_rate = 0.001: not set; the default is that of Pythia 70M (arXiv 2304.01373)\n" in text
    )
    assert "\n# optimizer.learning_rate = 0.002: as set\n" in print_config_output(
        "--set", "optimizer.learning_rate=2e-3"
    )


def test_train_print_config_names_attention_kernel(run_file: Path) -> None:
    settings = ("data.mask_documents=false", "model.sliding_window=16")
    output = [print_config_output(), print_config_output(*(argument for x in settings for argument in ("--set", x)))]
    kernels = [text.splitlines()[1] for text in output]
    assert kernels == [f"# attention kernel: flash by document{window}" for window in ("", ", window 16")]


def test_train_print_config_applies_defaults_file_environment_set_in_order(
    run_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PHALANX_TRAINING__SEED", "3")
    monkeypatch.setenv("PHALANX_TRAINING__SEQ_LEN", "128")
    training = tomllib.loads(print_config_output("--set", "training.seed=4"))["training"]
    assert training["precision"] == "bf16"  # the default
    assert training["steps"] == 30  # the file
    assert training["seq_len"] == 128  # the environment
    assert training["seed"] == 4  # --set


PROGRAM = """
import json, resource, sys
from phalanx.cli.main import main
try:
    main()
except SystemExit as ended:
    assert not ended.code, ended.code
used = resource.getrusage(resource.RUSAGE_SELF)
heavy = [name for name in ("torch", "tensorboard", "transformers", "datasets", "pandas") if name in sys.modules]
print(json.dumps({"heavy": heavy, "seconds": used.ru_utime + used.ru_stime}), file=sys.stderr)
"""


@pytest.mark.parametrize(
    "command",
    [["--help"], ["info", "tiny"], ["init", "new.toml"], ["memory", "run.toml", "--ranks", "2"]],
    ids=" ".join,
)
def test_cli_commands_start_without_importing_torch(command: list[str], run_file: Path) -> None:
    process = subprocess.run([sys.executable, "-c", PROGRAM, *command], capture_output=True, text=True, timeout=60)
    assert process.returncode == 0, process.stderr
    cost = json.loads(process.stderr.splitlines()[-1])
    assert cost["heavy"] == []
    print(f"phalanx {' '.join(command)}: {cost['seconds']:.2f} s of CPU time")


def test_replan_layout_is_unchanged_when_machine_memory_is_unknown(tmp_path: Path) -> None:
    """A node may be lost before the run has measured anything, and the planner cannot choose a layout then."""
    cluster, layout = {"peak_flops": 1e12}, {"data_parallel": "zero2"}
    run = run_from_table(
        {"output_dir": str(tmp_path), "model": {"preset": "tiny"}, "cluster": cluster, "layout": layout}
    )
    (tmp_path / run.name).mkdir()
    (tmp_path / run.name / "run.toml").write_text(to_toml(run))
    assert replan_layout(run, 1, 1) == run.layout


def test_replan_layout_is_equal_on_nodes_that_chose_other_recomputation(tmp_path: Path) -> None:
    table = {"output_dir": str(tmp_path), "model": {"preset": "tiny"}}
    recorded, other = (
        run_from_table({**table, "layout": {"activation_checkpointing": "full", "recomputed_blocks": count}})
        for count in (1, 2)
    )
    (tmp_path / recorded.name).mkdir()
    (tmp_path / recorded.name / "run.toml").write_text(to_toml(recorded))
    assert replan_layout(other, 1, 2) == recorded.layout


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (("--nodes", "1:2", "--rendezvous", "nowhere.invalid:29500", "--nproc", "1"), 1, "cannot be resolved"),
        (("--nodes", "1:2", "--rendezvous", "127.0.0.1:29500", "--nproc", "8"), 1, "finds no GPU"),
        (("--nodes", "1:2", "--rendezvous", "127.0.0.1", "--nproc", "8"), 2, "is not a valid rendezvous address"),
        (("--nproc", "8"), 2, "fix: run it on a machine with GPUs; to check the file here, use"),
    ],
)
def test_train_exits_1_for_local_node_errors_and_2_for_user_errors(
    run_file: Path, options: tuple[str, ...], code: int, message: str
) -> None:
    """After a local error the other nodes may continue, and Kubernetes should restart this one."""
    unfit = (
        "--set",
        "cluster.device=cuda",
        "--set",
        "recovery.rendezvous_timeout_seconds=0.1",
        "--set",
        "layout.micro_batch_size=1",
    )
    command = [sys.executable, "-m", "phalanx", "train", str(run_file), *options, *unfit]
    no_gpus = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    process = run_python(command, env=no_gpus, text=True, timeout=60)
    assert (process.returncode, message in process.stderr) == (code, True), process.stderr


def test_select_nproc_raises_local_node_error_for_too_few_gpus(run_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 7)
    with pytest.raises(LocalNodeError, match="exceeds the 7 GPUs of this machine"):
        select_nproc(load_run(run_file), 8)


TWO_TASKS = {
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2",
}
"""srun's variables of a task."""
TRAIN_JOB = {
    "PET_NNODES": "2",
    "PET_NPROC_PER_NODE": "4",
    "PET_MASTER_ADDR": "127.0.0.1",
    "PET_MASTER_PORT": "29400",
}
"""Kubeflow's variables of a pod."""


@pytest.mark.parametrize(
    ("variables", "options", "start"),
    [
        (TWO_TASKS, ["--resume"], ("rank", "--resume")),
        (TWO_TASKS, ["--set", "training.steps=2"], ("rank", "--set", "training.steps=2")),
        (TWO_TASKS, ["--nproc", "4"], ("launcher", 1, 4)),
        (TRAIN_JOB, [], ("node", 2, 4, 2, ("127.0.0.1", 29400))),
        ({**TRAIN_JOB, "PET_NNODES": "1:2"}, [], ("node", 2, 4, 1, ("127.0.0.1", 29400))),
        ({**TRAIN_JOB, "PET_NNODES": "1"}, [], ("launcher", 1, 4)),
        (TRAIN_JOB, ["--nproc", "1"], ("launcher", 1, 1)),
    ],
    ids=["srun", "srun-set", "srun-nproc", "kubeflow", "kubeflow-elastic", "kubeflow-one-node", "kubeflow-nproc"],
)
def test_train_starts_what_variables_of_other_program_say(
    variables: dict[str, str],
    options: list[str],
    start: tuple[object, ...],
    run_file: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    starts: list[tuple[object, ...]] = []

    def become_rank(_: str, file: str, *words: str) -> None:
        starts.append(("rank", *words))
        sys.exit()

    def launch(kind: str, run: RunSpec, _: object, *nodes: object) -> int:
        starts.append((kind, run.cluster.nodes, run.cluster.nproc_per_node, *nodes))
        return 0

    monkeypatch.setattr("phalanx.launch.process.run_in_place", become_rank)
    monkeypatch.setattr(train_command, "run_on_one_machine", partial(launch, "launcher"))
    monkeypatch.setattr(train_command, "run_on_nodes", partial(launch, "node"))
    monkeypatch.setattr(os, "environ", {**os.environ, **variables})
    result = CliRunner().invoke(app, ["train", str(run_file), *options])
    assert result.exit_code == 0, result.output
    assert starts == [start]
