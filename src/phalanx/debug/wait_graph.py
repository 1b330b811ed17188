"""The wait graph of a hang: which ranks wait in a collective, and for which ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from phalanx.debug.collective_log import Calls, Key, was_in_collective, was_waiting
from phalanx.runs.hang_dumps import HangDump, RecordedCollective


@dataclass(frozen=True, kw_only=True)
class IncompleteCollective:
    """A collective that some ranks of its group entered and others did not reach."""

    group: Key
    call: RecordedCollective
    """The call of one of the ranks inside."""
    ranks_inside: list[int]
    ranks_missing: list[int]


@dataclass(frozen=True, kw_only=True)
class WaitGraph:
    """Ranks and what they wait for. An edge leads from a rank in a collective to each rank that did not reach it.

    Example: rank 0 waits for rank 1 in a tp group, and rank 1 for rank 2 in a dp group. Rank 2 computes.

        rank 0 --tp--> rank 1 --dp--> rank 2        ranks_waiting  [0, 1]
                                                    ranks_missing  {1: {0}, 2: {1}}
                                                    blockers       [2]
    """

    collectives: list[IncompleteCollective]
    """The first incomplete collective of each group."""
    ranks_waiting: list[int]
    """Ranks that waited for others in a collective or for a pipeline message, as their stacks show."""
    ranks_busy: list[int]
    """The other ranks with a hang dump. On a GPU, a rank that waits in a collective is among these too."""
    ranks_silent: list[int]
    """Ranks without a hang dump."""

    @cached_property
    def ranks_missing(self) -> dict[int, set[int]]:
        """The ranks inside a collective, by each rank that did not reach it."""
        missing: dict[int, set[int]] = {}
        for collective in self.collectives:
            for rank in collective.ranks_missing:
                missing.setdefault(rank, set()).update(collective.ranks_inside)
        return missing

    @cached_property
    def blockers(self) -> list[int]:
        """The ranks that others wait for and that wait for no rank: the ends of the edges.

        If no busy rank is such an end, then the silent ranks that others wait for, or else the busy ones. If there are
        none either, the ranks wait for a pipeline message: from any busy rank, or else from any silent one.
        """
        ranks_ahead = set().union(*self.ranks_missing.values())
        missing_busy = [rank for rank in self.ranks_busy if rank in self.ranks_missing]
        ends = [rank for rank in missing_busy if rank not in ranks_ahead]
        if ends:
            return ends
        missing_silent = [rank for rank in self.ranks_silent if rank in self.ranks_missing]
        if missing_silent:
            return missing_silent
        if missing_busy:
            return missing_busy
        # Pipeline messages leave no record.
        if self.ranks_waiting:
            return self.ranks_busy or self.ranks_silent
        return []


def build_wait_graph(
    dumps: Mapping[int, HangDump], groups: Mapping[Key, Calls], ranks_silent: Sequence[int]
) -> WaitGraph:
    """Return the wait graph of a run. `ranks_silent` are the ranks without a hang dump."""
    collectives = []
    for group, calls in groups.items():
        last_numbers = {rank: max(rank_calls, default=0) for rank, rank_calls in calls.items()}
        inside_by_number: dict[int, list[int]] = {}
        for rank, rank_calls in calls.items():
            for number, call in rank_calls.items():
                if was_in_collective(dumps[rank], call):
                    inside_by_number.setdefault(number, []).append(rank)
        for number, inside in sorted(inside_by_number.items()):
            missing = [rank for rank in group[1] if last_numbers.get(rank, 0) < number]
            if missing:
                call = calls[inside[0]][number]
                collectives.append(
                    IncompleteCollective(group=group, call=call, ranks_inside=inside, ranks_missing=missing)
                )
                break
    return WaitGraph(
        collectives=collectives,
        ranks_waiting=[rank for rank, dump in dumps.items() if was_waiting(dump)],
        ranks_busy=[rank for rank, dump in dumps.items() if not was_waiting(dump)],
        ranks_silent=list(ranks_silent),
    )
