"""Runs of real processes in which a rank has a fault (tests/helpers/faulty_rank.py)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from phalanx.debug.collective_order import CHECK_VARIABLE
from phalanx.launch.elastic_agent import launch_ranks
from phalanx.launch.failures import report_and_exit_code
from phalanx.launch.process import set_worker_environment
from phalanx.spec.log import log_to_stderr
from phalanx.testing.processes import WAIT_SECONDS, start_python
from phalanx.train.create_run import create_run
from tests.helpers.small_runs import small_run

TIMEOUT_SECONDS = 6.0


def create_run_directory(text: Path, out: Path, nproc: int, layout: dict[str, Any]) -> Path:
    changes = {
        "training.steps": 100_000,
        "training.collective_timeout_seconds": TIMEOUT_SECONDS,
        "training.precision": "fp32",
    }
    run = small_run(text, out, {**changes, **layout})
    return create_run(run, nproc, resume=False)


def start_faulty_run(
    directory: Path, nproc: int, fault: str, in_child: Callable[[], None] | None = None, check_order: bool = False
) -> subprocess.Popen[str]:
    """Start the ranks of a run. Without `check_order`, wrong orders of
    collectives are found as by default, after a hang."""
    command = [sys.executable, "-m", __name__, str(directory), str(nproc), fault]
    options: dict[str, Any] = {"stderr": subprocess.PIPE, "text": True, "start_new_session": True}
    options["env"] = {**os.environ, "OMP_NUM_THREADS": "1", CHECK_VARIABLE: "1" if check_order else ""}
    options["cwd"] = Path(__file__).parents[2]
    if in_child is not None:
        return subprocess.Popen(command, preexec_fn=in_child, **options)
    return start_python(command, **options)


def launch(directory: str, nproc: str, fault: str) -> None:
    """Launch a run as `phalanx train` does, with another program for the ranks."""
    log_to_stderr()
    set_worker_environment(int(nproc))
    module_and_arguments = "tests.helpers.faulty_rank", fault, directory
    sys.exit(launch_ranks(int(nproc), module_and_arguments, partial(report_and_exit_code, Path(directory))))


def wait_for_failure(process: subprocess.Popen[str]) -> str:
    """Wait until the run has failed and all its processes have exited; return the output of the launcher."""
    try:
        _, output = process.communicate(timeout=WAIT_SECONDS)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    assert process.returncode == 1, output
    return output


if __name__ == "__main__":
    launch(*sys.argv[1:])
