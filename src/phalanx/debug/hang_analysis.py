"""Why a run stood still: what its ranks left behind (`runs/hang_dumps.py`), held against each other."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

from phalanx.debug.collective_log import (
    Calls,
    Key,
    call_signature,
    collectives_by_group,
    describe_call,
    first_difference,
    innermost_user_frame,
    is_peer_loss,
    join_words,
    minority_ranks,
    was_in_pipeline_p2p,
    was_waiting,
)
from phalanx.runs.hang_dumps import ABORTED, FAILED, STALLED, HangDump, RecordedCollective, format_frame
from phalanx.spec.layout import ParallelDims, expert_parallel_groups

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


def diagnose_hang(
    dumps: Mapping[int, HangDump], failures: Mapping[int, Mapping[str, Any]], sizes: ParallelDims
) -> Explanation:
    """Hold the ranks' words against each other. `sizes` is the layout on the ranks of the run."""
    case = _Evidence(dumps, failures, sizes)
    looks = _killed, _collective_decision, _own_error, _mismatch, _aborted, _stopped, _absent, _lost, _standing_still
    found = (look(case) for look in looks)
    verdict = next((one for one in found if one is not None), None)
    steps = [dump["step"] for dump in dumps.values()]
    lines = {rank: case.line(rank) for rank in range(sizes.world_size)} if dumps or failures else {}
    nothing = Verdict("nothing", (), "no rank left word of a collective that it waited for", "read failures/")
    return Explanation(verdict or nothing, min(steps, default=None), lines)


class _Evidence:
    """The evidence, and words for it."""

    def __init__(
        self, dumps: Mapping[int, HangDump], failures: Mapping[int, Mapping[str, Any]], sizes: ParallelDims
    ) -> None:
        self.failures, self.sizes, self.all = failures, sizes, dumps
        self.states: dict[int, str] = {}
        """Of processes that others looked at: the worst that one saw."""
        for dump in dumps.values():
            for rank, state in dump["beside"].items():
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
        still = f", still for {dump['stood_seconds']:.0f} s" if dump["why"] == STALLED else ""
        said = [f"after step {dump['step']}{still}: {self.where(rank)}", *([f"in {call}"] if call else [])]
        if state in (*STOPPED, "D"):  # one that has died did so after its word
            said.append(STATES[state or ""])
        return "; ".join(said)


# -- what it may have been, the surest first ---------------------------------------------------------------------------


def _killed(case: _Evidence) -> Verdict | None:
    """A rank that a signal ended, other than one that a mismatch aborts."""
    ended = {rank: record for rank, record in case.failures.items() if "traceback" not in record}
    ended = {rank: record for rank, record in ended.items() if "SIGABRT" not in str(record["reason"])}
    if not ended:
        return None
    rank = min(ended)
    said = f"{case.name(rank)} {ended[rank]['reason']}; the others lost it"
    return Verdict("killed", (rank,), said, "see its node's log (dmesg) for who killed it, and continue with --resume")


def _collective_decision(case: _Evidence) -> Verdict | None:
    """What all ranks found together, and ended for: a loss that is not finite, or ranks that hold other numbers."""
    for record in case.failures.values():
        if "blamed" in record:
            fix = "it says what to do; with --resume the run goes on from its newest checkpoint"
            return Verdict("error", tuple(record["blamed"]), str(record["reason"]), fix)
    return None


def _own_error(case: _Evidence) -> Verdict | None:
    """A rank that failed in its own work, and not because others were gone or late."""
    own = {rank: record for rank, record in case.failures.items() if "traceback" in record}
    own = {rank: record for rank, record in own.items() if not is_peer_loss(str(record["reason"]))}
    if not own:
        return None
    rank = min(own, key=lambda rank: float(own[rank]["time"]))
    others = "; the others lost it" if len(own) < len(case.failures) else ""
    said = f"{case.name(rank)} failed by itself: {own[rank]['reason']}{others}"
    return Verdict("error", (rank,), said, "its traceback is in failures/")


def _mismatch(case: _Evidence) -> Verdict | None:
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
            said += f", where {_the_others(case, others, key)} called {describe_call(theirs)} at {format_frame(theirs['at'])}"
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


def _aborted(case: _Evidence) -> Verdict | None:
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


def _stopped(case: _Evidence) -> Verdict | None:
    """A process that stands still by a signal, or is gone."""
    found = [rank for rank in case.silent if case.states.get(rank) in (*STOPPED, "Z", "X", "gone")]
    if not found:
        return None
    rank = min(found, key=lambda rank: (case.states[rank] not in STOPPED, rank))
    state = case.states[rank]
    said = f"{case.name(rank)} {STATES[state]}{_missed_collective(case, [rank])}"
    if state in STOPPED:
        return Verdict("stopped", (rank,), said, "find who stopped it (a debugger, Ctrl-Z, a scheduler), or kill -CONT")
    return Verdict("killed", (rank,), said, "see the node's log (dmesg), and continue with --resume")


def _absent(case: _Evidence) -> Verdict | None:
    """A rank that never came to what others wait for in, for another reason than that it waits itself."""
    waiting = {rank: was_waiting(dump) for rank, dump in case.dumps.items()}
    behind = _waited_for(case)
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
        said = f"{case.names(roots)} left no word{_missed_collective(case, roots)}"
        fix = "its process or host is gone or frozen: look there (ps, dmesg, the network), and continue with --resume"
        return Verdict("silent", tuple(sorted(roots)), said, fix)
    standing_at = join_words([f"{case.name(rank)} was in {case.where(rank)}" for rank in sorted(roots)])
    fix = "look there: is it slow, does it wait for something else, or did it leave a collective out?"
    return Verdict(
        "absent",
        tuple(sorted(roots)),
        f"{standing_at}{_missed_collective(case, roots)}{_divergence_point(case, roots)}",
        fix,
    )


def _crossed(case: _Evidence, behind: Mapping[int, set[int]]) -> Verdict | None:
    """Ranks that all wait for each other, in different collectives."""
    if not behind:
        return None
    free = [rank for rank in behind if not any(rank in others for others in behind.values())]
    most = max(len(others) for others in behind.values())
    ranks = sorted(free or [rank for rank, others in behind.items() if len(others) == most])
    said = f"{case.names(ranks)} never came{_missed_collective(case, ranks)}"
    others = sorted({other for rank in ranks for other in behind[rank]})
    for rank in ranks:
        calls = case.dumps[rank]["calls"] if rank in case.dumps else []
        if calls:
            key = calls[-1]["group"], tuple(case.dumps[rank]["groups"].get(calls[-1]["group"], ()))
            said += f"; rank {rank} was in {describe_call(calls[-1])} of {case.group(key)}, at {format_frame(calls[-1]['at'])}"
    return Verdict(
        "crossed",
        tuple(ranks),
        said + _divergence_point(case, ranks),
        MISMATCH_FIXES["operation"] if others else MISMATCH_FIXES["shape"],
    )


def _lost(case: _Evidence) -> Verdict | None:
    """Every rank came, and it did not end."""
    for key, calls in reversed(case.groups.items()):
        last = max((max(mine, default=0) for mine in calls.values()), default=0)
        inside = [rank for rank, mine in calls.items() if last in mine and case.under_way(rank, mine[last])]
        if inside:
            call = calls[inside[0]][last]
            said = f"{case.group(key)} came to {describe_call(call)}, number {last}, and it did not end"
            fix = "the network between them, or a device: phalanx measure times the links; check cards and cables"
            return Verdict("lost", key[1], said, fix)
    return None


def _standing_still(case: _Evidence) -> Verdict | None:
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


def _waiting_fronts(case: _Evidence) -> Iterator[tuple[Key, RecordedCollective, list[int], list[int]]]:
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


def _waited_for(case: _Evidence) -> dict[int, set[int]]:
    """By rank that had not come as far as others of a group: who had."""
    found: dict[int, set[int]] = defaultdict(set)
    for _, _, came, missing in _waiting_fronts(case):
        for rank in missing:
            found[rank].update(came)
    return dict(found)


def _missed_collective(case: _Evidence, ranks: Sequence[int]) -> str:
    """What they never came to."""
    for key, call, came, missing in _waiting_fronts(case):
        if set(ranks) & set(missing):
            also = [rank for rank in missing if rank not in ranks and rank in case.dumps]
            said = f"; {_the_others(case, came, key)} waited in {describe_call(call)}, number {call['number']}"
            also_missing = f", to which {case.names(also)} had not come either" if also else ""
            return f"{said} of {case.group(key)}{also_missing}"
    waiting = [rank for rank, dump in case.dumps.items() if was_waiting(dump) and rank not in ranks]
    if not waiting:
        return ""
    inside = case.last_call(waiting[0])
    return f"; {case.names(waiting)} waited in {f'{inside}, ' if inside else ''}{case.where(waiting[0])}"


def _divergence_point(case: _Evidence, ranks: Sequence[int]) -> str:
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
                f"({format_frame(here[mine])}, where others were at {format_frame(theirs)}): one was left out there, or added"
            )
    return ""


def _the_others(case: _Evidence, ranks: Sequence[int], key: Key) -> str:
    return case.names(ranks) if len(ranks) == 1 or len(key[1]) <= 4 else f"{len(ranks)} others"
