"""Rule of the hang diagnosis: ranks of a group called different collectives."""

from __future__ import annotations

from phalanx.debug.collective_log import call_signature, describe_call, first_difference, minority_ranks
from phalanx.debug.hang_evidence import Evidence, describe_other_ranks
from phalanx.debug.hang_messages import Verdict, make_verdict
from phalanx.runs.hang_dumps import RecordedCollective, format_frame
from phalanx.spec.formatting import join_words


def find_mismatch(evidence: Evidence) -> Verdict | None:
    """Blame the ranks that called another collective, or with other sizes, than the rest of their group.

    Without a majority, these are all ranks of the group.
    """
    for group, calls in evidence.groups.items():
        number = first_difference(calls, call_signature)
        if number is None:
            continue
        call_by_rank = {rank: rank_calls[number] for rank, rank_calls in calls.items() if number in rank_calls}
        deviating_ranks = sorted(minority_ranks({rank: call_signature(call) for rank, call in call_by_rank.items()}))
        other_ranks = [rank for rank in call_by_rank if rank not in deviating_ranks]
        call_texts = {
            rank: f"called {describe_call(call)} at {format_frame(call['at'])}" for rank, call in call_by_rank.items()
        }
        other_calls = ""
        reordering = ""
        if other_ranks:
            other_calls = f", while {describe_other_ranks(evidence, other_ranks, group)} {call_texts[other_ranks[0]]}"
            if len(deviating_ranks) == 1:
                reordering = _describe_reordering(calls[deviating_ranks[0]], calls[other_ranks[0]], number)
        operations = {call["operation"] for call in call_by_rank.values()}
        return make_verdict(
            "operation_mismatch" if len(operations) > 1 else "shape_mismatch",
            tuple(deviating_ranks),
            number=number,
            group=evidence.group(group),
            deviating_calls=join_words([f"{evidence.name(rank)} {call_texts[rank]}" for rank in deviating_ranks]),
            other_calls=other_calls,
            reordering=reordering,
        )
    return None


def _describe_reordering(
    calls: dict[int, RecordedCollective], other_calls: dict[int, RecordedCollective], number: int
) -> str:
    """Describe whether a rank skipped the collective or swapped it with the next, as far as the next calls show it."""
    call = calls[number]
    other_call = other_calls[number]
    next_call = calls.get(number + 1)
    other_next_call = other_calls.get(number + 1)
    if next_call is None or other_next_call is None or call["operation"] == other_call["operation"]:
        return ""
    if not _is_same_call(call, other_next_call):
        return ""
    if _is_same_call(next_call, other_call):
        return ": this rank calls the two collectives in a different order"
    return ": this rank skipped that collective"


def _is_same_call(a: RecordedCollective, b: RecordedCollective) -> bool:
    return (call_signature(a), a["at"]) == (call_signature(b), b["at"])
