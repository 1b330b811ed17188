"""Process that plans and keeps the plan: `python -m phalanx.cli.commands.plan_worker [CPU_SECONDS MEMORY_BYTES]`.

It reads lines of JSON from stdin: first the arguments of the plan, then indices of layouts. Each line is answered by
one on stdout: the data of the page, the details of the layout, or an error.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any

from phalanx.cli.commands.plan_explorer import PlanArguments, explore_arguments
from phalanx.report.explorer.exploration import Exploration
from phalanx.report.explorer.page import details_of
from phalanx.spec.errors import UserError, UserErrorGroup


def main() -> None:
    """Answer requests until stdin is closed."""
    max_cpu_seconds, max_memory_bytes = map(int, sys.argv[1:]) if len(sys.argv) > 1 else (0, 0)
    requests: SimpleQueue[str] = SimpleQueue()
    Thread(target=_read_requests, args=(requests,), daemon=True).start()
    if max_memory_bytes:
        with suppress(ValueError, OSError):  # systems without this limit
            _set_soft_limit(resource.RLIMIT_AS, max_memory_bytes)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the limit of CPU time would dump core
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)  # what the planner prints is not an answer
        exploration = None
        while True:
            request = json.loads(requests.get())
            if max_cpu_seconds:
                usage = resource.getrusage(resource.RUSAGE_SELF)
                _set_soft_limit(resource.RLIMIT_CPU, int(usage.ru_utime + usage.ru_stime) + max_cpu_seconds)
            try:
                exploration, answer = _answer_request(exploration, request)
            except UserError as error:
                errors = error.errors if isinstance(error, UserErrorGroup) else [error]
                answer = {
                    "errors": [
                        [user_error.field, user_error.value, user_error.problem, user_error.fix]
                        for user_error in errors
                    ]
                }
            except MemoryError:
                problem = f"exceeded {max_memory_bytes / 2**30:g} GiB of memory"
                answer = {"errors": [["plan", None, problem, "choose fewer nodes, or run phalanx plan"]]}
            print(json.dumps(answer, allow_nan=False, default=str), file=answers, flush=True)


def _set_soft_limit(resource_type: int, limit: int) -> None:
    """Limit this process; the hard limit that it was started with remains, because only root may raise it."""
    _, hard = resource.getrlimit(resource_type)
    resource.setrlimit(resource_type, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))


def _read_requests(requests: SimpleQueue[str]) -> None:
    """Pass on the lines of stdin; end this process with the server, also while it plans."""
    for line in sys.stdin:
        requests.put(line)
    os._exit(0)


def _answer_request(exploration: Exploration | None, request: Any) -> tuple[Exploration, dict[str, Any]]:
    """Return the plan, and the answer to a request: arguments of the plan, or the index of a layout."""
    if exploration is None:
        paths = {name: Path(request[name]) for name in ("run", "topology") if request[name] is not None}
        return explore_arguments(PlanArguments(**{**request, "overrides": tuple(request["overrides"]), **paths}))
    if request >= len(exploration.layouts):
        raise UserError("layout", request, "is not a layout of this plan", fix="reload the page")
    return exploration, details_of(exploration, request)


if __name__ == "__main__":
    main()
