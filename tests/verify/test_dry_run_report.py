"""The result of a dry run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from phalanx.cli.main import app
from phalanx.cli.views.dryrun import print_dry_run
from phalanx.spec.errors import UserError
from phalanx.spec.files.load import run_from_table
from phalanx.verify.dry_run_report import DryRunReport, PlanMismatchError, dry_run
from phalanx.verify.plan_comparison import PlanCheck


def make_report(agrees: bool) -> DryRunReport:
    checks = [
        PlanCheck(kind="memory", quantity="total", among="", ranks=1, planned=100.0, traced=100.0),
        PlanCheck(
            kind="flops",
            quantity="step",
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


def test_dryrun_command_prints_each_traced_rank_on_stderr_without_a_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run.toml").write_text('[model]\npreset = "tiny"\n')
    module = "phalanx.verify.dry_run_report"

    def trace_nothing(resolved: Any, ranks: list[int], **options: Any) -> list[dict[str, Any]]:
        return [{"rank": rank, "peak_bytes": 1, "tracing": {}} for rank in ranks]

    monkeypatch.setattr(f"{module}.trace_ranks", trace_nothing)
    checks_by_rank = {0: make_report(agrees=True), 7: make_report(agrees=False)}
    monkeypatch.setattr(f"{module}.compare_with_plan", lambda *arguments: checks_by_rank[arguments[-1]["rank"]].checks)
    command = ["dryrun", str(tmp_path / "run.toml"), "--ranks", "8", "--trace", "0,7", "--json"]
    done = CliRunner().invoke(app, command, catch_exceptions=False)
    assert done.stderr.splitlines() == [
        "tracing 2 ranks, 2 at a time",
        "rank 0: agrees (1 of 2)",
        "rank 7: differs from the plan (2 of 2)",
    ]
    assert [rank["agrees"] for rank in json.loads(done.stdout)["ranks"]] == [True, False]


@pytest.mark.parametrize("works", [[(4, 1), (2, 6), (8, 12)], [(8, 12), (2, 6), (4, 1)]], ids=str)
def test_printed_note_has_counts_of_rank_with_least_traced_work(
    works: list[tuple[int, int]], capsys: pytest.CaptureFixture[str]
) -> None:
    """Of 8 micro-batches and 12 blocks, 4 x 1 are less work than 2 x 6."""
    report = DryRunReport(4, [])
    for rank, (micro_batches, blocks) in enumerate(works):
        tracing = {"micro_batches": 8, "blocks": 12, "traced_micro_batches": micro_batches, "traced_blocks": blocks}
        is_full = (micro_batches, blocks) == (8, 12)
        traced = {"rank": rank, "tracing": {**tracing, "full": is_full, "seconds": 1.0}}
        report.results.append((traced, make_report(agrees=True).checks))
    print_dry_run(run_from_table({"model": {"preset": "tiny"}}), report)
    note = "equal work ran once: 4 of 8 micro-batches, 1 of 12 blocks, few chunks of rows (--full runs all)"
    assert note in capsys.readouterr().out.splitlines()


def test_printed_report_names_ranks_that_differ(capsys: pytest.CaptureFixture[str]) -> None:
    tracing = {"full": True, "seconds": 1.0}
    results = [({"rank": rank, "tracing": tracing}, make_report(agrees=rank != 2).checks) for rank in range(3)]
    run = run_from_table({"model": {"preset": "tiny"}})
    print_dry_run(run, DryRunReport(4, results))
    differing = capsys.readouterr().out
    assert "plan and program disagree on ranks 2\n" in differing
    assert "rank 2: differences" in differing
    assert "equal work ran once" not in differing
    print_dry_run(run, DryRunReport(4, results[:2]))
    assert "plan and program agree on all 2 traced ranks of 4\n" in capsys.readouterr().out


@pytest.mark.parametrize("ranks", [[], [2], [-1, 0]], ids=str)
def test_dry_run_rejects_ranks_outside_the_run(ranks: list[int]) -> None:
    with pytest.raises(UserError, match=r"ranks = .* is not a list of valid ranks\n  fix: use ranks from 0 to 1"):
        dry_run(run_from_table({"model": {"preset": "tiny"}}), 2, ranks)
