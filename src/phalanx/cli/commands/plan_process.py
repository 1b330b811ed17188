"""A plan in a process of its own, which a server of plans can stop: the client of `plan_worker`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from threading import Lock
from typing import Any

from phalanx.spec.errors import UserError, UserErrorGroup

WORKER = "phalanx.cli.commands.plan_worker"
MAX_CPU_SECONDS = 600
"""CPU time of a plan. Plans of 405B on 4,096 and 16,384 GPUs took 175 and 109 s of wall clock on two busy cores."""
MAX_MEMORY_BYTES = 4 * 2**30
"""Address space of a plan's process. The plan of 405B on 4,096 GPUs has a peak of 650 MiB."""


class PlanProcess:
    """A process that plans once, keeps the plan, and answers for its layouts."""

    def __init__(self, arguments: Mapping[str, object], is_limited: bool = True) -> None:
        """Start the process; `arguments` of the plan are in JSON types.

        Its time and memory are limited, except for the plan of the command line.
        """
        self.num_users = 0
        """Number of threads that use this plan; it is changed under the lock of its owner."""
        self._lock = Lock()
        self._arguments = arguments
        self._facts: dict[str, Any] | None = None
        limits = [str(MAX_CPU_SECONDS), str(MAX_MEMORY_BYTES)] if is_limited else []
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", WORKER, *limits],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={"OMP_NUM_THREADS": "1", **os.environ},
            start_new_session=True,  # Ctrl-C is for the server, which then closes this process
        )

    @property
    def is_running(self) -> bool:
        """True if the process has neither ended nor been closed."""
        return self._process.poll() is None

    def facts(self) -> dict[str, Any]:
        """Return the data of the explorer's page, without details, after planning if that is not done yet.

        Raises UserError if the run cannot be planned, or a limit was exceeded.
        """
        with self._lock:
            if self._facts is None:
                self._facts = self._request(self._arguments)
            return self._facts

    def details(self, layout: int) -> dict[str, Any]:
        """Return the details of a layout of the plan, which is made first if necessary.

        Raises UserError if the plan has no such layout, the run cannot be planned, or a limit was exceeded.
        """
        self.facts()
        with self._lock:
            return self._request(layout)

    def close(self) -> None:
        """End the process; a thread that waits for its answer gets a UserError."""
        self._process.kill()
        self._process.wait()

    def _request(self, request: object) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            is_too_slow = self._process.wait() == -signal.SIGXCPU
            reason = f"exceeded {MAX_CPU_SECONDS} s of CPU time" if is_too_slow else "was stopped"
            fix = "choose fewer nodes or sequences a step, or run phalanx plan, which has no limits"
            raise UserError("plan", None, reason, fix=fix)
        answer: dict[str, Any] = json.loads(line)
        if "errors" in answer:
            errors = [UserError(field, value, problem, fix=fix) for field, value, problem, fix in answer["errors"]]
            raise UserErrorGroup(errors) if len(errors) > 1 else errors[0]
        return answer
