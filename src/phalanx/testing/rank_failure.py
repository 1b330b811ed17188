"""What a failed run on the pool tells its reader: the rank that failed first, then the rest."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class RankFailure:
    """How one rank ended a run that did not succeed everywhere."""

    rank: int
    kind: Literal["raised", "died", "did not return", "returned"]
    seconds: float
    """When, after the start of the run."""
    summary: str = ""
    """One line: the exception, or how the process ended."""
    detail: str = ""
    """The traceback, or the Python stack of a rank that did not return."""
    output: str = ""
    """The end of what the rank printed during the run."""


class RankError(AssertionError):
    """A function failed on a rank; `failures` has every rank, the one that failed first at the front. Or ranks called
    collectives in different orders, and `order_difference` is the first call that differs."""

    def __init__(self, name: str, failures: Iterable[RankFailure], order_difference: str = "") -> None:
        self.failures = cause_first(failures)
        self.order_difference = order_difference
        prefix = f"{name}: {order_difference}\n" if order_difference else ""
        super().__init__(prefix + describe(name, self.failures))

    @property
    def all_returned(self) -> bool:
        """Whether every rank is alive and has left the function."""
        return all(failure.kind in ("raised", "returned") for failure in self.failures)


def cause_first(failures: Iterable[RankFailure]) -> list[RankFailure]:
    """The cause first, then its consequences, then the ranks that were well.

    An exception's time is exact; a death's is when the pool noticed it, a little after it happened and maybe
    after the exceptions it caused in peers. An exception kills no peer, so in one run a death goes first.
    """
    priority = {"died": 0, "raised": 1, "did not return": 2, "returned": 3}
    return sorted(failures, key=lambda failure: (priority[failure.kind], failure.seconds, failure.rank))


def describe(name: str, failures: list[RankFailure]) -> str:
    """The message: the first failure whole, a line for every other rank; of ranks that hang, every stack."""
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
        lines.append(f"  rank {failure.rank} printed, last of all:")
        lines += [f"  > {line}" for line in failure.output.splitlines()]
    return lines
