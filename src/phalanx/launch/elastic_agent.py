"""Agent of one node's ranks, based on torchrun's, with a callback that decides about restarts."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from enum import Enum
from typing import Any

from torch.distributed import DistError
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousStateError,
    RendezvousTimeoutError,
)

from phalanx.debug.oom import cgroup_oom_kills
from phalanx.launch.process import STOP_SECONDS, stop_signals
from phalanx.launch.rank_processes import (
    InheritedOutput,
    RankProcesses,
    RankStarter,
    exit_status,
    quiet_torchelastic,
    rank_environments,
)
from phalanx.launch.rendezvous import (
    SINGLE_NODE,
    Rendezvous,
    RendezvousError,
    expected_nodes,
    local_address,
    make_rendezvous_handler,
    set_socket_interface,
    wait_for_host,
)
from phalanx.launch.warm_process import WarmProcess, warm_process
from phalanx.spec.errors import EXIT_INTERRUPTED, EXIT_STOPPED, UserError
from phalanx.spec.formatting import plural

logger = logging.getLogger(__name__)

FAILURE_GRACE_SECONDS = 3.0
"""Seconds for other ranks to report their own failure after the first one."""
MONITOR_SECONDS = 0.05
MIN_CONNECTED_SECONDS = 30.0
"""Seconds of contact with the rendezvous host after which a node counts as having joined other nodes."""
COMMAND_KEY = "phalanx/command"
COMMAND_TIMEOUT_SECONDS = 300
"""Store key of the command that the first node sets for all nodes, and the timeout in seconds."""

WorkerCommand = Callable[[int], Sequence[str]]
"""Command for a number of ranks: the module to run and its arguments."""
ProcessFailures = Mapping[int, ProcessFailure]
"""Failures of this node's ranks, by rank."""


class FailureAction(Enum):
    """Action after a failure on this node."""

    RESTART = "restart the ranks on all nodes"
    LEAVE = "remove this node from the run; other nodes may continue"
    STOP = "end the run on all nodes"


FailureHandler = Callable[[ProcessFailures, int], FailureAction]
"""Callback, given the failures and the number of processes that the kernel's OOM killer ended since ranks started."""


class RunEndedByOtherNode(Exception):  # noqa: N818 - no error of this node's
    """Another node has ended the run."""


class ElasticAgent(LocalElasticAgent):
    """torchrun's agent with a callback after failures. It kills ranks that wait for a failed one."""

    def __init__(
        self,
        spec: WorkerSpec,
        worker_command: WorkerCommand,
        on_failure: FailureHandler,
        num_nodes: int,
        rank_starter: RankStarter,
    ) -> None:
        super().__init__(spec, InheritedOutput())
        self._worker_command = worker_command
        self._on_failure = on_failure
        self._num_nodes = num_nodes
        self._rank_starter = rank_starter
        self.failure_action = FailureAction.STOP
        self._oom_kills_at_start = 0
        self._killed_pids: set[int] = set()
        """Processes that the agent killed, which do not count as failures."""

    def _initialize_workers(self, worker_group: WorkerGroup) -> None:
        """Perform the rendezvous and start the ranks; if a node is lost during it, repeat the rendezvous."""
        while True:
            try:
                return super()._initialize_workers(worker_group)
            except DistError as error:
                logger.warning("a node was lost before ranks started; repeating the rendezvous: %s", error)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        command = self._agree_on_command(worker_group)
        if self._num_nodes > 1:
            nodes = f"{worker_group.group_world_size} of {plural(self._num_nodes, 'node')}"
            num_ranks = worker_group.workers[0].world_size
            logger.info("%s joined; starting %d ranks", nodes, num_ranks)
        self._oom_kills_at_start = cgroup_oom_kills() or 0
        self._pcontext = RankProcesses(command, rank_environments(worker_group), self._rank_starter)
        self._pcontext.start()
        started: dict[int, Any] = self._pcontext.pids()
        return started

    def _agree_on_command(self, group: WorkerGroup) -> Sequence[str]:
        """Return the first node's command, which all nodes run, because their conditions may differ."""
        world_size = group.workers[0].world_size
        if group.group_world_size == 1:
            return self._worker_command(world_size)
        assert group.store is not None
        if group.group_rank == 0:
            try:
                command = list(self._worker_command(world_size))
            except UserError as error:
                group.store.set(COMMAND_KEY, json.dumps({"error": [error.field, None, error.problem, error.fix]}))
                raise
            group.store.set(COMMAND_KEY, json.dumps({"command": command}))
            return command
        group.store.wait([COMMAND_KEY], timedelta(seconds=COMMAND_TIMEOUT_SECONDS))
        message = json.loads(group.store.get(COMMAND_KEY))
        if "error" in message:
            raise UserError(*message["error"])
        return [str(argument) for argument in message["command"]]

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        if any(status not in (None, 0) for status in map(exit_status, self._list_pids())):
            self._kill_remaining()
        result = super()._monitor_workers(worker_group)
        if result.is_failed():
            failures = result.failures
            genuine = {rank: failure for rank, failure in failures.items() if failure.pid not in self._killed_pids}
            oom_kills = (cgroup_oom_kills() or 0) - self._oom_kills_at_start
            self.failure_action = self._on_failure(genuine or failures, oom_kills)
            self._remaining_restarts = int(self.failure_action is FailureAction.RESTART)
        return result

    def _kill_remaining(self) -> None:
        """Let ranks that wait for a lost one fail and report it; kill those that are stopped."""
        deadline = time.monotonic() + FAILURE_GRACE_SECONDS
        running_pids = self._list_running_pids()
        while running_pids and time.monotonic() < deadline:
            time.sleep(MONITOR_SECONDS / 2)
            running_pids = self._list_running_pids()
        for pid in running_pids:
            os.kill(pid, signal.SIGKILL)
        self._killed_pids |= set(running_pids)

    def _list_running_pids(self) -> list[int]:
        return [pid for pid in self._list_pids() if exit_status(pid) is None]

    def _list_pids(self) -> list[int]:
        return list(self._pcontext.pids().values()) if self._pcontext else []

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = STOP_SECONDS) -> None:
        self._stop_ranks(death_sig)
        super()._shutdown(signal.SIGKILL)

    def _stop_ranks(self, death_sig: signal.Signals) -> None:
        """Send ranks a signal, and give them time to save.

        Once the signal itself has killed one, the others have `FAILURE_GRACE_SECONDS` left."""
        pids = self._list_pids()
        for pid in self._list_running_pids():
            os.kill(pid, death_sig)
        deadline = time.monotonic() + STOP_SECONDS
        while any(exit_status(pid) is None for pid in pids) and time.monotonic() < deadline:
            if any(exit_status(pid) == death_sig for pid in pids):
                deadline = min(deadline, time.monotonic() + FAILURE_GRACE_SECONDS)
            time.sleep(MONITOR_SECONDS / 2)


@contextmanager
def stop_signals_as_exit() -> Iterator[None]:
    """Turn stop signals into an exit with `EXIT_INTERRUPTED` or `EXIT_STOPPED`, even without ranks.

    torchrun handles signals only while ranks run. Raises SystemExit after a signal.
    """

    def handle_signal(number: int, _: object) -> None:
        sigval = signal.SIGINT if number == signal.SIGINT else signal.SIGTERM
        raise SignalException(f"signal {number}", sigval)

    previous_handlers = {number: signal.signal(number, handle_signal) for number in stop_signals()}
    try:
        yield
    except SignalException as signalled:
        raise SystemExit(EXIT_INTERRUPTED if signalled.sigval == signal.SIGINT else EXIT_STOPPED) from None
    finally:
        for number, handler in previous_handlers.items():
            signal.signal(number, handler)


def run_until_done(
    nproc: int,
    worker_command: WorkerCommand,
    on_failure: FailureHandler,
    rendezvous: Rendezvous = SINGLE_NODE,
    rank_starter: RankStarter | None = None,
) -> bool:
    """Run local ranks, with those of other nodes, until all have succeeded or `on_failure` decides against a restart.

    The command for a world size is the first node's on all nodes. Without `rank_starter`, ranks are new interpreters.
    Return True if all ranks succeeded. Raises UserError if nodes cannot perform a rendezvous. Raises RendezvousError if
    the rendezvous failed. Raises RunEndedByOtherNode if another node has ended the run.
    """
    if rendezvous.max_nodes > 1:
        logger.info("%s", expected_nodes(rendezvous))
    deadline = time.monotonic() + rendezvous.join_seconds
    while True:
        started_at = time.monotonic()
        try:
            wait_for_host(rendezvous, deadline)
            with quiet_torchelastic():
                handler = make_rendezvous_handler(rendezvous)
                address = local_address(rendezvous)
                if rendezvous is not SINGLE_NODE:
                    set_socket_interface(address)
                spec = WorkerSpec(
                    role="default",
                    local_world_size=nproc,
                    entrypoint=sys.executable,
                    args=(),
                    rdzv_handler=handler,
                    max_restarts=0,
                    monitor_interval=MONITOR_SECONDS,
                    local_addr=address,
                )
                starter = rank_starter or RankStarter()
                agent = ElasticAgent(spec, worker_command, on_failure, rendezvous.max_nodes, starter)
                result = agent.run()
            if agent.failure_action is not FailureAction.LEAVE:
                # After this no node can join any more.
                handler.shutdown()
            return result is not None and not result.is_failed()
        except RendezvousTimeoutError:
            fix = "start the command on every node with the same --rendezvous, or allow fewer nodes: --nodes MIN:MAX"
            nodes_text = plural(rendezvous.min_nodes, "node", one="one")
            problem = f"was joined by fewer than {nodes_text} within {rendezvous.join_seconds:g} s"
            raise RendezvousError("--rendezvous", rendezvous.endpoint, problem, fix) from None
        except RendezvousClosedError:
            message = "another node ended the run; the output of that node contains the cause"
            raise RunEndedByOtherNode(message) from None
        except (RendezvousConnectionError, RendezvousStateError) as error:
            if rendezvous.is_host:
                fix = "use a port that no other run uses; to start several ranks on one machine, use --nproc"
                problem = f"cannot be used on this machine: {error.__cause__}"
                raise UserError("--rendezvous", rendezvous.endpoint, problem, fix) from None
            # The other node may be about to restart.
            if time.monotonic() - started_at > MIN_CONNECTED_SECONDS:
                deadline = time.monotonic() + rendezvous.join_seconds
            elif time.monotonic() > deadline:
                problem = f"has lost its connection: {error}"
                raise RendezvousError("--rendezvous", rendezvous.endpoint, problem, "use another port") from None


def launch_ranks(
    nproc: int,
    worker_args: Sequence[str],
    report: Callable[[ProcessFailures, int], int],
    started: WarmProcess | None = None,
) -> int:
    """Run a module as local ranks, wait for them, and return the exit code.

    `report` prints the cause of the failures, given also the number of OOM kills, and returns the exit code. Several
    ranks are forked from a warm process: `started`, or a new one.
    """
    code = 0

    def on_failure(failures: ProcessFailures, kills: int) -> FailureAction:
        nonlocal code
        code = report(failures, kills)
        return FailureAction.STOP

    with stop_signals_as_exit(), nullcontext(started) if started or nproc == 1 else warm_process() as warm:
        run_until_done(nproc, lambda _: worker_args, on_failure, rank_starter=RankStarter(warm))
    return code
