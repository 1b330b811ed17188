from itertools import groupby

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.cost.formulas.collectives import bus_factor, ring_steps, sent_bytes, step_traffic
from tests.helpers.ring_simulation import RingMessage, all_gather_sends, reduce_scatter_sends, ring_all_reduce

A, B, C, D = range(4)
RANKS = st.integers(1, 9)
P, G = 3e9, 5e9


def total_traffic_bytes(strategy: str, ranks: int, accumulation: int = 1, **choices: int) -> float:
    return sum(t.bytes for t in step_traffic(strategy, P, G, ranks, accumulation, **choices))


def test_ring_all_reduce_of_four_ranks_matches_worked_example():
    result = ring_all_reduce([[float(rank)] * 1024 for rank in range(4)])
    assert reduce_scatter_sends(4)[:4] == [
        RingMessage(1, 0, 1, A),
        RingMessage(1, 1, 2, B),
        RingMessage(1, 2, 3, C),
        RingMessage(1, 3, 0, D),
    ]
    assert result.steps == (3, 3)
    assert [result.owner.index(rank) for rank in range(4)] == [B, C, D, A]
    assert result.sent == [(768, 768)] * 4
    assert sent_bytes("all_reduce", 1024 * 4, 4) == 1536 * 4 == 6144
    assert result.sums == [[0 + 1 + 2 + 3] * 1024] * 4


@pytest.mark.parametrize(
    ("gradients", "mean"),
    [
        ([[0.8, 0.2, 0.5], [0.6, 0.4, 0.3], [0.7, 0.3, 0.4], [0.5, 0.1, 0.6]], [0.65, 0.25, 0.45]),
        ([[0.1, 0.2, 0.3], [0.2, 0.1, 0.4], [0.3, 0.3, 0.2], [0.2, 0.2, 0.3]], [0.2, 0.2, 0.3]),
    ],
)
def test_ring_all_reduce_sums_give_mean_gradients(gradients, mean):
    for sums in ring_all_reduce(gradients).sums:
        assert [x / 4 for x in sums] == pytest.approx(mean, rel=1e-15)


def test_ring_all_reduce_matches_worked_example_of_weight_update():
    sums = ring_all_reduce([[0.1, 0.2, 0.3], [0.2, 0.1, 0.4], [0.3, 0.3, 0.2], [0.2, 0.2, 0.3]]).sums[0]
    assert [w + x / 4 for w, x in zip([0.5, 0.3, 0.2], sums, strict=True)] == pytest.approx([0.7, 0.5, 0.5], rel=1e-15)


@st.composite
def gradients(draw) -> list[list[float]]:
    """Return integers, whose sums are exact in any order. Some arrays are shorter than the number of ranks."""
    ranks, length = draw(RANKS), draw(st.integers(0, 30))
    row = st.lists(st.integers(-1000, 1000).map(float), min_size=length, max_size=length)
    return draw(st.lists(row, min_size=ranks, max_size=ranks))


@settings(deadline=None)
@given(gradients())
def test_ring_all_reduce_sums_and_sent_bytes_match_formulas(values):
    result, ranks, length = ring_all_reduce(values), len(values), len(values[0])
    assert result.sums == [[sum(column) for column in zip(*values, strict=True)]] * ranks
    assert sum(result.steps) == ring_steps("all_reduce", ranks)
    for phase, operation in enumerate(["reduce_scatter", "all_gather"]):
        sent = [rank_sent[phase] for rank_sent in result.sent]
        assert sum(sent) == pytest.approx(ranks * sent_bytes(operation, length, ranks))
        assert all(abs(elements - sent_bytes(operation, length, ranks)) < 1 for elements in sent)


@given(RANKS)
def test_ring_step_has_one_send_and_one_receive_per_rank(ranks):
    for sends in (reduce_scatter_sends(ranks), all_gather_sends(ranks)):
        steps = [list(step) for _, step in groupby(sends, key=lambda send: send.step)]
        assert len(steps) == ring_steps("all_gather", ranks)
        for step in steps:
            assert [send.source for send in step] == list(range(ranks))
            assert sorted(send.target for send in step) == sorted(send.chunk for send in step) == list(range(ranks))
            assert all(send.target == (send.source + 1) % ranks for send in step)


@given(RANKS)
def test_ring_all_gather_first_step_sends_owned_chunks(ranks):
    owner = ring_all_reduce([[1.0]] * ranks).owner
    assert sorted(owner) == list(range(ranks))
    assert all(owner[send.chunk] == send.source for send in all_gather_sends(ranks) if send.step == 1)


def test_ring_all_reduce_rejects_unequal_lengths():
    with pytest.raises(ValueError, match="zip"):
        ring_all_reduce([[1.0, 2.0], [1.0, 2.0, 3.0]])


def test_bus_factor_matches_nccl_tests_definition():
    algbw = 16e9 / 0.1
    assert algbw == 160e9
    assert algbw * bus_factor("all_reduce", 125) == pytest.approx(320e9, rel=0.01)
    assert algbw * bus_factor("all_reduce", 2) == algbw
    assert ring_steps("all_reduce", 125) == 248
    others = [bus_factor(operation, 4) for operation in ("all_gather", "reduce_scatter", "all_to_all", "broadcast")]
    assert others == [0.75, 0.75, 0.75, 1]
    assert sent_bytes("all_gather", P, 1) == sent_bytes("broadcast", P, 1) == 0


@given(RANKS, st.integers(1, 5))
def test_step_traffic_matches_formula_of_each_strategy(n, a):
    f = (n - 1) / n
    assert total_traffic_bytes("ddp", n, a) == pytest.approx(2 * G * f)
    assert total_traffic_bytes("zero1", n, a) == pytest.approx((G + P) * f)
    assert total_traffic_bytes("zero2", n, a) == pytest.approx((a * G + P) * f)
    assert total_traffic_bytes("zero3", n, a) == pytest.approx(a * (2 * P + G) * f)
    assert total_traffic_bytes("zero3", n, a, reshard_after_forward=False) == pytest.approx(a * (P + G) * f)


@given(RANKS, RANKS, st.integers(1, 5))
def test_hsdp_traffic_is_zero3_plus_all_reduce_between_replicas(n, r, a):
    between = 2 * G / n * (r - 1) / r
    assert total_traffic_bytes("hsdp", n, a, replicas=r) == pytest.approx(total_traffic_bytes("zero3", n, a) + between)
    assert total_traffic_bytes("hsdp", 1, a, replicas=r) == pytest.approx(total_traffic_bytes("ddp", r, a))


def test_step_traffic_matches_zero_paper_volumes():
    volumes = [sum(t.bytes for t in step_traffic(s, 1, 1, 10**6)) for s in ("ddp", "zero1", "zero2", "zero3")]
    assert volumes == pytest.approx([2, 2, 2, 3], rel=2e-6)


def test_step_traffic_uses_torch_collective_names():
    traffic = step_traffic("hsdp", P, G, 4, replicas=2)
    assert [t.operation for t in traffic] == ["all_gather", "all_gather", "reduce_scatter", "all_reduce"]


def test_parameter_server_worker_receives_parameters_and_sends_gradients_once():
    traffic = step_traffic("parameter_server", P, G, 4, accumulation=3)
    assert {t.operation: t.bytes for t in traffic} == {"recv": P, "send": G}
