"""Diagnosis of a hang from the records of the ranks (`runs/hang_dumps.py`): rules, the most certain first.

`Evidence` has the records, `WaitGraph` which ranks wait for which, and `MESSAGES` the texts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from phalanx.debug.collective_log import describe_call, group_key, is_peer_loss, was_in_collective, was_waiting
from phalanx.debug.collective_mismatch import find_mismatch
from phalanx.debug.hang_evidence import (
    EXITED_STATES,
    PROCESS_STATES,
    STOPPED_STATES,
    Evidence,
    describe_divergence_point,
    missed_collective,
)
from phalanx.debug.hang_messages import CONNECTION_LOST, Explanation, Verdict, make_verdict
from phalanx.runs.hang_dumps import ABORTED, STALLED, HangDump, format_frame
from phalanx.spec.formatting import join_words
from phalanx.spec.parallel_dims import ParallelDims

MAX_LOCATIONS = 4
"""Number of ranks whose lines of code a message shows."""


def diagnose_hang(
    dumps: Mapping[int, HangDump], failures: Mapping[int, Mapping[str, Any]], sizes: ParallelDims
) -> Explanation:
    """Return why a run hung: the verdict of the first rule that has one.

    The records are by rank; `sizes` is the layout on the ranks of the run.
    """
    evidence = Evidence(dumps, failures, sizes)
    rules = (
        _find_killed_rank,
        _find_collective_decision,
        _find_rank_error,
        find_mismatch,
        _find_aborted_rank,
        _find_stopped_rank,
        _find_awaited_ranks,
        _find_crossed_collectives,
        _find_stuck_collective,
        _find_stalled_rank,
    )
    verdicts = (rule(evidence) for rule in rules)
    verdict = next((verdict for verdict in verdicts if verdict is not None), make_verdict("nothing", ()))
    return Explanation(
        verdict=verdict,
        step=min((dump["step"] for dump in dumps.values()), default=None),
        ranks={rank: evidence.describe_rank(rank) for rank in range(sizes.world_size)} if dumps or failures else {},
    )


# -- failure records ---------------------------------------------------------------------------------------------------


def _find_killed_rank(evidence: Evidence) -> Verdict | None:
    """Blame the first rank that a signal killed, other than SIGABRT, by which a mismatch aborts."""
    reason_by_rank = {
        rank: str(record["reason"]) for rank, record in evidence.failures.items() if "traceback" not in record
    }
    killed_ranks = [rank for rank, reason in reason_by_rank.items() if "SIGABRT" not in reason]
    if not killed_ranks:
        return None
    rank = min(killed_ranks)
    return make_verdict("killed_by_signal", (rank,), rank=evidence.name(rank), reason=reason_by_rank[rank])


def _find_collective_decision(evidence: Evidence) -> Verdict | None:
    """Blame the ranks that all ranks suspected together: their loss is not finite, or their replica differs."""
    for record in evidence.failures.values():
        if "suspect_ranks" in record:
            return make_verdict("collective_decision", tuple(record["suspect_ranks"]), reason=record["reason"])
    return None


def _find_rank_error(evidence: Evidence) -> Verdict | None:
    """Blame the first rank that failed in its own work, and not because others were gone or late."""
    failed_at = {
        rank: float(record["time"])
        for rank, record in evidence.failures.items()
        if "traceback" in record and not is_peer_loss(str(record["reason"]))
    }
    if not failed_at:
        return None
    rank = min(failed_at, key=failed_at.__getitem__)
    return make_verdict(
        "rank_error",
        (rank,),
        rank=evidence.name(rank),
        reason=evidence.failures[rank]["reason"],
        loss=CONNECTION_LOST if len(failed_at) < len(evidence.failures) else "",
    )


# -- processes that ended or stopped -----------------------------------------------------------------------------------


def _find_aborted_rank(evidence: Evidence) -> Verdict | None:
    """Blame the first rank that a library aborted, and not because of a timeout or mismatched sizes."""
    reason_by_rank = {
        rank: f"was aborted (SIGABRT) in {evidence.where(rank)}"
        for rank, dump in evidence.dumps.items()
        if dump["why"] == ABORTED and not was_waiting(dump) and not evidence.last_call(rank)
    }
    # A silent rank may have been aborted where no Python thread could write a dump.
    for rank in evidence.silent:
        failure = evidence.failures.get(rank)
        if failure is not None and "SIGABRT" in str(failure["reason"]):
            reason_by_rank[rank] = str(failure["reason"])
    if not reason_by_rank:
        return None
    rank = min(reason_by_rank)
    return make_verdict("aborted_by_library", (rank,), rank=evidence.name(rank), reason=reason_by_rank[rank])


def _find_stopped_rank(evidence: Evidence) -> Verdict | None:
    """Blame the first rank whose process a signal stopped, or else the first whose process is gone."""
    for states in (STOPPED_STATES, EXITED_STATES):
        ranks = [rank for rank in evidence.silent if evidence.states.get(rank) in states]
        if ranks:
            return make_verdict(
                "process_stopped" if states == STOPPED_STATES else "process_gone",
                (ranks[0],),
                rank=evidence.name(ranks[0]),
                state=PROCESS_STATES[evidence.states[ranks[0]]],
                missed_collective=missed_collective(evidence, ranks[:1]),
            )
    return None


# -- ranks that others wait for ----------------------------------------------------------------------------------------


def _find_awaited_ranks(evidence: Evidence) -> Verdict | None:
    """Blame the ranks that others wait for, which wrote no hang dump or were in code of their own."""
    ranks = evidence.wait_graph.blockers
    if not ranks:
        return None
    missed = missed_collective(evidence, ranks)
    if ranks[0] in evidence.silent:
        return make_verdict("silent", tuple(sorted(ranks)), ranks=evidence.names(ranks), missed_collective=missed)
    return make_verdict(
        "absent",
        tuple(sorted(ranks)),
        locations=join_words([f"{evidence.name(rank)} was in {evidence.where(rank)}" for rank in sorted(ranks)]),
        missed_collective=missed,
        divergence=describe_divergence_point(evidence, ranks),
    )


def _find_crossed_collectives(evidence: Evidence) -> Verdict | None:
    """Blame the ranks that most ranks wait for, or that are ahead of none, if all wait for each other."""
    ranks_missing = evidence.wait_graph.ranks_missing
    if not ranks_missing or evidence.wait_graph.blockers:
        return None
    ranks_ahead = set().union(*ranks_missing.values())
    max_waiters = max(len(waiters) for waiters in ranks_missing.values())
    most_awaited = [rank for rank, waiters in ranks_missing.items() if len(waiters) == max_waiters]
    ranks = sorted([rank for rank in ranks_missing if rank not in ranks_ahead] or most_awaited)
    last_calls = ""
    for rank in ranks:
        dump = evidence.dumps.get(rank)
        if dump is not None and dump["calls"]:
            call = dump["calls"][-1]
            group = evidence.group(group_key(dump, call))
            last_calls += f"; rank {rank} was in {describe_call(call)} of {group}, at {format_frame(call['at'])}"
    return make_verdict(
        "crossed",
        tuple(ranks),
        ranks=evidence.names(ranks),
        missed_collective=missed_collective(evidence, ranks),
        last_calls=last_calls,
        divergence=describe_divergence_point(evidence, ranks),
    )


# -- ranks that wait for no other rank ---------------------------------------------------------------------------------


def _find_stuck_collective(evidence: Evidence) -> Verdict | None:
    """Blame the links of a group if all its ranks entered a collective and it did not finish."""
    for group, calls in reversed(evidence.groups.items()):
        number = max((max(rank_calls, default=0) for rank_calls in calls.values()), default=0)
        calls_inside = [
            rank_calls[number]
            for rank, rank_calls in calls.items()
            if number in rank_calls and was_in_collective(evidence.dumps[rank], rank_calls[number])
        ]
        if calls_inside:
            call = describe_call(calls_inside[0])
            return make_verdict("stuck_collective", group[1], group=evidence.group(group), call=call, number=number)
    return None


def _find_stalled_rank(evidence: Evidence) -> Verdict | None:
    """Blame a lost message if several ranks stalled outside of collectives, or the line of one rank alone."""
    stalled_ranks = sorted(rank for rank, dump in evidence.dumps.items() if dump["why"] == STALLED)
    if not stalled_ranks:
        return None
    locations = [f"{evidence.name(rank)} in {evidence.where(rank)}" for rank in stalled_ranks[:MAX_LOCATIONS]]
    if len(stalled_ranks) > MAX_LOCATIONS:
        locations.append(f"{len(stalled_ranks) - MAX_LOCATIONS} more")
    return make_verdict(
        "ranks_stalled" if len(stalled_ranks) > 1 else "one_rank_stalled",
        tuple(stalled_ranks),
        locations=join_words(locations),
    )
