"""Ranks and nodes that another program has started, by the environment variables that it sets. No torch here.

Sources: torchrun's documentation, "Environment Variables"; srun(1), "OUTPUT ENVIRONMENT VARIABLES"; mpirun(1) of Open
MPI, MVAPICH and MPICH; kubeflow/trainer, pkg/runtime/framework/plugins/torch/torch.go; kubeflow/training-operator,
pkg/controller.v1/pytorch/elastic.go.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

from phalanx.spec.errors import UserError


@dataclass(frozen=True)
class Starter:
    """A program that starts ranks, and the names of its variables."""

    name: str
    rank: str
    world_size: str
    local_rank: str
    local_world_size: str

    @property
    def variables(self) -> tuple[str, ...]:
        """The names of the variables."""
        return self.rank, self.world_size, self.local_rank, self.local_world_size


TORCHRUN = Starter("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
SRUN = Starter("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE")
STARTERS = (
    Starter(
        "Open MPI",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    Starter(
        "MVAPICH",
        "MV2_COMM_WORLD_RANK",
        "MV2_COMM_WORLD_SIZE",
        "MV2_COMM_WORLD_LOCAL_RANK",
        "MV2_COMM_WORLD_LOCAL_SIZE",
    ),
    Starter("MPICH", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    SRUN,
)
"""Starters other than torchrun, in order of precedence. mpirun may start its daemons with srun: ranks of other nodes
then have the variables of a step too. The script of sbatch has SLURM_PROCID and SLURM_NTASKS, but is not a rank: it has
no variables of a step."""
DEFAULT_PORT = 29500
"""torchrun's port of rank 0."""


def rank_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return torchrun's variables for this process; empty if it is not one of several ranks.

    Those of an address are missing if the address of rank 0 is unknown."""
    if "RANK" in environment and "WORLD_SIZE" in environment:
        return {name: environment[name] for name in TORCHRUN.variables if name in environment}
    starter = _find_starter(environment)
    if starter is None or environment[starter.world_size] == "1":
        return {}
    # A person in the shell of `srun --pty`.
    if starter is SRUN and sys.stdin is not None and sys.stdin.isatty():
        return {}
    values = [environment[name] for name in starter.variables]
    if starter is SRUN:
        values[3] = str(_tasks_of_node(values[3], int(environment.get("SLURM_NODEID", "0"))))
    variables = dict(zip(TORCHRUN.variables, values, strict=True))
    is_one_node = variables["LOCAL_WORLD_SIZE"] == variables["WORLD_SIZE"]
    of_slurm = "STEP" if starter is SRUN else "JOB"
    nodes = environment.get(f"SLURM_{of_slurm}_NODELIST", "")
    host = environment.get("MASTER_ADDR") or ("127.0.0.1" if is_one_node else _first_host(nodes))
    port = environment.get("MASTER_PORT") or str(_port(environment, has_step=starter is SRUN))
    return {**variables, "MASTER_ADDR": host, "MASTER_PORT": port} if host else variables


def set_rank_variables(environment: MutableMapping[str, str]) -> bool:
    """Set torchrun's variables if another program started this process as a rank; return whether it is one of several.

    Raises UserError if the address of rank 0 is unknown, or the process is a node's, which has several ranks."""
    variables = rank_variables(environment)
    if not variables and (options := kubeflow_options(environment)) and (options.nodes != "1" or options.nproc != 1):
        fix = "start the nodes with phalanx train, or with torchrun -m phalanx.train"
        raise UserError("PET_NNODES", options.nodes, "describes nodes, but this process is one rank", fix)
    environment.update(variables)
    is_one_of_several = variables.get("WORLD_SIZE", "1") != "1"
    if is_one_of_several and "MASTER_ADDR" not in environment:
        fix = "set it to the host of rank 0, such as mpirun -x MASTER_ADDR=HOST"
        raise UserError("MASTER_ADDR", None, "is not set, and what started the ranks does not say where rank 0 is", fix)
    return is_one_of_several


def _find_starter(environment: Mapping[str, str]) -> Starter | None:
    """Return the program that started this rank; srun, if its variables agree with those of the first that has some."""
    starters = [each for each in STARTERS if all(name in environment for name in each.variables)]
    if SRUN in starters and all(
        environment[ours] == environment[first]
        for ours, first in zip(SRUN.variables[:2], starters[0].variables[:2], strict=True)
    ):
        return SRUN
    return next(iter(starters), None)


@dataclass(frozen=True)
class NodeOptions:
    """Options of `phalanx train` on a node."""

    nodes: str
    nproc: int | None
    """Ranks of this node; None for one per GPU."""
    rendezvous: str | None


def kubeflow_options(environment: Mapping[str, str]) -> NodeOptions | None:
    """Return the options by the variables that Kubeflow sets for torchrun; None without them, and under torchrun."""
    if "PET_NNODES" not in environment or "LOCAL_RANK" in environment:
        return None
    nodes = environment["PET_NNODES"]
    nproc = environment.get("PET_NPROC_PER_NODE", "1")
    endpoint = environment.get("PET_RDZV_ENDPOINT")
    if not endpoint and (host := environment.get("PET_MASTER_ADDR")):
        endpoint = f"{host}:{environment.get('PET_MASTER_PORT', DEFAULT_PORT)}"
    return NodeOptions(nodes, int(nproc) if nproc.isdecimal() else None, None if nodes == "1" else endpoint)


def is_restart(environment: Mapping[str, str]) -> bool:
    """Return whether torchrun or Slurm has started this job before."""
    names = "TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"
    return any(int(environment.get(name, "0")) > 0 for name in names)


def _tasks_of_node(counts: str, node: int) -> int:
    """Return the number of tasks of a node, of srun's counts for all nodes, such as "2(x3),1"."""
    expanded: list[str] = []
    for count, repeat in re.findall(r"(\d+)(?:\(x(\d+)\))?", counts):
        expanded += [count] * int(repeat or "1")
    return int(expanded[node])


def _first_host(nodes: str) -> str:
    """Return the first host of Slurm's list of nodes, such as "n[07-09,12],m1"; empty without one."""
    first = re.match(r"(?:\[[^]]*\]|[^,\[])*", nodes)
    return re.sub(r"\[([^],-]*)[^]]*\]", r"\1", first[0] if first else "")


def _port(environment: Mapping[str, str], has_step: bool) -> int:
    """Return a port that differs between Slurm's jobs and steps, below those that the kernel gives to clients."""
    if "SLURM_JOB_ID" not in environment:
        return DEFAULT_PORT
    step = environment.get("SLURM_STEP_ID", "0") if has_step else "0"
    return 20000 + (int(environment["SLURM_JOB_ID"]) + int(step if step.isdecimal() else "0")) % 10000
