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
    STATES,
    STOPPED,
    Evidence,
    Explanation,
    Verdict,
    describe_divergence_point,
    describe_other_ranks,
    missed_collective,
    ranks_waited_for,
)
from phalanx.runs.hang_dumps import ABORTED, STALLED, HangDump, RecordedCollective, format_frame
from phalanx.spec.degrees import ParallelDims
from phalanx.spec.formatting import join_words


def diagnose_hang(
    dumps: Mapping[int, HangDump], failures: Mapping[int, Mapping[str, Any]], sizes: ParallelDims
) -> Explanation:
    """Hold the ranks' words against each other. `sizes` is the layout on the ranks of the run."""
    case = Evidence(dumps, failures, sizes)
    looks = _killed, _collective_decision, _own_error, _mismatch, _aborted, _stopped, _absent, _lost, _standing_still
    found = (look(case) for look in looks)
    verdict = next((one for one in found if one is not None), None)
    steps = [dump["step"] for dump in dumps.values()]
    lines = {rank: case.line(rank) for rank in range(sizes.world_size)} if dumps or failures else {}
    nothing = Verdict("nothing", (), "no rank left word of a collective that it waited for", "read failures/")
    return Explanation(verdict or nothing, min(steps, default=None), lines)


# -- what it may have been, the surest first ---------------------------------------------------------------------------


def _killed(case: Evidence) -> Verdict | None:
    """A rank that a signal ended, other than one that a mismatch aborts."""
    ended = {rank: record for rank, record in case.failures.items() if "traceback" not in record}
    ended = {rank: record for rank, record in ended.items() if "SIGABRT" not in str(record["reason"])}
    if not ended:
        return None
    rank = min(ended)
    said = f"{case.name(rank)} {ended[rank]['reason']}; the others lost it"
    return Verdict("killed", (rank,), said, "see its node's log (dmesg) for who killed it, and continue with --resume")


def _collective_decision(case: Evidence) -> Verdict | None:
    """What all ranks found together, and ended for: a loss that is not finite, or ranks that hold other numbers."""
    for record in case.failures.values():
        if "suspect_ranks" in record:
            fix = "it says what to do; with --resume the run goes on from its newest checkpoint"
            return Verdict("error", tuple(record["suspect_ranks"]), str(record["reason"]), fix)
    return None


def _own_error(case: Evidence) -> Verdict | None:
    """A rank that failed in its own work, and not because others were gone or late."""
    own = {rank: record for rank, record in case.failures.items() if "traceback" in record}
    own = {rank: record for rank, record in own.items() if not is_peer_loss(str(record["reason"]))}
    if not own:
        return None
    rank = min(own, key=lambda rank: float(own[rank]["time"]))
    others = "; the others lost it" if len(own) < len(case.failures) else ""
    said = f"{case.name(rank)} failed by itself: {own[rank]['reason']}{others}"
    return Verdict("error", (rank,), said, "its traceback is in failures/")


def _mismatch(case: Evidence) -> Verdict | None:
    """Ranks that called other collectives, or with other sizes, where they should have called the same."""
    for key, calls in case.groups.items():
        number = first_difference(calls, call_signature)
        if number is None:
            continue
        here = {rank: mine[number] for rank, mine in calls.items() if number in mine}
        off = minority_ranks({rank: call_signature(call) for rank, call in here.items()})
        others = [rank for rank in here if rank not in off]
        theirs = here[others[0]] if others else None
        called_so = [
            f"{case.name(rank)} called {describe_call(here[rank])} at {format_frame(here[rank]['at'])}"
            for rank in sorted(off)
        ]
        said = f"in collective {number} of {case.group(key)}, {join_words(called_so)}"
        if theirs is not None:
            said += (
                f", where {describe_other_ranks(case, others, key)} called {describe_call(theirs)} "
                f"at {format_frame(theirs['at'])}"
            )
        return Verdict(
            "mismatch",
            tuple(sorted(off)),
            said + _describe_reordering(calls, off, others, number),
            MISMATCH_FIXES[_mismatch_kind(here)],
        )
    return None


MISMATCH_FIXES = {
    "operation": "every rank must call the same collectives in the same order: look for a branch that depends on the "
    "rank or its data above these lines",
    "shape": "every rank must give this collective as many numbers of one dtype: look at how this tensor gets its size",
}


def _mismatch_kind(here: Mapping[int, RecordedCollective]) -> str:
    return "operation" if len({call["operation"] for call in here.values()}) > 1 else "shape"


def _describe_reordering(calls: Calls, off: Sequence[int], others: Sequence[int], number: int) -> str:
    """Where what came after tells it: whether a rank left one out, or turned two round."""
    if len(off) != 1 or not others:
        return ""
    mine, theirs = calls[off[0]], calls[others[0]]
    now, after = (mine.get(number), mine.get(number + 1)), (theirs.get(number), theirs.get(number + 1))
    if None in now or None in after or _mismatch_kind({0: mine[number], 1: theirs[number]}) == "shape":
        return ""
    if _alike(now[0], after[1]) and _alike(now[1], after[0]):
        return ": the two are in another order there"
    return ": it left that one out" if _alike(now[0], after[1]) else ""


def _alike(one: RecordedCollective | None, other: RecordedCollective | None) -> bool:
    return (
        one is not None
        and other is not None
        and (call_signature(one), one["at"]) == (call_signature(other), other["at"])
    )


def _aborted(case: Evidence) -> Verdict | None:
    """A rank that a library ended, and not because it waited too long or for other numbers than came."""
    told = [rank for rank, dump in case.dumps.items() if dump["why"] == ABORTED and not was_waiting(dump)]
    found = {rank: f"was aborted (SIGABRT) in {case.where(rank)}" for rank in told if not case.last_call(rank)}
    ended = {rank: str(case.failures[rank]["reason"]) for rank in case.silent if rank in case.failures}
    found |= {rank: reason for rank, reason in ended.items() if "SIGABRT" in reason}  # in what no thread can look into
    if not found:
        return None
    rank = min(found)
    fix = "its last output says why; where its threads stood is in hangs/"
    return Verdict("killed", (rank,), f"{case.name(rank)} {found[rank]}; the others lost it", fix)


def _stopped(case: Evidence) -> Verdict | None:
    """A process that stands still by a signal, or is gone."""
    found = [rank for rank in case.silent if case.states.get(rank) in (*STOPPED, "Z", "X", "gone")]
    if not found:
        return None
    rank = min(found, key=lambda rank: (case.states[rank] not in STOPPED, rank))
    state = case.states[rank]
    said = f"{case.name(rank)} {STATES[state]}{missed_collective(case, [rank])}"
    if state in STOPPED:
        return Verdict("stopped", (rank,), said, "find who stopped it (a debugger, Ctrl-Z, a scheduler), or kill -CONT")
    return Verdict("killed", (rank,), said, "see the node's log (dmesg), and continue with --resume")


def _absent(case: Evidence) -> Verdict | None:
    """A rank that never came to what others wait for in, for another reason than that it waits itself."""
    waiting = {rank: was_waiting(dump) for rank, dump in case.dumps.items()}
    behind = ranks_waited_for(case)
    if not behind and all(waiting.values()) and not case.silent:
        return None
    busy = [rank for rank, waits_too in waiting.items() if not waits_too]
    # On a GPU who waits stands in its own code too, but has come further than others somewhere else.
    ahead = set().union(*behind.values())
    roots = [rank for rank in busy if rank in behind and rank not in ahead]
    roots = roots or [rank for rank in case.silent if rank in behind] or [rank for rank in busy if rank in behind]
    if not roots and any(waiting.values()):  # messages of a pipeline are in no recorder
        roots = busy or case.silent
    if not roots:
        return _crossed(case, behind)
    if roots[0] in case.silent:
        said = f"{case.names(roots)} left no word{missed_collective(case, roots)}"
        fix = "its process or host is gone or frozen: look there (ps, dmesg, the network), and continue with --resume"
        return Verdict("silent", tuple(sorted(roots)), said, fix)
    standing_at = join_words([f"{case.name(rank)} was in {case.where(rank)}" for rank in sorted(roots)])
    fix = "look there: is it slow, does it wait for something else, or did it leave a collective out?"
    return Verdict(
        "absent",
        tuple(sorted(roots)),
        f"{standing_at}{missed_collective(case, roots)}{describe_divergence_point(case, roots)}",
        fix,
    )


def _crossed(case: Evidence, behind: Mapping[int, set[int]]) -> Verdict | None:
    """Ranks that all wait for each other, in different collectives."""
    if not behind:
        return None
    free = [rank for rank in behind if not any(rank in others for others in behind.values())]
    most = max(len(others) for others in behind.values())
    ranks = sorted(free or [rank for rank, others in behind.items() if len(others) == most])
    said = f"{case.names(ranks)} never came{missed_collective(case, ranks)}"
    others = sorted({other for rank in ranks for other in behind[rank]})
    for rank in ranks:
        calls = case.dumps[rank]["calls"] if rank in case.dumps else []
        if calls:
            key = calls[-1]["group"], tuple(case.dumps[rank]["groups"].get(calls[-1]["group"], ()))
            said += (
                f"; rank {rank} was in {describe_call(calls[-1])} of {case.group(key)}, "
                f"at {format_frame(calls[-1]['at'])}"
            )
    return Verdict(
        "crossed",
        tuple(ranks),
        said + describe_divergence_point(case, ranks),
        MISMATCH_FIXES["operation"] if others else MISMATCH_FIXES["shape"],
    )


def _lost(case: Evidence) -> Verdict | None:
    """Every rank came, and it did not end."""
    for key, calls in reversed(case.groups.items()):
        last = max((max(mine, default=0) for mine in calls.values()), default=0)
        inside = [rank for rank, mine in calls.items() if last in mine and case.under_way(rank, mine[last])]
        if inside:
            call = calls[inside[0]][last]
            said = f"{case.group(key)} came to {describe_call(call)}, number {last}, and it did not end"
            fix = "the network between them, or a device: phalanx bench times the links; check cards and cables"
            return Verdict("lost", key[1], said, fix)
    return None


def _standing_still(case: Evidence) -> Verdict | None:
    """Ranks that stand still in what no recorder has: messages of a pipeline; or one alone."""
    still = [rank for rank, dump in case.dumps.items() if dump["why"] == STALLED]
    if not still:
        return None
    shown = [f"{case.name(rank)} in {case.where(rank)}" for rank in sorted(still)[:4]]
    more = [f"{len(still) - 4} more"] if len(still) > 4 else []
    said = f"{join_words([*shown, *more])}: nothing moved there, and no collective was under way"
    fix = "look there: is it slow, or does it wait for something that does not come?"
    if len(still) > 1:
        fix = "a message between them was lost: look at the network there (phalanx doctor), and continue with --resume"
    return Verdict("lost", tuple(sorted(still)), said, fix)


# -- comparing ---------------------------------------------------------------------------------------------------------
