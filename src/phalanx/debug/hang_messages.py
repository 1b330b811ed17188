"""Verdicts on a hang or a failure, and their texts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["mismatch", "killed", "stopped", "error", "silent", "absent", "crossed", "lost", "nothing"]
Cause = Literal[
    "killed_by_signal",
    "collective_decision",
    "rank_error",
    "operation_mismatch",
    "shape_mismatch",
    "aborted_by_library",
    "process_stopped",
    "process_gone",
    "silent",
    "absent",
    "crossed",
    "stuck_collective",
    "one_rank_stalled",
    "ranks_stalled",
    "nothing",
]
"""The finding of a rule. Several causes have the same kind."""


@dataclass(frozen=True)
class Verdict:
    """The probable cause of a hang or a failure."""

    kind: Kind
    ranks: tuple[int, ...]
    """The ranks to look at."""
    summary: str
    fix: str


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """The diagnosis of a run that hung or failed."""

    verdict: Verdict
    step: int | None
    """The last step that all ranks with a hang dump had finished."""
    ranks: dict[int, str]
    """A line on each rank, if any rank wrote a record."""
    earlier_failures: tuple[str, ...] = ()
    """A line on each failure from which the run recovered."""
    problems: tuple[str, ...] = ()
    """Files of the run directory that could not be read in full, so that the diagnosis may be incomplete."""


@dataclass(frozen=True)
class Message:
    """Text of the verdicts of one cause; `summary` has a field in braces for each value that a rule gives."""

    kind: Kind
    summary: str
    fix: str


MISMATCH_FIXES = {
    "operation": "call the same collectives in the same order on every rank: look for a branch that depends on the "
    "rank or its data above these lines",
    "shape": "use the same number of elements of one dtype on every rank in this collective: check how the size of "
    "this tensor is computed",
}
MISMATCH = "in collective {number} of {group}, {deviating_calls}{other_calls}{reordering}"
CONNECTION_LOST = "; the other ranks lost the connection to it"

MESSAGES: dict[Cause, Message] = {
    "killed_by_signal": Message(
        "killed",
        "{rank} {reason}" + CONNECTION_LOST,
        fix="read its node's kernel log (dmesg) for the cause, and continue with --resume",
    ),
    "collective_decision": Message(
        "error", "{reason}", fix="follow the message; --resume continues from the newest checkpoint"
    ),
    "rank_error": Message("error", "{rank} failed by itself: {reason}{loss}", fix="read its traceback in failures/"),
    "operation_mismatch": Message("mismatch", MISMATCH, fix=MISMATCH_FIXES["operation"]),
    "shape_mismatch": Message("mismatch", MISMATCH, fix=MISMATCH_FIXES["shape"]),
    "aborted_by_library": Message(
        "killed",
        "{rank} {reason}" + CONNECTION_LOST,
        fix="read the end of its output for the cause, and hangs/ for the stacks of its threads",
    ),
    "process_stopped": Message(
        "stopped",
        "{rank} {state}{missed_collective}",
        fix="find what stopped it (a debugger, Ctrl-Z, a scheduler), or run kill -CONT",
    ),
    "process_gone": Message(
        "killed",
        "{rank} {state}{missed_collective}",
        fix="read the node's kernel log (dmesg), and continue with --resume",
    ),
    "silent": Message(
        "silent",
        "{ranks} wrote no hang dump{missed_collective}",
        fix="check its process and its host (ps, dmesg, the network), and continue with --resume",
    ),
    "absent": Message(
        "absent",
        "{locations}{missed_collective}{divergence}",
        fix="check this line: it may be slow, wait for something else, or follow a skipped collective",
    ),
    "crossed": Message(
        "crossed", "{ranks} did not arrive{missed_collective}{last_calls}{divergence}", fix=MISMATCH_FIXES["operation"]
    ),
    "stuck_collective": Message(
        "lost",
        "{group} entered {call}, number {number}, and it did not finish",
        fix="check the network between these ranks (cards, cables) and the devices; phalanx bench times the links",
    ),
    "one_rank_stalled": Message(
        "lost",
        "{locations}: no progress, and no collective was pending",
        fix="check this line: it may be slow, or wait for an event that does not occur",
    ),
    "ranks_stalled": Message(
        "lost",
        "{locations}: no progress, and no collective was pending",
        fix="a message was lost: check the network between these ranks with phalanx doctor, "
        "then continue with --resume",
    ),
    "nothing": Message("nothing", "no rank reported a pending collective", fix="read failures/"),
}


def make_verdict(cause: Cause, ranks: tuple[int, ...], /, **values: object) -> Verdict:
    """Return the verdict of a cause on these ranks; the values fill the fields of its message's summary."""
    message = MESSAGES[cause]
    return Verdict(message.kind, ranks, message.summary.format(**values), fix=message.fix)
