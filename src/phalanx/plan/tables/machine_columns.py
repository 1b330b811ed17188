"""Columns of a job table for a machine, and defaults for missing speeds and sizes of a cluster."""

from __future__ import annotations

from typing import NamedTuple

from phalanx.cost.estimate.job_table import JobRow
from phalanx.cost.formulas.reliability import LLAMA3, NODE_STORAGE_BYTES_PER_SECOND
from phalanx.spec.base import require
from phalanx.spec.cluster import GENERATIONS, ClusterSpec
from phalanx.spec.errors import UserError
from phalanx.spec.files.load import load_machine
from phalanx.spec.formatting import format_si
from phalanx.spec.layout import OffloadName

DISK_BYTES_PER_SECOND = 5e9
"""Bandwidth of an NVMe drive that is read and written.

On four lanes of Gen4, data sheets state about 7 and 4 GB/s.
"""
HOST_MEMORY_BYTES = 2**38
"""A device's share of CPU memory: of the 2 TB of a DGX A100 (640 GB), H100 or B200."""

HOST_POWER_SHARE = 575 / 700
"""Power of the rest of a node per watt of its devices, as in a DGX H100: 10.2 kW at most, less 8 x 700 W."""


class AssumedValue(NamedTuple):
    """Default of a value that a cluster does not give."""

    value: float
    text: str


def assumed_values(cluster: ClusterSpec) -> dict[str, AssumedValue]:
    """Return the default values of the fields that a cluster does not give and that a plan requires."""
    generation_defaults = GENERATIONS[cluster.generation]
    matmul = cluster.matmul_flops or generation_defaults.matmul_efficiency * float(cluster.peak_flops or 0)
    defaults = {
        "matmul_flops": (matmul, f"FLOP/s, {generation_defaults.matmul_efficiency:.1%} of the peak"),
        "matmul_flops_8bit": (2 * matmul, "FLOP/s, twice the speed in 16 bits"),
        "host_link_bytes_per_second": (generation_defaults.host_link_bytes_per_second, "B/s, PCIe with 16 lanes"),
        "host_bytes_per_second": (
            generation_defaults.host_bytes_per_second,
            "B/s, two channels of CPU memory per device",
        ),
        "host_memory_bytes": (float(HOST_MEMORY_BYTES), "B of CPU memory per device"),
        "disk_bytes_per_second": (DISK_BYTES_PER_SECOND, "B/s per device"),
    }
    return {
        name: AssumedValue(value, f"{format_si(value)}{text}")
        for name, (value, text) in defaults.items()
        if getattr(cluster, name) is None
    }


def machine_columns(cluster: ClusterSpec, ranks: int) -> JobRow:
    """Return the speeds and sizes of one device and of the links between `ranks` devices.

    Raises UserError if a speed of the machine is unknown.
    """
    for field in ("peak_flops", "memory_bytes", "hbm_bytes_per_second"):
        if getattr(cluster, field) is None:
            problem = "is unknown, but a plan requires it"
            if cluster.preset is None and cluster.peak_flops is None:
                problem += ", and the run names no machine"
            example = "cpu" if cluster.device == "cpu" else "h100, or on a machine without GPUs --machine cpu"
            fix = f"add --machine {example} (`phalanx info --list` shows all), or set cluster.preset or cluster.{field}"
            raise UserError(f"cluster.{field}", None, problem, fix=fix)
    link, network = _resolve_link_speeds(cluster, ranks)
    filled = {name: assumed.value for name, assumed in assumed_values(cluster).items()}

    def value_of(field: str) -> float:
        return float(filled.get(field) or getattr(cluster, field))

    ranks_per_core = cluster.ranks_per_core
    return {
        "peak_flops": value_of("peak_flops") / ranks_per_core,
        "matmul_flops": value_of("matmul_flops") / ranks_per_core,
        "low_matmul_flops": value_of("matmul_flops_8bit") / ranks_per_core,
        "num_sms": cluster.num_sms or 0,
        "hbm_bytes_per_second": value_of("hbm_bytes_per_second") / ranks_per_core,
        "memory_bytes": float(cluster.rank_memory_bytes or 0),
        "link_bytes_per_second": link / ranks_per_core,
        "network_bytes_per_second": network,
        "oversubscription": cluster.oversubscription,
        "host_link_bytes_per_second": value_of("host_link_bytes_per_second"),
        "host_bytes_per_second": value_of("host_bytes_per_second"),
        "host_memory_bytes": host_memory(cluster),
        "disk_bytes_per_second": value_of("disk_bytes_per_second"),
        "fast_link_domain": cluster.fast_link_domain_size,
        "ranks_per_core": ranks_per_core,
        "comm_uses_compute_cores": float(cluster.uses_cpu),
        "hardware_generation": cluster.generation,
    }


def _resolve_link_speeds(cluster: ClusterSpec, ranks: int) -> tuple[float, float]:
    """Return the bandwidths of fast links and of the network; an unused one equals the other.

    Raises UserError if a bandwidth between ranks is unknown.
    """
    domain = cluster.fast_link_domain_size
    link = cluster.link_bytes_per_second
    network = cluster.network_bytes_per_second
    require(
        min(domain, ranks) == 1 or link is not None,
        "cluster.link_bytes_per_second",
        link,
        problem=f"is unknown for a domain of {domain} devices",
        fix="set the bandwidth of NVLink, or of PCIe (31.5e9 for 16 lanes of Gen4), or cluster.fast_link_domain = 1",
    )
    require(
        ranks <= domain or network is not None,
        "cluster.network_bytes_per_second",
        network,
        problem=f"is unknown, but {ranks} devices are more than the {domain} that fast links connect",
        fix="set one device's share of its node's network cards, in one direction: 1.5625e9 if 8 devices share "
        "100 Gb/s",
    )
    speeds = [speed for speed in (link, network) if speed]
    return link or max(speeds, default=1.0), network or max(speeds, default=1.0)


def host_watts(cluster: ClusterSpec) -> float | None:
    """Return one device's share of the power of the rest of its node; None if its own power is unknown."""
    if cluster.host_watts_per_device is None and cluster.watts_per_device is not None:
        return HOST_POWER_SHARE * cluster.watts_per_device
    return cluster.host_watts_per_device


def host_memory(cluster: ClusterSpec) -> float:
    """Return the bytes of CPU memory for the offloaded state of one rank."""
    return float(cluster.host_memory_bytes or HOST_MEMORY_BYTES)


OFFLOAD_FIELDS: dict[OffloadName, tuple[str, ...]] = {
    "none": (),
    "cpu": ("host_link_bytes_per_second", "host_bytes_per_second", "host_memory_bytes"),
    "nvme": ("host_link_bytes_per_second", "host_bytes_per_second", "host_memory_bytes", "disk_bytes_per_second"),
}
"""Fields that affect a plan with offload of state."""
ACTIVATION_OFFLOAD_FIELDS = ("host_link_bytes_per_second", "host_memory_bytes")
"""Fields that affect a plan with offload of activations."""


def describe_assumptions(
    cluster: ClusterSpec,
    ranks: int,
    offload_targets: set[OffloadName],
    precision: str = "bf16",
    offloads_activations: bool = False,
) -> list[str]:
    """Return a text per value of a machine that affects a plan and is neither given nor measured."""
    domain = cluster.fast_link_domain_size
    given_fields = cluster.model_fields_set
    assumed = {}
    if precision == "fp32" and cluster.preset and cluster.calibration is None:
        peak = load_machine(cluster.preset).peak_flops
        if peak == cluster.peak_flops:
            assumed["peak_flops"] = f"{format_si(peak or 0)}FLOP/s also in fp32, preset {cluster.preset}"
    if "nproc_per_node" not in given_fields:
        assumed["nproc_per_node"] = f"{cluster.nproc_per_node}"
    if cluster.fast_link_domain is None and min(domain, ranks) > 1:
        assumed["fast_link_domain"] = f"{domain}, a node"
    if ranks > domain and cluster.preset and cluster.calibration is None:
        speed = load_machine(cluster.preset).network_bytes_per_second
        if speed == cluster.network_bytes_per_second:
            assumed["network_bytes_per_second"] = f"{format_si(speed or 0)}B/s per device, preset {cluster.preset}"
    if ranks > domain and "oversubscription" not in given_fields:
        assumed["oversubscription"] = "1"
    used = {"matmul_flops", *(field for target in offload_targets for field in OFFLOAD_FIELDS[target])}
    used |= set(ACTIVATION_OFFLOAD_FIELDS if offloads_activations else ())
    assumed |= {name: value.text for name, value in assumed_values(cluster).items() if name in used}
    if cluster.num_sms is None and not cluster.uses_cpu:
        assumed["num_sms"] = "products of any shape are equally fast"
    if cluster.failures_per_device_hour is None:
        assumed["failures_per_device_hour"] = f"{LLAMA3.per_device_hour:.3g}, as of Llama 3 405B"
    if cluster.storage_bytes_per_second is None:
        assumed["storage_bytes_per_second"] = (
            f"{format_si(NODE_STORAGE_BYTES_PER_SECOND)}B/s per node, as of Llama 3 405B"
        )
    if "restart_seconds" not in given_fields:
        assumed["restart_seconds"] = f"{cluster.restart_seconds:g}"
    if cluster.watts_per_device is not None and cluster.host_watts_per_device is None:
        assumed["host_watts_per_device"] = f"{host_watts(cluster):.0f}, in proportion to a DGX H100's"
    if cluster.watts_per_device is not None and "pue" not in given_fields:
        assumed["pue"] = f"{cluster.pue:g}, the average of data centers"
    return [f"cluster.{name} = {text}" for name, text in assumed.items()]
