"""The reserve of a device's memory, and the CPU memory of a node."""

import re

import pytest

from phalanx.plan.search.oom_risk import (
    SAFE_OOM_PROBABILITY,
    describe_host_need,
    describe_memory_limit,
    layout_oom_probability,
    node_host_bytes,
    safe_capacity_bytes,
)
from phalanx.spec.formatting import GIB
from tests.helpers.planned_runs import make_run


@pytest.mark.parametrize("machine", ["rtx4090", "h100", "cpu"])
def test_memory_limit_and_reserve_add_up_to_memory(machine):
    cluster = make_run(machine=machine, cluster={"nproc_per_node": 1}).cluster
    text = describe_memory_limit(cluster)
    limit, memory, *reserve = (float(number) for number in re.findall(r"([\d.]+) GiB", text))
    assert memory == pytest.approx(cluster.rank_memory_bytes / GIB, abs=0.05)
    assert limit + sum(reserve) == pytest.approx(memory, abs=0.2)
    assert len(reserve) == (1 if machine == "cpu" else 2), "of a CPU's process everything is counted"


@pytest.mark.parametrize("machine", ["rtx4090", "cpu"])
def test_oom_probability_of_safe_capacity_is_safe_probability(machine):
    cluster = make_run(machine=machine).cluster
    probability = layout_oom_probability(cluster, safe_capacity_bytes(cluster), 0)
    assert probability == pytest.approx(SAFE_OOM_PROBABILITY)


def test_host_need_is_that_of_all_ranks_of_a_node():
    cluster = make_run(machine="rtx4090", cluster={"nproc_per_node": 4, "host_memory_bytes": 32 * GIB}).cluster
    assert node_host_bytes(cluster, 10 * GIB) == 40 * GIB
    need = "CPU memory: a node of 4 ranks needs up to 40.0 GiB for checkpoint copies"
    provides = "; cluster.host_memory_bytes provides 128.0 GiB"
    assert describe_host_need(cluster, 10 * GIB, offloads=False) == need + provides
    assert describe_host_need(cluster, 10 * GIB, offloads=True) == f"{need} and offload{provides}"
    assert describe_host_need(cluster, 0, offloads=True) == ""


def test_host_need_of_cpu_ranks_is_part_of_their_memory():
    assert describe_host_need(make_run(machine="cpu").cluster, 10 * GIB, offloads=True) == ""
