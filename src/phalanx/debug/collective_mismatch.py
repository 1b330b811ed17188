"""Rule of the hang diagnosis: ranks of a group called different collectives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from phalanx.debug.collective_log import Calls, Key, call_signature, describe_call, first_difference, minority_ranks
from phalanx.debug.hang_evidence import Evidence, describe_other_ranks
from phalanx.debug.hang_messages import Verdict, make_verdict
from phalanx.runs.hang_dumps import RecordedCollective, format_frame
from phalanx.spec.formatting import join_words


@dataclass(frozen=True, kw_only=True)
class CollectiveMismatch:
    """The first collective of a group that ranks called with different signatures."""

    group: Key
    number: int
    calls: Calls
    """All calls of the group."""
    deviating_ranks: list[int]
    """The ranks that differ from the majority; all ranks without a majority."""
    other_ranks: list[int]

    def call(self, rank: int) -> RecordedCollective:
        """Return the call of a rank with this number."""
        return self.calls[rank][self.number]


def find_mismatch(evidence: Evidence) -> Verdict | None:
    """Blame the ranks that called another collective, or with other sizes, than the rest of their group."""
    mismatches = (_first_mismatch(group, calls) for group, calls in evidence.groups.items())
    mismatch = next((mismatch for mismatch in mismatches if mismatch is not None), None)
    if mismatch is None:
        return None
    return make_verdict(
        _mismatch_kind(mismatch),
        tuple(sorted(mismatch.deviating_ranks)),
        number=mismatch.number,
        group=evidence.group(mismatch.group),
        deviating_calls=_describe_deviating_calls(evidence, mismatch),
        other_calls=_describe_other_calls(evidence, mismatch),
        reordering=_describe_reordering(mismatch),
    )


def _first_mismatch(group: Key, calls: Calls) -> CollectiveMismatch | None:
    number = first_difference(calls, call_signature)
    if number is None:
        return None
    signatures = {
        rank: call_signature(rank_calls[number]) for rank, rank_calls in calls.items() if number in rank_calls
    }
    deviating_ranks = minority_ranks(signatures)
    return CollectiveMismatch(
        group=group,
        number=number,
        calls=calls,
        deviating_ranks=deviating_ranks,
        other_ranks=[rank for rank in signatures if rank not in deviating_ranks],
    )


def _mismatch_kind(mismatch: CollectiveMismatch) -> Literal["operation_mismatch", "shape_mismatch"]:
    """Return the part of the signature that differs, as a cause."""
    calls = [mismatch.call(rank) for rank in (*mismatch.deviating_ranks, *mismatch.other_ranks)]
    return "operation_mismatch" if len({call["operation"] for call in calls}) > 1 else "shape_mismatch"


def _describe_deviating_calls(evidence: Evidence, mismatch: CollectiveMismatch) -> str:
    texts = []
    for rank in sorted(mismatch.deviating_ranks):
        call = mismatch.call(rank)
        texts.append(f"{evidence.name(rank)} called {describe_call(call)} at {format_frame(call['at'])}")
    return join_words(texts)


def _describe_other_calls(evidence: Evidence, mismatch: CollectiveMismatch) -> str:
    if not mismatch.other_ranks:
        return ""
    call = mismatch.call(mismatch.other_ranks[0])
    names = describe_other_ranks(evidence, mismatch.other_ranks, mismatch.group)
    return f", while {names} called {describe_call(call)} at {format_frame(call['at'])}"


def _describe_reordering(mismatch: CollectiveMismatch) -> str:
    """Describe whether one rank skipped a collective or swapped two, as far as the next calls show it."""
    if len(mismatch.deviating_ranks) != 1 or not mismatch.other_ranks:
        return ""
    rank = mismatch.deviating_ranks[0]
    other_rank = mismatch.other_ranks[0]
    call = mismatch.call(rank)
    other_call = mismatch.call(other_rank)
    next_call = mismatch.calls[rank].get(mismatch.number + 1)
    other_next_call = mismatch.calls[other_rank].get(mismatch.number + 1)
    if next_call is None or other_next_call is None or call["operation"] == other_call["operation"]:
        return ""
    if not _is_same_call(call, other_next_call):
        return ""
    if _is_same_call(next_call, other_call):
        return ": this rank calls the two collectives in a different order"
    return ": this rank skipped that collective"


def _is_same_call(a: RecordedCollective, b: RecordedCollective) -> bool:
    return (call_signature(a), a["at"]) == (call_signature(b), b["at"])
