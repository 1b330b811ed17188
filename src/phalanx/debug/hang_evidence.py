"""Evidence of a hang: what each rank recorded, and which ranks wait for which."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

from phalanx.debug.collective_log import (
    Key,
    collectives_by_group,
    describe_call,
    first_difference,
    innermost_user_frame,
    is_peer_loss,
    minority_ranks,
    was_in_pipeline_p2p,
    was_waiting,
)
from phalanx.runs.hang_dumps import FAILED, STALLED, HangDump, RecordedCollective, format_frame
from phalanx.spec.degrees import ParallelDims, expert_parallel_groups
from phalanx.spec.formatting import join_words

Kind = Literal["mismatch", "killed", "stopped", "error", "silent", "absent", "crossed", "lost", "nothing"]


STATES = {
    "T": "was stopped (SIGSTOP)",
    "t": "was stopped by a debugger",
    "Z": "had died",
    "X": "had died",
    "gone": "was gone",
    "D": "waited for a disk or a driver (state D)",
}
"""Of a process, as its neighbours saw it."""


STOPPED = ("T", "t")


@dataclass(frozen=True)
class Verdict:
    """What it was, as far as the ranks' words tell."""

    kind: Kind
    ranks: tuple[int, ...]
    """Those to look at."""
    summary: str
    fix: str


@dataclass(frozen=True)
class Explanation:
    """What is known of a run that stood still or broke off."""

    verdict: Verdict
    step: int | None
    """The last that all ranks which told had finished."""
    ranks: dict[int, str]
    """A line on each, where any left word."""
    earlier_failures: tuple[str, ...] = ()
    """A line on each failure that the run went on from."""


def format_coordinates(sizes: ParallelDims, rank: int) -> str:
    """Where a rank is in the layout: "pp=2, tp=5, dp=0", axes of one rank left out; "" for a single rank."""
    if rank < sizes.servers:
        return f"server {rank}"
    place = {**sizes.coordinates(rank), "ep": sizes.expert_rank(rank)}
    if sizes.dp_replicate == 1 or sizes.dp_shard == 1:
        place["dp"] = place.pop("dp_replicate") + place.pop("dp_shard")
    order = ("pp", "tp", "cp", "ep", "dp", "dp_replicate", "dp_shard")
    size = {**vars(sizes), "dp": sizes.dp_size}
    return ", ".join(f"{axis}={place[axis]}" for axis in order if axis in place and size[axis] > 1)


class Evidence:
    """The evidence, and words for it."""

    def __init__(
        self, dumps: Mapping[int, HangDump], failures: Mapping[int, Mapping[str, Any]], sizes: ParallelDims
    ) -> None:
        self.failures, self.sizes, self.all = failures, sizes, dumps
        self.states: dict[int, str] = {}
        """Of processes that others looked at: the worst that one saw."""
        for dump in dumps.values():
            for rank, state in dump["sibling_states"].items():
                if state in STOPPED or int(rank) not in self.states:
                    self.states[int(rank)] = state
        # A rank that was stopped tells only what it did when it was woken, to end.
        self.dumps = {rank: dump for rank, dump in dumps.items() if self.states.get(rank) not in STOPPED}
        self.silent = [rank for rank in range(sizes.world_size) if rank not in self.dumps]
        self.groups = collectives_by_group(self.dumps)
        self.expert_groups = set(expert_parallel_groups(sizes))

    def name(self, rank: int) -> str:
        where = format_coordinates(self.sizes, rank)
        return f"rank {rank} ({where})" if where else f"rank {rank}"

    def names(self, ranks: Iterable[int]) -> str:
        found = sorted(ranks)
        shown = [self.name(rank) for rank in found[:4]]
        return join_words([*shown, f"{len(found) - 4} more"] if len(found) > 4 else shown)

    def group(self, key: Key) -> str:
        """ "the dp ranks 0, 2"."""
        ranks = key[1]
        if len(ranks) == self.sizes.world_size:
            return "all ranks"
        if ranks and max(ranks) < self.sizes.servers:
            return f"the servers {', '.join(map(str, ranks))}"
        places = [self.sizes.coordinates(rank) for rank in ranks if rank >= self.sizes.servers]
        axes = [axis for axis in self.sizes.axes if len({place[axis] for place in places}) > 1]
        if ranks in self.expert_groups and prod(getattr(self.sizes, axis) for axis in axes) > len(ranks):
            axes = ["ep"]  # none of the mesh's
        shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
        named = dict.fromkeys("dp" if axis.startswith("dp") else axis for axis in axes)
        return f"the {' x '.join(named)} ranks {shown}"

    def where(self, rank: int) -> str:
        return innermost_user_frame(self.dumps[rank]["stack"]) if rank in self.dumps else ""

    def under_way(self, rank: int, call: RecordedCollective) -> bool:
        """Whether this rank was in it. Gloo takes a collective that failed for one that is over; a message that failed
        says nothing of collectives before it."""
        dump = self.dumps[rank]
        failed = dump["why"] == FAILED and was_waiting(dump) and not was_in_pipeline_p2p(dump)
        return not call["over"] or (failed and call is dump["calls"][-1])

    def last_call(self, rank: int) -> str:
        """The collective that a rank waited in; "" if it was in none that is known."""
        dump = self.dumps[rank]
        last = dump["calls"][-1] if dump["calls"] else None
        if last is None or not self.under_way(rank, last):
            return ""
        key = last["group"], tuple(dump["groups"].get(last["group"], ()))
        return f"{describe_call(last)}, number {last['number']} of {self.group(key)}"

    def line(self, rank: int) -> str:
        """Of one rank: what it did, and where."""
        return f"{self.name(rank)}: {self._did(rank)}"

    def _did(self, rank: int) -> str:
        state, failure = self.states.get(rank), self.failures.get(rank)
        if rank not in self.dumps:
            word = STATES.get(state or "", "left no word")
            own = failure is not None and not is_peer_loss(str(failure["reason"]))
            return f"{word}; {failure['reason']}" if failure and own else word
        dump = self.dumps[rank]
        call = self.last_call(rank)
        still = f", still for {dump['stalled_seconds']:.0f} s" if dump["why"] == STALLED else ""
        said = [f"after step {dump['step']}{still}: {self.where(rank)}", *([f"in {call}"] if call else [])]
        if state in (*STOPPED, "D"):  # one that has died did so after its word
            said.append(STATES[state or ""])
        return "; ".join(said)


def _waiting_fronts(case: Evidence) -> Iterator[tuple[Key, RecordedCollective, list[int], list[int]]]:
    """Of each group in which ranks wait for others: the group, the first collective that some did not come to, who came
    and waits, and who did not come."""
    for key, calls in case.groups.items():
        last = {rank: max(mine, default=0) for rank, mine in calls.items()}
        waited = {n for rank, mine in calls.items() for n, call in mine.items() if case.under_way(rank, call)}
        for number in sorted(waited):
            missing = [rank for rank in key[1] if last.get(rank, 0) < number]
            if missing:
                came = [rank for rank, mine in calls.items() if number in mine and case.under_way(rank, mine[number])]
                yield key, calls[came[0]][number], came, missing
                break


def ranks_waited_for(case: Evidence) -> dict[int, set[int]]:
    """By rank that had not come as far as others of a group: who had."""
    found: dict[int, set[int]] = defaultdict(set)
    for _, _, came, missing in _waiting_fronts(case):
        for rank in missing:
            found[rank].update(came)
    return dict(found)


def missed_collective(case: Evidence, ranks: Sequence[int]) -> str:
    """What they never came to."""
    for key, call, came, missing in _waiting_fronts(case):
        if set(ranks) & set(missing):
            also = [rank for rank in missing if rank not in ranks and rank in case.dumps]
            said = f"; {describe_other_ranks(case, came, key)} waited in {describe_call(call)}, number {call['number']}"
            also_missing = f", to which {case.names(also)} had not come either" if also else ""
            return f"{said} of {case.group(key)}{also_missing}"
    waiting = [rank for rank, dump in case.dumps.items() if was_waiting(dump) and rank not in ranks]
    if not waiting:
        return ""
    inside = case.last_call(waiting[0])
    return f"; {case.names(waiting)} waited in {f'{inside}, ' if inside else ''}{case.where(waiting[0])}"


def describe_divergence_point(case: Evidence, ranks: Sequence[int]) -> str:
    """From where on they called the same collectives from other lines than the others: one was left out, or added."""
    for key, calls in case.groups.items():
        number = first_difference(calls, lambda call: call["at"] and tuple(call["at"]))
        if number is None or all(number - 1 not in mine for mine in calls.values()):
            continue
        here = {rank: mine[number]["at"] for rank, mine in calls.items() if number in mine}
        off = minority_ranks({rank: tuple(place or ()) for rank, place in here.items()})
        if set(off) & set(ranks):
            mine = next(rank for rank in off if rank in ranks)
            theirs = next((place for place in here.values() if place != here[mine]), None)
            return (
                f"; from number {number} of {case.group(key)} on its calls came from other lines "
                f"({format_frame(here[mine])}, where others were at {format_frame(theirs)}): "
                "one was left out there, or added"
            )
    return ""


def describe_other_ranks(case: Evidence, ranks: Sequence[int], key: Key) -> str:
    return case.names(ranks) if len(ranks) == 1 or len(key[1]) <= 4 else f"{len(ranks)} others"
