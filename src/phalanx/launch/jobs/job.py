"""What is asked of a system that shares out machines, checked before it is asked."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from phalanx.cost.exact.layout_checks import check_layout
from phalanx.spec.base import require
from phalanx.spec.errors import UserError
from phalanx.spec.formatting import plural
from phalanx.spec.run import RunSpec

SAVING_SECONDS = 660
"""From SIGTERM to SIGKILL: a step and a checkpoint, for which `phalanx train` takes up to 10 minutes, and one more."""
PORT = 29500
"""Of the rendezvous, where nobody else has one on that address: torchrun's own."""
FLIGHT_RECORDER_PREFIX = "flight-recorder-rank-"
"""In the run directory, with a rank's number behind it: what NCCL was doing when a collective took too long."""


@dataclass(frozen=True)
class ClusterJob:
    """A run, and what it is to run on."""

    run: RunSpec
    file: Path
    """The run file, as the user named it."""
    command: str
    """The command that asked for this."""
    min_nodes: int
    """Nodes without which it does not train."""
    max_nodes: int
    """Nodes at most."""
    nproc: int
    """Ranks, and GPUs, of a node."""
    overrides: Sequence[str] = ()
    """What the user overrides of the run file, as words for `phalanx train`."""
    check: bool = True
    """Whether `phalanx doctor` looks at each node before it trains."""
    cpus: int | None = None
    """Cores of a node; None takes what there is."""
    memory: int | None = None
    """GiB of a node's memory; None takes what there is."""

    @property
    def gpus(self) -> int:
        """Of a node."""
        return 0 if self.run.cluster.device == "cpu" else self.nproc

    @property
    def nodes(self) -> str:
        """As `phalanx train --nodes` takes it."""
        return str(self.max_nodes) if self.min_nodes == self.max_nodes else f"{self.min_nodes}:{self.max_nodes}"

    def rendezvous_args(self, rendezvous: str) -> list[str]:
        """How the nodes find each other, as words for `phalanx train`. One needs none, unless the run file has more."""
        if self.max_nodes == 1:
            return ["--nodes", "1"] if self.run.cluster.nodes > 1 else []
        return ["--nodes", self.nodes, "--rendezvous", rendezvous]

    @property
    def train_args(self) -> list[str]:
        """What is the same on any number of nodes, as words for `phalanx train`."""
        return ["--nproc", str(self.nproc), "--resume", *self.overrides]

    @property
    def check_args(self) -> list[str]:
        """The run, as words for `phalanx train --print-config`, which ends with 2 for a mistake in it, and then for
        `phalanx doctor`, which ends with 2 for that too: what a rank holds depends on how many there are."""
        nodes = [] if self.max_nodes == self.run.cluster.nodes else ["--set", f"cluster.nodes={self.max_nodes}"]
        return ["--nproc", str(self.nproc), *self.overrides, *nodes]

    def environment(self, directory: str) -> dict[str, tuple[str, str]]:
        """Variables by name, each with its value and why it is set. `directory` is the run's."""
        if not self.gpus:
            return {}
        return {
            "NCCL_DEBUG": ("WARN", "say which link failed: NCCL is silent otherwise"),
            "TORCH_NCCL_DUMP_ON_TIMEOUT": ("1", "have PyTorch's flight recorder write when a collective took too long"),
            "TORCH_FR_DUMP_TEMP_FILE": (
                f"{directory}/{FLIGHT_RECORDER_PREFIX}",
                "into these files, rather than a node's /tmp",
            ),
        }


def check_job(job: ClusterJob) -> None:
    """Raise UserError for a run that the fewest or the most ranks cannot train."""
    run = job.run
    require(
        run.swarm is None,
        "swarm",
        run.swarm and run.swarm.method,
        problem="is for several sites, not for the nodes of one",
        fix="lead it with phalanx swarm serve; to train it on one site alone: --set swarm=",
    )
    if run.auto_layout:  # chosen where it starts, for the ranks that are there
        require(
            run.cluster.preset is not None,
            "layout",
            "auto",
            problem="needs to know the machine, and nobody names it",
            fix="set cluster.preset, or write a layout down with phalanx plan RUN.toml --out FILE",
        )
        return
    for nodes in sorted({job.min_nodes, job.max_nodes}):
        ranks = nodes * job.nproc
        try:
            check_layout(run, ranks)
        except UserError as error:
            size_text = f"{plural(nodes, 'node')} of {plural(job.nproc, 'rank')}"
            fix = f"{error.fix}; or ask for other --nodes or --nproc".removeprefix("; or ")
            raise UserError(error.field, error.value, f"on {size_text}: {error.problem}", fix=fix) from None


def parse_nodes(text: str) -> tuple[int, int]:
    """The fewest and the most nodes of "4" or "2:4".

    Raises UserError for anything else.
    """
    match = re.fullmatch(r"(\d+)(?::(\d+))?", text)
    min_nodes, max_nodes = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    require(
        0 < min_nodes <= max_nodes,
        "--nodes",
        text,
        problem="is no number of nodes",
        fix="write how many (4), or the fewest and the most (2:4)",
    )
    return min_nodes, max_nodes


def ranks_per_node(run: RunSpec, requested: int | None) -> int:
    """As asked, or as the run file says; one where CPUs compute.

    Raises UserError where nobody knows: the nodes' GPUs cannot be counted from here.
    """
    nproc = requested or run.cluster.nproc_per_node or (1 if run.cluster.device == "cpu" else None)
    if nproc is None:
        raise UserError(
            "--nproc",
            None,
            "is needed: the GPUs of a node cannot be counted from here",
            fix='give --nproc, or set cluster.nproc_per_node (or cluster.device = "cpu")',
        )
    return nproc


def shell_join(args: Sequence[str]) -> str:
    """Words as a shell takes them."""
    return " ".join(map(shlex.quote, args))
