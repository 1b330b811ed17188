"""Remedies free the advised memory, remedies that should fit do fit, and their order is that of the guide."""

from __future__ import annotations

import json
from math import ceil, exp
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from phalanx.cost.estimate.constants import memory_constants
from phalanx.cost.exact.cuda_process import CONTEXT_BYTES
from phalanx.cost.exact.model_state import model_state_bytes
from phalanx.cost.exact.parameters import count_parameters
from phalanx.cost.exact.rank_memory import rank_memory
from phalanx.plan.advice.oom import (
    Diagnosis,
    RemedyEffect,
    apply_until_fits,
    changed_settings,
    diagnose,
    evaluate_single_remedies,
    fits_after,
    limit_bytes,
    minimal_subset,
    relative_slowdown,
    run_footprint,
)
from phalanx.plan.advice.oom_remedies import REMEDIES
from phalanx.plan.search.evaluate import evaluate_layout
from phalanx.plan.search.oom_risk import SAFE_OOM_PROBABILITY as RISK
from phalanx.program.pipeline_split import layers_per_rank
from phalanx.spec.errors import UserError
from phalanx.spec.families.config_json import hf_config
from phalanx.spec.files.load import load_run, run_from_table
from phalanx.spec.layout import Layout
from phalanx.spec.resolved_run import ResolvedRun
from phalanx.spec.run import RunSpec

GIB = 2**30
Table = dict[str, Any]
WIDE = {
    "vocab_size": 4096,
    "hidden_size": 1024,
    "num_layers": 16,
    "num_heads": 16,
    "num_kv_heads": 16,
    "ffn_hidden_size": 4096,
    "max_seq_len": 1024,
}


def make_run(
    model: Table | None = None, cluster: Table | None = None, training: Table | None = None, **layout: Any
) -> RunSpec:
    training = {"seq_len": 1024, "tokens_per_step": 2**18, **(training or {})}
    cluster = {"preset": "h100", "nodes": 1, "nproc_per_node": 8, **(cluster or {})}
    return run_from_table({"model": model or WIDE, "training": training, "cluster": cluster, "layout": layout})


MEMORY_CONSTANTS = memory_constants()
SAFE_MEMORY_FRACTION = exp(-1.644853627 * MEMORY_CONSTANTS.spread)
"""Share of memory up to which a run is likely to fit."""


def make_run_with_memory_limit(gib: float, **sections: Any) -> RunSpec:
    """Return a run on devices where it may use this many bytes, in addition
    to those of a GPU's libraries and the margin."""
    return make_run(cluster={"memory_bytes": ceil((gib * GIB + CONTEXT_BYTES) / SAFE_MEMORY_FRACTION)}, **sections)


def make_llama3_8b_run(**layout: Any) -> RunSpec:
    return make_run({"preset": "llama3-8b"}, training={"seq_len": 8192, "tokens_per_step": 2**20}, **layout)


def effects_by_name(effects: list[RemedyEffect]) -> dict[str, RemedyEffect]:
    return {effect.remedy.name: effect for effect in effects}


def max_rank_bytes(run: RunSpec) -> int:
    """Return the device bytes of the fullest rank."""
    return max(memory.device for memory in rank_memory(ResolvedRun(run, run.cluster.ranks)).values())


def reload_with_settings(run: RunSpec, folder: Path, *changes: str) -> RunSpec:
    """Reload the run from a file with settings of `--set`."""
    path = folder / "run.toml"
    path.write_text(tomli_w.dumps(run.model_dump(exclude_none=True)))
    return load_run(path, changes, environment={})


RUNS = {
    "ddp": lambda: make_run_with_memory_limit(7),
    "zero1 in a pipeline": lambda: make_run_with_memory_limit(4, data_parallel="zero1", pp=2, micro_batch_size=4),
    "8b on one node": make_llama3_8b_run,
    "8b sharded": lambda: make_llama3_8b_run(data_parallel="zero3", micro_batch_size=2),
    "experts": lambda: make_run(
        {"preset": "mixtral-8x7b"}, {"nodes": 8}, {"seq_len": 8192, "tokens_per_step": 2**22}, data_parallel="zero3"
    ),
}


@pytest.fixture(scope="module", params=RUNS)
def run(request) -> RunSpec:
    return RUNS[request.param]()


@pytest.fixture(scope="module")
def diagnosis(run) -> Diagnosis:
    return diagnose(run)


def test_diagnose_steps_fit_when_their_settings_are_applied(run, diagnosis, tmp_path):
    assert max_rank_bytes(run) > limit_bytes(run), "the run is of use here only if it does not fit"
    result = diagnosis
    assert fits_after(result.steps)
    for effect in (*result.steps, *result.needed):
        assert effect.new_footprint
        changed = reload_with_settings(run, tmp_path, *effect.settings)
        assert max_rank_bytes(changed) == effect.new_footprint.memory.device
        assert effect.new_footprint.fits == (max_rank_bytes(changed) <= limit_bytes(changed))
    assert max_rank_bytes(reload_with_settings(run, tmp_path, *result.needed[-1].settings)) < run.cluster.memory_bytes


def test_single_remedy_effects_match_memory_of_applied_settings(run, tmp_path):
    batch_plan = ResolvedRun(run, run.cluster.ranks).batch
    for effect in evaluate_single_remedies(run):
        if effect.new_footprint:
            changed = reload_with_settings(
                run, tmp_path, f"layout.micro_batch_size={batch_plan.micro_batch_size}", *effect.settings
            )
            assert max_rank_bytes(changed) == effect.new_footprint.memory.device, effect.settings
            assert effect.new_footprint.fits == (max_rank_bytes(changed) <= limit_bytes(changed))
            assert effect.freed_bytes == max_rank_bytes(run) - max_rank_bytes(changed)


def test_apply_until_fits_reports_bytes_freed_between_steps(run):
    steps, before = apply_until_fits(run), run_footprint(run).memory
    for effect in steps:
        assert effect.new_footprint
        assert effect.freed_bytes == before.device - effect.new_footprint.memory.device > 0.01 * before.device
        assert effect.freed["activations"] == before.activations - effect.new_footprint.memory.activations
        before = effect.new_footprint.memory
    assert all(not effect.new_footprint.fits for effect in steps[:-1] if effect.new_footprint), (
        "it stops when the run fits"
    )
    order = [remedy.name for remedy in REMEDIES]
    assert [effect.remedy.name for effect in steps] == sorted((e.remedy.name for e in steps), key=order.index)


def test_apply_until_fits_skips_remedies_with_negligible_effect():
    """Short sequences have few activations compared with 8 billion parameters."""
    run = make_run({"preset": "llama3-8b"}, training={"seq_len": 16, "tokens_per_step": 128, "precision": "fp32"})
    recomputed = effects_by_name(evaluate_single_remedies(run))["recompute blocks"]
    assert 0 < recomputed.freed_bytes < 0.01 * max_rank_bytes(run)
    steps = apply_until_fits(run)
    assert fits_after(steps)
    assert {effect.remedy.name for effect in steps} <= {"ZeRO-1", "ZeRO-2", "ZeRO-3"}


def test_minimal_subset_has_no_removable_remedy(run):
    subset = minimal_subset(run, apply_until_fits(run))
    assert fits_after(subset)
    for effect in subset:
        assert not fits_after(apply_until_fits(run, [other.remedy for other in subset if other is not effect]))


def test_diagnose_ranks_cheapest_sufficient_remedies_first(run, diagnosis):
    """Remedies that make the run fit come first, ordered by their cost in time; remedies with other costs come last."""
    result = diagnosis
    assert result.current_footprint.step_seconds
    groups = [0 if fits_after([effect]) else 1 if effect.helps else 2 for effect in result.single_remedies]
    assert groups == sorted(groups)
    for group in set(groups):
        group_effects = [effect for effect, other in zip(result.single_remedies, groups, strict=True) if other == group]
        assert [effect.remedy.is_last_resort for effect in group_effects] == sorted(
            effect.remedy.is_last_resort for effect in group_effects
        )
        costs = [
            relative_slowdown(effect, result.current_footprint)
            for effect in group_effects
            if not effect.remedy.is_last_resort
        ]
        assert costs == sorted(costs)
    assert {effect.remedy.name for effect in result.single_remedies if effect.remedy.is_last_resort} == {
        "bf16",
        "SGD",
        "LoRA",
        "QLoRA",
        "more devices",
    }


def test_diagnose_advice_is_no_slower_than_any_single_sufficient_remedy(run, diagnosis):
    result = diagnosis
    advised = result.needed[-1]
    for effect in result.single_remedies:
        if fits_after([effect]) and not effect.remedy.is_last_resort:
            assert relative_slowdown(advised, result.current_footprint) <= relative_slowdown(
                effect, result.current_footprint
            )
    assert relative_slowdown(advised, result.current_footprint) <= relative_slowdown(
        minimal_subset(run, apply_until_fits(run))[-1], result.current_footprint
    )


def test_diagnose_uses_published_order_when_step_times_are_unknown():
    result = diagnose(make_run_with_memory_limit(7, training={"precision": "fp32"}))
    assert result.current_footprint.step_seconds is None
    order = [remedy.name for remedy in sorted(REMEDIES, key=lambda remedy: remedy.is_last_resort)]
    assert order[-4:] == ["SGD", "LoRA", "QLoRA", "more devices"]
    for suffices in (True, False):
        names = [
            effect.remedy.name
            for effect in result.single_remedies
            if effect.new_footprint and fits_after([effect]) == suffices
        ]
        assert names == sorted(names, key=order.index)
    assert result.steps == apply_until_fits(make_run_with_memory_limit(7, training={"precision": "fp32"}))


def test_remedies_follow_published_guide_order():
    assert [remedy.name for remedy in REMEDIES] == [
        "smaller micro-batch",
        "recompute norms",
        "recompute attention",
        "recompute blocks",
        "bf16",
        "ZeRO-1",
        "ZeRO-2",
        "ZeRO-3",
        "expert parallelism",
        "tensor parallelism",
        "context parallelism",
        "pipeline",
        "offload activations",
        "offload to CPU memory",
        "SGD",
        "LoRA",
        "QLoRA",
        "more devices",
    ]
    assert "+33% compute" in next(remedy.cost for remedy in REMEDIES if remedy.name == "recompute blocks")


def test_sgd_remedy_frees_half_of_adamw_model_state():
    """AdamW has 4 bytes for each of 4 m numbers. SGD with momentum frees a quarter."""
    run = make_run_with_memory_limit(1, training={"precision": "fp32"})
    state = run_footprint(run).memory.state
    m = count_parameters(run.model).total
    assert state == 16 * m
    sgd = effects_by_name(evaluate_single_remedies(run))["SGD"]
    assert sgd.settings == ("optimizer.name=sgd", "optimizer.momentum=0.0")
    assert sgd.freed_bytes == sgd.freed["optimizer"] == 8 * m == state // 2
    fits_with_momentum = make_run_with_memory_limit(
        (max_rank_bytes(run) - 4 * m) / GIB + 0.01, training={"precision": "fp32"}
    )
    assert effects_by_name(evaluate_single_remedies(fits_with_momentum))["SGD"].settings == ("optimizer.name=sgd",)
    assert effects_by_name(evaluate_single_remedies(fits_with_momentum))["SGD"].freed_bytes == 4 * m


def test_lora_remedy_keeps_state_of_adapters_only(tmp_path: Path) -> None:
    """A full tuning of llama3-8b does not fit on one H100; with frozen weights it does."""
    spec = make_llama3_8b_run().model
    (tmp_path / "config.json").write_text(json.dumps(hf_config(spec)))
    sizes = {"seq_len": 2048, "tokens_per_step": 2048}
    run = make_run({"from_hf": str(tmp_path)}, {"nproc_per_node": 1}, sizes, activation_checkpointing="full")
    lora = effects_by_name(evaluate_single_remedies(run))["LoRA"]
    assert lora.settings == ("adapter.rank=64", "adapter.alpha=16.0")
    assert lora.new_footprint is not None
    assert lora.new_footprint.fits
    # In bf16, AdamW has 4 bytes for each of 3 numbers.
    num_trained = lora.new_footprint.memory.optimizer // 12
    assert lora.freed["optimizer"] == 12 * (count_parameters(spec).total - num_trained)
    quantized = effects_by_name(evaluate_single_remedies(run))["QLoRA"]
    assert quantized.settings == (*lora.settings, "adapter.base_dtype=nf4")
    count = count_parameters(spec)
    # 2 bytes for a number become 36 for 64.
    assert quantized.freed["parameters"] - lora.freed["parameters"] == count.block_matrices * (2 - 36 / 64)
    for other in (lora.new_footprint.run, make_llama3_8b_run()):
        assert effects_by_name(evaluate_single_remedies(other))["LoRA"].run is None


@pytest.mark.parametrize("size", [2, 4, 8])
def test_smaller_micro_batch_remedy_frees_activations_proportionally(size):
    """Rotary tables, which sequences share, and a chunk of the loss are not proportional."""
    run = make_run_with_memory_limit(0.1, training={"precision": "fp32"}, micro_batch_size=size)
    assert max_rank_bytes(run) > limit_bytes(run)
    halved = run_footprint(
        make_run_with_memory_limit(0.1, training={"precision": "fp32"}, micro_batch_size=size // 2)
    ).memory
    memory = run_footprint(run).memory
    assert memory.activations == pytest.approx(2 * halved.activations, rel=5e-3)
    assert (memory.parameters, memory.gradients, memory.optimizer) == (
        halved.parameters,
        halved.gradients,
        halved.optimizer,
    )
    effect = effects_by_name(evaluate_single_remedies(run))["smaller micro-batch"]
    assert effect.settings == ("layout.micro_batch_size=1",)
    assert {part for part, freed in effect.freed.items() if freed} == {"activations"}
    assert effect.new_footprint
    freed_gaps = memory.unused - effect.new_footprint.memory.unused
    assert effect.freed_bytes == pytest.approx((1 - 1 / size) * memory.activations + freed_gaps, rel=5e-3)


def test_pipeline_remedy_names_unequal_layers_of_its_ranks() -> None:
    run = make_llama3_8b_run()
    run = run.model_copy(update={"model": run.model.model_copy(update={"num_layers": 30})})
    pipeline = effects_by_name(evaluate_single_remedies(run))["pipeline"]
    assert pipeline.run is not None
    assert [len(layers) for layers in layers_per_rank(pipeline.run)] == [4, 4, 4, 4, 4, 4, 4, 2]
    assert pipeline.cost == "stages wait for each other; ranks have 2 to 4 layers"


def test_remedy_applies_smallest_sufficient_change():
    run = make_run(micro_batch_size=32)
    four = run_footprint(make_run(micro_batch_size=4)).memory.device
    just = make_run_with_memory_limit((four + 1) / GIB, micro_batch_size=32)
    assert max_rank_bytes(run) > limit_bytes(just)
    assert effects_by_name(evaluate_single_remedies(just))["smaller micro-batch"].settings == (
        "layout.micro_batch_size=4",
    )
    assert [effect.remedy.name for effect in apply_until_fits(just)] == ["smaller micro-batch"]


def test_zero_remedies_free_the_state_that_their_stage_shards():
    run = make_run_with_memory_limit(0.1, training={"precision": "fp32"})
    state_bytes = model_state_bytes(count_parameters(run.model), "adamw", "fp32")
    effects = effects_by_name(evaluate_single_remedies(run))
    for stage, parts in (
        (1, {"optimizer"}),
        (2, {"optimizer", "gradients"}),
        (3, {"optimizer", "gradients", "parameters"}),
    ):
        freed = effects[f"ZeRO-{stage}"].freed
        for part in ("optimizer", "gradients", "parameters"):
            expected = 7 / 8 * getattr(state_bytes, part) if part in parts else 0
            assert freed[part] == pytest.approx(expected, rel=0.01), (stage, part)


def test_remedy_step_seconds_equal_planner_times_or_none():
    run = make_llama3_8b_run()
    effects = effects_by_name(evaluate_single_remedies(run))
    recomputed = effects["recompute blocks"]
    assert recomputed.run is not None
    assert recomputed.new_footprint
    planned_seconds = evaluate_layout(ResolvedRun(run, 8), recomputed.run.layout).step_seconds
    assert recomputed.new_footprint.step_seconds == planned_seconds
    seconds_before = run_footprint(run).step_seconds
    assert seconds_before is not None
    assert 0.2 < planned_seconds / seconds_before - 1 < 0.4, "about a third"
    offloaded = effects["offload to CPU memory"].new_footprint
    assert offloaded
    assert (
        offloaded.step_seconds
        == evaluate_layout(ResolvedRun(run, 8), Layout(data_parallel="zero1", offload="cpu")).step_seconds
    )
    assert offloaded.step_seconds > seconds_before
    assert run_footprint(make_run_with_memory_limit(7, training={"precision": "fp32"})).step_seconds is None


def test_inapplicable_remedies_report_the_reason():
    effects = effects_by_name(
        evaluate_single_remedies(
            make_llama3_8b_run(data_parallel="zero3", activation_checkpointing="full", micro_batch_size=1)
        )
    )
    for name in ("ZeRO-1", "ZeRO-2", "ZeRO-3", "recompute attention", "recompute blocks", "bf16"):
        assert effects[name].new_footprint is None
        assert effects[name].problem.startswith("already applied")
    assert effects["smaller micro-batch"].problem == "a micro-batch is one sequence"
    assert "no experts" in effects["expert parallelism"].problem
    assert effects["more devices"].new_footprint
    odd = effects_by_name(
        evaluate_single_remedies(
            make_run({**WIDE, "num_heads": 9, "num_kv_heads": 9, "hidden_size": 1152}, cluster={"nproc_per_node": 2})
        )
    )
    assert "does not divide model.num_heads" in odd["tensor parallelism"].problem


def test_context_parallel_remedy_chooses_cp_method_like_the_planner():
    on_gpu, on_cpu = (
        make_run(cluster={"memory_bytes": 2 * GIB}),
        make_run(cluster={"memory_bytes": 2 * GIB, "device": "cpu"}),
    )
    assert effects_by_name(evaluate_single_remedies(on_gpu))["context parallelism"].settings == (
        "layout.cp=4",  # with 8, NCCL's buffers for more peers exceed the freed memory
        "layout.cp_method=ulysses",
    )
    assert effects_by_name(evaluate_single_remedies(on_cpu))["context parallelism"].settings == ("layout.cp=8",)
    five = {**WIDE, "num_heads": 5, "num_kv_heads": 5, "hidden_size": 1280}
    few_heads = make_run(five, cluster={"memory_bytes": 2 * GIB})
    assert effects_by_name(evaluate_single_remedies(few_heads))["context parallelism"].settings == ("layout.cp=8",)


def test_remedies_reset_options_that_no_longer_apply():
    run = make_run_with_memory_limit(0.1, data_parallel="ddp", gradient_compression="bf16")
    effects = effects_by_name(evaluate_single_remedies(run))
    assert "layout.gradient_compression=none" in effects["ZeRO-1"].settings
    assert "layout.gradient_compression=none" in effects["pipeline"].settings


def test_remedies_recompute_all_blocks_of_a_partly_recomputed_run():
    partial = {"activation_checkpointing": "full", "recomputed_blocks": 8, "micro_batch_size": 4}
    effects = effects_by_name(evaluate_single_remedies(make_llama3_8b_run(data_parallel="zero3", **partial)))
    assert effects["recompute blocks"].settings == ("layout.recomputed_blocks=",)
    assert effects["recompute blocks"].freed["activations"] > 0
    assert effects["recompute attention"].run is None
    assert "layout.recomputed_blocks=" in effects["pipeline"].settings


def test_offload_remedy_respects_cpu_memory_limit():
    on_cpu = effects_by_name(evaluate_single_remedies(make_run(cluster={"memory_bytes": 2 * GIB, "device": "cpu"})))[
        "offload to CPU memory"
    ]
    assert on_cpu.new_footprint is None
    assert "CPU memory is insufficient" in on_cpu.problem
    run = make_llama3_8b_run(data_parallel="zero3", offload="cpu", activation_checkpointing="full")
    resting = run_footprint(run).memory.host
    assert run_footprint(run).fits
    memory = run_footprint(run).memory
    assert memory.host == memory.offloaded + memory.checkpoint_copy
    assert memory.offloaded == pytest.approx(2 * 8.03e9, rel=0.01)
    for memory, fit in ((resting / SAFE_MEMORY_FRACTION * 1.0001, True), (resting, False)):
        cluster = run.cluster.model_copy(update={"host_memory_bytes": round(memory)})
        assert run_footprint(run.model_copy(update={"cluster": cluster})).fits is fit


def test_offload_remedy_on_one_device_includes_gradients_when_needed():
    """The planner finds ZeRO-1 and ZeRO-2, whose state and gradients are in CPU memory."""

    def one(memory_gib: float, **layout: Any) -> RunSpec:
        cluster = {"nproc_per_node": 1, "memory_bytes": round(memory_gib * GIB)}
        training = {"seq_len": 4096, "tokens_per_step": 65_536}
        return make_run(
            {"preset": "llama3-8b"}, cluster, training, activation_checkpointing="full", micro_batch_size=1, **layout
        )

    for memory, data in ((80, "zero1"), (37, "zero2")):
        result = diagnose(one(memory))
        assert result.best
        assert (result.best.candidate.data_parallel, result.best.candidate.offload) == (data, "cpu")
        assert [effect.settings for effect in result.needed] == [(f"layout.data_parallel={data}", "layout.offload=cpu")]
        assert "a single device" in effects_by_name(result.single_remedies)["ZeRO-2"].problem
    offloading = effects_by_name(evaluate_single_remedies(one(37, data_parallel="zero1", offload="cpu")))
    assert offloading["ZeRO-2"].new_footprint
    assert offloading["ZeRO-2"].new_footprint.fits
    assert offloading["ZeRO-3"].new_footprint is None


def test_diagnose_needs_no_steps_when_run_fits():
    result = diagnose(make_run(micro_batch_size=1))
    assert result.current_footprint.fits
    assert (result.steps, result.needed) == ([], [])
    assert len(result.single_remedies) == len(REMEDIES)


def test_limit_bytes_subtracts_gpu_context_memory():
    on_gpu, on_cpu = (
        make_run(cluster={"preset": None, "device": device, "memory_bytes": 10**10}) for device in ("cuda", "cpu")
    )
    assert limit_bytes(on_cpu) == pytest.approx(SAFE_MEMORY_FRACTION * 10**10)
    assert limit_bytes(on_gpu) == pytest.approx(SAFE_MEMORY_FRACTION * 10**10 - CONTEXT_BYTES)
    with pytest.raises(UserError, match=r"cluster\.memory_bytes"):
        limit_bytes(make_run(cluster={"preset": None}))


def make_calibrated_run(held_bytes: float) -> RunSpec:
    """Return a run in fp32 on a machine where a process has 4 GiB without
    tensors, and tensors need 10 % more than counted."""
    measured = {
        "runs": 3,
        "precision": "fp32",
        "time_constants": {},
        "identified_constants": [],
        "log_half_width": 0.1,
        "baseline_process_bytes": 4 * GIB,
        "bytes_per_counted_byte": 1.1,
    }
    process_bytes = 4 * GIB
    memory = round((1.1 * held_bytes + process_bytes) / SAFE_MEMORY_FRACTION)
    return make_run(
        cluster={"memory_bytes": memory, "calibration": measured}, training={"precision": "fp32"}, micro_batch_size=2
    )


def test_run_footprint_agrees_with_planner_on_calibrated_machine():
    """The run uses the precision of the calibration, with its measured process and tensor bytes."""
    count = max_rank_bytes(make_run(training={"precision": "fp32"}, micro_batch_size=2))
    for room, fit in ((1.001 * count, True), (0.999 * count, False)):
        run = make_calibrated_run(room)
        assert limit_bytes(run) == pytest.approx(room)
        planned = evaluate_layout(ResolvedRun(run, 8), run.layout)
        assert run_footprint(run).fits is fit is (planned.p_oom < RISK)
        assert run_footprint(run).step_seconds == planned.step_seconds


def test_changed_settings_lists_differing_fields():
    run = make_run()
    assert changed_settings(run, run) == ()
    other = make_run(training={"precision": "fp32"}, cluster={"nodes": 2}, tp=2)
    assert changed_settings(run, other) == ("training.precision=fp32", "layout.tp=2", "cluster.nodes=2")
