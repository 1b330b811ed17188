"""Step times: parts add up, bubbles are those of the simulated schedules, more hardware is never slower."""

from dataclasses import fields

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.cost.estimate import step_time
from phalanx.cost.estimate.block_time import StageTime
from phalanx.cost.estimate.constants import MemoryConstants, TimeConstants, bounds, memory_constants, time_constants
from phalanx.cost.estimate.step_time import PARTS, step_seconds
from phalanx.schedule.registry import build_schedule
from phalanx.schedule.simulate import ActionTimes, simulate
from tests.helpers.job_tables import make_job_row, make_job_table

TIME_CONSTANTS = time_constants()


@pytest.mark.parametrize("kind", [TimeConstants, MemoryConstants])
def test_fitted_constants_lie_within_their_bounds(kind):
    fitted = time_constants() if kind is TimeConstants else memory_constants()
    for constant in fields(kind):
        low, high = bounds(constant)
        assert low * 0.999 <= getattr(fitted, constant.name) <= high * 1.001, constant.name


SHARDED = {"dp": 64, "zero_stage": 3, "shard_group_size": 64}
COMMUNICATING_ROWS = {
    "tp": make_job_row(tp=16, dp=4),
    "tp selective": make_job_row(tp=16, dp=4, recompute="selective"),
    "tp full": make_job_row(tp=16, dp=4, recompute="full"),
    "ring": make_job_row(cp=16, dp=4),
    "ulysses": make_job_row(cp=16, dp=4, ulysses=1, recompute="full"),
    "ep": make_job_row("mixtral-8x7b", ep=16, dp=64),
    "zero3": make_job_row(**SHARDED),
    "zero3 of one block after another": make_job_row(trainer="DeepSpeed", **SHARDED),
    "zero3 and ep": make_job_row("mixtral-8x7b", ep=16, **SHARDED),
    "hsdp": make_job_row(**{**SHARDED, "shard_group_size": 8}),
    "zero3 and tp": make_job_row(tp=8, **SHARDED),
    "zero3 offloaded": make_job_row(offload="cpu", **SHARDED),
    "cores that communicate": make_job_row(comm_uses_compute_cores=1, **SHARDED),
    "cores that ranks share": make_job_row(pp=4, tp=16, dp=2, ranks_per_core=2),
}


def test_step_seconds_equals_sum_of_parts():
    rows = [make_job_row(), make_job_row(dp=8, zero_stage=1, shard_group_size=8), *COMMUNICATING_ROWS.values()]
    time = step_seconds(TIME_CONSTANTS, make_job_table(*rows))
    parts = [np.broadcast_to(getattr(time, part), len(rows)) for part in PARTS]
    np.testing.assert_allclose(time.total, sum(parts))
    assert all((part >= -1e-12).all() for part in parts)
    assert time.exchange[0] == 0


@pytest.mark.parametrize("name", COMMUNICATING_ROWS)
def test_slow_links_never_lengthen_compute(name):
    """The additional time on a slower link is communication, copies or waiting."""
    row = COMMUNICATING_ROWS[name]
    links = ("link_bytes_per_second", "network_bytes_per_second", "host_link_bytes_per_second")
    slow = {**row, **{link: row[link] / 100 for link in links}}
    time = step_seconds(TIME_CONSTANTS, make_job_table(row, slow))
    assert time.compute[1] == pytest.approx(time.compute[0])
    assert time.total[1] > 2 * time.total[0]
    assert (time.update == time.update[0]).all()


@pytest.mark.parametrize(("model", "ep"), [("llama3-8b", 1), ("mixtral-8x7b", 1), ("mixtral-8x7b", 8)])
def test_zero3_books_exposed_gathers_and_scatters_as_data_parallel(model, ep):
    """Passes hide at most their own duration of two gathers and a scatter per micro-batch on a slow network. Expert
    parameters on eight ranks are gathered by eight groups, each over one NIC of a node."""
    row = make_job_row(model, network_bytes_per_second=2e9, ep=ep, **SHARDED)
    time = step_seconds(TIME_CONSTANTS, make_job_table(row))
    experts = row["expert_parameters"] * 63 / 64 if ep == 1 else row["expert_parameters"] * 7 / 8
    parameters = (row["parameters"] - row["expert_parameters"]) * 63 / 64 + experts
    sent_bytes = (2 * row["compute_dtype_bytes"] + row["gradient_wire_bytes"]) * parameters
    sent_seconds = row["micro_batches"] * sent_bytes / (8 * 2e9 * TIME_CONSTANTS.network)
    hidden = time.compute[0] + time.exchange[0]
    assert time.data_parallel[0] == pytest.approx(sent_seconds - hidden, rel=0.1)
    assert time.data_parallel[0] > time.total[0] / 2


@pytest.mark.parametrize(
    ("name", "order", "v"),
    [
        ("1f1b", "1f1b", 1),
        ("gpipe", "gpipe", 1),
        ("interleaved", "interleaved", 2),
        ("interleaved", "interleaved", 4),
        ("zb-h1", "zb-h1", 1),
        ("zb-h2", "zb-h2", 1),
        ("zb-v", "zb-v", 1),
    ],
)
@pytest.mark.parametrize(("p", "m"), [(2, 8), (4, 8), (4, 16)])
@pytest.mark.parametrize(("F", "B", "W"), [(1.0, 1.0, 1.0), (2.0, 2.0, 1.0), (3.0, 4.0, 2.0)])
def test_bubble_seconds_match_simulated_schedules(name, order, v, p, m, F, B, W):
    chunks = 2 if name == "zb-v" else v
    times = ActionTimes(forward=F / chunks, input_grad=B / chunks, weight_grad=W / chunks)
    simulated = simulate(build_schedule(name, p, m, v), times).makespan - m * (F + B + W)
    jobs = make_job_table(make_job_row(pp=p, dp=1, virtual_stages=v, schedule=order, micro_batches=m))
    stage = StageTime(forward=np.array([F]), backward=np.array([B + W]), weight_grad=np.array([W]))
    predicted = float(step_time._bubble_seconds(jobs, stage.scaled(p - 1))[0])
    assert predicted == pytest.approx(float(simulated), rel=0.02)


@settings(max_examples=60, deadline=None)
@given(
    tp=st.sampled_from([1, 2, 4, 8]),
    pp=st.sampled_from([1, 2, 4]),
    dp=st.sampled_from([1, 2, 8, 64]),
    zero=st.integers(0, 3),
    micro_batch=st.sampled_from([1, 2, 4]),
    recompute=st.sampled_from(["none", "attention core", "operations", "full"]),
    field=st.sampled_from(
        ["link_bytes_per_second", "network_bytes_per_second", "hbm_bytes_per_second", "peak_flops", "matmul_flops"]
    ),
)
def test_step_seconds_never_increase_with_faster_hardware(tp, pp, dp, zero, micro_batch, recompute, field):
    row = make_job_row(
        tp=tp,
        pp=pp,
        dp=dp,
        zero_stage=zero,
        shard_group_size=dp if zero else 1,
        micro_batch=micro_batch,
        recompute=recompute,
    )
    slow, fast = step_seconds(TIME_CONSTANTS, make_job_table(row, {**row, field: 2 * row[field]})).total
    assert fast <= slow * (1 + 1e-9)


@settings(max_examples=40, deadline=None)
@given(tp=st.sampled_from([1, 2, 8]), micro_batch=st.sampled_from([1, 4]), layers=st.sampled_from([8, 32, 80]))
def test_step_seconds_is_at_least_matmul_time_at_best_flops(tp, micro_batch, layers):
    row = make_job_row(tp=tp, micro_batch=micro_batch, layers=layers, dense_layers=layers)
    matrices = row["attention_parameters"] + row["mlp_matrices"] * row["width"] * row["ffn"]
    flops = 6 * layers * matrices * row["sequence"] * micro_batch * row["micro_batches"] / tp
    assert step_seconds(TIME_CONSTANTS, make_job_table(row)).total[0] >= flops / (1.05 * row["matmul_flops"])


def test_full_activation_checkpointing_adds_about_one_forward_pass():
    plain, recomputed = step_seconds(
        TIME_CONSTANTS, make_job_table(make_job_row(), make_job_row(recompute="full"))
    ).compute
    assert 1.2 < recomputed / plain < 4 / 3 + 0.01


def test_recomputed_norms_add_two_memory_passes_per_norm():
    rows = [make_job_row(recompute=method) for method in ("none", "norms")]
    plain, norms = step_seconds(TIME_CONSTANTS, make_job_table(*rows)).compute
    blocks = 32 * rows[0]["micro_batches"]
    moved_bytes = 2 * 2 * 4096 * 4096 * 2
    assert 1 < (norms - plain) / (blocks * moved_bytes / rows[0]["hbm_bytes_per_second"]) < 1.6
    assert norms < 1.01 * plain


def test_partial_activation_checkpointing_adds_time_in_proportion_to_recomputed_blocks():
    rows = [
        make_job_row(recompute="full") | {"recomputed": [fraction] * 3, "mean_recomputed": fraction}
        for fraction in (0.0, 0.25, 1.0)
    ]
    none, quarter, full = step_seconds(TIME_CONSTANTS, make_job_table(*rows)).total
    assert none == pytest.approx(step_seconds(TIME_CONSTANTS, make_job_table(make_job_row())).total[0])
    assert quarter == pytest.approx(none + (full - none) / 4)


def test_tp_communication_is_slower_outside_fast_link_domain():
    rows = [make_job_row("llama3-70b", "a100", tp=tp, network_bytes_per_second=12.5e9) for tp in (8, 16)]
    within_domain, across_domains = step_seconds(TIME_CONSTANTS, make_job_table(*rows)).exchange
    assert across_domains > 1.3 * within_domain


def test_overlap_grad_reduce_hides_gradient_communication():
    hidden, exposed = step_seconds(
        TIME_CONSTANTS,
        make_job_table(make_job_row(dp=64, overlap_grad_reduce=1), make_job_row(dp=64, overlap_grad_reduce=0)),
    ).data_parallel
    assert hidden < exposed / 2


def test_overlap_param_gather_hides_parameter_gathers():
    row = make_job_row(dp=64, zero_stage=1, shard_group_size=64)
    overlapped, not_overlapped = step_seconds(
        TIME_CONSTANTS, make_job_table({**row, "trainer": "Megatron-LM"}, {**row, "trainer": "nanotron"})
    ).data_parallel
    assert not_overlapped > overlapped


def test_scatter_gather_p2p_shortens_pipeline_sends():
    row = make_job_row(tp=8, pp=4, sequence_parallel=0)
    scattered, not_scattered = step_seconds(
        TIME_CONSTANTS, make_job_table({**row, "scatter_gather_p2p": 1}, {**row, "scatter_gather_p2p": 0})
    ).send
    assert scattered < not_scattered


def test_gathering_logits_increases_compute_time():
    row = make_job_row(tp=8)
    gathered, sharded = step_seconds(
        TIME_CONSTANTS, make_job_table({**row, "gathers_logits": 1}, {**row, "gathers_logits": 0})
    ).compute
    assert gathered > sharded
