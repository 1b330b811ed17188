"""The result of a dry run."""

from __future__ import annotations

import pytest

from phalanx.spec.errors import UserError
from phalanx.spec.files.load import run_from_table
from phalanx.verify.dry_run_report import DryRunReport, PlanMismatchError, dry_run
from phalanx.verify.plan_comparison import PlanCheck


def make_report(agrees: bool) -> DryRunReport:
    checks = [
        PlanCheck(kind="memory", what="total", among="", ranks=1, planned=100.0, traced=100.0),
        PlanCheck(
            kind="flops",
            what="step",
            among="",
            ranks=1,
            planned=8.0,
            traced=9.0,
            planned_calls=0,
            traced_calls=0,
            agrees=agrees,
        ),
    ]
    return DryRunReport(4, [({"rank": 3}, checks)])


def test_report_of_agreeing_ranks_is_ok() -> None:
    report = make_report(agrees=True)
    assert report.ok
    report.raise_on_mismatch()
    assert "plan and program agree on 1 traced rank of 4" in report._repr_html_()


def test_report_names_what_disagrees() -> None:
    report = make_report(agrees=False)
    assert not report.ok
    with pytest.raises(PlanMismatchError, match=r"1 of 2 checks disagree: rank 3: step  is 9, planned 8"):
        report.raise_on_mismatch()
    assert "differ" in report._repr_html_()


@pytest.mark.parametrize("ranks", [[], [2], [-1, 0]], ids=str)
def test_dry_run_rejects_ranks_outside_the_run(ranks: list[int]) -> None:
    with pytest.raises(UserError, match=r"ranks = .* is not a list of valid ranks\n  fix: use ranks from 0 to 1"):
        dry_run(run_from_table({"model": {"preset": "tiny"}}), 2, ranks)
