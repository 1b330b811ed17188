"""Layouts of runs with phases: they fit in every phase, and their micro-batches are those of the largest."""

from __future__ import annotations

from phalanx.plan.search.explain import plan_or_raise
from phalanx.plan.search.phases import largest_phase, layout_of_run, phase_costs
from phalanx.spec.files.load import load_machine, run_from_table
from phalanx.spec.resolved_run import ResolvedRun
from phalanx.spec.run import RunSpec


def run_with_long_start() -> RunSpec:
    """Return a run whose few first steps have long sequences, and the others short ones."""
    training = {"steps": 1000, "seq_len": 32_768, "tokens_per_step": 2**20}
    phase = [{"from_step": 10, "seq_len": 2048}]
    run = run_from_table({"model": {"preset": "qwen3-8b", "num_layers": 8}, "training": training, "phase": phase})
    return run.replace(cluster=load_machine("h100").replace(nodes=1, nproc_per_node=8))


def test_best_layout_fits_in_every_phase_with_the_same_figures() -> None:
    resolved = ResolvedRun.on_cluster(run_with_long_start())
    plan = plan_or_raise(resolved, keep=3)
    assert largest_phase(resolved).run.training.seq_len == 2048
    for layout in plan.layouts:
        costs = phase_costs(resolved, layout.layout)
        assert [cost.phase.run.training.seq_len for cost in costs] == [32_768, 2048]
        assert all(cost.layout.p_oom < 0.2 for cost in costs)
        assert costs[1].layout.step_seconds == layout.step_seconds
        assert costs[1].layout.memory_bytes == layout.memory_bytes


def test_micro_batch_of_the_file_has_the_tokens_of_the_largest_phase() -> None:
    run = run_with_long_start()
    layout = run.layout.replace(micro_batch_size=32)
    assert layout_of_run(run, layout).micro_batch_size == 2
    assert layout_of_run(run.replace(phase=[]), layout) == layout
