"""Loads of collectives on a rail fabric, compared with a count of every message of every rank."""

from collections import Counter
from itertools import pairwise, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.cost.formulas.rail_fabric import (
    FabricLoad,
    all_to_all,
    double_tree_all_reduce,
    flat_ring_all_reduce,
    hierarchical_all_reduce,
    network_seconds,
    oversubscription_slowdown,
)
from phalanx.spec.errors import UserError
from tests.helpers.ring_simulation import all_gather_sends, reduce_scatter_sends

SIZE_BYTES = 5040.0
FABRIC_SHAPES = list(product((1, 2, 3, 4), (1, 2, 3, 4)))
LINK_BYTES_PER_SECOND = 50e9  # 400 Gb/s


class MessageCounter:
    """Count of bytes sent between devices; a device is (node, rail)."""

    def __init__(self):
        self.nic, self.nvlink, self.spine = Counter(), Counter(), 0.0

    def send(self, source, target, size_bytes):
        if source[0] == target[0]:
            self.nvlink[source] += size_bytes * (source != target)
        else:
            self.nic[source] += size_bytes
            self.spine += size_bytes * (source[1] != target[1])

    def load(self, nodes, rails, is_uniform=True):
        devices = list(product(range(nodes), range(rails)))
        for sent in (self.nic, self.nvlink):
            assert not is_uniform or [sent[device] for device in devices] == pytest.approx([sent[0, 0]] * len(devices))
        most_nic, most_nvlink = (max(sent[device] for device in devices) for sent in (self.nic, self.nvlink))
        return most_nic, most_nvlink, self.spine / (sum(self.nic.values()) or 1)


def load_equals(load: FabricLoad, counted_load):
    return (load.nic_bytes, load.nvlink_bytes, load.spine_share) == pytest.approx(counted_load, abs=1e-9)


@pytest.mark.parametrize("pxn", [False, True])
@pytest.mark.parametrize(("nodes", "rails"), FABRIC_SHAPES)
def test_all_to_all_load_matches_count_of_messages(nodes, rails, pxn):
    counter, devices = MessageCounter(), list(product(range(nodes), range(rails)))
    for source, target in product(devices, devices):
        path = [source, (source[0], target[1]), target] if pxn else [source, target]
        for a, b in pairwise(path):
            counter.send(a, b, SIZE_BYTES / len(devices))
    assert load_equals(all_to_all(SIZE_BYTES, nodes, rails, pxn), counter.load(nodes, rails))


def count_ring_messages(counter, order, size_bytes, *phases):
    """Count the messages of devices in `order` that exchange `size_bytes` in these phases."""
    for phase in phases:
        for send in phase(len(order)):
            counter.send(order[send.source], order[send.target], size_bytes / len(order))


@pytest.mark.parametrize(("nodes", "rails"), [(n, g) for n, g in FABRIC_SHAPES if n % 2 == 0 or 1 in (n, g)])
def test_flat_ring_all_reduce_load_matches_count_of_messages(nodes, rails):
    """The ring crosses every second node in the other direction, and enters
    it on the rail on which it left the last one."""
    counter = MessageCounter()
    for rail in range(rails):
        up = [(rail + step) % rails for step in range(rails)]
        order = [(node, device) for node in range(nodes) for device in (up[::-1] if node % 2 else up)]
        count_ring_messages(counter, order, SIZE_BYTES / rails, reduce_scatter_sends, all_gather_sends)
    assert load_equals(flat_ring_all_reduce(SIZE_BYTES, nodes, rails), counter.load(nodes, rails))


@pytest.mark.parametrize(("nodes", "rails"), FABRIC_SHAPES)
def test_hierarchical_all_reduce_load_matches_count_of_messages(nodes, rails):
    counter = MessageCounter()
    for node in range(nodes):
        count_ring_messages(
            counter, [(node, rail) for rail in range(rails)], SIZE_BYTES, reduce_scatter_sends, all_gather_sends
        )
    for rail in range(rails):
        count_ring_messages(
            counter, [(node, rail) for node in range(nodes)], SIZE_BYTES / rails, reduce_scatter_sends, all_gather_sends
        )
    assert load_equals(hierarchical_all_reduce(SIZE_BYTES, nodes, rails), counter.load(nodes, rails))


def tree_parent(node, nodes):
    """Return the parent in a tree in which odd nodes are leaves and 0 is the root."""
    bit = node & -node
    up = (node ^ bit) | bit << 1
    return up if up < nodes else node ^ bit


@pytest.mark.parametrize("rails", [1, 2, 3])
@pytest.mark.parametrize("nodes", range(1, 17))
def test_double_tree_all_reduce_load_matches_count_of_messages(nodes, rails):
    """The second tree is the first, mirrored or shifted by one: its leaves are the inner nodes of the first."""
    counter = MessageCounter()
    for rail in range(rails):
        for node, name in product(range(1, nodes), (lambda n: n, lambda n: n + 1 if nodes % 2 else nodes - 1 - n)):
            link = (name(node) % nodes, rail), (name(tree_parent(node, nodes)) % nodes, rail)
            counter.send(*link, SIZE_BYTES / rails / 2)
            counter.send(*link[::-1], SIZE_BYTES / rails / 2)
        for node, step in product(range(nodes), range(rails - 1)):
            link = (node, (rail + step) % rails), (node, (rail + step + 1) % rails)
            counter.send(*link, SIZE_BYTES / rails)
            counter.send(*link[::-1], SIZE_BYTES / rails)
    nic, nvlink, spine = counter.load(nodes, rails, is_uniform=False)
    load = double_tree_all_reduce(SIZE_BYTES, nodes, rails)
    assert (load.nvlink_bytes, load.spine_share) == pytest.approx((nvlink, spine))
    assert load.nic_bytes >= nic
    assert load.nic_bytes == pytest.approx(nic) or nodes in (2, 3, 5)


@pytest.mark.parametrize(("nodes", "ratio"), [(2, 1.875), (16, 1.06)])
def test_flat_ring_sends_more_nic_bytes_than_hierarchical_all_reduce(nodes, ratio):
    flat, hierarchical = (
        load(SIZE_BYTES, nodes, 8).nic_bytes for load in (flat_ring_all_reduce, hierarchical_all_reduce)
    )
    assert flat / hierarchical == pytest.approx(ratio, abs=0.005 if nodes > 2 else 0)


def test_all_to_all_without_pxn_sends_seven_eighths_over_the_spine():
    assert all_to_all(SIZE_BYTES, 16, 8, pxn=False).spine_share == 0.875


@pytest.mark.parametrize(
    ("load", "oversubscription", "slowdown"),
    [
        (all_to_all(SIZE_BYTES, 16, 8, pxn=False), 1, 1),
        (all_to_all(SIZE_BYTES, 16, 8, pxn=False), 2, 1.75),
        (all_to_all(SIZE_BYTES, 16, 8, pxn=False), 4, 3.5),
        (all_to_all(SIZE_BYTES, 16, 8, pxn=True), 4, 1),
        (flat_ring_all_reduce(SIZE_BYTES, 16, 8), 4, 1),
        (hierarchical_all_reduce(SIZE_BYTES, 16, 8), 4, 1),
    ],
)
def test_network_seconds_scale_with_oversubscription_slowdown(load, oversubscription, slowdown):
    assert oversubscription_slowdown(load.spine_share, oversubscription) == slowdown
    assert (
        network_seconds(load, LINK_BYTES_PER_SECOND, oversubscription)
        == slowdown * load.nic_bytes / LINK_BYTES_PER_SECOND
    )


@given(st.floats(0, 1), st.floats(1, 64))
def test_network_seconds_is_maximum_of_nic_and_spine_time(share, oversubscription):
    nics, spine = SIZE_BYTES / LINK_BYTES_PER_SECOND, SIZE_BYTES * share / (LINK_BYTES_PER_SECOND / oversubscription)
    assert network_seconds(FabricLoad(SIZE_BYTES, 0, share), LINK_BYTES_PER_SECOND, oversubscription) == pytest.approx(
        max(nics, spine)
    )


@pytest.mark.parametrize("load", [all_to_all, flat_ring_all_reduce, hierarchical_all_reduce, double_tree_all_reduce])
def test_fabric_loads_reject_zero_nodes_or_devices(load):
    with pytest.raises(UserError, match=r"^nodes = 0"):
        load(SIZE_BYTES, 0, 8)
    with pytest.raises(UserError, match=r"^devices_per_node = 0"):
        load(SIZE_BYTES, 2, 0)


@pytest.mark.parametrize(
    ("call", "field"),
    [
        (lambda: oversubscription_slowdown(0.5, 0.9), "oversubscription"),
        (lambda: oversubscription_slowdown(1.1, 2), "spine_share"),
    ],
)
def test_fabric_functions_reject_invalid_arguments(call, field):
    with pytest.raises(UserError, match=f"^{field} = "):
        call()
