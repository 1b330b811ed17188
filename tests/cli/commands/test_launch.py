"""`phalanx launch`: the Slurm script as text (test_slurm.py runs it), and
Kubernetes objects read by the client's models."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes.client
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from phalanx.launch.jobs.job import parse_nodes
from phalanx.launch.jobs.slurm import parse_time_limit
from phalanx.spec.errors import UserError
from tests.helpers import h100_snapshot
from tests.helpers.cli_runner import command_json, command_output, command_stderr

ROOT = Path(__file__).parents[3]
RUN = """
name = "first"
[model]
preset = "tiny"
[training]
tokens_per_step = 4096
seq_len = 64
[layout]
pp = 2
"""
IMAGE = ("--image", "registry.example/phalanx:1", "--volume", "shared")
CPU = ("--set", "cluster.device=cpu")


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    (tmp_path / "run.toml").write_text(RUN)
    return tmp_path / "run.toml"


def launch_output(file: Path, target: str, *options: str) -> str:
    """Return the output of `phalanx launch` for nodes of 8 ranks."""
    return command_output("launch", file, "--to", target, "--nproc", 8, *options)


def sbatch_options(script: str) -> dict[str, str]:
    """Return the #SBATCH options of a batch script."""
    lines = [line.removeprefix("#SBATCH --") for line in script.splitlines() if line.startswith("#SBATCH --")]
    return dict(line.partition("=")[::2] for line in lines)


def exported_variables(script: str, **variables: str) -> dict[str, str]:
    """Return the variables that a batch script exports if the user has set these."""
    lines = [line for line in script.splitlines() if line[:7] == "export "]
    cores = {"PATH": os.environ["PATH"], "cores": "96", "nproc": "8"}
    shell = subprocess.run(
        ["bash", "-c", "\n".join([*lines, "env -0"])], env=cores | variables, capture_output=True, text=True
    )
    return dict(line.split("=", 1) for line in shell.stdout.split("\0")[:-1])


FAKE_COMMANDS = {
    "phalanx": "exit 0",
    "scontrol": "[ $1 = requeue ] && echo again || printf '%s\\n' n1 n2",
    "srun": """
        echo "$*" >> srun.log
        case "$*" in
            *doctor*) printf '%s\\n' n1 n2 ;;
            *) mkdir -p $SAVES; printf '%s\\n' $CODES ;;
        esac""",
}
"""Slurm commands of a cluster with two healthy nodes. Training ends with CODES and saves the checkpoints in SAVES."""


def run_batch_script(
    script: str, directory: Path, codes: str = "0", saves: str = ".", cpus: str = "8(x2)"
) -> tuple[int, str]:
    """Run a batch script with the fake commands, and return its exit code and output."""
    for name, body in FAKE_COMMANDS.items():
        (directory / name).write_text(f"#!/bin/bash\n{body}\n")
        (directory / name).chmod(0o755)
    variables = {"CODES": codes, "SAVES": saves, "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]"}
    variables |= {
        "SLURM_JOB_CPUS_PER_NODE": cpus,
        "SLURM_CPUS_ON_NODE": "16",
        "PATH": f"{directory}:{os.environ['PATH']}",
    }
    process = subprocess.run(
        ["bash", "-c", script], cwd=directory, env=variables, capture_output=True, text=True, timeout=20
    )
    return process.returncode, process.stdout + process.stderr


def test_example_slurm_script_equals_launch_output(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    example = Path("examples/slurm.sbatch").read_text()
    command = example.splitlines()[1].removeprefix("# Written by: phalanx ")
    assert command_output(*shlex.split(command)) == example


def test_slurm_script_requests_resources_of_the_run(run_file: Path) -> None:
    options = sbatch_options(
        launch_output(run_file, "slurm", "--nodes", "3:4", "--time", "1-00", "--partition", "gpu", "--account", "lab")
    )
    expected = {"job-name": "first", "nodes": "3-4", "gpus-per-node": "8", "exclusive": "", "mem": "0", "time": "1-00"}
    expected |= {"partition": "gpu", "account": "lab", "signal": "TERM@660", "requeue": "", "open-mode": "append"}
    assert options == expected | {"output": "%x-%j.log", "no-kill": ""}
    shared = sbatch_options(launch_output(run_file, "slurm", "--cpus", "16", "--memory", "64"))
    assert (shared["nodes"], shared["cpus-per-task"], shared["mem"]) == ("1", "16", "64G")
    assert "exclusive" not in shared


def test_slurm_script_runs_same_train_command_on_every_node(run_file: Path) -> None:
    several = launch_output(run_file, "slurm", "--nodes", "2:4")
    assert '"$run" "${rendezvous[@]}" --nproc 8 --resume' in several
    assert '--nodes "$min_nodes:${#healthy[@]}" --rendezvous "${healthy[0]}:' in several
    script = launch_output(run_file, "slurm")
    assert '"$run" --nproc 8 --resume)' in script
    assert "--rendezvous" not in script
    assert '"$run" --nodes 1 --nproc 8 --resume --set cluster.nodes=4)' in launch_output(
        run_file, "slurm", "--nodes", "1", "--set", "cluster.nodes=4"
    )


@pytest.mark.parametrize("options", [(), ("--nodes", "2:4"), ("--no-check",), ("--set", "data.text_key='it''s $(x)'")])
def test_slurm_script_is_valid_bash(run_file: Path, options: tuple[str, ...]) -> None:
    script = launch_output(run_file, "slurm", *options)
    assert subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True, timeout=20).stderr == ""


def test_slurm_script_quotes_overrides_as_single_arguments(run_file: Path) -> None:
    """bash parses the words after the run file as it does in Slurm's tasks."""
    override = "data.text_key='it is $(id) `id` \"'"
    script = launch_output(run_file, "slurm", "--set", override)
    for arguments, expected in zip(
        re.findall(r' "\$run" (.*?)(?: --print-config .*| \| sort -V\)|\))$', script, re.MULTILINE),
        (["--nproc", "8"], ["--quick", "--nproc", "8"], ["--nproc", "8", "--resume"]),
        strict=True,
    ):
        read = subprocess.run(["bash", "-c", f"printf '%s\\0' {arguments}"], text=True, capture_output=True, timeout=20)
        assert read.stdout.split("\0")[:-1] == [*expected, "--set", override]


def test_slurm_script_writes_flight_recorder_dumps_to_run_directory(run_file: Path) -> None:
    assert (
        exported_variables(launch_output(run_file, "slurm"))["TORCH_FR_DUMP_TEMP_FILE"]
        == "runs/first/flight-recorder-rank-"
    )
    assert [
        name for name in exported_variables(launch_output(run_file, "slurm", *CPU)) if "NCCL" in name or "TORCH" in name
    ] == []


def test_slurm_script_preserves_environment_variables_set_by_user(run_file: Path) -> None:
    script = launch_output(run_file, "slurm", "--set", "output_dir='a b/$x'")
    exported = exported_variables(script)
    assert (exported["NCCL_DEBUG"], exported["OMP_NUM_THREADS"]) == ("WARN", "12")
    assert exported["TORCH_FR_DUMP_TEMP_FILE"] == "a b/$x/first/flight-recorder-rank-"
    user_variables = {"NCCL_DEBUG": "INFO", "OMP_NUM_THREADS": "3", "TORCH_FR_DUMP_TEMP_FILE": "/tmp/a b"}
    assert exported_variables(script, **user_variables).items() >= user_variables.items()


@pytest.mark.parametrize(
    ("codes", "saved_path", "expected"),
    [
        ("0 1", "", (0, "")),
        ("2 2", "", (2, "")),
        ("1 2", "", (2, "")),
        ("1", "", (1, "")),
        ("", "", (1, "")),
        ("75 75", "runs/first/checkpoints/step-00000009", (0, "again\n")),
        ("75 2", "runs/first/checkpoints/step-00000009", (0, "again\n")),
        ("75 75", "runs/first/checkpoints/step-00000009.tmp", (1, "saved a new checkpoint")),
        ("75", "runs/first/checkpoints/step-00000007", (1, "saved a new checkpoint")),
    ],
)
def test_slurm_script_requeues_only_stopped_run_with_new_checkpoint(
    run_file: Path, codes: str, saved_path: str, expected: tuple[int, str]
) -> None:
    """The run was started from step 7."""
    (run_file.parent / "runs" / "first" / "checkpoints" / "step-00000007").mkdir(parents=True)
    code, output = run_batch_script(
        launch_output(run_file, "slurm", "--nodes", "1:2"), run_file.parent, codes, saved_path or "."
    )
    assert code == expected[0]
    assert expected[1] in output if expected[1] else output == ""


@pytest.mark.parametrize(("cpus", "min_cpus"), [("16", 16), ("16(x2)", 16), ("16(x2),8", 8), ("8,128(x30),16(x2)", 8)])
def test_slurm_script_uses_cpu_count_of_smallest_node(run_file: Path, cpus: str, min_cpus: int) -> None:
    code, _ = run_batch_script(launch_output(run_file, "slurm", "--nodes", "2"), run_file.parent, cpus=cpus)
    check, train = (run_file.parent / "srun.log").read_text().splitlines()
    assert code == 0
    assert f"--cpus-per-task={min_cpus} " in check
    assert f"--cpus-per-task={min_cpus} " in train
    assert " --time=5 " in check
    assert "--time" not in train


@pytest.mark.parametrize(
    ("text", "expected"),
    [("90", 5400), ("12:30", 750), ("24:00:00", 86_400), ("2-0", 172_800), ("1-02:03", 93_780), ("1-02:03:04", 93_784)],
)
def test_slurm_time_limit_is_parsed_to_seconds(text: str, expected: int) -> None:
    assert parse_time_limit(text) == expected


@given(st.integers(1, 99), st.integers(0, 99))
def test_parse_nodes_accepts_only_number_or_range(min_nodes: int, extra_nodes: int) -> None:
    assert parse_nodes(str(min_nodes)) == (min_nodes, min_nodes)
    assert parse_nodes(f"{min_nodes}:{min_nodes + extra_nodes}") == (min_nodes, min_nodes + extra_nodes)
    for text in (
        f"{min_nodes + extra_nodes + 1}:{min_nodes}",
        f"{min_nodes}:",
        "0",
        f"{min_nodes}-{min_nodes + extra_nodes}",
        "",
    ):
        with pytest.raises(UserError, match="is not a valid node count"):
            parse_nodes(text)


def parse_kubernetes_objects(text: str) -> dict[str, Any]:
    """Return the objects of a file by kind, as the client's models, which would lose unknown fields."""
    api, objects = kubernetes.client.ApiClient(), {}
    for table in yaml.safe_load_all(text):
        kind = table["kind"]
        objects[kind] = api.deserialize(json.dumps(table), f"V1{kind}", "application/json")
        assert api.sanitize_for_serialization(objects[kind]) == table
    return objects


def test_kubernetes_models_reject_unknown_and_missing_fields(run_file: Path) -> None:
    text = launch_output(run_file, "kubernetes", *IMAGE)
    with pytest.raises(AssertionError):
        parse_kubernetes_objects(text.replace("  completions: 1", "  completion: 1"))
    with pytest.raises(ValueError, match="template"):
        parse_kubernetes_objects(text[: text.index("  template:")])
    with pytest.raises(ValueError, match=r"nvidia\.com/gpu"):
        parse_kubernetes_objects(text.replace('"nvidia.com/gpu": "8"', '"nvidia.com/gpu": 8'))


def test_kubernetes_job_starts_one_pod_per_node(run_file: Path) -> None:
    objects = parse_kubernetes_objects(
        launch_output(run_file, "kubernetes", "--nodes", "2:4", "--cpus", "32", "--memory", "256", *IMAGE)
    )
    job, service = objects["Job"].spec, objects["Service"].spec
    pod = job.template.spec
    [train], [check] = pod.containers, pod.init_containers
    assert (job.completion_mode, job.completions, job.parallelism) == ("Indexed", 4, 4)
    assert job.success_policy.rules[0].succeeded_indexes == "0"
    first_pod = f"{objects['Job'].metadata.name}-0.{pod.subdomain}"
    assert train.command == [
        "phalanx",
        "train",
        "/etc/phalanx/run.toml",
        "--nodes",
        "2:4",
        "--rendezvous",
        f"{first_pod}:29500",
        "--nproc",
        "8",
        "--resume",
    ]
    assert pod.subdomain == objects["Service"].metadata.name
    assert (service.cluster_ip, service.publish_not_ready_addresses) == ("None", True)
    assert service.selector == {"batch.kubernetes.io/job-name": objects["Job"].metadata.name}
    for container in (train, check):
        assert container.resources.limits == {"nvidia.com/gpu": "8", "cpu": "32", "memory": "256Gi"}
        assert {env.name: env.value for env in container.env}["OMP_NUM_THREADS"] == "4"
    assert pod.termination_grace_period_seconds == 660
    volumes = {volume.name: volume for volume in pod.volumes}
    assert volumes["shared-memory"].empty_dir.medium == "Memory"
    assert volumes["work"].persistent_volume_claim.claim_name == "shared"
    assert {mount.name: mount.mount_path for mount in train.volume_mounts}["shared-memory"] == "/dev/shm"


def test_kubernetes_job_maps_exit_codes_to_pod_failure_policy(run_file: Path) -> None:
    job = parse_kubernetes_objects(launch_output(run_file, "kubernetes", "--nodes", "2", *IMAGE))["Job"].spec
    *by_code, disruption = job.pod_failure_policy.rules
    [train], [check] = job.template.spec.containers, job.template.spec.init_containers
    codes = [(rule.action, rule.on_exit_codes.container_name, rule.on_exit_codes.values) for rule in by_code]
    assert codes == [("FailJob", train.name, [2]), ("FailJob", check.name, [2]), ("Ignore", train.name, [75])]
    assert (disruption.action, disruption.on_pod_conditions[0].type) == ("Ignore", "DisruptionTarget")
    assert job.template.spec.restart_policy == "Never"
    assert job.success_policy is None


def test_kubernetes_config_map_contains_full_run_file(run_file: Path) -> None:
    run_file.write_text(
        RUN.replace('"first"', '"1.0"  # "ü": {{x}} {x}').replace("\n", "\n  ") + "\n\t\n  [evaluation]\n"
    )
    with pytest.raises(UserError, match="must start with a letter"):
        launch_output(run_file, "kubernetes", *IMAGE)
    objects = parse_kubernetes_objects(launch_output(run_file, "kubernetes", "--set", "name=on", *IMAGE))
    assert objects["ConfigMap"].data == {"run.toml": run_file.read_text().strip() + "\n"}
    assert objects["Job"].metadata.name == "on"


def test_job_node_check_counts_ranks_of_all_nodes(run_file: Path, tmp_path: Path) -> None:
    """The run is invalid for eight ranks in total, on a healthy node of eight."""
    run_file.write_text(RUN.replace("tiny", "llama3-8b").replace("pp = 2", "pp = 16"))
    h100_snapshot.write_h100_snapshot(tmp_path / "node")
    [check] = parse_kubernetes_objects(launch_output(run_file, "kubernetes", "--nodes", "2", *IMAGE))[
        "Job"
    ].spec.template.spec.init_containers
    assert check.args[0] == "/etc/phalanx/run.toml"
    assert "0 failures" in command_output(
        "doctor", run_file, *check.args[1:], "--quick", "--from-snapshot", tmp_path / "node"
    )
    for target, options in (("slurm", ()), ("skypilot", ("--accelerator", "H100", *IMAGE))):
        assert f" {shlex.join(check.args[1:])}" in launch_output(run_file, target, "--nodes", "2", *options)


def test_launch_refuses_what_memory_says_does_not_fit(run_file: Path) -> None:
    run_file.write_text(
        RUN.replace("tiny", "llama3-70b").replace("pp = 2", "data_parallel = 'ddp'") + "[cluster]\npreset = 'h100'\n"
    )
    count = ("--ranks", 16, "--set", "cluster.nodes=2")
    [layout] = [row for row in command_json("memory", run_file, *count)["layouts"] if row["own"]]
    assert layout["p_oom"] > 0.99
    planned_memory = f"{layout['memory']['device'] / 2**30:.1f} GiB"
    fitting = ("--set", "layout.data_parallel=zero3", "--set", "layout.tp=8")
    for target, options in (("slurm", ()), ("kubernetes", IMAGE), ("skypilot", ("--accelerator", "H100", *IMAGE))):
        with pytest.raises(UserError) as error_info:
            launch_output(run_file, target, "--nodes", "2", *options)
        assert (error_info.value.field, error_info.value.value) == ("planned memory", planned_memory)
        assert error_info.value.problem == "does not fit in the 80.0 GiB of a GPU (h100) with 2 nodes of 8 ranks"
        assert f"phalanx advise oom {run_file} --nodes 2 --nproc 8" in error_info.value.fix
        forced = launch_output(run_file, target, "--nodes", "2", "--force", *options)
        assert forced.count("--force") == 3  # in the header, the check of the run file, and the start
        assert "--force" not in launch_output(run_file, target, "--nodes", "2", *fitting, *options)
    errors = command_stderr("launch", run_file, "--to", "slurm", "--nproc", 8, "--nodes", "2:4", *fitting)
    assert re.search(r"memory: with 2 nodes of 8 ranks, [\d.]+ GiB on the fullest rank; may not fit \(P\(OOM", errors)
    assert re.search(r"memory: with 4 nodes of 8 ranks, [\d.]+ GiB on the fullest rank; fits in the 80", errors)
    with pytest.raises(UserError, match=r"does not fit .*with 1 node of 8 ranks"):
        launch_output(run_file, "slurm", "--nodes", "1:2", *fitting)


def test_launch_names_the_memory_that_is_too_small(run_file: Path) -> None:
    run_file.write_text(RUN.replace("tiny", "llama3-8b").replace("pp = 2", "") + "[cluster]\npreset = 'h100'\n")
    offload = ("layout.data_parallel=zero3", "layout.offload=cpu", "cluster.host_memory_bytes=8000000000")
    options = [argument for change in offload for argument in ("--set", change)]
    with pytest.raises(UserError, match="CPU memory: a node of 8 ranks needs up to 209") as error_info:
        launch_output(run_file, "slurm", *options)
    assert error_info.value.field == "cluster.host_memory_bytes"
    unknown = ("--set", "model.implementation=torch.nn:Linear")
    assert "memory: not checked, because model.implem" in command_stderr(
        "launch", run_file, "--to", "slurm", "--nproc", 8, *unknown
    )


def test_launch_names_unset_choices_of_a_large_model(run_file: Path) -> None:
    launch = ("launch", run_file, "--to", "slurm", "--nproc", 8)
    assert command_stderr(*launch).splitlines() == [
        "phalanx: memory: not checked, because that of a GPU is unknown; set cluster.preset or cluster.memory_bytes"
    ]
    assert "that of a rank is unknown" in command_stderr(*launch, *CPU)
    run_file.write_text(RUN.replace("tiny", "llama3-8b").replace("pp = 2", ""))
    launch = (*launch, "--set", "layout.data_parallel=zero1")
    errors = command_stderr(*launch)
    assert (
        "not set: data.train (stdlib), data.tokenizer (bpe), data.tokenizer_vocab (2048; the model has 128256), tr"
        in errors
    )
    choices = {"data.train": "books.txt", "data.tokenizer": "llama.json", "training.steps": 9, "checkpoint.every": 9}
    choices["optimizer.warmup_steps"] = 1
    errors = command_stderr(
        *launch, *(argument for item in choices.items() for argument in ("--set", "{}={}".format(*item)))
    )
    assert [line.split(":")[1] for line in errors.splitlines()] == [" memory"]
    automatic = ("--set", "layout=auto", "--set", "cluster.preset=h100", "--set", "data.train=books.txt")
    errors = command_stderr(*launch, *automatic, "--set", "data.tokenizer=llama.json")
    assert "data." not in errors
    assert 'layout = "auto": the layout is chosen at the start' in errors


def test_launch_plans_the_layout_that_a_large_model_lacks(run_file: Path) -> None:
    """The job plans again at its start, for the nodes that are healthy then."""
    run_file.write_text(RUN.replace("tiny", "llama3-8b").replace("[layout]\npp = 2", ""))
    launch = ("launch", run_file, "--to", "slurm", "--nproc", 8, "--nodes", "1:2", "--set", "training.seq_len=4096")
    with pytest.raises(UserError, match=r"^layout is not set; .*\n  fix: add --set cluster.preset=MACHINE"):
        command_output(*launch)
    launch = (*launch, "--set", "training.tokens_per_step=65536", "--set", "cluster.preset=h100")
    lines = command_stderr(*launch).splitlines()
    number = lines.index("phalanx: layout is not set, so it is planned; with 2 nodes of 8 ranks:")
    assert re.match(r"layout: zero3 dp 16, .* \(of [\d,]+; \d\.\d+ s a step predicted\)", lines[number + 1])
    script = command_output(*launch)
    assert "--resume --set training.seq_len=4096" in script
    assert script.count("--set layout=auto") == script.count("--set cluster.preset=h100") - 1  # the first line
    explicit = command_output(*launch, "--set", "layout.data_parallel=zero3")
    assert "layout=auto" not in explicit


def expand_kubernetes_variables(argument: str) -> str:
    """Return a container's argument after Kubernetes' expansion, with only
    NODE_NAME set (k8s.io/kubernetes, expansion.go)."""
    return re.sub(
        r"\$(?:(\$)|\((\w+)\))", lambda match: match[1] or {"NODE_NAME": "n7"}.get(match[2], match[0]), argument
    )


def test_kubernetes_job_does_not_expand_user_values(run_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PHALANX_DATA__TRAIN", "['$(NODE_NAME)',\n'$$']")
    monkeypatch.setenv("PHALANX_LOG", "info,train=debug")
    override = "data.held_out=['$(NODE_NAME)',\r\n'$$']"
    pod = parse_kubernetes_objects(launch_output(run_file, "kubernetes", "--set", override, *IMAGE))[
        "Job"
    ].spec.template.spec
    [train], [check] = pod.containers, pod.init_containers
    assert [expand_kubernetes_variables(argument) for argument in train.command[-2:]] == ["--set", override]
    assert [expand_kubernetes_variables(argument) for argument in check.args[-2:]] == ["--set", override]
    assert {env.name: env.value for env in train.env}["PHALANX_LOG"] == "info,train=debug"
    assert [expand_kubernetes_variables(env.value) for env in train.env if env.name == "PHALANX_DATA__TRAIN"] == [
        "['$(NODE_NAME)',\n'$$']"
    ]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ((), None),
        (("--nodes", "2"), "86400"),
        (("--nodes", "2", "--set", "recovery.rendezvous_timeout_seconds=60"), None),
    ],
)
def test_kubernetes_job_extends_rendezvous_timeout_for_several_nodes(
    run_file: Path, options: tuple[str, ...], expected: str | None
) -> None:
    [train] = parse_kubernetes_objects(launch_output(run_file, "kubernetes", *IMAGE, *options))[
        "Job"
    ].spec.template.spec.containers
    assert {env.name: env.value for env in train.env}.get("PHALANX_RECOVERY__RENDEZVOUS_TIMEOUT_SECONDS") == expected


def test_kubernetes_failed_check_names_node_to_cordon(run_file: Path) -> None:
    """Runs the shell of the init container with a fake doctor that returns each of the documented exit codes."""
    job = parse_kubernetes_objects(launch_output(run_file, "kubernetes", *IMAGE))["Job"].spec
    [check] = job.template.spec.init_containers
    assert check.command[:2] == ["sh", "-c"]
    for run_code, code, expected in ((0, 0, 0), (0, 1, 0), (0, 2, 1), (0, 3, 0), (2, 2, 2), (1, 2, 1)):
        script = f"phalanx() {{ [ $1 = doctor ] && return {code} || return {run_code}; }}\n{check.command[2]}"
        process = subprocess.run(
            ["sh", "-c", script], env={"NODE_NAME": "n7"}, capture_output=True, text=True, timeout=20
        )
        assert process.returncode == expected
        assert ("kubectl cordon n7" in process.stderr) == (code == 2 and not run_code)
    unchecked = parse_kubernetes_objects(launch_output(run_file, "kubernetes", "--no-check", *IMAGE))["Job"].spec
    assert unchecked.template.spec.init_containers is None
    assert {rule.on_exit_codes.container_name for rule in unchecked.pod_failure_policy.rules[:-1]} == {"train"}


@pytest.mark.parametrize(("target", "options"), [("kubernetes", ()), ("skypilot", ("--accelerator", "H100"))])
def test_job_node_check_does_not_blame_node_when_run_file_is_invalid(
    run_file: Path, target: str, options: tuple[str, ...]
) -> None:
    """Runs the node check with the real command, on a run file that was edited after the launch file was written."""
    text = launch_output(run_file, target, *options, *IMAGE)
    run_file.write_text(RUN + "[evaluation]\nstep = 3\n")
    if target == "kubernetes":
        [check] = parse_kubernetes_objects(text)["Job"].spec.template.spec.init_containers
        command = [*check.command, *check.args]
    else:
        command = ["bash", "-c", yaml.safe_load(text)["run"].replace("cd /work", ":")]
    command = [re.sub(r"(/etc|~)/phalanx/run\.toml", str(run_file), argument) for argument in command]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    process = subprocess.run(command, env={**os.environ, "PATH": path}, capture_output=True, text=True, timeout=60)
    assert process.returncode == 2, process.stderr
    assert "evaluation.step" in process.stderr
    assert not re.search("cordon|failed phalanx doctor", process.stderr)


def test_skypilot_task_has_nodes_accelerators_and_train_command(run_file: Path) -> None:
    task = yaml.safe_load(launch_output(run_file, "skypilot", "--nodes", "2", "--accelerator", "H100", *IMAGE))
    assert (task["name"], task["num_nodes"]) == ("first", 2)
    assert task["resources"] == {
        "image_id": "docker:registry.example/phalanx:1",
        "accelerators": "H100:8",
        "job_recovery": {"recover_on_exit_codes": [75]},
    }
    assert (task["volumes"], task["file_mounts"]) == ({"/work": "shared"}, {"~/phalanx/run.toml": str(run_file)})
    last = task["run"].splitlines()[-1]
    assert last == ('exec phalanx train ~/phalanx/run.toml --nodes 2 --rendezvous "$head:29500" --nproc 8 --resume')
    assert subprocess.run(["sh", "-n"], input=task["run"], text=True, capture_output=True, timeout=20).stderr == ""


@pytest.mark.parametrize("target", ["kubernetes", "skypilot"])
@pytest.mark.parametrize("output_dir", ["/data/runs", "~/runs", "../runs"])
def test_launch_rejects_output_directory_outside_volume(run_file: Path, target: str, output_dir: str) -> None:
    with pytest.raises(UserError, match="is not on the volume"):
        launch_output(run_file, target, *IMAGE, *CPU, "--set", f"output_dir='{output_dir}'")


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (("--to", "pbs"), "is not known"),
        (("--to", "slurm", "--nodes", "4:2"), "is not a valid node count"),
        (("--to", "slurm"), "cannot be counted from this machine"),
        (("--to", "slurm", "--nproc", "3"), "with 1 node of 3 ranks"),
        (("--to", "slurm", "--nproc", "1", "--nodes", "1:2"), "with 1 node of 1 rank"),
        (("--to", "slurm", "--nproc", "8", "--nodes", "2:48"), "is 64 sequences.*, with 48 nodes of 8 ranks"),
        (("--to", "slurm", "--nproc", "8", "--time", "17:00"), "leaves no time to train"),
        (("--to", "slurm", "--nproc", "8", "--time", "soon"), "is not a valid time limit"),
        (("--to", "slurm", "--nproc", "8", "--image", "a"), "does not apply to slurm"),
        (("--to", "kubernetes", "--nproc", "8"), "is required: a container image"),
        (("--to", "kubernetes", "--nproc", "8", "--image", "a"), "is required: a PersistentVolumeClaim"),
        (("--to", "skypilot", "--nproc", "8"), "(?s)^--image is .*\n--volume is .*\n--accelerator is "),
        (("--to", "skypilot", "--nproc", "8", *IMAGE), "is required: SkyPilot's name of the GPU"),
        (("--to", "skypilot", "--nproc", "8", *IMAGE, "--accelerator", "H100", *CPU), "cannot be combined with"),
        (("--to", "kubernetes", "--nproc", "8", *IMAGE, "--set", f"name={'n' * 53}"), "must start with a letter"),
        (("--to", "slurm", "--nproc", "8", "--set", "layout='auto'"), "requires a machine description"),
        (("--to", "slurm", "--nproc", "8", "--out", "/nowhere/a.sbatch"), "cannot be written"),
    ],
)
def test_launch_rejects_invalid_options(run_file: Path, options: tuple[str, ...], problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        command_output("launch", run_file, *options)


def zero3_range(nodes: str, *settings: str) -> tuple[str, ...]:
    """Return the options of a run of 512 sequences with ZeRO-3 on a range of nodes of eight ranks."""
    fields = ("layout.pp=1", "layout.data_parallel=zero3", "training.tokens_per_step=32768", *settings)
    return ("--nodes", nodes, *(argument for field in fields for argument in ("--set", field)))


@pytest.mark.parametrize(
    ("nodes", "settings"),
    [
        ("2:4", ("training.tokens_per_step=4480",)),
        ("2:4", ("training.tokens_per_step=32704",)),
        ("3:6", ()),
        ("7:8", ("layout.micro_batch_size=3", "training.tokens_per_step=65536")),
        ("2:5", ("layout.data_parallel=zero1", "training.tokens_per_step=640")),
        ("3:4", ("layout.data_parallel=hsdp", "layout.dp_shard=6", "training.tokens_per_step=30720")),
        ("2:3", ("training.tokens_per_step=12288", "layout.micro_batch_size=3")),
        ("48:64", ("training.tokens_per_step=65536",)),
    ],
)
def test_launch_suggests_value_that_suits_a_range_of_nodes(
    run_file: Path, nodes: str, settings: tuple[str, ...]
) -> None:
    """The run with the suggested value is accepted, without a second error that suggests another value."""
    options = zero3_range(nodes, *settings)
    with pytest.raises(UserError) as raised:
        launch_output(run_file, "slurm", *options)
    advised = re.findall(r"\d+", raised.value.fix.partition(";")[0].partition(", which")[0])
    launch_output(run_file, "slurm", *options, "--set", f"{raised.value.field}={advised[-1]}")


def test_launch_says_why_no_value_suits_a_range_of_nodes(run_file: Path) -> None:
    with pytest.raises(UserError) as raised:
        launch_output(run_file, "slurm", *zero3_range("60:64"))
    assert "480 and 512 data-parallel ranks have no common multiple below 7680 sequences" in raised.value.fix
    assert "training.tokens_per_step =" not in raised.value.fix
    advice = re.search(r"--nodes (\S+) ", raised.value.fix)
    assert advice is not None
    launch_output(run_file, "slurm", *zero3_range(advice[1]))


def test_launch_writes_script_to_out_file(run_file: Path) -> None:
    script_file = run_file.with_name("run.sbatch")
    assert str(script_file) in command_output(
        "launch", run_file, "--to", "slurm", "--nproc", "8", "--out", script_file
    ).replace("\n", "")
    assert script_file.read_text().startswith("#!/bin/bash\n")
