"""Planning from Python."""

from __future__ import annotations

from typing import Any

import pytest

from phalanx.api.planning import memory, place_on_nodes, plan_run, predict
from phalanx.cost.exact.rank_memory import rank_memory
from phalanx.plan.search.explain import plan_or_raise
from phalanx.spec.errors import UserError
from phalanx.spec.files.load import run_from_table
from phalanx.spec.layout import Layout
from phalanx.spec.resolved_run import ResolvedRun
from phalanx.spec.run import RunSpec


def make_run(cluster: dict[str, Any] | None = None) -> RunSpec:
    """Return a run of Llama 3 8B."""
    training = {"seq_len": 4096, "tokens_per_step": 64 * 4096}
    model, machine = {"preset": "llama3-8b"}, {"preset": "h100"}
    return run_from_table({"model": model, "cluster": {**machine, **(cluster or {})}, "training": training})


@pytest.mark.parametrize(
    ("cluster", "world_size", "expected"),
    [
        ({}, 64, (8, 8)),
        ({}, 2, (1, 2)),
        ({}, 12, (2, 6)),
        ({"nproc_per_node": 4}, 64, (16, 4)),
        ({"nproc_per_node": 8}, 2, (1, 2)),
        ({"nodes": 16}, 64, (16, 4)),
        ({"preset": "cpu", "cores": 2}, 16, (1, 16)),
    ],
)
def test_place_on_nodes(cluster: dict[str, Any], world_size: int, expected: tuple[int, int]) -> None:
    placed = place_on_nodes(make_run(cluster), world_size).cluster
    assert (placed.nodes, placed.nproc_per_node) == expected


def test_place_on_nodes_rejects_ranks_that_do_not_fill_nodes() -> None:
    with pytest.raises(UserError, match=r"world_size = 12 does not fill its nodes\n  fix: .*\(8\)"):
        place_on_nodes(make_run({"nproc_per_node": 8}), 12)


def test_plan_run_equals_search_of_the_command() -> None:
    run = make_run({"nodes": 1, "nproc_per_node": 8})
    plan = plan_run(run.model_copy(update={"auto_layout": True}), 8, top=3)
    assert plan.layouts == plan_or_raise(ResolvedRun(run, 8), 3).layouts
    assert [row["layout"] for row in (layout.to_row() for layout in plan.layouts)] == [
        str(layout.candidate) for layout in plan.layouts
    ]


def test_plan_run_reports_progress_and_keeps_only_wanted_layouts() -> None:
    phases: list[str] = []
    plan = plan_run(make_run(), 8, top=2, where=lambda c: c.tp == 2, progress=lambda phase, *_: phases.append(phase))
    assert {layout.layout.tp for layout in plan.layouts} == {2}
    assert "evaluating layouts" in phases


def test_plan_run_rejects_where_that_accepts_nothing() -> None:
    with pytest.raises(UserError, match=r"where accepts none of [\d,]+ layouts"):
        plan_run(make_run(), 8, where=lambda _: False)


def test_predict_takes_layout_text_or_the_layout_of_the_run() -> None:
    run = make_run()
    layout = Layout(data_parallel="zero3", micro_batch_size=1)
    predicted = predict(run, 8, layout)
    assert predicted == predict(run, 8, "data_parallel=zero3,micro_batch_size=1")
    assert predicted == predict(run.model_copy(update={"layout": layout}), 8)
    assert predicted.layout.data_parallel == "zero3"


def test_memory_equals_count_on_placed_ranks() -> None:
    run = make_run()
    assert memory(run, 8) == rank_memory(ResolvedRun(place_on_nodes(run, 8), 8))
