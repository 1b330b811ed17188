"""Dry run: trace ranks of a run and compare each with the plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from phalanx.spec.base import require
from phalanx.spec.formatting import format_si, plural
from phalanx.spec.resolved_run import ResolvedRun
from phalanx.spec.result_tables import data_frame, html_table
from phalanx.spec.run import RunSpec
from phalanx.verify.dry_run import Traced, check_traceable, corner_ranks, trace_ranks
from phalanx.verify.plan_comparison import PlanCheck, compare_with_plan

if TYPE_CHECKING:
    import pandas

MAX_LISTED_MISMATCHES = 3


class PlanMismatchError(RuntimeError):
    """The traced program differs from the plan."""


@dataclass(frozen=True, repr=False)
class DryRunReport:
    """The traced ranks of a dry run, each compared with the plan.

    Example:
        >>> report = phalanx.dry_run(phalanx.load_run("run.toml"), world_size=2, ranks=[0])
        >>> report.ok, sorted({check.kind for check in report.checks})
        (True, ['collective', 'flops', 'memory'])
        >>> report.raise_on_mismatch()
    """

    world_size: int
    results: list[tuple[Traced, list[PlanCheck]]]
    """Memory, traffic and FLOPs of each traced rank in a step, compared with the plan."""

    @property
    def ok(self) -> bool:
        """True if every comparison agrees."""
        return all(check.agrees for check in self.checks)

    @property
    def rank_checks(self) -> dict[int, list[PlanCheck]]:
        """The comparisons by rank."""
        return {traced["rank"]: checks for traced, checks in self.results}

    @property
    def checks(self) -> list[PlanCheck]:
        """The comparisons of all traced ranks."""
        return [check for _, checks in self.results for check in checks]

    def raise_on_mismatch(self) -> None:
        """Raise PlanMismatchError with the first comparisons that disagree, if there are any."""
        mismatches = [
            f"rank {rank}: {check.quantity} {check.among} is {check.traced:,.0f}, planned {check.planned:,.0f}"
            for rank, checks in self.rank_checks.items()
            for check in checks
            if not check.agrees
        ]
        if mismatches:
            listing = "; ".join(mismatches[:MAX_LISTED_MISMATCHES])
            raise PlanMismatchError(f"{len(mismatches)} of {len(self.checks)} checks disagree: {listing}")

    def to_dataframe(self) -> pandas.DataFrame:
        """Return a pandas DataFrame with one row per rank and check.

        Raises:
            UserError: pandas is not installed.
        """
        return data_frame([{"rank": r, **asdict(check)} for r, checks in self.rank_checks.items() for check in checks])

    def __repr__(self) -> str:
        return f"DryRunReport({self._summarize()})"

    def _summarize(self) -> str:
        verdict = "agree" if self.ok else "differ"
        return f"plan and program {verdict} on {plural(len(self.results), 'traced rank')} of {self.world_size:,}"

    def _repr_html_(self) -> str:
        rows = [
            (
                r,
                check.quantity,
                check.among,
                format_si(check.planned),
                format_si(check.traced),
                "yes" if check.agrees else "no",
            )
            for r, checks in self.rank_checks.items()
            for check in checks
        ]
        return html_table(("rank", "quantity", "among", "planned", "traced", "agrees"), rows, self._summarize())


def dry_run(
    run: RunSpec,
    world_size: int,
    ranks: Sequence[int] | None = None,
    *,
    max_workers: int = 2,
    full: bool = False,
    on_rank_traced: Callable[[int, bool], None] | None = None,
) -> DryRunReport:
    """Trace a training step of some ranks without hardware, and compare it with the plan.

    The program of `phalanx train` runs on tensors without values: forward and backward passes, clipping and optimizer.
    Collectives and state must equal the plan, the peak of memory must be within 2 %, and the FLOPs within 0.1 %. Equal
    micro-batches and blocks run once. Ranks are traced in processes of their own, so a script must call this below
    `if __name__ == "__main__":`.

    Args:
        run: The run.
        world_size: The number of ranks of the run, of any size.
        ranks: The ranks to trace. By default the first and the last rank of every axis.
        max_workers: The number of ranks that are traced at a time, each on one core.
        full: Run all micro-batches and blocks, also equal ones.
        on_rank_traced: Called after each traced rank, with the rank and whether it agrees with the plan.

    Returns:
        The comparisons, by rank.

    Raises:
        UserError: The run cannot be traced, or not run at all, on `world_size` ranks.

    Example:
        >>> run = phalanx.load_run("run.toml", ["layout.data_parallel=zero2"])
        >>> report = phalanx.dry_run(run, world_size=8, ranks=[7])
        >>> report.ok, list(report.rank_checks)
        (True, [7])
    """
    resolved = ResolvedRun(run, world_size)
    check_traceable(resolved)
    traced_ranks = corner_ranks(resolved) if ranks is None else list(ranks)
    allowed = f"use ranks from 0 to {world_size - 1}"
    valid = bool(traced_ranks) and all(0 <= rank < world_size for rank in traced_ranks)
    require(valid, "ranks", traced_ranks, problem="is not a list of valid ranks", fix=allowed)
    results = []
    for traced in trace_ranks(resolved, traced_ranks, max_workers=max_workers, full=full):
        checks = compare_with_plan(resolved, traced)
        results.append((traced, checks))
        if on_rank_traced is not None:
            on_rank_traced(traced["rank"], all(check.agrees for check in checks))
    return DryRunReport(world_size, results)
