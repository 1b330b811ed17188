"""The search's closed forms, compared with simulated schedules of whole layouts, including embedding and head."""

import numpy as np
import pytest

from phalanx.plan.search.enumerate_layouts import enumerate_layouts
from phalanx.plan.search.evaluate import evaluate
from phalanx.plan.search.pipeline_simulation import show_command, simulate_candidate
from phalanx.spec.resolved_run import ResolvedRun
from tests.helpers.cli_runner import command_json
from tests.helpers.planned_runs import make_run


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v"])
@pytest.mark.parametrize("model", ["llama3-8b", "olmoe-1b-7b"])
def test_estimated_pipeline_time_matches_simulated_schedule(model, schedule):
    """Stages are unequal. With few micro-batches a long stage waits less than the
    closed forms say, because it computes meanwhile."""
    run = make_run(model, sequence=2048, sequences=64)
    candidates = [
        c
        for c in enumerate_layouts(ResolvedRun(run, 16))
        if c.pp > 1 and c.schedule == schedule and c.activation_checkpointing == "none"
    ]
    sample = candidates[:: max(1, len(candidates) // 25)]
    ratios = np.array(
        [
            option.schedule_seconds / float(simulate_candidate(ResolvedRun(run, 16), candidate).makespan)
            for candidate, option in zip(sample, evaluate(ResolvedRun(run, 16), sample), strict=True)
        ]
    )
    filled = np.array([candidate.micro_batches >= 4 * candidate.pp for candidate in sample])
    assert ratios.min() > 0.97
    assert ratios[filled].max() < 1.06
    assert ratios.max() < 1.13
    assert np.abs(ratios - 1).mean() < 0.035


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "zb-v"])
@pytest.mark.parametrize("first_dense", [1, 6])
def test_estimated_pipeline_time_accounts_for_leading_dense_blocks(first_dense, schedule):
    run = make_run("olmoe-1b-7b", sequence=2048, sequences=64)
    moe = run.model.moe.model_copy(update={"num_leading_dense_layers": first_dense})
    run = run.model_copy(update={"model": run.model.model_copy(update={"moe": moe})})
    candidates = [
        c
        for c in enumerate_layouts(ResolvedRun(run, 16))
        if c.schedule == schedule and c.pp in (4, 8) and c.micro_batches > 8
    ]
    sample = candidates[:: len(candidates) // 12]
    for candidate, option in zip(sample, evaluate(ResolvedRun(run, 16), sample), strict=True):
        estimated = option.schedule_seconds
        simulated = float(simulate_candidate(ResolvedRun(run, 16), candidate).makespan)
        assert 0.93 * simulated < estimated < 1.13 * simulated, str(candidate)


@pytest.mark.parametrize(("schedule", "virtual_stages"), [("1f1b", 1), ("interleaved", 4), ("zb-v", 1)])
def test_show_command_reproduces_simulated_schedule(schedule, virtual_stages):
    run = make_run(sequence=2048, sequences=64)
    schedule_options = (4, schedule, virtual_stages)
    candidate = next(
        c for c in enumerate_layouts(ResolvedRun(run, 16)) if (c.pp, c.schedule, c.virtual_stages) == schedule_options
    )
    timeline = command_json(*show_command(ResolvedRun(run, 16), candidate).split()[1:])
    stages = 4 * {"zb-v": 2}.get(schedule, virtual_stages)
    assert (timeline["schedule"], timeline["stages"], timeline["micro_batches"]) == (
        schedule,
        stages,
        candidate.micro_batches,
    )
    simulated = float(simulate_candidate(ResolvedRun(run, 16), candidate).makespan)
    assert simulated < timeline["makespan"] < 1.05 * simulated
