"""Traffic between ranks: small hand-counted cases, conservation, and the loads of a rail fabric."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.cost.exact.parameters import count_parameters
from phalanx.cost.exact.traffic import traffic_by_group, traffic_by_role
from phalanx.cost.formulas.collectives import Traffic, sent_bytes
from phalanx.cost.formulas.rail_fabric import all_to_all, flat_ring_all_reduce
from phalanx.plan.placement.findings import (
    bytes_by_link,
    nic_loads,
    with_pxn,
)
from phalanx.plan.placement.traffic_matrix import (
    TrafficMatrix,
    _all_to_all_transfers,
    _ring_transfers,
    merge_matrices,
    traffic_matrices,
)
from phalanx.spec.communication_groups import communication_groups
from phalanx.spec.parallel_dims import parallel_dims
from phalanx.spec.resolved_run import ResolvedRun
from tests.helpers.placement_runs import DENSE, MOE, make_node_layout, make_run, matrix_entries


def test_traffic_matrix_of_tp2_dp2_on_two_nodes_matches_hand_count() -> None:
    """Tensor parallelism stays on a node (0-1, 2-3), and gradients stay on rails (0-2, 1-3). Each rank reduces half
    of them, and an all-reduce of two ranks sends it once."""
    run = make_run({"tp": 2})
    matrices = traffic_matrices(ResolvedRun(run, 4), island=2)
    assert set(matrices) == {"tp", "dp"}
    rows = traffic_by_group(ResolvedRun(run, 4))["rank"]
    products = sum(row.bytes for row in rows if row.group_kind in ("tp", "copies"))
    (gradients,) = (row.bytes for row in rows if row.group_kind == "data")
    assert matrix_entries(matrices["tp"]) == dict.fromkeys([(0, 1), (1, 0), (2, 3), (3, 2)], pytest.approx(products))
    assert matrix_entries(matrices["dp"]) == dict.fromkeys([(0, 2), (2, 0), (1, 3), (3, 1)], pytest.approx(gradients))
    assert bytes_by_link(matrices["tp"], make_node_layout(2)) == pytest.approx(
        {"fast": 4 * products, "node": 0, "rail": 0, "spine": 0}
    )
    assert bytes_by_link(matrices["dp"], make_node_layout(2)) == pytest.approx(
        {"fast": 0, "node": 0, "rail": 4 * gradients, "spine": 0}
    )


def test_traffic_matrix_of_two_data_parallel_ranks_matches_hand_count() -> None:
    run = make_run({})
    size = 4 * count_parameters(run.model).total
    assert matrix_entries(traffic_matrices(ResolvedRun(run, 2), island=1)["dp"]) == {(0, 1): size, (1, 0): size}


def test_pipeline_traffic_between_nodes_stays_on_one_rail() -> None:
    """Two stages have two tensor-parallel ranks. For each micro-batch, each rank sends the fp32 residual stream of
    its half of the tokens, and receives its gradient."""
    run = make_run({"pp": 2, "tp": 2}, tokens=8 * 32)
    message = 4 * 32 * 32 / 2
    matrix = traffic_matrices(ResolvedRun(run, 4), island=2)["pp"]
    assert matrix_entries(matrix) == dict.fromkeys([(0, 2), (1, 3), (2, 0), (3, 1)], pytest.approx(8 * message))
    assert bytes_by_link(matrix, make_node_layout(2))["rail"] == pytest.approx(matrix.total)


def test_interleaved_pipeline_traffic_connects_last_rank_to_first() -> None:
    """With 2 x 3 stages, the last rank of a round sends to the first, so that all three pairs communicate."""
    run = make_run({"pp": 3, "schedule": "interleaved", "virtual_stages": 2}, {**DENSE, "num_layers": 6}, tokens=3 * 32)
    message = 4 * 32 * 32
    sent = matrix_entries(traffic_matrices(ResolvedRun(run, 3), island=1)["pp"])
    forward = {(0, 1): 2, (1, 2): 2, (2, 0): 1}
    backward = {(b, a): count for (a, b), count in forward.items()}
    assert sent == {pair: 3 * count * message for pair, count in {**forward, **backward}.items()}


def test_expert_all_to_all_traffic_is_even() -> None:
    run = make_run({"ep": 4}, MOE)
    matrix = traffic_matrices(ResolvedRun(run, 4), island=2)["ep"]
    pair_bytes = sum(row.bytes for row in traffic_by_group(ResolvedRun(run, 4))["rank"] if row.group_kind == "ep") / 3
    assert matrix_entries(matrix) == {(a, b): pytest.approx(pair_bytes) for a in range(4) for b in range(4) if a != b}
    assert bytes_by_link(matrix, make_node_layout(2)) == pytest.approx(
        {"fast": 4 * pair_bytes, "node": 0, "rail": 4 * pair_bytes, "spine": 4 * pair_bytes}
    )


LAYOUTS: list[tuple[int, dict[str, Any], dict[str, Any]]] = [
    (8, {"tp": 2, "pp": 2}, DENSE),
    (8, {"tp": 4}, DENSE),
    (8, {"tp": 4, "data_parallel": "zero3"}, DENSE),
    (8, {"data_parallel": "hsdp", "dp_shard": 4, "cp": 2, "micro_batch_size": 2}, DENSE),
    (8, {"data_parallel": "hsdp", "dp_shard": 4, "ep": 2}, MOE),
    (8, {"tp": 2, "ep": 4, "data_parallel": "zero1"}, MOE),
    (8, {"pp": 2, "ep": 2, "data_parallel": "zero2"}, MOE),
    (8, {"pp": 2, "ep": 2, "data_parallel": "zero2", "rank_order": "pipeline_outer"}, MOE),
    (8, {"cp": 4, "cp_method": "ulysses"}, {**DENSE, "num_kv_heads": 4}),
    (6, {"pp": 3, "schedule": "1f1b"}, {**DENSE, "tie_embeddings": True, "num_layers": 6}),
    (8, {"pp": 4, "schedule": "zb-v"}, {**DENSE, "tie_embeddings": True, "num_layers": 8}),
    (8, {"cp": 4}, MOE),
    (6, {}, DENSE),
]
LAYOUT_IDS = [f"{ranks} {layout}" for ranks, layout, _ in LAYOUTS]


@pytest.mark.parametrize(("world_size", "layout", "model"), LAYOUTS, ids=LAYOUT_IDS)
@pytest.mark.parametrize("nproc", [1, 2, 4, 8])
def test_traffic_matrix_row_sums_equal_counted_traffic(
    world_size: int, layout: dict[str, Any], model: dict[str, Any], nproc: int
) -> None:
    """Each rank sends the bytes that `traffic_by_role` counts for its position, and none to itself."""
    run = make_run(layout, model, tokens=48 * 32)
    sizes, counted = parallel_dims(run.layout, world_size), traffic_by_role(ResolvedRun(run, world_size))
    total = merge_matrices(world_size, list(traffic_matrices(ResolvedRun(run, world_size), nproc).values()))
    sent = np.bincount(total.source, total.bytes, world_size)
    for rank in range(world_size):
        stage = sizes.coordinates(rank)["pp"]
        rows = counted["rank" if sizes.pp == 1 else f"pp{stage}"]
        assert sent[rank] == pytest.approx(sum(row.bytes for row in rows if row.operation != "recv"), rel=1e-12)
    assert (total.source != total.target).all()
    assert sum(bytes_by_link(total, make_node_layout(nproc)).values()) == pytest.approx(total.total)
    assert total.aggregated(nproc).total == pytest.approx(total.total)
    assert total.to_dense().sum() == pytest.approx(total.total)


@pytest.mark.parametrize(("world_size", "layout", "model"), LAYOUTS, ids=LAYOUT_IDS)
def test_communicating_groups_partition_all_ranks(
    world_size: int, layout: dict[str, Any], model: dict[str, Any]
) -> None:
    """The traffic was counted for these group sizes: every rank is in one group, with at least one other rank."""
    run = make_run(layout, model, tokens=48 * 32)
    sizes = parallel_dims(run.layout, world_size)
    for row in (row for rows in traffic_by_group(ResolvedRun(run, world_size)).values() for row in rows):
        if row.group_kind not in ("pp", "ends"):
            members = np.array(communication_groups(run, sizes, row.group_kind))
            assert sorted(members.ravel()) == list(range(world_size))
            assert members.shape[1] > 1, row
            assert (np.diff(members, axis=1) > 0).all()


def test_communicating_groups_match_hand_list_for_hsdp_with_experts() -> None:
    """8 ranks are 2 replicas of 4. Within a replica, every second rank has
    the same experts; each shard is reduced with that of the other replica."""
    run = make_run({"data_parallel": "hsdp", "dp_shard": 4, "ep": 2}, MOE)
    sizes = parallel_dims(run.layout, 8)
    assert communication_groups(run, sizes, "data") == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert communication_groups(run, sizes, "replicas") == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert sorted(communication_groups(run, sizes, "same_experts")) == [(0, 2), (1, 3), (4, 6), (5, 7)]
    assert sorted(communication_groups(run, sizes, "expert_replicas")) == [(0, 4), (1, 5), (2, 6), (3, 7)]


def test_communicating_groups_match_hand_list_for_hsdp_cp_and_tp() -> None:
    """Context-parallel ranks share a replica's shards; 2 key/value heads are shared by pairs of 4 ranks."""
    run = make_run({"data_parallel": "hsdp", "dp_shard": 2, "cp": 2})
    assert communication_groups(run, parallel_dims(run.layout, 8), "data") == [(0, 1, 2, 3), (4, 5, 6, 7)]
    run = make_run({"tp": 4})
    assert communication_groups(run, parallel_dims(run.layout, 8), "copies") == [
        (0, 1),
        (2, 3),
        (4, 5),
        (6, 7),
    ]


@pytest.mark.parametrize("staleness", [None, 2])
def test_parameter_server_traffic_matrix_uses_chain_only_when_synchronous(staleness: int | None) -> None:
    """W workers send and receive the model W times. With synchronous steps, a chain distributes it."""
    run = make_run({"data_parallel": "parameter_server", "num_servers": 2, "max_staleness": staleness})
    sent = matrix_entries(traffic_matrices(ResolvedRun(run, 5), island=5)["servers"])
    size = 4 * count_parameters(run.model).total
    assert sum(sent.values()) == pytest.approx(2 * 3 * size)
    assert sum(sent[worker, server] for worker in (2, 3, 4) for server in (0, 1)) == pytest.approx(3 * size)
    down = {pair for pair in sent if pair[0] < 2}
    assert down == ({(0, 2), (1, 2)} if staleness is None else {(s, w) for s in (0, 1) for w in (2, 3, 4)})
    assert ((2, 3) in sent) == (staleness is None)


@given(nodes=st.integers(1, 5), devices=st.integers(1, 6))
def test_traffic_matrix_loads_equal_rail_fabric_formulas(nodes: int, devices: int) -> None:
    """The formulas of `rail_fabric` are tested there by enumeration."""
    count, size = nodes * devices, 1e6
    members = np.arange(count)[None]
    if count == 1:
        return
    layout = make_node_layout(devices)

    def loads(matrix: TrafficMatrix) -> tuple[float, float, float]:
        links = bytes_by_link(matrix, layout)
        leaving = links["rail"] + links["spine"]
        return leaving / count, links["fast"] / count, links["spine"] / leaving if leaving else 0.0

    ring = TrafficMatrix(count, *_ring_transfers(members, sent_bytes("all_reduce", size, count), devices))
    expected = flat_ring_all_reduce(size, nodes, devices)
    assert loads(ring) == pytest.approx((expected.nic_bytes, expected.nvlink_bytes, 0.0))
    tokens = TrafficMatrix(count, *_all_to_all_transfers(members, sent_bytes("all_to_all", size, count)))
    for pxn, matrix in ((False, tokens), (True, with_pxn(tokens, layout))):
        expected = all_to_all(size, nodes, devices, pxn)
        assert loads(matrix) == pytest.approx((expected.nic_bytes, expected.nvlink_bytes, expected.spine_share))


@given(st.integers(1, 6), st.integers(2, 6), st.integers(1, 3))
def test_ring_traffic_is_equal_in_and_out_of_every_rank(island: int, count: int, stride: int) -> None:
    """Includes groups with different numbers of ranks on their islands."""
    members = np.arange(2 * count * stride).reshape(2, count, stride).swapaxes(1, 2).reshape(-1, count)
    sent = TrafficMatrix(2 * count * stride, *_ring_transfers(members, 6.0, island))
    for devices in (sent.source, sent.target):
        assert np.bincount(devices, sent.bytes) == pytest.approx(6.0)
    group = {int(rank): row for row, ranks in enumerate(members) for rank in ranks}
    assert all(group[a] == group[b] and a != b for a, b in matrix_entries(sent))


def test_ring_traffic_uses_one_ring_for_uneven_node_groups() -> None:
    """The group has 2, 1 and 3 members on nodes of 4."""
    source, target, sent = _ring_transfers(np.array([[2, 3, 7, 8, 9, 10]]), 5.0, 4)
    assert list(zip(source, target, sent, strict=True)) == [
        (2, 3, 5),
        (3, 7, 5),
        (7, 8, 5),
        (8, 9, 5),
        (9, 10, 5),
        (10, 2, 5),
    ]


def test_traffic_matrix_is_empty_for_one_rank() -> None:
    assert traffic_matrices(ResolvedRun(make_run({}), 1), 1) == {}
    nothing = merge_matrices(1, [])
    assert nothing.total == 0
    assert nic_loads(nothing, make_node_layout(1))[0].sent_bytes == 0


def test_traffic_by_group_separates_expert_gradients() -> None:
    """Gradients of experts go to ranks with the same experts, other gradients to all ranks."""
    rows = [
        row
        for row in traffic_by_group(ResolvedRun(make_run({"ep": 2}, MOE), 4))["rank"]
        if "gradients, summed" in row.purpose
    ]
    assert [row.group_kind for row in rows] == ["data", "same_experts"]
    (merged,) = [
        r for r in traffic_by_role(ResolvedRun(make_run({"ep": 2}, MOE), 4))["rank"] if "gradients, summed" in r.purpose
    ]
    assert merged == Traffic(
        operation="all_reduce", bytes=rows[0].bytes + rows[1].bytes, purpose=rows[0].purpose, calls=2
    )
