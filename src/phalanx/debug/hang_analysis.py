"""Diagnosis of a hang from the records of the ranks (`runs/hang_dumps.py`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from phalanx.debug.collective_log import (
    Calls,
    call_signature,
    describe_call,
    first_difference,
    is_peer_loss,
    minority_ranks,
    was_waiting,
)
from phalanx.debug.hang_evidence import (
    PROCESS_STATES,
    STOPPED_STATES,
    Evidence,
    Explanation,
    Verdict,
    describe_divergence_point,
    describe_other_ranks,
    missed_collective,
    ranks_waited_for,
)
from phalanx.runs.hang_dumps import ABORTED, STALLED, HangDump, RecordedCollective, format_frame
from phalanx.spec.formatting import join_words
from phalanx.spec.parallel_dims import ParallelDims


def diagnose_hang(
    dumps: Mapping[int, HangDump], failures: Mapping[int, Mapping[str, Any]], sizes: ParallelDims
) -> Explanation:
    """Return why a run hung.

    Args:
        dumps: The hang dumps by rank.
        failures: The failure records by rank.
        sizes: The layout on the ranks of the run.
    """
    evidence = Evidence(dumps, failures, sizes)
    checks = (
        _find_killed_rank,
        _find_collective_decision,
        _find_rank_error,
        _find_mismatch,
        _find_aborted_rank,
        _find_stopped_rank,
        _find_absent_rank,
        _find_stuck_collective,
        _find_stalled_rank,
    )
    verdicts = (check(evidence) for check in checks)
    verdict = next((candidate for candidate in verdicts if candidate is not None), None)
    steps = [dump["step"] for dump in dumps.values()]
    lines = {rank: evidence.describe_rank(rank) for rank in range(sizes.world_size)} if dumps or failures else {}
    fallback = Verdict("nothing", (), "no rank reported a pending collective", fix="read failures/")
    return Explanation(verdict or fallback, min(steps, default=None), lines)


# -- possible causes, the most certain first ---------------------------------------------------------------------------


def _find_killed_rank(evidence: Evidence) -> Verdict | None:
    """Find a rank that a signal killed, other than SIGABRT, by which a mismatch aborts."""
    killed = {rank: record for rank, record in evidence.failures.items() if "traceback" not in record}
    killed = {rank: record for rank, record in killed.items() if "SIGABRT" not in str(record["reason"])}
    if not killed:
        return None
    rank = min(killed)
    summary = f"{evidence.name(rank)} {killed[rank]['reason']}; the other ranks lost the connection to it"
    return Verdict(
        "killed", (rank,), summary, fix="read its node's kernel log (dmesg) for the cause, and continue with --resume"
    )


def _find_collective_decision(evidence: Evidence) -> Verdict | None:
    """Find an error that all ranks detected together: a loss that is not finite, or replicas that differ."""
    for record in evidence.failures.values():
        if "suspect_ranks" in record:
            fix = "follow the message; --resume continues from the newest checkpoint"
            return Verdict("error", tuple(record["suspect_ranks"]), str(record["reason"]), fix=fix)
    return None


def _find_rank_error(evidence: Evidence) -> Verdict | None:
    """Find a rank that failed in its own work, and not because others were gone or late."""
    errors = {rank: record for rank, record in evidence.failures.items() if "traceback" in record}
    errors = {rank: record for rank, record in errors.items() if not is_peer_loss(str(record["reason"]))}
    if not errors:
        return None
    rank = min(errors, key=lambda rank: float(errors[rank]["time"]))
    suffix = "; the other ranks lost the connection to it" if len(errors) < len(evidence.failures) else ""
    summary = f"{evidence.name(rank)} failed by itself: {errors[rank]['reason']}{suffix}"
    return Verdict("error", (rank,), summary, fix="read its traceback in failures/")


def _find_mismatch(evidence: Evidence) -> Verdict | None:
    """Find ranks that called another collective, or with other sizes, than the rest of their group."""
    for key, calls in evidence.groups.items():
        number = first_difference(calls, call_signature)
        if number is None:
            continue
        call_by_rank = {rank: rank_calls[number] for rank, rank_calls in calls.items() if number in rank_calls}
        deviating_ranks = minority_ranks({rank: call_signature(call) for rank, call in call_by_rank.items()})
        other_ranks = [rank for rank in call_by_rank if rank not in deviating_ranks]
        other_call = call_by_rank[other_ranks[0]] if other_ranks else None
        deviating_calls = [
            f"{evidence.name(rank)} called {describe_call(call)} at {format_frame(call['at'])}"
            for rank, call in sorted(call_by_rank.items())
            if rank in deviating_ranks
        ]
        summary = f"in collective {number} of {evidence.group(key)}, {join_words(deviating_calls)}"
        if other_call is not None:
            summary += (
                f", while {describe_other_ranks(evidence, other_ranks, key)} called {describe_call(other_call)} "
                f"at {format_frame(other_call['at'])}"
            )
        return Verdict(
            "mismatch",
            tuple(sorted(deviating_ranks)),
            summary + _describe_reordering(calls, deviating_ranks, other_ranks, number=number),
            fix=MISMATCH_FIXES[_mismatch_kind(call_by_rank)],
        )
    return None


MISMATCH_FIXES = {
    "operation": "call the same collectives in the same order on every rank: look for a branch that depends on the "
    "rank or its data above these lines",
    "shape": "use the same number of elements of one dtype on every rank in this collective: check how the size of "
    "this tensor is computed",
}


def _mismatch_kind(call_by_rank: Mapping[int, RecordedCollective]) -> str:
    return "operation" if len({call["operation"] for call in call_by_rank.values()}) > 1 else "shape"


def _describe_reordering(calls: Calls, deviating_ranks: Sequence[int], other_ranks: Sequence[int], number: int) -> str:
    """Describe whether a rank skipped a collective or swapped two, as far as the next calls show it."""
    if len(deviating_ranks) != 1 or not other_ranks:
        return ""
    deviating_calls = calls[deviating_ranks[0]]
    other_calls = calls[other_ranks[0]]
    deviating_pair = (deviating_calls.get(number), deviating_calls.get(number + 1))
    other_pair = (other_calls.get(number), other_calls.get(number + 1))
    if (
        None in deviating_pair
        or None in other_pair
        or _mismatch_kind({0: deviating_calls[number], 1: other_calls[number]}) == "shape"
    ):
        return ""
    if _is_same_call(deviating_pair[0], other_pair[1]) and _is_same_call(deviating_pair[1], other_pair[0]):
        return ": this rank calls the two collectives in a different order"
    return ": this rank skipped that collective" if _is_same_call(deviating_pair[0], other_pair[1]) else ""


def _is_same_call(a: RecordedCollective | None, b: RecordedCollective | None) -> bool:
    return a is not None and b is not None and (call_signature(a), a["at"]) == (call_signature(b), b["at"])


def _find_aborted_rank(evidence: Evidence) -> Verdict | None:
    """Find a rank that a library aborted, and not because of a timeout or mismatched sizes."""
    aborted_ranks = [rank for rank, dump in evidence.dumps.items() if dump["why"] == ABORTED and not was_waiting(dump)]
    reason_by_rank = {
        rank: f"was aborted (SIGABRT) in {evidence.where(rank)}"
        for rank in aborted_ranks
        if not evidence.last_call(rank)
    }
    silent_failures = {
        rank: str(evidence.failures[rank]["reason"]) for rank in evidence.silent if rank in evidence.failures
    }
    reason_by_rank |= {
        rank: reason for rank, reason in silent_failures.items() if "SIGABRT" in reason
    }  # aborted where no Python thread could write a dump
    if not reason_by_rank:
        return None
    rank = min(reason_by_rank)
    fix = "read the end of its output for the cause, and hangs/ for the stacks of its threads"
    return Verdict(
        "killed",
        (rank,),
        f"{evidence.name(rank)} {reason_by_rank[rank]}; the other ranks lost the connection to it",
        fix=fix,
    )


def _find_stopped_rank(evidence: Evidence) -> Verdict | None:
    """Find a process that a signal stopped, or that is gone."""
    stopped_ranks = [
        rank for rank in evidence.silent if evidence.states.get(rank) in (*STOPPED_STATES, "Z", "X", "gone")
    ]
    if not stopped_ranks:
        return None
    rank = min(stopped_ranks, key=lambda rank: (evidence.states[rank] not in STOPPED_STATES, rank))
    state = evidence.states[rank]
    summary = f"{evidence.name(rank)} {PROCESS_STATES[state]}{missed_collective(evidence, [rank])}"
    if state in STOPPED_STATES:
        return Verdict(
            "stopped", (rank,), summary, fix="find what stopped it (a debugger, Ctrl-Z, a scheduler), or run kill -CONT"
        )
    return Verdict("killed", (rank,), summary, fix="read the node's kernel log (dmesg), and continue with --resume")


def _find_absent_rank(evidence: Evidence) -> Verdict | None:
    """Find a rank that did not reach a collective in which others wait, and does not wait itself."""
    is_waiting = {rank: was_waiting(dump) for rank, dump in evidence.dumps.items()}
    lagging = ranks_waited_for(evidence)
    if not lagging and all(is_waiting.values()) and not evidence.silent:
        return None
    busy = [rank for rank, waits in is_waiting.items() if not waits]
    # On a GPU, a waiting rank is in its own code too, but is ahead of other ranks in another group.
    ahead = set().union(*lagging.values())
    roots = [rank for rank in busy if rank in lagging and rank not in ahead]
    roots = roots or [rank for rank in evidence.silent if rank in lagging] or [rank for rank in busy if rank in lagging]
    if not roots and any(is_waiting.values()):  # no recorder contains pipeline messages
        roots = busy or evidence.silent
    if not roots:
        return _find_crossed_collectives(evidence, lagging)
    if roots[0] in evidence.silent:
        summary = f"{evidence.names(roots)} wrote no hang dump{missed_collective(evidence, roots)}"
        fix = "check its process and its host (ps, dmesg, the network), and continue with --resume"
        return Verdict("silent", tuple(sorted(roots)), summary, fix=fix)
    locations = join_words([f"{evidence.name(rank)} was in {evidence.where(rank)}" for rank in sorted(roots)])
    fix = "check this line: it may be slow, wait for something else, or follow a skipped collective"
    return Verdict(
        "absent",
        tuple(sorted(roots)),
        f"{locations}{missed_collective(evidence, roots)}{describe_divergence_point(evidence, roots)}",
        fix=fix,
    )


def _find_crossed_collectives(evidence: Evidence, lagging: Mapping[int, set[int]]) -> Verdict | None:
    """Find ranks that all wait for each other, in different collectives."""
    if not lagging:
        return None
    never_ahead = [rank for rank in lagging if not any(rank in waiters for waiters in lagging.values())]
    max_waiters = max(len(waiters) for waiters in lagging.values())
    ranks = sorted(never_ahead or [rank for rank, waiters in lagging.items() if len(waiters) == max_waiters])
    summary = f"{evidence.names(ranks)} did not arrive{missed_collective(evidence, ranks)}"
    waiters = sorted({waiter for rank in ranks for waiter in lagging[rank]})
    for rank in ranks:
        calls = evidence.dumps[rank]["calls"] if rank in evidence.dumps else []
        if calls:
            key = calls[-1]["group"], tuple(evidence.dumps[rank]["groups"].get(calls[-1]["group"], ()))
            summary += (
                f"; rank {rank} was in {describe_call(calls[-1])} of {evidence.group(key)}, "
                f"at {format_frame(calls[-1]['at'])}"
            )
    return Verdict(
        "crossed",
        tuple(ranks),
        summary + describe_divergence_point(evidence, ranks),
        fix=MISMATCH_FIXES["operation"] if waiters else MISMATCH_FIXES["shape"],
    )


def _find_stuck_collective(evidence: Evidence) -> Verdict | None:
    """Find a collective that every rank entered and that did not finish."""
    for key, calls in reversed(evidence.groups.items()):
        last_number = max((max(rank_calls, default=0) for rank_calls in calls.values()), default=0)
        ranks_inside = [
            rank
            for rank, rank_calls in calls.items()
            if last_number in rank_calls and evidence.is_in_collective(rank, rank_calls[last_number])
        ]
        if ranks_inside:
            call = calls[ranks_inside[0]][last_number]
            summary = (
                f"{evidence.group(key)} entered {describe_call(call)}, number {last_number}, and it did not finish"
            )
            fix = "check the network between these ranks (cards, cables) and the devices; phalanx bench times the links"
            return Verdict("lost", key[1], summary, fix=fix)
    return None


def _find_stalled_rank(evidence: Evidence) -> Verdict | None:
    """Find ranks that made no progress in pipeline messages, which no recorder has, or one rank alone."""
    stalled_ranks = [rank for rank, dump in evidence.dumps.items() if dump["why"] == STALLED]
    if not stalled_ranks:
        return None
    shown = [f"{evidence.name(rank)} in {evidence.where(rank)}" for rank in sorted(stalled_ranks)[:4]]
    more = [f"{len(stalled_ranks) - 4} more"] if len(stalled_ranks) > 4 else []
    summary = f"{join_words([*shown, *more])}: no progress, and no collective was pending"
    fix = "check this line: it may be slow, or wait for an event that does not occur"
    if len(stalled_ranks) > 1:
        fix = (
            "a message was lost: check the network between these ranks with phalanx doctor, then continue with --resume"
        )
    return Verdict("lost", tuple(sorted(stalled_ranks)), summary, fix=fix)


# -- comparing ---------------------------------------------------------------------------------------------------------
