"""The name of this machine in the records of a run directory."""

from __future__ import annotations

import os
import socket


def host_name() -> str:
    """Return Slurm's name of this node where Slurm started the process, else the node's own name.

    `srun --exclude` accepts only Slurm's name.
    """
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()
