"""Ranks that other programs start are known by the variables of these programs."""

from __future__ import annotations

import sys
from io import StringIO

import pytest

from phalanx.launch.starters import NodeOptions, is_restart, kubeflow_options, rank_variables, set_rank_variables
from phalanx.spec.errors import UserError

SRUN = {
    "SLURM_JOB_ID": "123456",
    "SLURM_STEP_ID": "2",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_NTASKS": "7",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
    "SLURM_STEP_NODELIST": "gpu[07-09,12],login1",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "a"}
KUBEFLOW = {
    "PET_NNODES": "2",
    "PET_NPROC_PER_NODE": "4",
    "PET_NODE_RANK": "1",
    "PET_MASTER_ADDR": "job-node-0-0.job",
    "PET_MASTER_PORT": "29400",
}


def expected(*values: object) -> dict[str, str]:
    names = "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"
    return dict(zip(names, map(str, values), strict=True))


@pytest.mark.parametrize(
    ("environment", "variables"),
    [
        (SRUN, expected(5, 7, 1, 2, "gpu07", 23458)),
        ({**SRUN, "MASTER_ADDR": "head", "MASTER_PORT": "1"}, expected(5, 7, 1, 2, "head", 1)),
        ({**SRUN, **OPEN_MPI, "SLURM_JOB_NODELIST": "gpu[06-09]"}, expected(3, 4, 1, 2, "gpu06", 23456)),
        ({**OPEN_MPI, "MASTER_ADDR": "head"}, expected(3, 4, 1, 2, "head", 29500)),
        (MPICH, expected(1, 2, 1, 2, "127.0.0.1", 29500)),
        ({**SRUN, "PMI_RANK": "5", "PMI_SIZE": "7"}, expected(5, 7, 1, 2, "gpu07", 23458)),
        ({**SRUN, "SLURM_STEP_NODELIST": "rack[1-2]n[3-4]"}, expected(5, 7, 1, 2, "rack1n3", 23458)),
    ],
    ids=["srun", "srun-address", "mpirun-in-slurm", "mpirun", "mpiexec", "srun-pmi2", "two-ranges"],
)
def test_rank_variables_are_those_of_starter(environment: dict[str, str], variables: dict[str, str]) -> None:
    assert rank_variables(environment) == variables


def test_rank_variables_of_torchrun_take_precedence() -> None:
    assert rank_variables({**SRUN, **OPEN_MPI, **TORCHRUN}) == {k: v for k, v in TORCHRUN.items() if k[0] != "M"}


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {**SRUN, "SLURM_STEP_NUM_TASKS": "1"},
        {name: value for name, value in SRUN.items() if "STEP" not in name},
        {**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "1"},
    ],
    ids=["none", "srun-of-one-task", "script-of-sbatch", "mpirun-of-one"],
)
def test_process_without_other_ranks_has_no_rank_variables(environment: dict[str, str]) -> None:
    assert rank_variables(environment) == {}
    assert not set_rank_variables(environment)


def test_shell_in_terminal_of_srun_is_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """`srun --ntasks 7 --pty bash` runs the person's shell as task 0."""
    terminal = StringIO()
    terminal.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr(sys, "stdin", terminal)
    assert rank_variables(SRUN) == {}


def test_unknown_address_of_rank_0_is_refused() -> None:
    environment = dict(OPEN_MPI)
    with pytest.raises(UserError, match="MASTER_ADDR is not set, and what started the ranks does not say"):
        set_rank_variables(environment)
    assert environment["RANK"] == "3", "so that rank 0 alone prints the error"


def test_ranks_of_mpirun_in_a_job_of_slurm_meet_at_one_address() -> None:
    """mpirun runs on the job's first node, and starts a daemon on each other node with a step of srun."""
    job = {"SLURM_JOB_ID": "1000", "SLURM_JOB_NODELIST": "n[07-09]"}
    step = {**SRUN, **job, "SLURM_STEP_ID": "1", "SLURM_STEP_NODELIST": "n[08-09]"}
    addresses = [
        {name: variables[name] for name in ("MASTER_ADDR", "MASTER_PORT")}
        for variables in (rank_variables({**OPEN_MPI, **job}), rank_variables({**step, **OPEN_MPI}))
    ]
    assert addresses == [{"MASTER_ADDR": "n07", "MASTER_PORT": "21000"}] * 2


def test_tasks_of_srun_with_variables_of_its_pmi_are_those_of_srun() -> None:
    pmi = {"PMI_RANK": SRUN["SLURM_PROCID"], "PMI_SIZE": SRUN["SLURM_STEP_NUM_TASKS"]}
    pmi |= {"MPI_LOCALRANKID": SRUN["SLURM_LOCALID"], "MPI_LOCALNRANKS": "2"}
    assert rank_variables({**SRUN, **pmi}) == rank_variables(SRUN)


@pytest.mark.parametrize(
    ("changes", "options"),
    [
        ({}, NodeOptions("2", 4, "job-node-0-0.job:29400")),
        ({"PET_NPROC_PER_NODE": "auto"}, NodeOptions("2", None, "job-node-0-0.job:29400")),
        ({"PET_NNODES": "1"}, NodeOptions("1", 4, None)),
        ({"PET_NNODES": "1:4", "PET_RDZV_ENDPOINT": "w-0:23456"}, NodeOptions("1:4", 4, "w-0:23456")),
        ({"LOCAL_RANK": "0"}, None),
    ],
    ids=["TrainJob", "auto", "one-node", "elastic-PyTorchJob", "under-torchrun"],
)
def test_kubeflow_options_are_those_of_torchrun(changes: dict[str, str], options: NodeOptions | None) -> None:
    assert kubeflow_options({**KUBEFLOW, **changes}) == options


def test_rank_in_pod_of_kubeflow_without_launcher_is_refused() -> None:
    with pytest.raises(UserError, match="start the nodes with phalanx train"):
        set_rank_variables(dict(KUBEFLOW))
    assert set_rank_variables({**KUBEFLOW, "RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "job-0"}), (
        "the script of a PyTorchJob"
    )


@pytest.mark.parametrize("name", ["TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"])
def test_restart_is_known_by_count(name: str) -> None:
    assert is_restart({name: "1"})
    assert not is_restart({name: "0"})
    assert not is_restart({})
