"""Supervision of training: start ranks, watch them, and restart them after failures, fewer of them if necessary."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path

from phalanx.launch.elastic_agent import RunEndedByOtherNode, run_until_done, stop_signals_as_exit
from phalanx.launch.failure_policy import FailurePolicy, LayoutChooser
from phalanx.launch.failures import find_first_failure, log_final_failure, log_resume_hint
from phalanx.launch.process import run_in_place, select_device, set_worker_environment
from phalanx.launch.rank_processes import RankStarter
from phalanx.launch.rendezvous import SINGLE_NODE, Rendezvous
from phalanx.launch.shared_memory import allocate_slots
from phalanx.launch.warm_process import WarmProcess
from phalanx.runs.create import is_finished
from phalanx.runs.events import FINISHED, read_events
from phalanx.spec.components import named_components
from phalanx.spec.errors import EXIT_STOPPED, UserError
from phalanx.spec.run import RunSpec

logger = logging.getLogger(__name__)


def supervise_training(
    directory: Path,
    run: RunSpec,
    nproc: int,
    choose_layout: LayoutChooser,
    options: Sequence[str] = (),
    rendezvous: Rendezvous = SINGLE_NODE,
    warm_process: WarmProcess | None = None,
) -> int:
    """Train the run of a directory, restart after failures, and return the exit code.

    Prints the cause of failures. A single rank that is not to be restarted runs in this process. `choose_layout`
    returns the layout for a number of ranks. Raises RendezvousError if the rendezvous failed. Raises UserError if nodes
    cannot perform a rendezvous, or too few ranks are left for any layout.
    """
    # After the loss of a GPU, ranks must not continue on the CPU.
    options = ["--device", select_device(run), *options]
    # The checks before the start have found that the user trusts the components.
    if any(named_components(run)):
        options = ["--trust", *options]
    # A single rank without restarts runs in this process and prints its failure itself.
    if nproc == 1 and rendezvous is SINGLE_NODE and not run.recovery.restarts_ranks:
        if warm_process is not None:
            warm_process.close()
        # The variables of a program that started several launchers are not this rank's.
        os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        run_in_place("phalanx.train", str(directory), *options)
    set_worker_environment(nproc)
    if run.recovery.in_memory_checkpoint_every:
        allocate_slots(nproc)
    policy = FailurePolicy(directory, run.recovery, rendezvous)
    num_events = len(read_events(directory))
    planned_ranks = nproc * rendezvous.max_nodes
    ranks_per_node = 1 if rendezvous is SINGLE_NODE else nproc

    def worker_command(ranks: int) -> Sequence[str]:
        is_planned = ranks == planned_ranks
        layout_options = () if is_planned else largest_usable_layout(ranks, ranks_per_node, choose_layout)
        return "phalanx.train", str(directory), *layout_options, *options

    rank_starter = RankStarter(warm_process)
    try:
        with stop_signals_as_exit():
            while not run_until_done(nproc, worker_command, policy.decide, rendezvous, rank_starter):
                fewer_ranks = policy.drop_failing_rank(nproc, choose_layout) if rendezvous is SINGLE_NODE else None
                if fewer_ranks is None:
                    if policy.exit_code not in (2, EXIT_STOPPED):
                        log_resume_hint(directory)
                    return policy.exit_code
                nproc = fewer_ranks
            return 0
    except (SystemExit, RunEndedByOtherNode) as exit_reason:
        if is_finished(directory):
            return 0
        if isinstance(exit_reason, RunEndedByOtherNode):
            logger.error("%s", exit_reason)
            return 1
        new_records = policy.new_failure_records()
        # New records mean that the stop was not orderly, unless ranks only lost each other through it.
        if new_records:
            first_failure = find_first_failure(directory, {}, records=new_records)
            if "lost_peer" not in first_failure:
                return log_final_failure(directory, first_failure)
        if FINISHED not in (event["kind"] for event in read_events(directory)[num_events:]):
            logger.info("stopped by a signal while ranks were starting; no new checkpoint was saved")
        raise


def largest_usable_layout(ranks: int, ranks_per_node: int, choose_layout: LayoutChooser) -> Sequence[str]:
    """Return the layout of the maximum number of usable ranks, as options of phalanx.train.

    The number is `ranks` minus a multiple of `ranks_per_node`; the remaining ranks stand by. Raises UserError if no
    layout fits any number.
    """
    first_error: UserError | None = None
    for num_used in range(ranks, 0, -ranks_per_node):
        try:
            layout = choose_layout(num_used)
        except UserError as error:
            first_error = first_error or error
            continue
        if first_error is not None:
            reason = f"no layout fits more: {first_error}"
            logger.warning("training on %d of %d ranks, because %s", num_used, ranks, reason)
        return "--layout", layout.model_dump_json(exclude_defaults=True), "--ranks", str(num_used)
    assert first_error is not None
    raise first_error
