"""Start of `phalanx train`: checks on this machine, data preparation, and the ranks of one machine or of a node."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from ipaddress import IPv4Address
from pathlib import Path
from socket import gethostbyname
from typing import IO

from phalanx.cli.commands.auto_layout import choose_layout_for, replan_layout
from phalanx.spec.errors import LocalNodeError, UserError
from phalanx.spec.resolved_run import ResolvedRun
from phalanx.spec.run import RunSpec

logger = logging.getLogger(__name__)

RETRY_SECONDS = 1.0
"""Seconds before an unknown host name is looked up again."""


@dataclass(frozen=True)
class StartOptions:
    """Options of a start that are not fields of the run."""

    resume: bool
    force: bool
    """True if the run may start where more memory is planned than the machine has."""
    rank_options: Sequence[str] = ()
    """Options of phalanx.train for each rank."""
    step: int | None = None
    """Step of the checkpoint to resume from; None: the newest."""


def resolve_rendezvous(rendezvous: str | None, nodes: int, patience_seconds: float) -> tuple[str, int]:
    """Return the host and port of the rendezvous; wait until the name of a starting machine resolves.

    Raises UserError for an invalid address, and for a name that does not resolve in `patience_seconds`.
    """
    if rendezvous is None:
        problem = f"is not set, which {nodes} nodes (cluster.nodes, --nodes) need"
        fix = "add it on each node, such as --rendezvous node0:29500 (docs/guides/multi-node.md)"
        raise UserError("--rendezvous", None, problem, fix=f"{fix}; or --nodes 1 to train on this machine alone")
    host, _, port = rendezvous.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        fix = "write the same node and free port on all nodes, such as node0:29500 (docs/guides/multi-node.md)"
        raise UserError("--rendezvous", rendezvous, "is not a valid rendezvous address", fix=fix)
    is_waiting = False
    deadline = time.monotonic() + patience_seconds
    while True:
        try:
            ip_address = IPv4Address(gethostbyname(host))
            break
        except OSError as error:
            if time.monotonic() > deadline:
                problem = f"has a host that cannot be resolved: {error.strerror}"
                fix = "use a host name that all nodes can resolve, or an IP address"
                raise LocalNodeError("--rendezvous", rendezvous, problem, fix=fix) from None
            if not is_waiting:
                logger.warning("%s cannot be resolved yet (%s); retrying", host, error.strerror)
        is_waiting = True
        time.sleep(RETRY_SECONDS)
    if ip_address.is_unspecified:
        fix = "use the address of one of the nodes"
        raise UserError("--rendezvous", rendezvous, "stands for all addresses of a machine", fix=fix)
    return host, int(port)


def decide_and_check(
    run: RunSpec, ranks: int, start: StartOptions, layout_ranks: int | None = None
) -> tuple[RunSpec, str | None]:
    """Decide what the run file leaves open, and check the run on this machine, before any text is read.

    The result is the run with its choices, and the planner's report as JSON if it chose the layout. `layout_ranks`
    is the number of ranks per node for `layout = "auto"`, or None if it is unknown. Raises UserError if settings,
    run directory, disk or memory are unusable.
    """
    from phalanx.launch.preflight import check_settings, preflight
    from phalanx.train.create_run import check_machine_memory, decide_choices, decide_recomputation

    run = decide_choices(run, start.resume)
    plan = None
    if run.auto_layout:
        run, plan = choose_layout_for(run, layout_ranks)
    run = decide_recomputation(run, ranks * run.cluster.nodes)
    # Of several nodes, only the rendezvous host checks the run directory.
    if run.cluster.nodes == 1:
        preflight(ResolvedRun(run, ranks), start.resume, start.step)
    else:
        check_settings(ResolvedRun(run, ranks * run.cluster.nodes))
    if not start.force:
        check_machine_memory(run, ranks)
    return run, plan


def run_on_one_machine(run: RunSpec, start: StartOptions) -> int:
    """Run all ranks on this machine; return the exit code."""
    from phalanx.launch.preflight import preflight
    from phalanx.launch.warm_process import warm_process

    nproc = run.cluster.nproc_per_node
    plan = None
    if run.auto_layout:
        from phalanx.train.create_run import decide_choices

        run, plan = choose_layout_for(decide_choices(run, start.resume), nproc)
    # Before the import of torch, which takes a second; the warm process imports it in the meantime.
    if nproc is not None and not run.layout.auto_checkpointing:
        preflight(ResolvedRun(run, nproc), start.resume, start.step)
    has_launcher = nproc != 1 or run.recovery.restarts_ranks
    with warm_process() if has_launcher else nullcontext() as warm:
        from phalanx.launch.process import select_nproc
        from phalanx.launch.supervisor import supervise_training

        ranks = select_nproc(run)
        run, _ = decide_and_check(run, ranks, start)
        directory, lock = _set_up_run_directory(run, ranks, start, plan)
        choose_layout = partial(replan_layout, run, None)
        with lock or nullcontext():
            return supervise_training(directory, run, ranks, choose_layout, start.rank_options, warm_process=warm)


def run_on_nodes(run: RunSpec, start: StartOptions, min_nodes: int, endpoint: tuple[str, int]) -> int:
    """Run one of several nodes, each of which runs this command; return the exit code.

    The run's cluster has the maximum number of nodes; `endpoint` is the host and port of the rendezvous.
    """
    from phalanx.launch.warm_process import warm_process

    with warm_process() as warm:
        from phalanx.launch.process import select_nproc
        from phalanx.launch.rendezvous import Rendezvous
        from phalanx.launch.supervisor import supervise_training
        from phalanx.runs.create import run_directory

        ranks = select_nproc(run)
        max_nodes = run.cluster.nodes
        run, plan = decide_and_check(run, ranks, start, layout_ranks=ranks)
        rendezvous = Rendezvous(
            name=run.name,
            host=endpoint[0],
            port=endpoint[1],
            min_nodes=min_nodes,
            max_nodes=max_nodes,
            join_seconds=run.recovery.rendezvous_timeout_seconds,
            last_call_seconds=run.recovery.last_call_timeout_seconds,
        )
        directory = run_directory(run)
        lock = None
        # Other nodes find no rendezvous before the run directory exists.
        if rendezvous.is_host:
            directory, lock = _set_up_run_directory(run, ranks * max_nodes, start, plan)
        choose_layout = partial(replan_layout, run, ranks)
        with lock or nullcontext():
            return supervise_training(
                directory, run, ranks, choose_layout, start.rank_options, rendezvous, warm_process=warm
            )


def _set_up_run_directory(
    run: RunSpec, ranks: int, start: StartOptions, plan: str | None
) -> tuple[Path, IO[str] | None]:
    """Return the run's directory, and the lock that excludes others from it."""
    from phalanx.cli.common.progress import tokenization_progress
    from phalanx.launch.preflight import lock_run_directory
    from phalanx.runs.create import PLAN_FILE, write_run_directory
    from phalanx.spec.files.replace import replace_file
    from phalanx.train.create_run import check_and_prepare

    with tokenization_progress() as progress:
        run, prepared = check_and_prepare(run, ranks, start.resume, progress, start.step)
    lock = lock_run_directory(run, start.resume, start.step)
    directory = write_run_directory(run, prepared)
    if plan is not None:
        replace_file(directory / PLAN_FILE, plan)
    return directory, lock
