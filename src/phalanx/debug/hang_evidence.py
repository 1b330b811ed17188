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
from phalanx.spec.formatting import join_words
from phalanx.spec.parallel_dims import ParallelDims, expert_parallel_groups

Kind = Literal["mismatch", "killed", "stopped", "error", "silent", "absent", "crossed", "lost", "nothing"]


PROCESS_STATES = {
    "T": "was stopped (SIGSTOP)",
    "t": "was stopped by a debugger",
    "Z": "had died",
    "X": "had died",
    "gone": "was gone",
    "D": "waited for a disk or a driver (state D)",
}
"""Of a process, as its neighbours saw it."""


STOPPED_STATES = ("T", "t")


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
    coordinates = {**sizes.coordinates(rank), "ep": sizes.expert_rank(rank)}
    if sizes.dp_replicate == 1 or sizes.dp_shard == 1:
        coordinates["dp"] = coordinates.pop("dp_replicate") + coordinates.pop("dp_shard")
    order = ("pp", "tp", "cp", "ep", "dp", "dp_replicate", "dp_shard")
    axis_sizes = {**vars(sizes), "dp": sizes.dp_size}
    return ", ".join(f"{axis}={coordinates[axis]}" for axis in order if axis in coordinates and axis_sizes[axis] > 1)


class Evidence:
    """The evidence, and words for it."""

    def __init__(
        self, dumps: Mapping[int, HangDump], failures: Mapping[int, Mapping[str, Any]], sizes: ParallelDims
    ) -> None:
        self.failures = failures
        self.sizes = sizes
        self.all = dumps
        self.states: dict[int, str] = {}
        """Of processes that others looked at: the worst that one saw."""
        for dump in dumps.values():
            for rank, state in dump["sibling_states"].items():
                if state in STOPPED_STATES or int(rank) not in self.states:
                    self.states[int(rank)] = state
        # A rank that was stopped tells only what it did when it was woken, to end.
        self.dumps = {rank: dump for rank, dump in dumps.items() if self.states.get(rank) not in STOPPED_STATES}
        self.silent = [rank for rank in range(sizes.world_size) if rank not in self.dumps]
        self.groups = collectives_by_group(self.dumps)
        self.expert_groups = set(expert_parallel_groups(sizes))

    def name(self, rank: int) -> str:
        coordinates = format_coordinates(self.sizes, rank)
        return f"rank {rank} ({coordinates})" if coordinates else f"rank {rank}"

    def names(self, ranks: Iterable[int]) -> str:
        sorted_ranks = sorted(ranks)
        shown = [self.name(rank) for rank in sorted_ranks[:4]]
        return join_words([*shown, f"{len(sorted_ranks) - 4} more"] if len(sorted_ranks) > 4 else shown)

    def group(self, key: Key) -> str:
        """ "the dp ranks 0, 2"."""
        ranks = key[1]
        if len(ranks) == self.sizes.world_size:
            return "all ranks"
        if ranks and max(ranks) < self.sizes.servers:
            return f"the servers {', '.join(map(str, ranks))}"
        coordinates = [self.sizes.coordinates(rank) for rank in ranks if rank >= self.sizes.servers]
        axes = [
            axis for axis in self.sizes.axes if len({rank_coordinates[axis] for rank_coordinates in coordinates}) > 1
        ]
        if ranks in self.expert_groups and prod(getattr(self.sizes, axis) for axis in axes) > len(ranks):
            axes = ["ep"]  # none of the mesh's
        shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
        axis_names = dict.fromkeys("dp" if axis.startswith("dp") else axis for axis in axes)
        return f"the {' x '.join(axis_names)} ranks {shown}"

    def where(self, rank: int) -> str:
        return innermost_user_frame(self.dumps[rank]["stack"]) if rank in self.dumps else ""

    def is_in_collective(self, rank: int, call: RecordedCollective) -> bool:
        """Whether this rank was in it. Gloo takes a collective that failed for one that is over; a message that failed
        says nothing of collectives before it."""
        dump = self.dumps[rank]
        failed = dump["why"] == FAILED and was_waiting(dump) and not was_in_pipeline_p2p(dump)
        return not call["over"] or (failed and call is dump["calls"][-1])

    def last_call(self, rank: int) -> str:
        """The collective that a rank waited in; "" if it was in none that is known."""
        dump = self.dumps[rank]
        call = dump["calls"][-1] if dump["calls"] else None
        if call is None or not self.is_in_collective(rank, call):
            return ""
        key = call["group"], tuple(dump["groups"].get(call["group"], ()))
        return f"{describe_call(call)}, number {call['number']} of {self.group(key)}"

    def describe_rank(self, rank: int) -> str:
        """Of one rank: what it did, and where."""
        return f"{self.name(rank)}: {self._describe_state(rank)}"

    def _describe_state(self, rank: int) -> str:
        state = self.states.get(rank)
        failure = self.failures.get(rank)
        if rank not in self.dumps:
            description = PROCESS_STATES.get(state or "", "left no word")
            failed_itself = failure is not None and not is_peer_loss(str(failure["reason"]))
            return f"{description}; {failure['reason']}" if failure and failed_itself else description
        dump = self.dumps[rank]
        call = self.last_call(rank)
        stall_note = f", still for {dump['stalled_seconds']:.0f} s" if dump["why"] == STALLED else ""
        parts = [f"after step {dump['step']}{stall_note}: {self.where(rank)}", *([f"in {call}"] if call else [])]
        if state in (*STOPPED_STATES, "D"):  # one that has died did so after its word
            parts.append(PROCESS_STATES[state or ""])
        return "; ".join(parts)


def _incomplete_collectives(evidence: Evidence) -> Iterator[tuple[Key, RecordedCollective, list[int], list[int]]]:
    """Of each group in which ranks wait for others: the group, the first collective that some did not come to, who came
    and waits, and who did not come."""
    for key, calls in evidence.groups.items():
        last_numbers = {rank: max(rank_calls, default=0) for rank, rank_calls in calls.items()}
        waited_numbers = {
            n
            for rank, rank_calls in calls.items()
            for n, call in rank_calls.items()
            if evidence.is_in_collective(rank, call)
        }
        for number in sorted(waited_numbers):
            missing = [rank for rank in key[1] if last_numbers.get(rank, 0) < number]
            if missing:
                waiters = [
                    rank
                    for rank, rank_calls in calls.items()
                    if number in rank_calls and evidence.is_in_collective(rank, rank_calls[number])
                ]
                yield key, calls[waiters[0]][number], waiters, missing
                break


def ranks_waited_for(evidence: Evidence) -> dict[int, set[int]]:
    """By rank that had not come as far as others of a group: who had."""
    ranks_ahead: dict[int, set[int]] = defaultdict(set)
    for _, _, waiters, missing in _incomplete_collectives(evidence):
        for rank in missing:
            ranks_ahead[rank].update(waiters)
    return dict(ranks_ahead)


def missed_collective(evidence: Evidence, ranks: Sequence[int]) -> str:
    """What they never came to."""
    for key, call, waiters, missing in _incomplete_collectives(evidence):
        if set(ranks) & set(missing):
            other_missing = [rank for rank in missing if rank not in ranks and rank in evidence.dumps]
            waiting = describe_other_ranks(evidence, waiters, key)
            text = f"; {waiting} waited in {describe_call(call)}, number {call['number']}"
            missing_note = f", to which {evidence.names(other_missing)} had not come either" if other_missing else ""
            return f"{text} of {evidence.group(key)}{missing_note}"
    waiting_ranks = [rank for rank, dump in evidence.dumps.items() if was_waiting(dump) and rank not in ranks]
    if not waiting_ranks:
        return ""
    collective = evidence.last_call(waiting_ranks[0])
    call_text = f"{collective}, " if collective else ""
    return f"; {evidence.names(waiting_ranks)} waited in {call_text}{evidence.where(waiting_ranks[0])}"


def describe_divergence_point(evidence: Evidence, ranks: Sequence[int]) -> str:
    """From where on they called the same collectives from other lines than the others: one was left out, or added."""
    for key, calls in evidence.groups.items():
        number = first_difference(calls, lambda call: call["at"] and tuple(call["at"]))
        if number is None or all(number - 1 not in mine for mine in calls.values()):
            continue
        frame_by_rank = {rank: mine[number]["at"] for rank, mine in calls.items() if number in mine}
        deviating_ranks = minority_ranks({rank: tuple(frame or ()) for rank, frame in frame_by_rank.items()})
        if set(deviating_ranks) & set(ranks):
            mine = next(rank for rank in deviating_ranks if rank in ranks)
            other_frame = next((frame for frame in frame_by_rank.values() if frame != frame_by_rank[mine]), None)
            return (
                f"; from number {number} of {evidence.group(key)} on its calls came from other lines "
                f"({format_frame(frame_by_rank[mine])}, where others were at {format_frame(other_frame)}): "
                "one was left out there, or added"
            )
    return ""


def describe_other_ranks(evidence: Evidence, ranks: Sequence[int], key: Key) -> str:
    return evidence.names(ranks) if len(ranks) == 1 or len(key[1]) <= 4 else f"{len(ranks)} others"
