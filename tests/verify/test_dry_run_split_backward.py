"""Peak memory of a rank with split backward passes, when deferred operands and one weight gradient are alive."""

from __future__ import annotations

from pathlib import Path

import pytest

from phalanx.spec.resolved_run import ResolvedRun
from phalanx.verify.dry_run import trace_ranks
from phalanx.verify.plan_comparison import compare_with_plan
from tests.helpers.dry_run_cases import BF16, MOE, TIED, Table, dry_run_case
from tests.helpers.small_runs import small_run

LARGE_VOCABULARY: Table = {"model": {**TIED, "tie_embeddings": False, "vocab_size": 8000, "num_layers": 2}}
CASES: dict[str, tuple[tuple[int, Table], int]] = {
    "head": (dry_run_case(2, pp=2, schedule="zb-h1"), 1),
    "embedding": (dry_run_case(2, pp=2, schedule="zb-h1", **LARGE_VOCABULARY), 0),
    "bf16": (dry_run_case(2, pp=2, schedule="zb-h2", **BF16), 0),
    "experts": (dry_run_case(4, MOE, pp=2, ep=2, schedule="zb-h1"), 1),
    "sequence parallel": (dry_run_case(4, pp=2, tp=2, schedule="zb-h1"), 2),
    "recomputed": (dry_run_case(2, pp=2, schedule="zb-v", activation_checkpointing="selective"), 0),
}
"""A run, and the rank to trace."""
TOLERANCE = 0.015


@pytest.mark.parametrize("case", CASES)
def test_planned_peak_of_split_backward_pass_matches_trace(case: str, text: Path, tmp_path: Path) -> None:
    (world_size, changes), rank = CASES[case]
    run = small_run(text, tmp_path, changes)
    (traced,) = trace_ranks(ResolvedRun(run, world_size), [rank])
    (total,) = [check for check in compare_with_plan(ResolvedRun(run, world_size), traced) if check.quantity == "total"]
    assert total.traced == pytest.approx(total.planned, rel=TOLERANCE)
