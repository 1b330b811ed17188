"""Details of a layout are the planner's own numbers."""

from __future__ import annotations

import pytest

from phalanx.cost.exact.rank_memory import rank_memory
from phalanx.plan.placement.findings import bytes_by_link, node_layout
from phalanx.plan.placement.traffic_matrix import traffic_matrices
from phalanx.plan.search.evaluate import evaluate_layout
from phalanx.plan.search.oom_risk import process_bytes
from phalanx.plan.search.pipeline_simulation import simulate_candidate
from phalanx.report.drawing.schedule import executed_spans
from phalanx.report.explorer import details as details_module
from phalanx.report.explorer.details import layout_details
from tests.helpers.explorations import small_exploration


def layout_of(**fields):
    """Return the first layout of the small plan with these fields that fits."""
    exploration = small_exploration()
    fitting = exploration.column(exploration.predictions.p_oom) < 0.01
    return next(
        layout
        for layout, fits in zip(exploration.layouts, fitting, strict=True)
        if fits and all(getattr(layout, name) == value for name, value in fields.items())
    )


PIPELINES = [{"pp": 4, "schedule": name} for name in ("1f1b", "zb-h1", "zb-v")]
PIPELINES.append({"pp": 2, "schedule": "interleaved", "virtual_stages": 2})


@pytest.mark.parametrize("fields", [{"pp": 1, "data_parallel": "zero3"}, *PIPELINES])
def test_layout_details_equal_what_the_planner_says(fields):
    exploration, candidate = small_exploration(), layout_of(**fields)
    resolved = exploration.resolved
    details = layout_details(resolved, candidate)
    option = evaluate_layout(resolved, candidate.layout())
    assert details["name"] == str(candidate)
    assert details["parts"] == option.parts
    assert (details["step_seconds"], details["p_oom"]) == (option.step_seconds, option.p_oom)
    assert details["counted_bytes"] == option.memory_bytes
    assert (details["node_host_bytes"], details["host_use"]) == (8 * option.host_bytes, "checkpoint copies")
    layout_run = resolved.with_layout(candidate.layout())
    memories = rank_memory(layout_run)
    assert list(details["memory"]) == list(memories)
    for role, memory in memories.items():
        role_details = details["memory"][role]
        assert role_details["peak_bytes"] == process_bytes(resolved.run.cluster, memory.device)
        assert role_details["parts"]["activations"] == memory.activations
        assert sum(role_details["parts"].values()) - memory.non_concurrent_bytes == role_details["peak_bytes"]
    site = node_layout(resolved.run.cluster, 8)
    assert details["traffic"] == {
        axis: bytes_by_link(matrix, site)
        for axis, matrix in traffic_matrices(layout_run, site.ranks_per_island).items()
    }


@pytest.mark.parametrize("fields", PIPELINES)
def test_timeline_starts_follow_from_order_durations_and_waits(fields):
    exploration, candidate = small_exploration(), layout_of(**fields)
    timeline = simulate_candidate(exploration.resolved, candidate)
    described_timeline = layout_details(exploration.resolved, candidate)["timeline"]
    assert described_timeline["makespan"] == timeline.makespan
    expected = sorted((rank, span.start, span.end, str(span.action)) for rank, span in executed_spans(timeline))
    rebuilt = []
    for number, rank in enumerate(described_timeline["ranks"]):
        clock, waits = 0.0, dict(rank["waits"])
        for position, (kind, stage, micro) in enumerate(
            zip(rank["kinds"], rank["stages"], rank["micros"], strict=True)
        ):
            start = clock + waits.get(position, 0.0)
            clock = start + described_timeline["seconds"][kind][stage]
            rebuilt.append((number, start, clock, f"{stage}{kind}{micro}"))
    assert [(rank, text) for rank, _, _, text in rebuilt] == [(rank, text) for rank, _, _, text in expected]
    for computed, planned in zip(rebuilt, expected, strict=True):
        assert computed[1:3] == pytest.approx(planned[1:3], abs=1e-5 * timeline.makespan)


def test_layout_details_name_offload_where_there_is_some():
    exploration = small_exploration()
    details = layout_details(
        exploration.resolved,
        layout_of(data_parallel="zero3", pp=1)._replace(offload="cpu"),
    )
    assert details["host_use"] == "checkpoint copies and offload"


def test_layout_details_say_why_a_layout_cannot_be_trained():
    exploration = small_exploration()
    candidate = layout_of(pp=4, micro_batches=2)._replace(schedule="interleaved", virtual_stages=2)
    details = layout_details(exploration.resolved, candidate)
    assert "interleaved" in details["problem"]
    assert "memory" not in details
    assert details["host_use"] == "offloaded state, estimated; checkpoint copies are not included"


def test_layout_details_leave_out_a_timeline_of_too_many_passes(monkeypatch):
    monkeypatch.setattr(details_module, "MAX_ACTIONS", 10)
    exploration, candidate = small_exploration(), layout_of(pp=4, schedule="1f1b")
    passes = 3 * candidate.pp * candidate.micro_batches
    timeline = layout_details(exploration.resolved, candidate)["timeline"]
    assert timeline == {"note": f"The schedule has {passes} passes; a page can show at most 10."}
