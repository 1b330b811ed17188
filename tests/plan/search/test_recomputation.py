"""Choice of `layout.activation_checkpointing = "auto"`, compared with all other choices."""

from itertools import product

import pytest

from phalanx.cost.exact.rank_memory import worker_memories
from phalanx.plan.search.candidates import candidate_from_run
from phalanx.plan.search.evaluate import evaluate
from phalanx.plan.search.oom_risk import (
    SAFE_OOM_PROBABILITY,
    device_and_host_bytes,
    ranks_oom_probability,
    safe_capacity_bytes,
)
from phalanx.plan.search.recomputation import choose_recomputation, with_recomputation
from phalanx.program.pipeline_split import layers_per_rank
from phalanx.spec.files.load import run_from_table
from phalanx.spec.resolved_run import ResolvedRun

METHODS = ("norms", "selective", "full")
LLAMA = {"preset": "llama3-8b"}
SMALL_LLAMA = {"preset": "llama3-8b", "num_layers": 10}
OLMOE = {"preset": "olmoe-1b-7b"}
SMALL_OLMOE = {**OLMOE, "num_layers": 8}
ZERO3 = {"data_parallel": "zero3"}
ZERO1 = {"data_parallel": "zero1"}
FULL_DEPTH_CASES = [
    (LLAMA, "h100", None, {**ZERO3, "micro_batch_size": 2}, 0.01),
    (LLAMA, "h100", None, {**ZERO3, "micro_batch_size": 4}, 0.015),  # norms in the blocks that recompute nothing
    (LLAMA, "a100", None, {**ZERO3, "micro_batch_size": 2}, 0.01),
    (LLAMA, "h200", None, {**ZERO1, "tp": 2, "micro_batch_size": 4}, 0.01),
    (LLAMA, "h100", 65e9, {**ZERO3, "cp": 2, "cp_method": "ulysses", "micro_batch_size": 4}, 0.025),
    (OLMOE, "h100", 60e9, {**ZERO1, "micro_batch_size": 8}, 0.01),
    (OLMOE, "h100", None, {**ZERO3, "ep": 8, "micro_batch_size": 8}, 0.025),  # one of its 16 blocks is 2 % of a step
]
PIPELINE_CASES = [
    (SMALL_LLAMA, "h100", 40e9, {**ZERO1, "pp": 2, "tp": 2, "micro_batch_size": 4}),
    (SMALL_LLAMA, "h100", 40e9, {**ZERO1, "pp": 4, "micro_batch_size": 4}),
    (SMALL_LLAMA, "h100", 36e9, {**ZERO1, "pp": 2, "cp": 2, "cp_method": "ulysses", "micro_batch_size": 4}),
    (SMALL_LLAMA, "a100", 50e9, {**ZERO1, "pp": 2, "schedule": "interleaved", "virtual_stages": 2}),
    (SMALL_OLMOE, "h100", 45e9, {**ZERO1, "pp": 2, "ep": 4, "micro_batch_size": 8}),
]


def make_run(model, machine, memory_bytes, layout):
    memory = {} if memory_bytes is None else {"memory_bytes": int(memory_bytes)}
    return run_from_table(
        {
            "model": model,
            "cluster": {"preset": machine, "nproc_per_node": 8, **memory},
            "training": {"seq_len": 8192 if "llama" in model["preset"] else 4096, "tokens_per_step": 2**20},
            "layout": {"micro_batch_size": 2, **layout, "activation_checkpointing": "auto"},
        }
    )


def predict(resolved):
    """Return the seconds of a step, and the device bytes of the fullest rank."""
    seconds = evaluate(resolved, [candidate_from_run(resolved)])[0].step_seconds
    return seconds, device_and_host_bytes(resolved.run.cluster, worker_memories(resolved))[0]


def fastest_mix(resolved):
    """Return the seconds of the fastest mix that fits, of blocks that recompute nothing, norms, attention or all.

    Time and memory are linear in the numbers of blocks, except for the peak of recomputation, which is left out."""
    seconds, size = predict(with_recomputation(resolved, "none", [0]))
    one_block = {method: predict(with_recomputation(resolved, method, [1])) for method in METHODS}
    limit, layers = safe_capacity_bytes(resolved.run.cluster), resolved.run.model.num_layers

    def mixed(counts, part, base):
        return base + sum(count * (one_block[method][part] - base) for method, count in counts.items())

    mixes = [
        dict(zip(METHODS, counts, strict=True))
        for counts in product(range(layers + 1), repeat=len(METHODS))
        if sum(counts) <= layers
    ]
    return min(mixed(counts, 0, seconds) for counts in mixes if mixed(counts, 1, size) <= limit)


@pytest.mark.parametrize(("model", "machine", "memory_bytes", "layout", "tolerance"), FULL_DEPTH_CASES)
def test_auto_recomputation_is_almost_as_fast_as_best_mix_of_methods(model, machine, memory_bytes, layout, tolerance):
    run = make_run(model, machine, memory_bytes, layout)
    resolved = ResolvedRun(run, 8)
    choice = choose_recomputation(resolved)
    assert choice.p_oom < SAFE_OOM_PROBABILITY
    assert predict(resolved.with_layout(choice.layout))[1] <= safe_capacity_bytes(run.cluster)
    assert choice.step_seconds <= (1 + tolerance) * fastest_mix(resolved)


@pytest.mark.parametrize(("model", "machine", "memory_bytes", "layout"), PIPELINE_CASES)
def test_auto_recomputation_equals_exhaustive_search_in_pipelines(model, machine, memory_bytes, layout):
    run = make_run(model, machine, memory_bytes, layout)
    resolved = ResolvedRun(run, 8)
    blocks = [range(len(layers) + 1) for layers in layers_per_rank(run)]
    variants = [with_recomputation(resolved, method, counts) for method in METHODS for counts in product(*blocks)]
    fitting = [
        variant
        for variant in variants
        if ranks_oom_probability(run.cluster, worker_memories(variant)) < SAFE_OOM_PROBABILITY
    ]
    choice = choose_recomputation(resolved)
    assert resolved.with_layout(choice.layout) in fitting
    assert 0 < len(fitting) < len(variants)
    assert choice.step_seconds == pytest.approx(min(predict(variant)[0] for variant in fitting))


def test_auto_recomputation_of_machine_without_speeds_recomputes_fewest_flops():
    run = make_run(LLAMA, "h100", None, {**ZERO3, "micro_batch_size": 2})
    unknown = run.model_copy(update={"cluster": run.cluster.model_copy(update={"peak_flops": None})})
    choice = choose_recomputation(ResolvedRun(unknown, 8))
    assert choice.step_seconds is None
    assert choice.p_oom < SAFE_OOM_PROBABILITY
    assert (choice.layout.activation_checkpointing, choice.layout.recomputed_blocks) == ("norms", 8)


def test_auto_recomputation_recomputes_all_blocks_if_nothing_fits():
    choice = choose_recomputation(ResolvedRun(make_run(LLAMA, "h100", 20e9, ZERO1), 8))
    assert choice.p_oom > SAFE_OOM_PROBABILITY
    assert (choice.layout.activation_checkpointing, choice.layout.recomputed_blocks) == ("full", None)
    assert not choice.layout.auto_checkpointing
