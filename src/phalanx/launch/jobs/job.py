"""Description of a job for a scheduler, validated before submission."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from phalanx.cost.exact.layout_checks import assume_no_recomputation, layout_error
from phalanx.launch.jobs.node_range import fix_for_node_range
from phalanx.spec.errors import UserError
from phalanx.spec.formatting import plural
from phalanx.spec.resolved_run import ResolvedRun
from phalanx.spec.run import RunSpec

SAVING_SECONDS = 660
"""Seconds from SIGTERM to SIGKILL. `phalanx train` needs up to 10 minutes for a step and a checkpoint; one is added."""
PORT = 29500
"""Port of the rendezvous if the address has no other: torchrun's default."""
FLIGHT_RECORDER_PREFIX = "flight-recorder-rank-"
"""Prefix of files in the run directory, followed by the rank: NCCL's state when a collective timed out."""


@dataclass(frozen=True, kw_only=True)
class ClusterJob:
    """A run and the machines that it needs."""

    run: RunSpec
    file: Path
    """Run file, as the user named it."""
    command: str
    """Command that requested the job file."""
    min_nodes: int
    """Minimum number of nodes for training."""
    max_nodes: int
    """Maximum number of nodes."""
    nproc: int
    """Ranks, and GPUs, per node."""
    overrides: Sequence[str] = ()
    """Overrides of the run file, as arguments of `phalanx train`."""
    check: bool = True
    """Check each node with `phalanx doctor` before training."""
    cpus: int | None = None
    """Cores per node; None uses all."""
    memory: int | None = None
    """Memory per node in GiB; None uses all."""
    force: bool = False
    """Start even if the planned memory exceeds that of the cards."""

    @property
    def gpus(self) -> int:
        """GPUs per node."""
        return 0 if self.run.cluster.device == "cpu" else self.nproc

    @property
    def nodes(self) -> str:
        """Number of nodes in the format of `phalanx train --nodes`."""
        return str(self.max_nodes) if self.min_nodes == self.max_nodes else f"{self.min_nodes}:{self.max_nodes}"

    def rendezvous_args(self, rendezvous: str) -> list[str]:
        """Return the rendezvous options of `phalanx train`.

        A single node needs none, unless the run file has more nodes.
        """
        if self.max_nodes == 1:
            return ["--nodes", "1"] if self.run.cluster.nodes > 1 else []
        return ["--nodes", self.nodes, "--rendezvous", rendezvous]

    @property
    def train_args(self) -> list[str]:
        """Arguments of `phalanx train` that do not depend on the number of nodes."""
        return ["--nproc", str(self.nproc), "--resume", *self._force_args, *self.overrides]

    @property
    def check_args(self) -> list[str]:
        """Arguments of `phalanx train --print-config` and of `phalanx doctor`.

        Both exit with 2 for an error in the run. They name the nodes, because the memory of a rank depends on the
        number of ranks.
        """
        nodes = [] if self.max_nodes == self.run.cluster.nodes else ["--set", f"cluster.nodes={self.max_nodes}"]
        return ["--nproc", str(self.nproc), *self.overrides, *nodes]

    @property
    def config_args(self) -> list[str]:
        """Arguments with which `phalanx train` checks the run, after `check_args`."""
        return ["--print-config", "--resume", *self._force_args]

    @property
    def _force_args(self) -> list[str]:
        return ["--force"] if self.force else []

    def environment(self, directory: str) -> dict[str, tuple[str, str]]:
        """Return variables by name, with their values and reasons, for a run directory."""
        if not self.gpus:
            return {}
        prefix = f"{directory}/{FLIGHT_RECORDER_PREFIX}"
        return {
            "NCCL_DEBUG": ("WARN", "log which link failed; NCCL logs no failures by default"),
            "TORCH_NCCL_DUMP_ON_TIMEOUT": ("1", "write PyTorch's flight recorder when a collective times out"),
            "TORCH_FR_DUMP_TEMP_FILE": (prefix, "prefix of the flight recorder's files, instead of /tmp"),
        }


def check_job(job: ClusterJob) -> None:
    """Raise UserError for a run that the minimum or the maximum number of ranks cannot train."""
    run = job.run
    if run.swarm is not None:
        problem = "trains on several sites, but a job file is for one site"
        fix = "start it with phalanx swarm serve, or train on one site only: --set swarm="
        raise UserError("swarm", run.swarm.method, problem, fix)
    if run.recovery.exit_codes != "phalanx":
        problem = "has codes by which this job would not be restarted after a stop"
        fix = "remove it; restartPolicy: ExitCode of Kubeflow needs it, in a job that starts phalanx train itself"
        raise UserError("recovery.exit_codes", run.recovery.exit_codes, problem, fix)
    # The layout is chosen at the start of the job, for the ranks that are available then.
    if run.auto_layout:
        if run.cluster.preset is None:
            problem = "requires a machine description"
            fix = "set cluster.preset, or write a run file with a fixed layout: phalanx plan RUN.toml --out FILE"
            raise UserError("layout", "auto", problem, fix)
        return
    run = assume_no_recomputation(run)
    errors = {
        nodes: error
        for nodes in sorted({job.min_nodes, job.max_nodes})
        if (error := layout_error(ResolvedRun(run, nodes * job.nproc))) is not None
    }
    if not errors:
        return
    # The batch is checked before what divides a rank's share of it.
    nodes, error = min(errors.items(), key=lambda item: item[1].field != "training.tokens_per_step")
    fix = error.fix
    if job.min_nodes < job.max_nodes:
        fix = fix_for_node_range(run, error, range(job.min_nodes, job.max_nodes + 1), job.nproc)
    size_text = f"{plural(nodes, 'node')} of {plural(job.nproc, 'rank')}"
    fix = f"{fix}; or change --nodes or --nproc".removeprefix("; or ")
    raise UserError(error.field, error.value, f"{error.problem}, with {size_text}", fix)


def parse_nodes(text: str) -> tuple[int, int]:
    """Return the minimum and the maximum number of nodes of "4" or "2:4".

    Raises UserError if the text has another format.
    """
    match = re.fullmatch(r"(\d+)(?::(\d+))?", text)
    min_nodes, max_nodes = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not (0 < min_nodes <= max_nodes):
        problem = "is not a valid node count"
        raise UserError("--nodes", text, problem, "write a number (4), or the minimum and the maximum (2:4)")
    return min_nodes, max_nodes


def ranks_per_node(run: RunSpec, requested: int | None) -> int:
    """Return the ranks per node: as requested, or as in the run file; one for CPU ranks.

    Raises UserError if the number is unknown, because the nodes' GPUs cannot be counted from this machine.
    """
    nproc = requested or run.cluster.nproc_per_node or (1 if run.cluster.device == "cpu" else None)
    if nproc is None:
        fix = 'add --nproc N, or set cluster.nproc_per_node or cluster.device = "cpu"'
        raise UserError("--nproc", None, "is required: the GPUs of the nodes cannot be counted from this machine", fix)
    return nproc


def shell_join(args: Sequence[str]) -> str:
    """Quote and join arguments for a shell."""
    return " ".join(map(shlex.quote, args))
