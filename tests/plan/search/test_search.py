"""The search, compared with brute force, and the layouts that it may offer."""

from bisect import bisect_left
from itertools import islice

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from phalanx.cost.exact.flops import forward_flops, mfu, training_flops_per_token
from phalanx.cost.exact.layout_checks import check_layout
from phalanx.cost.exact.rank_memory import rank_memory
from phalanx.cost.kinds import AttentionKernel
from phalanx.plan.advice.oom import run_footprint
from phalanx.plan.search.candidate_columns import candidate_jobs
from phalanx.plan.search.candidates import candidate_from_run
from phalanx.plan.search.enumerate_layouts import ENUMERATED_METHODS, enumerate_layouts, smaller_variants
from phalanx.plan.search.evaluate import evaluate, evaluate_layout, parse_layout, with_exact_memory
from phalanx.plan.search.explain import PART_DESCRIPTIONS, describe_differences, plan_or_raise
from phalanx.plan.search.oom_risk import MAX_OOM_PROBABILITY, SAFE_OOM_PROBABILITY
from phalanx.plan.search.result import TIE_TOLERANCE
from phalanx.plan.search.search import UNCERTAIN_GAIN, TimeBands, search_layouts, with_smaller_variants
from phalanx.spec.errors import UserError
from phalanx.spec.files.load import run_from_table
from phalanx.spec.resolved_run import ResolvedRun
from tests.helpers.planned_runs import make_run
from tests.helpers.synthetic_machine import SYNTHETIC_MACHINE


@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    model=st.sampled_from(["llama3-8b", "olmoe-1b-7b", "gpt2-124m"]),
    ranks=st.sampled_from([1, 2, 4, 8, 16]),
    sequences=st.sampled_from([16, 48, 64]),
    memory=st.sampled_from([16, 40, 80]),
)
def test_search_finds_brute_force_optimum(model, ranks, sequences, memory):
    """Compared with every layout. Some are also evaluated alone, to find columns that mix."""
    run = make_run(model, sequence=1024, sequences=sequences, cluster={"memory_bytes": memory * 2**30})
    methods = ENUMERATED_METHODS
    layouts = {
        layout._replace(activation_checkpointing=method): None
        for layout in enumerate_layouts(ResolvedRun(run, ranks))
        for method in methods
    }
    pairs = [(layout, variant) for layout in layouts for variant in (layout, *smaller_variants(run, layout))]
    plain, variants = (list(side) for side in zip(*pairs, strict=True))
    result = search_layouts(ResolvedRun(run, ranks), keep=3)
    assert len(set(plain)) <= result.searched <= len(variants)
    options = evaluate(ResolvedRun(run, ranks), variants)
    likely = {
        option.candidate for option in options if option.candidate in layouts and option.p_oom < MAX_OOM_PROBABILITY
    }
    for index in range(0, len(variants), 1 + len(variants) // 20):
        single = evaluate(ResolvedRun(run, ranks), [variants[index]])[0]
        assert (single.step_seconds, single.memory_bytes) == (options[index].step_seconds, options[index].memory_bytes)
    # Variants with another strategy are searched only if the layout itself does not fit.
    needs = [layout.data_parallel == variant.data_parallel or layout not in likely for layout, variant in pairs]
    fitting = [
        option
        for option, is_needed in zip(options, needs, strict=True)
        if is_needed and option.p_oom < MAX_OOM_PROBABILITY
    ]
    assert len(likely) <= result.fitting <= len(fitting)
    as_counted = (
        with_exact_memory(ResolvedRun(run, ranks), option) for option in sorted(fitting, key=lambda o: o.step_seconds)
    )
    best = next((option for option in as_counted if option.p_oom < MAX_OOM_PROBABILITY), None)
    if best:
        assert result.layouts[0].step_seconds <= best.step_seconds * (1 + 2 * TIE_TOLERANCE)
    else:
        assert result.layouts == []
        assert result.closest_to_fitting is not None
        assert result.closest_to_fitting.p_oom >= MAX_OOM_PROBABILITY
        by_formula = options[variants.index(result.closest_to_fitting.candidate)]
        assert by_formula.p_oom == min(option.p_oom for option in options)


@pytest.mark.parametrize(("model", "ranks"), [("llama3-8b", 8), ("olmoe-1b-7b", 8), ("gpt2-124m", 12)])
def test_enumerate_layouts_yields_only_runnable_layouts(model, ranks):
    run = make_run(model, sequence=1024, sequences=48)
    for layout in enumerate_layouts(ResolvedRun(run, ranks)):
        for candidate in (layout, *smaller_variants(run, layout)):
            layout_run = run.model_copy(update={"layout": candidate.layout()})
            check_layout(ResolvedRun(layout_run, ranks))
            assert candidate_from_run(ResolvedRun(layout_run, ranks)) == candidate


@pytest.mark.parametrize(("model", "ranks"), [("llama3-8b", 8), ("olmoe-1b-7b", 8), ("gpt2-124m", 1)])
@pytest.mark.parametrize("machine", ["v100-16gb", "h100", "b200"])
def test_smaller_variants_never_shorten_a_step_and_always_save_memory(model, machine, ranks):
    """Holds for arbitrarily fast CPUs. Therefore, the search may try
    smaller variants only for layouts that do not fit."""
    fast = {"host_link_bytes_per_second": 1e15, "host_bytes_per_second": 1e15, "disk_bytes_per_second": 1e15}
    layout = {"data_parallel": "zero1", "offload": "nvme", "offload_directory": "/local"}
    run = make_run(model, machine, sequence=1024, sequences=48, cluster=fast, layout=layout)
    pairs = [
        (kept, other) for kept in enumerate_layouts(ResolvedRun(run, ranks)) for other in smaller_variants(run, kept)
    ]
    assert {other.offload for _, other in pairs} == {"none", "cpu", "nvme"}
    assert all(other.offloads or other.activation_checkpointing == "norms" for _, other in pairs)
    kept, others = (evaluate(ResolvedRun(run, ranks), list(side)) for side in zip(*pairs, strict=True))
    for before, after in zip(kept, others, strict=True):
        same_strategy = after.candidate.data_parallel == before.candidate.data_parallel
        assert after.step_seconds >= before.step_seconds or not same_strategy, str(after.candidate)
        assert after.memory_bytes < before.memory_bytes, str(after.candidate)


def test_search_offers_offload_when_nothing_else_fits():
    """The model has 8 billion parameters of 16 bytes, and the device 80 GiB."""
    run = make_run(sequences=8, cluster={"nproc_per_node": 1})
    result = search_layouts(ResolvedRun(run, 1))
    assert result.layouts
    for option in result.layouts:
        assert option.candidate.offload == "cpu"
        assert option.parts["offload"] > 0
        option_run = run.model_copy(update={"layout": option.candidate.layout()})
        check_layout(ResolvedRun(option_run, 1))
        (memory,) = rank_memory(ResolvedRun(option_run, 1)).values()
        assert option.memory_bytes == memory.device < 80 * 2**30
        assert option.host_bytes == memory.host > memory.offloaded > 0
    scarce = run.cluster.model_copy(update={"host_memory_bytes": 64 * 2**30})
    assert search_layouts(ResolvedRun(run.model_copy(update={"cluster": scarce}), 1)).layouts == []
    files = run_from_table(
        {"layout": {"data_parallel": "zero1", "offload": "nvme", "offload_directory": "/local"}}
    ).layout
    in_files = search_layouts(ResolvedRun(run.model_copy(update={"cluster": scarce, "layout": files}), 1)).layouts
    assert in_files
    assert {option.candidate.offload for option in in_files} == {"nvme"}
    assert in_files[0].candidate.layout().offload_directory == "/local"


def test_search_offloads_activations_where_full_recomputation_does_not_fit():
    """Each device trains whole sequences of 262,144 tokens."""
    run = make_run("llama3-8b", sequence=262144, sequences=8, cluster={"memory_bytes": 80 * 2**30})
    run = run.model_copy(update={"model": run.model.replace(vocab_size=1024, ffn_hidden_size=4096)})
    options = search_layouts(ResolvedRun(run, 8), is_wanted=lambda c: c.dp == 8 and c.data_parallel == "zero3").layouts
    assert {option.candidate.activation_checkpointing for option in options} == {"offload"}
    assert all(option.parts["offload"] > 0 for option in options)


@pytest.mark.parametrize(("gib", "expected"), [(60, "none"), (24, "full")])
def test_search_recomputes_only_when_memory_is_tight(gib, expected):
    """The model has 8 billion parameters and long sequences."""
    run = make_run(sequence=8192, sequences=16, cluster={"memory_bytes": gib * 2**30})
    best = search_layouts(ResolvedRun(run, 8), keep=1, is_wanted=lambda candidate: not candidate.offloads).layouts[0]
    assert best.candidate.activation_checkpointing == expected


def test_search_options_are_sorted_and_pareto_front_decreases():
    result = search_layouts(ResolvedRun(make_run(), 16), keep=50)
    times = np.log([option.step_seconds for option in result.layouts])
    assert (np.diff(np.floor(times / TIE_TOLERANCE)) >= 0).all()
    front = [option.memory_bytes for option in result.pareto_front]
    assert front == sorted(front, reverse=True)
    assert result.pareto_front[0] is result.layouts[0]
    for option in result.layouts:
        assert option.low_seconds < option.step_seconds < option.high_seconds
        assert option.p_oom < MAX_OOM_PROBABILITY
        assert sum(option.parts.values()) == pytest.approx(option.step_seconds)


NEAR_RUNS = {
    "little memory": make_run(cluster={"memory_bytes": 24 * 2**30}),
    "slow network": make_run(sequences=128, cluster={"nodes": 2, "network_bytes_per_second": 4e9}),
}


@pytest.mark.parametrize("name", NEAR_RUNS)
def test_plan_puts_simple_layouts_without_offload_first_among_equals(name):
    """Step times are equal if they differ by less than the error of predictions."""
    run = NEAR_RUNS[name]
    ranks = run.cluster.ranks
    plan = plan_or_raise(ResolvedRun(run, ranks), keep=60, group_schedules=False)
    fastest = search_layouts(ResolvedRun(run, ranks), keep=1).layouts[0]
    assert plan.fastest == fastest
    bands = TimeBands(
        ResolvedRun(run, ranks),
        with_smaller_variants(ResolvedRun(run, ranks), enumerate_layouts(ResolvedRun(run, ranks)))[1],
        fastest,
    )
    assert list(islice(bands, 2000))
    assert bands.ends[0] == fastest.step_seconds * (1 + UNCERTAIN_GAIN)
    effort = [
        (bisect_left(bands.ends, o.step_seconds), o.candidate.offloads, o.candidate.num_parallel_axes)
        for o in plan.layouts
    ]
    assert effort == sorted(effort)
    assert len({band for band, _, _ in effort}) > 1
    assert effort[0] <= (0, fastest.candidate.offload != "none", fastest.candidate.num_parallel_axes)


@pytest.mark.parametrize("name", NEAR_RUNS)
def test_plan_groups_schedules_of_a_layout_and_takes_the_same(name):
    run = NEAR_RUNS[name]
    ranks = run.cluster.ranks
    grouped, ungrouped = (plan_or_raise(ResolvedRun(run, ranks), 20, group_schedules=kind) for kind in (True, False))
    assert grouped.best == ungrouped.best
    safe = [
        option.candidate._replace(schedule="", virtual_stages=1)
        for option in grouped.layouts
        if option.p_oom < SAFE_OOM_PROBABILITY
    ]
    assert len(safe) == len(set(safe))
    assert [option for option in ungrouped.layouts if option in grouped.layouts] == [
        option for option in grouped.layouts if option in ungrouped.layouts
    ]


def test_explanation_blames_exposed_gathers_of_zero3_on_a_slow_network():
    run = make_run(sequence=8192, sequences=128, cluster={"nodes": 8, "network_bytes_per_second": 2e9})
    zero3, piped = (
        evaluate_layout(ResolvedRun(run, 64), parse_layout(text))
        for text in ("data_parallel=zero3", "data_parallel=zero1,tp=4,pp=8,rank_order=pipeline_outer")
    )
    assert zero3.exposed > 0.6 * zero3.step_seconds
    assert describe_differences(zero3, piped)[0].endswith(PART_DESCRIPTIONS["data_parallel"])
    fast = make_run(sequence=8192, sequences=128, cluster={"nodes": 8})
    assert zero3.parts["compute"] == pytest.approx(
        evaluate_layout(ResolvedRun(fast, 64), parse_layout("data_parallel=zero3")).parts["compute"]
    )


def test_search_filter_finds_matching_layouts_at_any_rank():
    tight = make_run(sequences=16, cluster={"memory_bytes": 38 * 2**30})
    all_layouts = search_layouts(ResolvedRun(tight, 4), keep=40).layouts
    pipelines = [option for option in all_layouts if option.candidate.pp == 2]
    assert all_layouts.index(pipelines[0]) > 3
    assert (
        search_layouts(ResolvedRun(tight, 4), 3, is_wanted=lambda candidate: candidate.pp == 2).layouts == pipelines[:3]
    )


def test_search_reports_progress():
    progress: list[tuple[str, int, int]] = []
    result = search_layouts(ResolvedRun(make_run(), 16), 5, lambda *event: progress.append(event))
    stages = {phase: [(done, total) for name, done, total in progress if name == phase] for phase, _, _ in progress}
    evaluating, counting = stages.values()
    assert evaluating[0][0] == 0
    assert evaluating[-1] == (result.searched, result.searched)
    assert counting == [(done, 5) for done in range(6)]
    assert result == search_layouts(ResolvedRun(make_run(), 16), 5)


def test_evaluated_layout_mfu_uses_trainer_formula():
    run = make_run()
    option = evaluate(ResolvedRun(run, 8), [candidate_from_run(ResolvedRun(run, 8))])[0]
    flops = training_flops_per_token(run.model, 4096)
    assert option.mfu == pytest.approx(mfu(option.tokens_per_second, flops, run.cluster.peak_flops, 8))


def test_evaluated_layout_hfu_includes_recomputed_flops():
    run = make_run()
    candidate = candidate_from_run(ResolvedRun(run, 8))
    kinds = [candidate._replace(activation_checkpointing=method) for method in ("none", "selective", "full")]
    none, selective, full = evaluate(ResolvedRun(run, 8), kinds)
    parts = forward_flops(run.model, 4096)
    forward = parts.blocks + parts.head
    assert none.hfu == none.mfu
    assert selective.hfu / selective.mfu == pytest.approx(1 + (parts.projections + parts.core) / (3 * forward))
    assert full.hfu / full.mfu == pytest.approx(1 + parts.blocks / (3 * forward))


@pytest.mark.parametrize(("machine", "device"), [("h100", "cuda"), ("cpu", "cpu")])
def test_search_plans_device_auto_as_device_of_preset(machine, device):
    """Layouts, times, memory including CUDA's, and risks are equal when
    the device is detected at the start of the run."""
    auto, cuda = (
        make_run("olmoe-1b-7b", machine, sequences=16, cluster={"device": name, "memory_bytes": 2**34})
        for name in ("auto", device)
    )
    plans = [search_layouts(ResolvedRun(run, 8), keep=5) for run in (auto, cuda)]
    assert plans[0].layouts == plans[1].layouts
    cp = "cp=2,cp_method=ring,data_parallel=zero1,micro_batch_size=1"
    assert evaluate_layout(ResolvedRun(auto, 8), parse_layout(cp)) == evaluate_layout(
        ResolvedRun(cuda, 8), parse_layout(cp)
    )


def test_search_best_never_slows_with_more_memory_or_devices():
    small = make_run(cluster={"memory_bytes": 24 * 2**30})
    large = make_run(cluster={"memory_bytes": 80 * 2**30})
    first, second = (
        search_layouts(ResolvedRun(variant, 8), keep=1).layouts[0].step_seconds for variant in (small, large)
    )
    assert second <= first * (1 + TIE_TOLERANCE)
    assert search_layouts(ResolvedRun(large, 16), keep=1).layouts[0].step_seconds < second


def test_search_limits_tp_to_fast_link_domain_for_llama3_405b():
    best = search_layouts(
        ResolvedRun(make_run("llama3-405b", sequence=8192, sequences=128, cluster={"nodes": 32}), 256), keep=5
    ).layouts[0]
    assert 1 < best.candidate.tp <= 8
    assert best.candidate.pp > 1


@pytest.mark.parametrize(
    ("model", "layout", "min_ratio"),
    [
        # One rank has the embedding and the head.
        ("llama3-8b", {"pp": 2, "schedule": "zb-v", "activation_checkpointing": "full"}, 0.72),
        ("llama3-8b", {"pp": 4, "schedule": "1f1b", "data_parallel": "zero1"}, 0.85),
        ("mixtral-8x7b", {"tp": 8, "pp": 2, "data_parallel": "zero1"}, 0.85),  # experts are split as MLPs are
        # The fullest rank has the state of a whole expert.
        ("mixtral-8x7b", {"tp": 2, "ep": 8, "pp": 2, "data_parallel": "zero1"}, 0.68),
    ],
)
def test_estimated_memory_is_close_to_exact_memory(model, layout, min_ratio):
    run = make_run(model, sequences=64, cluster={"nodes": 4}, layout={**layout, "micro_batch_size": 1})
    (option,) = evaluate(ResolvedRun(run, 32), [candidate_from_run(ResolvedRun(run, 32))])
    assert min_ratio < option.memory_bytes / with_exact_memory(ResolvedRun(run, 32), option).memory_bytes < 1.15


def test_choose_rank_order_puts_pipeline_outermost_for_moe_across_nodes():
    """The experts of a stage share nodes, which the predicted time prefers. In one node, no traffic leaves it."""
    run = make_run("mixtral-8x7b", sequences=256, cluster={"nodes": 8, "memory_bytes": 100 * 2**30})
    piped = [option for option in search_layouts(ResolvedRun(run, 64), keep=20).layouts if option.candidate.pp > 1]
    best = next(option for option in piped if option.candidate.ep == 8)
    assert {option.candidate.rank_order for option in piped} == {"pipeline_outer"}
    data_outer = best.candidate.layout().model_copy(update={"rank_order": "data_outer"})
    assert evaluate_layout(ResolvedRun(run, 64), data_outer).step_seconds > 1.05 * best.step_seconds
    one_node = [c for c in enumerate_layouts(ResolvedRun(make_run("mixtral-8x7b"), 8)) if c.pp > 1]
    assert {c.rank_order for c in one_node} == {"data_outer"}


def test_search_returns_smallest_layout_when_none_fits():
    run = make_run("llama3-70b", cluster={"memory_bytes": 3 * 2**30})
    result = search_layouts(ResolvedRun(run, 8))
    assert (result.layouts, result.fitting) == ([], 0)
    assert result.closest_to_fitting is not None
    assert result.closest_to_fitting.memory_bytes > 3 * 2**30


def test_plan_or_raise_reports_cpu_memory_shortage():
    """Offloading needs the least device memory, but CPU memory has no room for the state."""
    scarce = {"nproc_per_node": 1, "memory_bytes": 40 * 2**30, "host_memory_bytes": 60 * 2**30}
    run = make_run(sequences=8, cluster=scarce)
    with pytest.raises(UserError, match=r"uses [\d.]+ GiB of 60\.0 of CPU memory \(P\(OOM\) 100%\)"):
        plan_or_raise(ResolvedRun(run, 1))
    least = search_layouts(ResolvedRun(run, 1)).closest_to_fitting
    assert least.host_bytes > 60 * 2**30
    assert least == with_exact_memory(ResolvedRun(run, 1), least)


def test_search_rejects_cluster_without_speeds():
    run = run_from_table({"model": {"preset": "tiny"}})
    with pytest.raises(UserError, match=r"cluster\.peak_flops.*\n.*preset"):
        search_layouts(ResolvedRun(run, 8))


def test_candidate_jobs_columns_match_layout():
    run = make_run(layout={"data_parallel": "zero1", "tp": 2, "pp": 2, "schedule": "interleaved", "virtual_stages": 2})
    jobs = candidate_jobs(ResolvedRun(run, 16), [candidate_from_run(ResolvedRun(run, 16))])
    assert (jobs.tp, jobs.pp, jobs.virtual_stages, jobs.dp, jobs.zero_stage, jobs.shard_group_size) == (
        2,
        2,
        2,
        4,
        1,
        4,
    )
    assert jobs.micro_batch * jobs.micro_batches * 4 == 64


@pytest.mark.parametrize(
    ("layout", "blocks"),
    [
        ({}, (32, 32, 32)),
        ({"pp": 2}, (17, 17, 15)),
        ({"pp": 5}, (7, 7, 4)),  # the head takes as long as two or three blocks
        ({"pp": 5, "schedule": "zb-v"}, (4, 7, 4)),  # embedding and head are on one rank
        ({"pp": 4, "schedule": "interleaved", "virtual_stages": 3}, (8, 9, 7)),
    ],
)
def test_candidate_jobs_use_actual_pipeline_split(layout, blocks):
    """A step takes as long as its longest stage, not the mean of stages."""
    run = make_run("llama3-8b", sequences=160, cluster={"nodes": 5}, layout={**layout, "micro_batch_size": 1})
    jobs = candidate_jobs(ResolvedRun(run, 40), [candidate_from_run(ResolvedRun(run, 40))])
    assert tuple(jobs.blocks) == blocks


@pytest.mark.parametrize(
    ("field", "layout"),
    [
        ("sequence_parallel", {"tp": 2, "sequence_parallel": False}),
        ("tp_attention", {"tp": 2, "tp_attention": "gathered"}),
        ("gradient_compression", {"gradient_compression": "powersgd"}),
        ("reshard_after_forward", {"data_parallel": "zero3", "reshard_after_forward": False}),
        ("fsdp_unit", {"data_parallel": "zero3", "fsdp_unit": "model"}),
        ("data_parallel", {"data_parallel": "zero3", "pp": 2}),
        ("data_parallel", {"data_parallel": "hsdp", "dp_shard": 2, "pp": 2}),
    ],
)
def test_candidate_from_run_rejects_unsupported_layout_field(field, layout):
    run = make_run("olmoe-1b-7b", layout=layout)
    with pytest.raises(UserError, match=rf"layout\.{field}.*not supported by the planner"):
        candidate_from_run(ResolvedRun(run, 8))
    assert run_footprint(run).step_seconds is None, "`advise oom` tells what it can"


def test_candidate_from_run_ignores_fields_without_effect():
    ddp = {"bucket_mb": 5.0, "first_bucket_mb": 1.0, "ddp_find_unused_parameters": True, "micro_batch_size": 1}
    assert candidate_from_run(ResolvedRun(make_run(layout=ddp), 8)).data_parallel == "ddp"
    assert (
        candidate_from_run(
            ResolvedRun(make_run(layout={"data_parallel": "zero3", "fsdp_prefetch": 3}), 8)
        ).data_parallel
        == "zero3"
    )


def test_candidate_from_run_uses_effective_strategy():
    """ZeRO-2 keeps whole gradients in a pipeline, and FSDP without other ranks is a replica."""
    assert (
        candidate_from_run(ResolvedRun(make_run(layout={"data_parallel": "zero2", "pp": 2}), 8)).data_parallel
        == "zero1"
    )
    assert (
        candidate_from_run(ResolvedRun(make_run(layout={"data_parallel": "hsdp", "dp_shard": 1}), 8)).data_parallel
        == "ddp"
    )
    assert candidate_from_run(ResolvedRun(make_run(layout={"data_parallel": "zero3"}), 1)).data_parallel == "ddp"


def test_search_options_fit_by_exact_rank_memory():
    run = make_run("qwen3-30b-a3b", sequences=1024, cluster={"nodes": 8})
    for option in search_layouts(ResolvedRun(run, 64), keep=4).layouts:
        memories = rank_memory(ResolvedRun(run.model_copy(update={"layout": option.candidate.layout()}), 64)).values()
        assert option.memory_bytes == max(memory.device for memory in memories) < 80 * 2**30


def test_enumerate_layouts_has_both_methods_of_cp_when_it_divides_heads():
    """Two or four ranks can exchange 12 heads for tokens; eight ranks cannot."""
    run = make_run("gpt2-124m", sequence=1024, sequences=16)
    candidates = {
        (c.cp, c.cp_method): c
        for c in enumerate_layouts(ResolvedRun(run, 8))
        if c.tp == c.pp == c.ep == 1 and c.activation_checkpointing == "none"
    }
    assert set(candidates) == {(1, "ring"), (2, "ring"), (2, "ulysses"), (4, "ring"), (4, "ulysses"), (8, "ring")}
    jobs = candidate_jobs(ResolvedRun(run, 8), [candidates[4, "ulysses"], candidates[8, "ring"], candidates[1, "ring"]])
    assert list(jobs.attention) == [AttentionKernel.FLASH_3, AttentionKernel.RING, AttentionKernel.FLASH_3]
    assert list(jobs.ulysses) == [1, 0, 0]


def test_fp8_is_faster_than_bf16_and_needs_memory_for_casts():
    layout = {"data_parallel": "zero3", "micro_batch_size": 2}
    evaluated = {}
    for precision in ("bf16", "fp8"):
        run = make_run(sequence=8192, layout=layout, training={"precision": precision, "compile": True})
        evaluated[precision] = evaluate_layout(ResolvedRun(run, 8), run.layout)
    assert 0.6 < evaluated["fp8"].step_seconds / evaluated["bf16"].step_seconds < 0.95
    assert evaluated["bf16"].memory_bytes <= evaluated["fp8"].memory_bytes < 1.02 * evaluated["bf16"].memory_bytes


@pytest.mark.parametrize("machine", ["a100", "l4", "mi300x", "cpu"])
def test_fp8_is_rejected_on_machine_without_known_speed(machine):
    run = make_run(machine=machine, training={"precision": "fp8"})
    with pytest.raises(UserError, match=r"training\.precision = 'fp8'.*\n.*cluster\.matmul_flops_8bit"):
        search_layouts(ResolvedRun(run, 8))


def test_fp8_on_calibrated_machine_is_rejected_with_remedy_that_works():
    run = make_run(training={"precision": "fp8"})
    calibrated = run.cluster.model_copy(update={"calibration": SYNTHETIC_MACHINE.calibration})
    with pytest.raises(UserError, match=r"without cluster\.calibration") as error:
        search_layouts(ResolvedRun(run.model_copy(update={"cluster": calibrated}), 8))
    assert "--machine" not in str(error.value)
