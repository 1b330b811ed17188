"""The time of collectives: latency, and bytes over bandwidth."""

import numpy as np
import pytest

from phalanx.cost.estimate.collective_time import (
    all_to_all_seconds,
    expert_all_to_all_seconds,
    fast_link_bandwidth,
    network_bandwidth,
    p2p_seconds,
    ring_seconds,
)
from phalanx.cost.estimate.constants import time_constants
from phalanx.cost.formulas.collectives import bus_factor
from tests.helpers.job_tables import make_job_row, make_job_table

TIME_CONSTANTS = time_constants()
ONE_GIB = np.array([float(2**30)])


def rank_column(count: float) -> np.ndarray:
    return np.array([float(count)])


def test_collective_seconds_are_zero_for_one_rank():
    table = make_job_table(make_job_row())
    assert ring_seconds(TIME_CONSTANTS, table, ONE_GIB, rank_column(1), 1.0) == 0
    assert expert_all_to_all_seconds(TIME_CONSTANTS, table, ONE_GIB) == 0


@pytest.mark.parametrize(("operation", "reduces"), [("all_gather", False), ("all_reduce", True)])
@pytest.mark.parametrize("count", [2, 4, 8])
def test_ring_seconds_match_bus_factor_for_large_messages(operation, reduces, count):
    table, size = make_job_table(make_job_row()), 1000 * ONE_GIB
    expected = bus_factor(operation, count) * size / fast_link_bandwidth(TIME_CONSTANTS, table)
    assert ring_seconds(TIME_CONSTANTS, table, size, rank_column(count), 1.0, reduces) == pytest.approx(
        expected, rel=1e-3
    )


def test_ring_seconds_use_all_nics_of_a_node_for_contiguous_ranks():
    """A ring of 64 contiguous ranks uses all eight NICs of each node; a
    ring of 64 ranks with stride 8 uses one of them."""
    table, size = make_job_table(make_job_row()), 1000 * ONE_GIB
    contiguous, strided = (ring_seconds(TIME_CONSTANTS, table, size, rank_column(64), stride) for stride in (1.0, 8.0))
    cards = (
        min(8 * network_bandwidth(TIME_CONSTANTS, table)[0], fast_link_bandwidth(TIME_CONSTANTS, table)[0])
        / network_bandwidth(TIME_CONSTANTS, table)[0]
    )
    assert strided / contiguous == pytest.approx(cards, rel=0.02)
    assert cards > 4
    assert strided == pytest.approx(63 / 64 * size / network_bandwidth(TIME_CONSTANTS, table), rel=0.01)


def test_ring_of_sends_leaves_a_node_by_one_card():
    table, size = make_job_table(make_job_row()), 1000 * ONE_GIB
    sends, gathers = (
        ring_seconds(TIME_CONSTANTS, table, size, rank_column(16), 1.0, neighbor_sends=kind) for kind in (1, 0)
    )
    assert sends == pytest.approx(15 / 16 * size / network_bandwidth(TIME_CONSTANTS, table), rel=0.01)
    assert sends > 4 * gathers


@pytest.mark.parametrize(("stride", "in_node"), [(1.0, 8), (2.0, 4), (8.0, 1)])
def test_all_to_all_leaves_a_node_by_each_ranks_own_card(stride, in_node):
    table, size = make_job_table(make_job_row()), 1000 * ONE_GIB
    seconds = all_to_all_seconds(TIME_CONSTANTS, table, size, rank_column(32), stride)
    assert seconds == pytest.approx((32 - in_node) / 32 * size / network_bandwidth(TIME_CONSTANTS, table), rel=0.01)


def test_ring_latency_grows_with_group_size_for_small_messages():
    table, size = make_job_table(make_job_row()), np.array([8.0])
    small_group, large_group = (
        float(ring_seconds(TIME_CONSTANTS, table, size, rank_column(n), 1.0)[0]) for n in (64, 1024)
    )
    assert large_group > 4 * small_group
    assert float(ring_seconds(TIME_CONSTANTS, table, size, rank_column(1024), 1.0, all_reduce=True)[0]) < large_group


def test_collectives_use_part_of_a_node_when_data_parallel_is_outermost():
    """Each of 4 stages has 2 of a node's 8 ranks: experts communicate across nodes, and two NICs serve a group."""
    row = make_job_row(dp=16, pp=4, ep=8)
    near, far = make_job_table(row), make_job_table({**row, "pipeline_outermost": 0.0})
    assert near.fast_link_ranks_per_stage == 8
    assert far.fast_link_ranks_per_stage == 2
    assert expert_all_to_all_seconds(TIME_CONSTANTS, near, ONE_GIB) == pytest.approx(
        7 / 8 * ONE_GIB / fast_link_bandwidth(TIME_CONSTANTS, near), rel=0.01
    )
    assert expert_all_to_all_seconds(TIME_CONSTANTS, far, 100 * ONE_GIB) == pytest.approx(
        6 / 8 * 100 * ONE_GIB / network_bandwidth(TIME_CONSTANTS, far), rel=0.01
    )
    slower = ring_seconds(TIME_CONSTANTS, far, 1000 * ONE_GIB, rank_column(16), 1.0) / ring_seconds(
        TIME_CONSTANTS, near, 1000 * ONE_GIB, rank_column(16), 1.0
    )
    assert slower == pytest.approx(
        min(8 * network_bandwidth(TIME_CONSTANTS, near), fast_link_bandwidth(TIME_CONSTANTS, near))
        / network_bandwidth(TIME_CONSTANTS, far)
        / 2,
        1e-3,
    )
    assert p2p_seconds(
        TIME_CONSTANTS, make_job_table(make_job_row(dp=16, pp=8, pipeline_outermost=0.0)), ONE_GIB
    ) < p2p_seconds(TIME_CONSTANTS, near, ONE_GIB)


def test_dedup_node_dispatch_sends_each_token_once_per_node():
    row = make_job_row("mixtral-8x7b", ep=64, dp=64, top_k=8)
    plain, relayed = expert_all_to_all_seconds(
        TIME_CONSTANTS, make_job_table(row, {**row, "dedup_node_dispatch": 1.0}), 100 * ONE_GIB
    )
    nodes, top_k = 8, 8
    distinct = nodes * (1 - (1 - 1 / nodes) ** top_k) / top_k
    assert relayed / plain == pytest.approx(distinct, rel=0.01)


def test_oversubscription_divides_network_bandwidth():
    full, half = make_job_table(make_job_row()), make_job_table(make_job_row(oversubscription=2))
    assert network_bandwidth(TIME_CONSTANTS, half) == pytest.approx(network_bandwidth(TIME_CONSTANTS, full) / 2)


def test_p2p_seconds_use_fast_links_within_one_domain():
    near, far = make_job_table(make_job_row(pp=8)), make_job_table(make_job_row(pp=8, dp=8))
    assert p2p_seconds(TIME_CONSTANTS, near, ONE_GIB) == pytest.approx(
        TIME_CONSTANTS.link_seconds + ONE_GIB / fast_link_bandwidth(TIME_CONSTANTS, near)
    )
    assert p2p_seconds(TIME_CONSTANTS, far, ONE_GIB) == pytest.approx(
        TIME_CONSTANTS.network_seconds + ONE_GIB / network_bandwidth(TIME_CONSTANTS, far)
    )
