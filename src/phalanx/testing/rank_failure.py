"""Report of a failed run on the pool: the rank that failed first, then the others."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class CallResult:
    """The message that a rank sends at the end of a call."""

    kind: Literal["raised", "returned"]
    finished_at: float
    """Time of the end, by time.monotonic()."""
    value: bytes = b""
    """The pickled return value."""
    summary: str = ""
    """One line: the exception."""
    traceback: str = ""


@dataclass(frozen=True, kw_only=True)
class RankFailure:
    """The outcome of one rank in a run that failed on at least one rank."""

    rank: int
    kind: Literal["raised", "died", "did not return", "returned"]
    seconds: float
    """Time since the start of the run."""
    summary: str = ""
    """One line: the exception, or how the process exited."""
    detail: str = ""
    """The traceback, or the Python stack of a rank that did not return."""
    output: str = ""
    """The last output of the rank during the run."""


class RankError(AssertionError):
    """A failure of a function on a rank, or different orders of collectives.

    `failures` has every rank, with the first failure at the front. `order_difference` describes the first call that
    differs."""

    def __init__(self, name: str, failures: Iterable[RankFailure], order_difference: str = "") -> None:
        self.failures = cause_first(failures)
        self.order_difference = order_difference
        prefix = f"{name}: {order_difference}\n" if order_difference else ""
        super().__init__(prefix + describe(name, self.failures))

    @property
    def all_returned(self) -> bool:
        """True if every rank is alive and has left the function."""
        return all(failure.kind in ("raised", "returned") for failure in self.failures)


def cause_first(failures: Iterable[RankFailure]) -> list[RankFailure]:
    """Sort failures: the cause, then its consequences, then the ranks without a failure.

    An exception's time is exact. A death is timed when the pool notices it, a little later and perhaps after the
    exceptions that it caused in peers. An exception kills no peer, so in one run a death goes first."""
    priority = {"died": 0, "raised": 1, "did not return": 2, "returned": 3}
    return sorted(failures, key=lambda failure: (priority[failure.kind], failure.seconds, failure.rank))


def describe(name: str, failures: list[RankFailure]) -> str:
    """Return the message: the first failure in full, one line for every other rank.

    If ranks hang, the message contains the stacks of all ranks."""
    cause, *other_failures = failures
    lines = [f"{name} failed on rank {cause.rank} of {len(failures)}: {_format_line(cause)}", *_format_body(cause)]
    for other in other_failures:
        lines.append(f"rank {other.rank}: {_format_line(other)}")
        if cause.kind == "did not return":
            lines += _format_body(other)
    return "\n".join(lines)


def _format_line(failure: RankFailure) -> str:
    after = f"{failure.kind} after {failure.seconds:.2f} s"
    return f"{after}: {failure.summary}" if failure.summary else after


def _format_body(failure: RankFailure) -> list[str]:
    lines = [f"  | {line}" for line in failure.detail.splitlines()]
    if failure.output:
        lines.append(f"  last output of rank {failure.rank}:")
        lines += [f"  > {line}" for line in failure.output.splitlines()]
    return lines
