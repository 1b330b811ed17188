"""Machines as columns: every assumed value is reported."""

import pytest

from phalanx.plan.tables.machine_columns import (
    assumed_values,
    describe_assumptions,
    machine_columns,
)
from phalanx.spec.cluster import ClusterSpec
from phalanx.spec.errors import UserError
from phalanx.spec.files.load import load_machine, preset_names

GIVEN = {"peak_flops": 1e12, "memory_bytes": 2**34, "hbm_bytes_per_second": 1e11, "nproc_per_node": 8}


@pytest.mark.parametrize("preset", ["rtx4090", "rtx3090", "l4", "l40s", "a10g"])
def test_devices_without_nvlink_are_joined_by_pcie_within_a_node(preset):
    cluster = load_machine(preset).model_copy(update={"nproc_per_node": 8})
    columns = machine_columns(cluster, 8)
    assert (columns["fast_link_domain"], columns["link_bytes_per_second"]) == (8, 31.5e9)


@pytest.mark.parametrize("preset", ["rtx4090", "rtx3090", "tpuv6e"])
def test_unknown_network_is_asked_for_where_ranks_leave_a_domain(preset):
    cluster = load_machine(preset).model_copy(update={"nproc_per_node": 8})
    domain = cluster.fast_link_domain_size
    machine_columns(cluster, domain)
    with pytest.raises(UserError, match=r"cluster\.network_bytes_per_second") as error_info:
        machine_columns(cluster, 2 * domain)
    assert f"{2 * domain} devices are more than the {domain}" in str(error_info.value)
    with_network = cluster.model_copy(update={"network_bytes_per_second": 1.5625e9})
    assert machine_columns(with_network, 2 * domain)["network_bytes_per_second"] == 1.5625e9


def test_unknown_links_are_asked_for_where_ranks_share_a_domain():
    cluster = ClusterSpec(**GIVEN)
    with pytest.raises(UserError, match=r"cluster\.link_bytes_per_second"):
        machine_columns(cluster, 8)
    machine_columns(cluster, 1)
    one_device = cluster.model_copy(update={"fast_link_domain": 1, "network_bytes_per_second": 1e9})
    assert machine_columns(one_device, 8)["link_bytes_per_second"] == 1e9


@pytest.mark.parametrize("preset", preset_names("machines"))
def test_each_value_that_is_filled_in_is_described(preset):
    """For each preset, also with offload to files, a line describes each value that the cluster does not define."""
    cluster = load_machine(preset).model_copy(update={"nproc_per_node": 8})
    values = assumed_values(cluster)
    lines = describe_assumptions(cluster, 8, {"nvme"})
    for field in values.keys() - {"matmul_flops_8bit"}:
        assert any(line.startswith(f"cluster.{field} = ") for line in lines), field
        assert values[field].value == pytest.approx(machine_columns(cluster, 8)[field] * cluster.ranks_per_core)


def test_assumptions_name_peak_of_preset_that_stands_for_fp32():
    cluster = load_machine("cpu").model_copy(update={"nproc_per_node": 2, "cores": 2})
    peak = "cluster.peak_flops = 60.0 GFLOP/s also in fp32, preset cpu"
    assert peak in describe_assumptions(cluster, 2, set(), "fp32")
    assert peak not in describe_assumptions(cluster, 2, set())
    with_peak = cluster.model_copy(update={"peak_flops": 1e11})
    assert not any("peak_flops" in line for line in describe_assumptions(with_peak, 2, set(), "fp32"))


def test_assumptions_name_network_of_preset_only_where_it_is_used():
    cluster = load_machine("h100").model_copy(update={"nproc_per_node": 8})
    network = "cluster.network_bytes_per_second = 50.0 GB/s per device, preset h100"
    assert network in describe_assumptions(cluster, 16, set())
    assert network not in describe_assumptions(cluster, 8, set())
    with_network = cluster.model_copy(update={"network_bytes_per_second": 2e9, "oversubscription": 1.0})
    assert [line for line in describe_assumptions(with_network, 16, set()) if "network" in line or "over" in line] == []
