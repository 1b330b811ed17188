"""Rank processes of a node: forked from a warm process if one is running, otherwise newly started."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch.distributed.elastic.agent.server.api import WorkerGroup
from torch.distributed.elastic.multiprocessing.api import LogsDest, LogsSpecs, SubprocessContext

from phalanx.launch.process import LAUNCHER_PID_ENV
from phalanx.launch.warm_process import ForkedProcess, WarmProcess, WarmProcessError

logger = logging.getLogger(__name__)


class RankStarter:
    """Starter of a launcher's ranks."""

    def __init__(self, warm_process: WarmProcess | None = None) -> None:
        self.warm_process = warm_process

    def start(self, args: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[Any]:
        """Start `python -P -m MODULE ARGUMENTS` as a rank, in a session of its own.

        Modules of the working directory, which may be someone else's run, are found only once a component is imported.
        """
        command = [sys.executable, "-P", "-m", *args]
        options: dict[str, Any] = {"env": {**os.environ, **environment}, "start_new_session": True}
        if self.warm_process is not None:
            try:
                forked = ForkedProcess(self.warm_process, command, name=f"rank {environment['RANK']}", **options)
                logger.debug(
                    "rank %s is process %d, forked from %d", environment["RANK"], forked.pid, self.warm_process.pid
                )
                return forked
            except WarmProcessError as error:
                logger.warning("the warm process %s; starting ranks without it", error)
                self.warm_process.close()
                self.warm_process = None
        process = subprocess.Popen(command, **options)
        logger.debug("rank %s is process %d, a new interpreter", environment["RANK"], process.pid)
        return process


class InheritedOutput(LogsSpecs):
    """Log destination that inherits our output.

    torchrun's own creates a directory for log files, which a killed launcher leaves behind.
    """

    root_log_dir = os.devnull

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Return a destination without log files."""
        empty_paths = dict.fromkeys(envs, "")
        return LogsDest(stdouts=empty_paths, stderrs=empty_paths, error_files=empty_paths)


@dataclass
class _Handler:
    """Rank process with the interface by which torchrun's context ends it."""

    proc: subprocess.Popen[Any]

    def close(self, death_sig: signal.Signals = signal.SIGTERM) -> None:
        os.killpg(self.proc.pid, death_sig)


class RankProcesses(SubprocessContext):
    """torchrun's subprocess context, with processes started by a RankStarter."""

    def __init__(
        self, args: Sequence[str], environments: Mapping[int, dict[str, str]], rank_starter: RankStarter
    ) -> None:
        local_ranks = dict.fromkeys(environments, tuple(args))
        super().__init__("default", sys.executable, local_ranks, dict(environments), InheritedOutput())
        self._rank_starter = rank_starter

    def _start(self) -> None:
        for local_rank, args in self.args.items():
            process = self._rank_starter.start(args, self.envs[local_rank])
            self.subprocess_handlers[local_rank] = _Handler(process)  # type: ignore[assignment]


def rank_environments(group: WorkerGroup) -> dict[int, dict[str, str]]:
    """Return the environment variables of torchrun for each local rank.

    Source: torchrun's documentation, "Environment Variables".
    """
    handler = group.spec.rdzv_handler
    common = {
        "GROUP_RANK": group.group_rank,
        "GROUP_WORLD_SIZE": group.group_world_size,
        "LOCAL_WORLD_SIZE": group.spec.local_world_size,
        "MASTER_ADDR": group.master_addr,
        "MASTER_PORT": group.master_port,
        "TORCHELASTIC_RUN_ID": handler.get_run_id(),
        "TORCHELASTIC_USE_AGENT_STORE": handler.use_agent_store,
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
    }
    return {
        worker.local_rank: {
            **{name: str(value) for name, value in common.items()},
            "RANK": str(worker.global_rank),
            "LOCAL_RANK": str(worker.local_rank),
            "WORLD_SIZE": str(worker.world_size),
        }
        for worker in group.workers
    }


def exit_status(pid: int) -> int | None:
    """Return a child's exit status, left for torchrun to collect; None if it runs, 0 if collected already."""
    try:
        exit_info = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return 0
    return None if exit_info is None else exit_info.si_status


@contextmanager
def quiet_torchelastic() -> Iterator[None]:
    """Silence torchrun's own failure messages, and pass our process id to the ranks."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
    os.environ[LAUNCHER_PID_ENV] = str(os.getpid())
    try:
        yield
    finally:
        del os.environ[LAUNCHER_PID_ENV]
