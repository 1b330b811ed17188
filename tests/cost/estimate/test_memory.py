"""Memory of many layouts at once, compared with published figures, the exact count and the schedules."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.cost.estimate.constants import memory_constants
from phalanx.cost.estimate.memory import estimate_memory, oom_probability, peak_in_flight_by_stage, reserved_bytes
from phalanx.cost.exact.rank_memory import rank_memory, rank_model_states
from phalanx.cost.kinds import AttentionKernel
from phalanx.plan.search.candidate_columns import candidate_jobs
from phalanx.plan.search.candidates import candidate_from_run
from phalanx.schedule.registry import build_schedule
from phalanx.schedule.simulate import peak_activations
from phalanx.spec.files.load import run_from_table
from phalanx.spec.formatting import GIB
from phalanx.spec.resolved_run import ResolvedRun
from tests.helpers.job_tables import make_job_row, make_job_table

MEMORY_CONSTANTS = memory_constants()
GPT_COLUMNS = {
    "mlp_matrices": 2,
    "vocab": 51200,
    "sequence": 2048,
    "attention": AttentionKernel.FUSED,
    "tied": 1,
    "expert_parameters": 0,
    "experts": 0,
    "parameter_bytes": 2,
    "gradient_bytes": 2,
    "state_bytes": 12,
    "hardware_generation": 0,
    "fused_elementwise": 1,
}


def make_gpt_row(layers: int, width: int, heads: int, **choices: float) -> dict[str, float]:
    attention = 4 * width**2
    parameters = layers * (attention + 8 * width**2) + 51200 * width
    shape = {
        "layers": layers,
        "dense_layers": layers,
        "width": width,
        "heads": heads,
        "kv_heads": heads,
        "ffn": 4 * width,
        "head_dim": width / heads,
        "value_dim": width / heads,
        "attention_parameters": attention,
        "parameters": parameters,
    }
    return make_job_row(**{**GPT_COLUMNS, **shape, **choices})


@pytest.mark.parametrize(
    ("shape", "choices", "gib"),
    [
        ((48, 6144, 64), {"tp": 8, "micro_batch": 4, "micro_batches": 1, "sequence_parallel": 0}, 104.812),
        (
            (96, 12288, 96),
            {
                "tp": 8,
                "pp": 8,
                "virtual_stages": 3,
                "schedule": "interleaved",
                "micro_batches": 64,
                "recompute": "attention core",
            },
            57.914,
        ),
        ((128, 25600, 160), {"tp": 8, "pp": 64, "micro_batches": 512, "sequence_parallel": 0}, 164.209),
        (
            (128, 25600, 160),
            {"tp": 8, "pp": 64, "micro_batches": 512, "recompute": "attention core"},
            59.5215,
        ),
    ],
)
def test_estimate_memory_matches_published_megatron_figures(shape, choices, gib):
    """Korthikanti et al. (arXiv 2205.05198), figure 1, within 8 %: the paper does not count buffers of libraries."""
    allocated_gib = (
        estimate_memory(MEMORY_CONSTANTS, make_job_table(make_gpt_row(*shape, **choices))).allocated_bytes / GIB
    )
    assert allocated_gib == pytest.approx(gib, rel=0.08)


@pytest.mark.parametrize(("zero", "bytes_per_parameter"), [(0, 16), (1, 4 + 12 / 64), (2, 2 + 14 / 64), (3, 16 / 64)])
def test_estimate_memory_state_matches_zero_paper(zero, bytes_per_parameter):
    """ZeRO, table 1: 7.5 B parameters on 64 ranks need 120, 31.4, 16.6 and 1.88 GB."""
    row = make_gpt_row(36, 4096, 32, dp=64, zero_stage=zero, shard_group_size=64)
    row["parameters"] = 7.5e9
    state = estimate_memory(MEMORY_CONSTANTS, make_job_table(row)).state[0, 0]
    gathered = 4 * MEMORY_CONSTANTS.gathered_blocks * (7.5e9 - 51200 * 4096) / 36 if zero == 3 else 0
    assert state - gathered == pytest.approx(7.5e9 * bytes_per_parameter, rel=1e-9)


@pytest.mark.parametrize(
    ("ranks", "layout"),
    [
        (1, {}),
        (8, {"data_parallel": "zero1"}),
        (8, {"data_parallel": "zero2"}),
        (8, {"data_parallel": "ddp"}),
        (8, {"tp": 4, "data_parallel": "zero1"}),
        (8, {"pp": 4, "data_parallel": "zero1"}),
        (16, {"pp": 2, "tp": 2, "data_parallel": "zero1"}),
        (8, {"data_parallel": "zero3"}),
    ],
)
def test_estimate_memory_state_matches_rank_model_states(ranks, layout):
    """The tolerance of 6 % covers norms, which are not sharded, and stages that are split by cost."""
    run = run_from_table(
        {
            "model": {"preset": "llama3-8b"},
            "training": {"seq_len": 4096, "tokens_per_step": 4096 * 64},
            "layout": {"micro_batch_size": 1, **layout},
            "cluster": {"preset": "h100"},
        }
    )
    estimate = estimate_memory(
        MEMORY_CONSTANTS, candidate_jobs(ResolvedRun(run, ranks), [candidate_from_run(ResolvedRun(run, ranks))])
    )
    state_bytes = max(estimate.state[0, 0], estimate.state[2, 0])
    blocks = run.model.num_layers
    dense = (8_030_261_248 - 2 * 128256 * 4096) / blocks
    state_bytes -= 4 * MEMORY_CONSTANTS.gathered_blocks * dense if layout.get("data_parallel") == "zero3" else 0
    assert state_bytes == pytest.approx(
        max(state.total for state in rank_model_states(ResolvedRun(run, ranks))), rel=0.06
    )


@pytest.mark.parametrize("offload_target", ["cpu", "nvme"])
@pytest.mark.parametrize(
    ("ranks", "layout"),
    [
        (1, {"data_parallel": "zero1"}),
        (1, {"data_parallel": "zero2"}),
        (8, {"data_parallel": "zero1"}),
        (8, {"data_parallel": "zero2"}),
        (8, {"data_parallel": "zero3"}),
        (8, {"pp": 4, "data_parallel": "zero1"}),
        (8, {"tp": 4, "data_parallel": "zero1"}),
    ],
)
def test_estimate_memory_offloaded_bytes_match_rank_memory(ranks, layout, offload_target):
    """The device memory decreases by the bytes that are in CPU memory and in files."""
    directory = {"offload_directory": "/local"} if offload_target == "nvme" else {}
    run = run_from_table(
        {
            "model": {"preset": "llama3-8b"},
            "training": {"seq_len": 4096, "tokens_per_step": 4096 * 64},
            "layout": {"micro_batch_size": 1, "offload": offload_target, **directory, **layout},
            "cluster": {"preset": "h100"},
        }
    )
    offloading, counts = candidate_from_run(ResolvedRun(run, ranks)), rank_memory(ResolvedRun(run, ranks)).values()
    offloaded, resident = (
        estimate_memory(MEMORY_CONSTANTS, candidate_jobs(ResolvedRun(run, ranks), [candidate]))
        for candidate in (offloading, offloading._replace(offload="none", offload_directory=None))
    )
    freed_bytes = max(resident.state[0, 0] - offloaded.state[0, 0], resident.state[2, 0] - offloaded.state[2, 0])
    assert freed_bytes == pytest.approx(max(count.offloaded for count in counts), rel=0.06)
    assert offloaded.host_bytes[0] == pytest.approx(
        max(count.host - count.checkpoint_copy for count in counts), rel=0.06
    )


def test_estimate_memory_grows_with_compute_dtype_bytes():
    """Temporary tensors grow in proportion. Logits grow in fp64 only,
    because the loss converts them to at least fp32."""
    rows = (
        make_gpt_row(36, 4096, 32, dp=64, zero_stage=3, shard_group_size=64, compute_dtype_bytes=size)
        for size in (2, 4, 8)
    )
    estimate = estimate_memory(MEMORY_CONSTANTS, make_job_table(*rows))
    np.testing.assert_allclose(estimate.logits[0] / estimate.logits[0, 0], [1, 1, 2])
    working = estimate.buffers[0] - MEMORY_CONSTANTS.workspace_gib * GIB
    np.testing.assert_allclose(working / working[0], [1, 2, 4])
    gathered = np.diff(estimate.state[0])
    assert gathered[1] == pytest.approx(2 * gathered[0])
    assert gathered[0] == pytest.approx(4 * MEMORY_CONSTANTS.gathered_blocks * 12 * 4096**2)


@pytest.mark.parametrize("precision", ["fp32", "fp64"])
@pytest.mark.parametrize("data", ["zero1", "zero2", "zero3"])
def test_estimate_memory_host_bytes_match_rank_memory_in_fp32_and_fp64(data, precision):
    """The machine was calibrated in this precision."""
    measured = {
        "runs": 1,
        "precision": precision,
        "time_constants": {},
        "identified_constants": [],
        "log_half_width": 0.1,
        "baseline_process_bytes": 0,
        "bytes_per_counted_byte": 1.0,
    }
    run = run_from_table(
        {
            "model": {"preset": "llama3-8b"},
            "layout": {"micro_batch_size": 1, "offload": "cpu", "data_parallel": data},
            "training": {"seq_len": 4096, "tokens_per_step": 4096 * 64, "precision": precision},
            "cluster": {"preset": "h100", "calibration": measured},
        }
    )
    estimate = estimate_memory(
        MEMORY_CONSTANTS, candidate_jobs(ResolvedRun(run, 8), [candidate_from_run(ResolvedRun(run, 8))])
    )
    counted_bytes = max(count.host - count.checkpoint_copy for count in rank_memory(ResolvedRun(run, 8)).values())
    assert estimate.host_bytes[0] == pytest.approx(counted_bytes, rel=0.06)


@pytest.mark.parametrize(
    ("name", "order", "v"),
    [
        ("1f1b", "1f1b", 1),
        ("gpipe", "gpipe", 1),
        ("interleaved", "interleaved", 2),
        ("zb-h1", "zb-h1", 1),
        ("zb-h2", "zb-h2", 1),
        ("zb-v", "zb-v", 1),
    ],
)
@pytest.mark.parametrize(("p", "m"), [(4, 8), (4, 16), (8, 16)])
def test_peak_in_flight_by_stage_matches_schedule_peak_activations(name, order, v, p, m):
    schedule = build_schedule(name, p, m, v)
    in_flight = peak_in_flight_by_stage(
        make_job_table(make_job_row(pp=p, virtual_stages=v, schedule=order, micro_batches=m))
    )
    for stage, count in zip((0, 1, p - 1), in_flight, strict=True):
        assert float(count[0]) == pytest.approx(float(peak_activations(schedule, stage)), abs=0.5)


@settings(max_examples=50, deadline=None)
@given(
    tp=st.sampled_from([1, 2, 8]),
    pp=st.sampled_from([1, 2, 4]),
    dp=st.sampled_from([1, 4, 16]),
    zero=st.integers(0, 2),
    micro_batch=st.sampled_from([1, 2, 4]),
)
def test_estimate_memory_never_grows_with_zero_stage_or_recompute(tp, pp, dp, zero, micro_batch):
    row = make_job_row(
        tp=tp, pp=pp, dp=dp, zero_stage=zero, shard_group_size=dp if zero else 1, micro_batch=micro_batch
    )
    smaller_rows = [
        {**row, "zero_stage": zero + 1.0, "shard_group_size": float(dp)} if zero < 2 else row,
        {**row, "recompute": "full"},
    ]
    full, *smaller = estimate_memory(MEMORY_CONSTANTS, make_job_table(row, *smaller_rows)).allocated_bytes
    assert all(size <= full * (1 + 1e-9) for size in smaller)


def test_reserved_bytes_include_fragmentation_of_pipeline_activations():
    piped = {"tp": 8, "pp": 4}
    rows = [
        make_gpt_row(48, 6144, 64, **choices)
        for choices in ({**piped, "micro_batches": 16}, {**piped, "micro_batches": 4}, {"tp": 8, "micro_batches": 16})
    ]
    estimate = estimate_memory(MEMORY_CONSTANTS, make_job_table(*rows))
    assert estimate.fragmented[0, 0] > 0
    assert (estimate.fragmented[0, 1:] == 0).all()
    assert (estimate.fragmented[2] == 0).all()
    reserved = reserved_bytes(MEMORY_CONSTANTS, estimate)
    assert reserved[0] > reserved[1]


def test_oom_probability_grows_with_reserved_bytes():
    table = make_job_table(*(make_job_row(dp=8, micro_batch=size) for size in (1, 2, 4, 8, 16)))
    estimate = estimate_memory(MEMORY_CONSTANTS, table)
    risk = oom_probability(MEMORY_CONSTANTS, table, estimate)
    assert (np.diff(risk) >= 0).all()
    assert risk[-1] > 0.99
    reserved = reserved_bytes(MEMORY_CONSTANTS, estimate)
    assert (reserved > estimate.allocated_bytes).all()
    filled = make_job_table(
        *(
            make_job_row(dp=8, micro_batch=size, memory_bytes=reserved[index])
            for index, size in enumerate((1, 2, 4, 8, 16))
        )
    )
    np.testing.assert_allclose(oom_probability(MEMORY_CONSTANTS, filled, estimate), 0.5)


def test_memory_of_partial_recomputation_is_between_that_of_none_and_all_blocks():
    table = {"model": {"preset": "llama3-8b"}, "cluster": {"preset": "h100"}, "training": {"seq_len": 8192}}
    layout = {"micro_batch_size": 1, "activation_checkpointing": "full"}
    runs = [run_from_table({**table, "layout": {**layout, "recomputed_blocks": blocks}}) for blocks in (1, 8, 24, 32)]
    no_recomputation = run_from_table({**table, "layout": {"micro_batch_size": 1}})
    sizes = []
    for run in (no_recomputation, *runs):
        jobs = candidate_jobs(ResolvedRun(run, 1), [candidate_from_run(ResolvedRun(run, 1))])
        sizes.append(estimate_memory(MEMORY_CONSTANTS, jobs).activations[0, 0])
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] - sizes[1] == pytest.approx((sizes[1] - sizes[2]) / 7)
    full_recomputation = run_from_table({**table, "layout": layout})
    jobs = candidate_jobs(ResolvedRun(full_recomputation, 1), [candidate_from_run(ResolvedRun(full_recomputation, 1))])
    assert sizes[-1] == pytest.approx(estimate_memory(MEMORY_CONSTANTS, jobs).activations[0, 0])


def test_recomputed_norms_save_two_tensors_of_the_residual_stream_per_block():
    table = {"model": {"preset": "llama3-8b"}, "cluster": {"preset": "h100"}, "training": {"seq_len": 8192}}
    sizes = []
    for method in ("none", "norms"):
        run = run_from_table({**table, "layout": {"micro_batch_size": 1, "activation_checkpointing": method}})
        jobs = candidate_jobs(ResolvedRun(run, 1), [candidate_from_run(ResolvedRun(run, 1))])
        sizes.append(estimate_memory(MEMORY_CONSTANTS, jobs).activations[0, 0])
    assert sizes[0] - sizes[1] == pytest.approx(32 * 2 * 8192 * 4096 * 2)


def test_context_parallel_rank_saves_its_share_of_a_sequence():
    table = {"model": {"preset": "llama3-8b"}, "cluster": {"preset": "h100"}, "training": {"seq_len": 8192}}
    sizes = []
    for cp in (1, 4):
        run = run_from_table({**table, "layout": {"micro_batch_size": 1, "cp": cp}})
        jobs = candidate_jobs(ResolvedRun(run, cp), [candidate_from_run(ResolvedRun(run, cp))])
        sizes.append(estimate_memory(MEMORY_CONSTANTS, jobs).activations[0, 0])
    assert sizes[1] == pytest.approx(sizes[0] / 4, rel=0.1)
