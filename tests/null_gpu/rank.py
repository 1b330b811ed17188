"""Rank of a program on the null GPU: `python -m tests.null_gpu.rank MODULE ARGUMENTS`."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import runpy
import socket
import sys
from pathlib import Path

from tests.null_gpu.given_numbers import give_numbers
from tests.null_gpu.host_syncs import write_host_syncs

HOST_PER_RANK = "NULL_GPU_HOST_PER_RANK"
"""Environment variable: each rank is on a host of its own, by name."""
HOST_SYNCS_FILE = "NULL_GPU_HOST_SYNCS_FILE"
"""Environment variable: the file for the waits of rank 0 in its last step."""
CLONE_NEWUTS = 0x04000000  # linux/sched.h: a UTS namespace, which has its own hostname


def take_hostname() -> None:
    """Set the hostname of this process: node0, node1, ..."""
    if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWUTS):
        raise PermissionError(ctypes.get_errno(), "unshare")
    socket.sethostname(f"node{os.environ['RANK']}")


if __name__ == "__main__":
    faulthandler.enable()
    give_numbers()
    if HOST_PER_RANK in os.environ:
        take_hostname()
    if os.environ.get(HOST_SYNCS_FILE) and os.environ["RANK"] == "0":
        write_host_syncs(Path(os.environ[HOST_SYNCS_FILE]))
    module = sys.argv.pop(1)
    runpy.run_module(module, run_name="__main__", alter_sys=True)
