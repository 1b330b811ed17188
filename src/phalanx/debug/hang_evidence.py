"""Evidence of a hang: what each rank recorded, and its description as text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any

from phalanx.debug.collective_log import (
    Key,
    collectives_by_group,
    describe_call,
    first_difference,
    group_key,
    innermost_user_frame,
    is_peer_loss,
    minority_ranks,
    was_in_collective,
)
from phalanx.debug.wait_graph import build_wait_graph
from phalanx.runs.hang_dumps import STALLED, HangDump, format_frame
from phalanx.spec.formatting import join_words
from phalanx.spec.parallel_dims import ParallelDims, expert_parallel_groups

PROCESS_STATES = {
    "T": "was stopped (SIGSTOP)",
    "t": "was stopped by a debugger",
    "Z": "had exited",
    "X": "had exited",
    "gone": "no longer existed",
    "D": "waited for a disk or a driver (state D)",
}
"""States of a process in /proc, as other ranks on its host saw it."""
STOPPED_STATES = ("T", "t")
EXITED_STATES = ("Z", "X", "gone")


def format_coordinates(sizes: ParallelDims, rank: int) -> str:
    """Return the coordinates of a rank in the layout, such as "pp=2, tp=5, dp=0".

    Axes of size 1 are omitted; the text of a single rank is empty.
    """
    if rank < sizes.servers:
        return f"server {rank}"
    coordinates = {**sizes.coordinates(rank), "ep": sizes.expert_rank(rank)}
    if sizes.dp_replicate == 1 or sizes.dp_shard == 1:
        coordinates["dp"] = coordinates.pop("dp_replicate") + coordinates.pop("dp_shard")
    order = ("pp", "tp", "cp", "ep", "dp", "dp_replicate", "dp_shard")
    axis_sizes = {**vars(sizes), "dp": sizes.dp_size}
    return ", ".join(f"{axis}={coordinates[axis]}" for axis in order if axis in coordinates and axis_sizes[axis] > 1)


class Evidence:
    """The records of all ranks, and their description as text."""

    def __init__(
        self, dumps: Mapping[int, HangDump], failures: Mapping[int, Mapping[str, Any]], sizes: ParallelDims
    ) -> None:
        self.failures = failures
        self.sizes = sizes
        self.states: dict[int, str] = {}
        """The worst state of each process that other ranks saw."""
        for dump in dumps.values():
            for rank, state in dump["sibling_states"].items():
                if state in STOPPED_STATES or int(rank) not in self.states:
                    self.states[int(rank)] = state
        # The dump of a stopped rank describes only the time after it was resumed to exit.
        self.dumps = {rank: dump for rank, dump in dumps.items() if self.states.get(rank) not in STOPPED_STATES}
        self.silent = [rank for rank in range(sizes.world_size) if rank not in self.dumps]
        self.groups = collectives_by_group(self.dumps)
        self.wait_graph = build_wait_graph(self.dumps, self.groups, ranks_silent=self.silent)
        self.expert_groups = set(expert_parallel_groups(sizes))

    def name(self, rank: int) -> str:
        """Return the name of a rank with its coordinates."""
        coordinates = format_coordinates(self.sizes, rank)
        return f"rank {rank} ({coordinates})" if coordinates else f"rank {rank}"

    def names(self, ranks: Iterable[int]) -> str:
        """Return the names of ranks, the first four in full."""
        sorted_ranks = sorted(ranks)
        listed_names = [self.name(rank) for rank in sorted_ranks[:4]]
        return join_words([*listed_names, f"{len(sorted_ranks) - 4} more"] if len(sorted_ranks) > 4 else listed_names)

    def group(self, key: Key) -> str:
        """Return the name of a process group, such as "the dp ranks 0, 2"."""
        ranks = key[1]
        if len(ranks) == self.sizes.world_size:
            return "all ranks"
        if ranks and max(ranks) < self.sizes.servers:
            return f"the servers {', '.join(map(str, ranks))}"
        coordinates = [self.sizes.coordinates(rank) for rank in ranks if rank >= self.sizes.servers]
        axes = [axis for axis in self.sizes.axes if len({member[axis] for member in coordinates}) > 1]
        # A group of experts belongs to no axis of the mesh.
        if ranks in self.expert_groups and prod(getattr(self.sizes, axis) for axis in axes) > len(ranks):
            axes = ["ep"]
        listed_ranks = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
        axis_names = dict.fromkeys("dp" if axis.startswith("dp") else axis for axis in axes)
        return f"the {' x '.join(axis_names)} ranks {listed_ranks}"

    def where(self, rank: int) -> str:
        """Return the innermost frame of a rank outside of libraries, or "" if it wrote no dump."""
        return innermost_user_frame(self.dumps[rank]["stack"]) if rank in self.dumps else ""

    def last_call(self, rank: int) -> str:
        """Return the collective in which a rank waited, or "" if it waited in no recorded collective."""
        dump = self.dumps[rank]
        call = dump["calls"][-1] if dump["calls"] else None
        if call is None or not was_in_collective(dump, call):
            return ""
        return f"{describe_call(call)}, number {call['number']} of {self.group(group_key(dump, call))}"

    def describe_rank(self, rank: int) -> str:
        """Return a line on a rank: its state and its line of code."""
        state = self.states.get(rank)
        failure = self.failures.get(rank)
        if rank not in self.dumps:
            description = f"{self.name(rank)}: {PROCESS_STATES.get(state or '', 'wrote no hang dump')}"
            failed_itself = failure is not None and not is_peer_loss(str(failure["reason"]))
            return f"{description}; {failure['reason']}" if failure and failed_itself else description
        dump = self.dumps[rank]
        call = self.last_call(rank)
        stall_note = f", no progress for {dump['stalled_seconds']:.0f} s" if dump["why"] == STALLED else ""
        description = f"{self.name(rank)}: after step {dump['step']}{stall_note}: {self.where(rank)}"
        if call:
            description += f"; in {call}"
        # Processes in other states exited after they wrote the dump.
        if state in (*STOPPED_STATES, "D"):
            description += f"; {PROCESS_STATES[state or '']}"
        return description


def missed_collective(evidence: Evidence, ranks: Sequence[int]) -> str:
    """Describe the collective that these ranks did not reach, or else the one in which others waited."""
    for collective in evidence.wait_graph.collectives:
        if not set(ranks) & set(collective.ranks_missing):
            continue
        other_missing = [rank for rank in collective.ranks_missing if rank not in ranks and rank in evidence.dumps]
        missing_note = f", which {evidence.names(other_missing)} had not reached either" if other_missing else ""
        waiting = describe_other_ranks(evidence, collective.ranks_inside, collective.group)
        call_text = f"{describe_call(collective.call)}, number {collective.call['number']}"
        return f"; {waiting} waited in {call_text} of {evidence.group(collective.group)}{missing_note}"
    waiting_ranks = [rank for rank in evidence.wait_graph.ranks_waiting if rank not in ranks]
    if not waiting_ranks:
        return ""
    call = evidence.last_call(waiting_ranks[0])
    call_text = f"{call}, " if call else ""
    return f"; {evidence.names(waiting_ranks)} waited in {call_text}{evidence.where(waiting_ranks[0])}"


def describe_divergence_point(evidence: Evidence, ranks: Sequence[int]) -> str:
    """Describe from which collective on these ranks called from other lines than the other ranks.

    Such a difference means that a call was skipped or added.
    """
    for group, calls in evidence.groups.items():
        number = first_difference(calls, lambda call: call["at"] and tuple(call["at"]))
        if number is None or all(number - 1 not in rank_calls for rank_calls in calls.values()):
            continue
        frame_by_rank = {rank: rank_calls[number]["at"] for rank, rank_calls in calls.items() if number in rank_calls}
        deviating_ranks = minority_ranks({rank: tuple(frame or ()) for rank, frame in frame_by_rank.items()})
        suspects = [rank for rank in deviating_ranks if rank in ranks]
        if suspects:
            suspect_frame = frame_by_rank[suspects[0]]
            other_frame = next((frame for frame in frame_by_rank.values() if frame != suspect_frame), None)
            return (
                f"; from call number {number} of {evidence.group(group)}, its calls came from different lines "
                f"({format_frame(suspect_frame)}; other ranks: {format_frame(other_frame)}): "
                "a call was skipped or added there"
            )
    return ""


def describe_other_ranks(evidence: Evidence, ranks: Sequence[int], key: Key) -> str:
    """Return the names of ranks; only their number if they are several of a large group (`key`)."""
    return evidence.names(ranks) if len(ranks) == 1 or len(key[1]) <= 4 else f"{len(ranks)} others"
