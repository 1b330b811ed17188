"""Why a run stood still: what its ranks left behind (`runs/hang_dumps.py`), held against each other."""

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
    """Hold the ranks' words against each other. `sizes` is the layout on the ranks of the run."""
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
    fallback = Verdict("nothing", (), "no rank left word of a collective that it waited for", fix="read failures/")
    return Explanation(verdict or fallback, min(steps, default=None), lines)


# -- what it may have been, the surest first ---------------------------------------------------------------------------


def _find_killed_rank(evidence: Evidence) -> Verdict | None:
    """A rank that a signal ended, other than one that a mismatch aborts."""
    killed = {rank: record for rank, record in evidence.failures.items() if "traceback" not in record}
    killed = {rank: record for rank, record in killed.items() if "SIGABRT" not in str(record["reason"])}
    if not killed:
        return None
    rank = min(killed)
    summary = f"{evidence.name(rank)} {killed[rank]['reason']}; the others lost it"
    return Verdict(
        "killed", (rank,), summary, fix="see its node's log (dmesg) for who killed it, and continue with --resume"
    )


def _find_collective_decision(evidence: Evidence) -> Verdict | None:
    """What all ranks found together, and ended for: a loss that is not finite, or ranks that hold other numbers."""
    for record in evidence.failures.values():
        if "suspect_ranks" in record:
            fix = "it says what to do; with --resume the run goes on from its newest checkpoint"
            return Verdict("error", tuple(record["suspect_ranks"]), str(record["reason"]), fix=fix)
    return None


def _find_rank_error(evidence: Evidence) -> Verdict | None:
    """A rank that failed in its own work, and not because others were gone or late."""
    errors = {rank: record for rank, record in evidence.failures.items() if "traceback" in record}
    errors = {rank: record for rank, record in errors.items() if not is_peer_loss(str(record["reason"]))}
    if not errors:
        return None
    rank = min(errors, key=lambda rank: float(errors[rank]["time"]))
    suffix = "; the others lost it" if len(errors) < len(evidence.failures) else ""
    summary = f"{evidence.name(rank)} failed by itself: {errors[rank]['reason']}{suffix}"
    return Verdict("error", (rank,), summary, fix="its traceback is in failures/")


def _find_mismatch(evidence: Evidence) -> Verdict | None:
    """Ranks that called other collectives, or with other sizes, where they should have called the same."""
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
                f", where {describe_other_ranks(evidence, other_ranks, key)} called {describe_call(other_call)} "
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
    "operation": "every rank must call the same collectives in the same order: look for a branch that depends on the "
    "rank or its data above these lines",
    "shape": "every rank must give this collective as many numbers of one dtype: look at how this tensor gets its size",
}


def _mismatch_kind(call_by_rank: Mapping[int, RecordedCollective]) -> str:
    return "operation" if len({call["operation"] for call in call_by_rank.values()}) > 1 else "shape"


def _describe_reordering(calls: Calls, deviating_ranks: Sequence[int], other_ranks: Sequence[int], number: int) -> str:
    """Where what came after tells it: whether a rank left one out, or turned two round."""
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
        return ": the two are in another order there"
    return ": it left that one out" if _is_same_call(deviating_pair[0], other_pair[1]) else ""


def _is_same_call(a: RecordedCollective | None, b: RecordedCollective | None) -> bool:
    return a is not None and b is not None and (call_signature(a), a["at"]) == (call_signature(b), b["at"])


def _find_aborted_rank(evidence: Evidence) -> Verdict | None:
    """A rank that a library ended, and not because it waited too long or for other numbers than came."""
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
    }  # in what no thread can look into
    if not reason_by_rank:
        return None
    rank = min(reason_by_rank)
    fix = "its last output says why; where its threads stood is in hangs/"
    return Verdict("killed", (rank,), f"{evidence.name(rank)} {reason_by_rank[rank]}; the others lost it", fix=fix)


def _find_stopped_rank(evidence: Evidence) -> Verdict | None:
    """A process that stands still by a signal, or is gone."""
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
            "stopped", (rank,), summary, fix="find who stopped it (a debugger, Ctrl-Z, a scheduler), or kill -CONT"
        )
    return Verdict("killed", (rank,), summary, fix="see the node's log (dmesg), and continue with --resume")


def _find_absent_rank(evidence: Evidence) -> Verdict | None:
    """A rank that never came to what others wait for in, for another reason than that it waits itself."""
    is_waiting = {rank: was_waiting(dump) for rank, dump in evidence.dumps.items()}
    lagging = ranks_waited_for(evidence)
    if not lagging and all(is_waiting.values()) and not evidence.silent:
        return None
    busy = [rank for rank, waits in is_waiting.items() if not waits]
    # On a GPU who waits stands in its own code too, but has come further than others somewhere else.
    ahead = set().union(*lagging.values())
    roots = [rank for rank in busy if rank in lagging and rank not in ahead]
    roots = roots or [rank for rank in evidence.silent if rank in lagging] or [rank for rank in busy if rank in lagging]
    if not roots and any(is_waiting.values()):  # messages of a pipeline are in no recorder
        roots = busy or evidence.silent
    if not roots:
        return _find_crossed_collectives(evidence, lagging)
    if roots[0] in evidence.silent:
        summary = f"{evidence.names(roots)} left no word{missed_collective(evidence, roots)}"
        fix = "its process or host is gone or frozen: look there (ps, dmesg, the network), and continue with --resume"
        return Verdict("silent", tuple(sorted(roots)), summary, fix=fix)
    locations = join_words([f"{evidence.name(rank)} was in {evidence.where(rank)}" for rank in sorted(roots)])
    fix = "look there: is it slow, does it wait for something else, or did it leave a collective out?"
    return Verdict(
        "absent",
        tuple(sorted(roots)),
        f"{locations}{missed_collective(evidence, roots)}{describe_divergence_point(evidence, roots)}",
        fix=fix,
    )


def _find_crossed_collectives(evidence: Evidence, lagging: Mapping[int, set[int]]) -> Verdict | None:
    """Ranks that all wait for each other, in different collectives."""
    if not lagging:
        return None
    never_ahead = [rank for rank in lagging if not any(rank in waiters for waiters in lagging.values())]
    max_waiters = max(len(waiters) for waiters in lagging.values())
    ranks = sorted(never_ahead or [rank for rank, waiters in lagging.items() if len(waiters) == max_waiters])
    summary = f"{evidence.names(ranks)} never came{missed_collective(evidence, ranks)}"
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
    """Every rank came, and it did not end."""
    for key, calls in reversed(evidence.groups.items()):
        last_number = max((max(rank_calls, default=0) for rank_calls in calls.values()), default=0)
        ranks_inside = [
            rank
            for rank, rank_calls in calls.items()
            if last_number in rank_calls and evidence.is_in_collective(rank, rank_calls[last_number])
        ]
        if ranks_inside:
            call = calls[ranks_inside[0]][last_number]
            summary = f"{evidence.group(key)} came to {describe_call(call)}, number {last_number}, and it did not end"
            fix = "the network between them, or a device: phalanx bench times the links; check cards and cables"
            return Verdict("lost", key[1], summary, fix=fix)
    return None


def _find_stalled_rank(evidence: Evidence) -> Verdict | None:
    """Ranks that stand still in what no recorder has: messages of a pipeline; or one alone."""
    stalled_ranks = [rank for rank, dump in evidence.dumps.items() if dump["why"] == STALLED]
    if not stalled_ranks:
        return None
    shown = [f"{evidence.name(rank)} in {evidence.where(rank)}" for rank in sorted(stalled_ranks)[:4]]
    more = [f"{len(stalled_ranks) - 4} more"] if len(stalled_ranks) > 4 else []
    summary = f"{join_words([*shown, *more])}: nothing moved there, and no collective was under way"
    fix = "look there: is it slow, or does it wait for something that does not come?"
    if len(stalled_ranks) > 1:
        fix = "a message between them was lost: look at the network there (phalanx doctor), and continue with --resume"
    return Verdict("lost", tuple(sorted(stalled_ranks)), summary, fix=fix)


# -- comparing ---------------------------------------------------------------------------------------------------------
