"""Debug mode that compares the order in which ranks call collectives and send messages.

With PHALANX_CHECK_COLLECTIVES set, each rank appends its calls to a file (`train.guards.collective_log`). The members
of a group must call the same collectives in the same order. The receiver of messages must expect them in the order in
which they are sent. NCCL matches both by order alone. The files remain after a hang or a crash.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict, deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import astuple, dataclass, field, fields
from itertools import permutations
from pathlib import Path
from typing import Any, Literal, Self

from phalanx.debug.collective_log import minority_ranks
from phalanx.runs.decode import Count, Decode, Rank, decoder
from phalanx.spec.formatting import join_words

CHECK_VARIABLE = "PHALANX_CHECK_COLLECTIVES"
COLLECTIVE = "collective"
MESSAGE = "message"
NO_CALL = ""
"""The signature of a call that a rank skipped."""
NUM_LAST_CALLS = 3
"""Number of calls that are shown for a hung rank."""


@dataclass(frozen=True, kw_only=True)
class LoggedCall:
    """One kind of call.

    A line of a log contains the values of all of these fields, or the index of an earlier line with equal values.
    """

    kind: str
    """COLLECTIVE or MESSAGE."""
    group: str
    """PyTorch's name of the process group."""
    ranks: tuple[int, ...]
    """The members of the group; the sender and the receiver of a message."""
    signature: str
    """Text that must be equal on all of these ranks."""
    caller: str
    """The line of the call, which may differ between ranks."""
    sent: tuple[int, ...] = ()
    """Number of elements for each member in an all-to-all."""
    received: tuple[int, ...] = ()
    """Number of elements expected from each member."""
    in_background: bool = False
    """True if a background thread made the call, in no fixed order with the other calls."""

    def to_json(self) -> str:
        """Return the line of the log."""
        return json.dumps(astuple(self))

    @classmethod
    def from_values(cls, values: Sequence[Any]) -> Self:
        """Return the call of a line of the log: its fields in the order of this class.

        Raises ValueError if the line is damaged.
        """
        call = cls(**{call_field.name: value for call_field, value in zip(fields(cls), values, strict=True)})
        if len(call.ranks) < 1 + (call.kind == MESSAGE) or {len(call.sent), len(call.received)} - {0, len(call.ranks)}:
            raise ValueError("the ranks of a call are damaged")
        return call

    @property
    def members(self) -> str:
        """The ranks and the group of the call, as text."""
        if self.kind == MESSAGE:
            return f"from rank {self.ranks[0]} to rank {self.ranks[1]} in group {self.group}"
        return f"of group {self.group} (ranks {', '.join(map(str, self.ranks))})"

    @property
    def description(self) -> str:
        """The call, its ranks and its line, as text."""
        return f"{self.signature} {self.members} at {self.caller}"


_CallFields = tuple[str, str, tuple[Rank, ...], str, str, tuple[Count, ...], tuple[Count, ...], bool]
_decode_line: Decode[int | tuple[Any, ...]] = decoder(Count | _CallFields)
"""Decode a line of a log: the fields of `LoggedCall`, or the index of an earlier line."""


@dataclass(frozen=True)
class OrderDifference:
    """The first call that differs between ranks."""

    ranks: tuple[int, ...]
    """The ranks that differ from the majority; all ranks without a majority."""
    message: str
    kind: Literal["mismatch", "crossed"] = "mismatch"
    """Kind of difference: other calls in a group (mismatch), or other orders across groups (crossed)."""


@dataclass(kw_only=True)
class _Log:
    """Reader of a rank's log file."""

    file: Path
    offset: int = 0
    kinds: list[LoggedCall] = field(default_factory=list)
    last_calls: deque[LoggedCall] = field(default_factory=lambda: deque(maxlen=NUM_LAST_CALLS))
    is_damaged: bool = False
    """True after a line that cannot be read. Later lines refer to earlier ones by index, and are not read either."""

    def read_new_calls(self) -> list[LoggedCall]:
        """Return the calls that were appended since the last read; none if the file does not exist."""
        if self.is_damaged or not self.file.is_file():
            return []
        with self.file.open("rb") as file:
            file.seek(self.offset)
            lines, _, _ = file.read().rpartition(b"\n")  # the last line may be incomplete
        calls: list[LoggedCall] = []
        try:
            for line in lines.split(b"\n") if lines else ():
                index_or_fields = _decode_line(line)
                if isinstance(index_or_fields, tuple):
                    self.kinds.append(LoggedCall.from_values(index_or_fields))
                    index_or_fields = len(self.kinds) - 1
                calls.append(self.kinds[index_or_fields])
        except (ValueError, IndexError):
            self.is_damaged = True
        self.offset += len(lines) + bool(lines)
        self.last_calls.extend(calls)
        return calls


@dataclass
class _Sequence:
    """Calls of a group, or messages from one rank to another, that some of the ranks have not made."""

    num_checked: int = 0
    """Number of earlier calls, which all ranks have made."""
    calls: dict[int, deque[LoggedCall]] = field(default_factory=lambda: defaultdict(deque))
    """The calls by rank."""


class CollectiveOrder:
    """Incremental comparison of the logs of all ranks."""

    def __init__(self, files: Mapping[int, Path]) -> None:
        """Open the log file of each rank."""
        self._logs = {rank: _Log(file=file) for rank, file in files.items()}
        self._sequences: dict[tuple[str, str, tuple[int, ...]], _Sequence] = defaultdict(_Sequence)
        self._pending: dict[int, deque[LoggedCall]] = {rank: deque() for rank in files}
        """Collectives of each rank, over all groups, that are not yet matched with those of the other ranks."""

    def first_difference(self, finished: Collection[int] = ()) -> OrderDifference | None:
        """Return the first call that differs between ranks, as far as logs are written, or None.

        Ranks in `finished` call no more collectives.
        """
        changed = {}
        for rank, log in self._logs.items():
            for call in log.read_new_calls():
                key = call.kind, call.group, call.ranks
                changed[key] = self._sequences[key]
                changed[key].calls[rank].append(call)
                if call.kind == COLLECTIVE and not call.in_background:
                    self._pending[rank].append(call)
        for (kind, _, ranks), sequence in (self._sequences if finished else changed).items():
            difference = _compare_calls(kind, ranks, sequence, finished=finished if kind == COLLECTIVE else ())
            if difference is not None:
                return difference
        return self._find_crossed_calls()

    def _find_crossed_calls(self) -> OrderDifference | None:
        """Return ranks that wait for each other in collectives of different groups, or None.

        Every call counts as blocking. A collective finishes when all of its ranks have reached it. NCCL requires one
        order on all ranks over several groups too.
        """
        candidates = list(self._pending)
        while candidates:
            calls = self._pending[candidates.pop()]
            members = [rank for rank in calls[0].ranks if rank in self._pending] if calls else []
            if calls and all(self._is_next_call(rank, calls[0]) for rank in members):
                candidates.extend(members)
                for rank in members:
                    self._pending[rank].popleft()
        cycle = self._find_wait_cycle()
        if not cycle:
            return None
        waits = [f"rank {rank} in {self._pending[rank][0].description}" for rank in cycle]
        message = f"ranks wait for each other in different groups: {join_words(waits)}"
        return OrderDifference(tuple(sorted(cycle)), message, "crossed")

    def _is_next_call(self, rank: int, call: LoggedCall) -> bool:
        """Return whether a rank's next pending call is in the group of this call."""
        pending = self._pending[rank]
        return bool(pending) and (pending[0].group, pending[0].ranks) == (call.group, call.ranks)

    def _find_wait_cycle(self) -> list[int]:
        """Return a cycle of ranks in which each waits for the next, and the last for the first.

        Each of them called another collective before the one that its predecessor waits in.
        """
        waits_for: dict[int, set[int]] = {}
        for rank, calls in self._pending.items():
            awaited_ranks = (
                [rank_in_group for rank_in_group in calls[0].ranks if self._pending.get(rank_in_group)] if calls else []
            )
            waits_for[rank] = {
                rank_in_group for rank_in_group in awaited_ranks if not self._is_next_call(rank_in_group, calls[0])
            }
        # Cycles, and what waits for them, remain when the ranks that become free are removed.
        while free_ranks := {rank for rank, awaited_ranks in waits_for.items() if not awaited_ranks}:
            waits_for = {
                rank: awaited_ranks - free_ranks for rank, awaited_ranks in waits_for.items() if rank not in free_ranks
            }
        if not waits_for:
            return []
        path = []
        rank = next(iter(waits_for))
        while rank not in path:
            path.append(rank)
            rank = min(waits_for[rank])
        return path[path.index(rank) :]

    @property
    def damaged_files(self) -> list[Path]:
        """The logs that could not be read to their ends."""
        return [log.file for log in self._logs.values() if log.is_damaged]

    def bytes_read(self, rank: int) -> int:
        """Return the number of bytes read from a rank's file."""
        return self._logs[rank].offset

    def describe_last_calls(self, rank: int) -> str:
        """Return the last calls of a rank that were read, as text."""
        calls = self._logs[rank].last_calls if rank in self._logs else ()
        return "; ".join(call.description for call in calls)


def _compare_calls(
    kind: str, ranks: tuple[int, ...], sequence: _Sequence, finished: Collection[int]
) -> OrderDifference | None:
    """Compare the calls of these ranks, and remove the calls that all ranks have made."""
    counts = {rank: len(sequence.calls[rank]) for rank in ranks}
    for index in range(max(counts.values())):
        calls = {rank: sequence.calls[rank][index] for rank in ranks if index < counts[rank]}
        absent = [rank for rank in finished if rank in ranks and rank not in calls]
        difference = _compare_signatures(kind, calls, absent) or _compare_all_to_all_sizes(ranks, calls)
        if difference is not None:
            members = next(iter(calls.values())).members
            message = f"in {kind} {sequence.num_checked + index + 1} {members}, {difference.message}"
            return OrderDifference(difference.ranks, message)
    for _ in range(min(counts.values())):
        sequence.num_checked += 1
        for rank in ranks:
            sequence.calls[rank].popleft()
    return None


def _compare_signatures(kind: str, calls: Mapping[int, LoggedCall], absent: Sequence[int]) -> OrderDifference | None:
    """Compare the signatures of calls. Ranks in `absent` made no call."""
    signatures = {rank: call.signature for rank, call in calls.items()} | dict.fromkeys(absent, NO_CALL)
    if len(set(signatures.values())) <= 1:
        return None
    differing = sorted(minority_ranks(signatures))
    texts = [_describe_calls_of_ranks(kind, differing, calls)]
    others = [rank for rank in signatures if rank not in differing]
    if others:
        texts.append(_describe_calls_of_ranks(kind, others, calls))
    return OrderDifference(tuple(differing), ", while ".join(texts))


def _compare_all_to_all_sizes(ranks: tuple[int, ...], calls: Mapping[int, LoggedCall]) -> OrderDifference | None:
    """Compare the numbers of elements that ranks send in an all-to-all with those that receivers expect."""
    for (i, sender), (j, receiver) in permutations(enumerate(ranks), 2):
        if sender not in calls or receiver not in calls or not calls[sender].sent:
            continue
        sent = calls[sender].sent[j]
        expected = calls[receiver].received[i]
        if sent != expected:
            return OrderDifference(
                tuple(sorted((sender, receiver))),
                f"rank {sender} sent {sent:,} elements at {calls[sender].caller} and rank {receiver} expected "
                f"{expected:,} of them at {calls[receiver].caller}: {calls[sender].signature}",
            )
    return None


def _describe_calls_of_ranks(kind: str, ranks: Sequence[int], calls: Mapping[int, LoggedCall]) -> str:
    """Return the calls of ranks as text.

    Example: "rank 0 and rank 2 called all_reduce of 4 float32 at a.py:3 (f) and rank 1 called nothing more".
    """
    by_signature: dict[str, list[int]] = defaultdict(list)
    for rank in ranks:
        by_signature[calls[rank].signature if rank in calls else NO_CALL].append(rank)
    texts = []
    for signature, same_ranks in by_signature.items():
        names = join_words([f"rank {rank}" for rank in same_ranks])
        call = calls.get(same_ranks[0])
        if call is None:
            texts.append(f"{names} called nothing more")
            continue
        verb = "called" if kind == COLLECTIVE else "sent" if same_ranks[0] == call.ranks[0] else "received"
        texts.append(f"{names} {verb} {signature} at {call.caller}")
    return " and ".join(texts)


def is_check_enabled() -> bool:
    """Return whether the user or a test has enabled the check."""
    return bool(os.environ.get(CHECK_VARIABLE))
