"""The traced programs of models of real size agree with the plan."""

from __future__ import annotations

import pytest

from phalanx.spec.parallel_dims import parallel_dims, pipeline_stage_groups
from phalanx.spec.resolved_run import ResolvedRun
from phalanx.verify.dry_run import corner_ranks, trace_ranks
from phalanx.verify.plan_comparison import PlanCheck, compare_with_plan
from tests.helpers.real_dry_run_cases import PRESET_CASES, QUICK_CASES, REAL_CASES, RealCase


def _disagreements(case: RealCase, ranks: list[int]) -> list[tuple[int, PlanCheck]]:
    """Return the differences of these ranks from the plan."""
    run = case.run()
    return [
        (traced["rank"], check)
        for traced in trace_ranks(ResolvedRun(run, case.world_size), ranks)
        for check in compare_with_plan(ResolvedRun(run, case.world_size), traced)
        if not check.agrees
    ]


@pytest.mark.parametrize("case", QUICK_CASES + PRESET_CASES, ids=str)
def test_first_and_last_role_of_real_size_agree_with_plan(case: RealCase) -> None:
    stages = pipeline_stage_groups(parallel_dims(case.run().layout, case.world_size))
    assert _disagreements(case, sorted({stages[0][0], stages[-1][0]})) == []


@pytest.mark.parametrize("case", REAL_CASES, ids=str)
def test_corner_ranks_of_real_size_agree_with_plan(case: RealCase) -> None:
    assert _disagreements(case, corner_ranks(ResolvedRun(case.run(), case.world_size))) == []
