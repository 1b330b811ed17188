"""Report of a node for the comparison of nodes: findings, and facts that should be equal on all nodes of a run."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from phalanx import __version__
from phalanx.doctor.checks import software
from phalanx.doctor.finding import CheckSkipped, DoctorFinding
from phalanx.doctor.machine import CommandTimeout, Machine
from phalanx.doctor.probes import nvidia_smi, pci, rdma
from phalanx.doctor.probes.host import memory_bytes
from phalanx.doctor.probes.text import first_match
from phalanx.spec.formatting import GIB

Facts = dict[str, str]
"""Versions, settings and hardware by name."""


@dataclass(frozen=True, kw_only=True)
class NodeReport:
    """The report of a node."""

    host: str
    clock_offset_seconds: float
    """Offset of the node's clock from the clock that stamps files of the shared storage."""
    facts: Facts
    findings: tuple[DoctorFinding, ...]
    job_nodes: tuple[str, ...] = ()
    """The nodes of the same job, which also write a report, if they are known."""


def node_facts(machine: Machine) -> Facts:
    """Return the facts of a machine by name, without those that it does not have."""
    ports = rdma.rdma_ports(machine)
    interfaces = sorted({port.interface for port in ports.values() if port.interface})
    memory = memory_bytes(machine).get("MemTotal")
    # The kernel reserves different amounts of memory, so it is rounded.
    facts = {
        "phalanx": __version__,
        "kernel": machine.read("/proc/sys/kernel/osrelease"),
        "system": first_match(r'^PRETTY_NAME="?([^"\n]*)', machine.read("/etc/os-release")),
        "CPU": first_match(r"^model name\s*: (.*)$", machine.read("/proc/cpuinfo")),
        "memory GiB": None if memory is None else str(round(memory / GIB)),
        "GPUs on the bus": str(len(pci.nvidia_gpus(machine))),
        "RDMA devices": str(len(rdma.rdma_devices(machine))),
        "RDMA firmware": _join_distinct(machine.read(f"{rdma.ROOT}/{port.device}/fw_ver") for port in ports.values()),
        "RDMA rate": _join_distinct(machine.read(f"{port.path}/rate") for port in ports.values()),
        "RDMA MTU": _join_distinct(machine.read(f"/sys/class/net/{name}/mtu") for name in interfaces),
        "RDMA driver": machine.read("/sys/module/mlx5_core/version"),
        "clock source": machine.read("/sys/devices/system/clocksource/clocksource0/current_clocksource"),
        **_collect_gpu_facts(machine),
        **_collect_torch_facts(machine),
        **{name: value for name, value in machine.environment.items() if name.startswith(("NCCL_", "TORCH_NCCL_"))},
    }
    return {name: value for name, value in facts.items() if value}


def job_nodes(machine: Machine) -> tuple[str, ...]:
    """Return the nodes of this Slurm step; none outside of Slurm."""
    node_lists = (machine.process_environment.get(f"SLURM_{scope}_NODELIST") for scope in ("STEP", "JOB"))
    nodes = next(filter(None, node_lists), None)
    try:
        output = machine.run("job_nodes", "scontrol", "show", "hostnames", nodes) if nodes else None
    except CommandTimeout:
        return ()
    return tuple(output.text.split()) if output and not output.code else ()


def _collect_gpu_facts(machine: Machine) -> dict[str, str | None]:
    fields = {
        "driver_version": "NVIDIA driver",
        "vbios_version": "VBIOS",
        "name": "GPU",
        "memory.total": "GPU memory MiB",
    }
    try:
        rows = nvidia_smi.query_gpus(machine, "smi_facts", "gpu", "index", *fields)
    except CheckSkipped:
        return {}
    return {name: _join_distinct(row.get(field) for row in rows.values()) for field, name in fields.items()}


def _collect_torch_facts(machine: Machine) -> dict[str, str | None]:
    try:
        facts = software.torch_facts(machine)
    except (CheckSkipped, CommandTimeout, software.NotImportedError):
        return {}
    return {"PyTorch": facts["torch"], "CUDA of PyTorch": facts["cuda"], "NCCL": facts["nccl"]}


def _join_distinct(values: Iterable[str | None]) -> str:
    """Return the distinct values, sorted."""
    return ", ".join(sorted({value for value in values if value}))
