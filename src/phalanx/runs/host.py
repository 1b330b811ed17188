"""The name of this machine, as records of a run directory have it."""

from __future__ import annotations

import os
import socket


def host_name() -> str:
    """Return Slurm's name of this node where Slurm started the process (`srun --exclude` takes no other), else its own."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()
