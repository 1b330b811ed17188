"""The much faster layout that does not fit, compared with every layout."""

import numpy as np
import pytest

from phalanx.plan.search.evaluate import can_run, evaluate, evaluate_layout, layout_to_text, parse_layout
from phalanx.plan.search.faster_layout import MIN_SPEEDUP, find_faster_layout
from phalanx.plan.search.oom_risk import MAX_OOM_PROBABILITY
from phalanx.plan.search.search import search_layouts
from phalanx.spec.resolved_run import ResolvedRun
from phalanx.spec.run import RunSpec
from tests.helpers.planned_runs import make_run

CARDS = {"nodes": 2, "nproc_per_node": 1, "network_bytes_per_second": 1.25e8}


def two_cards(memory_gib: float, **cluster: float) -> RunSpec:
    return make_run(
        machine="rtx4090", sequences=32, cluster={**CARDS, "memory_bytes": round(memory_gib * 2**30), **cluster}
    )


def test_find_faster_layout_returns_none_when_no_layout_is_twice_as_fast():
    run = make_run()
    assert find_faster_layout(ResolvedRun(run, 8), search_layouts(ResolvedRun(run, 8), keep=1)) is None


def test_find_faster_layout_is_smallest_of_much_faster_layouts():
    run = two_cards(24)
    plan = search_layouts(ResolvedRun(run, 2), keep=1)
    faster = find_faster_layout(ResolvedRun(run, 2), plan)
    assert faster is not None
    assert plan.fastest is not None
    much_faster = [
        option
        for option in evaluate(ResolvedRun(run, 2), plan.candidates)
        if MIN_SPEEDUP * option.step_seconds <= plan.fastest.step_seconds
    ]
    assert len(much_faster) > 100
    risks = {option.candidate: option.p_oom for option in much_faster if option.p_oom < 1 - 1e-9}
    runnable_risks = [risk for candidate, risk in risks.items() if can_run(ResolvedRun(run, 2), candidate)]
    assert risks[faster.option.candidate] == min(runnable_risks)
    assert faster.option.p_oom >= MAX_OOM_PROBABILITY


@pytest.mark.parametrize("part", ["device", "host"])
def test_find_faster_layout_fits_when_missing_bytes_are_added(part):
    """With one percent less than the missing bytes, the layout does not fit."""
    run = two_cards(24) if part == "device" else two_cards(40, host_memory_bytes=92 * 2**30)
    faster = find_faster_layout(ResolvedRun(run, 2), search_layouts(ResolvedRun(run, 2), keep=1))
    assert faster is not None
    field = "memory_bytes" if part == "device" else "host_memory_bytes"
    missing = faster.missing_device_bytes if part == "device" else faster.missing_host_bytes
    assert missing > 0
    for share in (0.99, 1.02):
        # The usable part of memory grows a little more slowly than memory itself.
        memory = round(getattr(run.cluster, field) + share * missing / 0.978)
        larger = run.model_copy(update={"cluster": run.cluster.model_copy(update={field: memory})})
        fits = evaluate_layout(ResolvedRun(larger, 2), faster.option.candidate.layout()).p_oom < MAX_OOM_PROBABILITY
        assert fits == (share > 1)


def test_layout_to_text_is_read_by_parse_layout():
    run = make_run(cluster={"nodes": 2, "network_bytes_per_second": 4e9})
    plan = search_layouts(ResolvedRun(run, 16), keep=1)
    for index in np.linspace(0, len(plan.candidates) - 1, 50).astype(int):
        layout = plan.candidates[index].layout()
        assert parse_layout(layout_to_text(layout)) == layout
