"""Facts that should be equal on all nodes of a run: versions, settings, hardware."""

from __future__ import annotations

import re

from phalanx import __version__
from phalanx.doctor.checks import rdma_ports, software
from phalanx.doctor.finding import CheckSkipped
from phalanx.doctor.machine import CommandTimeout, Machine
from phalanx.doctor.probes import nvidia_smi, pci

Facts = dict[str, str]


def node_facts(machine: Machine) -> Facts:
    """Return the facts of a machine by name, without those that it does not have."""
    ports = rdma_ports.rdma_ports(machine)
    interfaces = sorted({port.interface for port in ports.values() if port.interface})
    facts = {
        "phalanx": __version__,
        "kernel": machine.read("/proc/sys/kernel/osrelease"),
        "system": _first_match(r'^PRETTY_NAME="?([^"\n]*)', machine.read("/etc/os-release")),
        "CPU": _first_match(r"^model name\s*: (.*)$", machine.read("/proc/cpuinfo")),
        "memory GiB": _memory_gib(machine),
        "GPUs on the bus": str(len(pci.pci_devices(machine, pci.GPU, pci.NVIDIA))),
        "RDMA devices": str(len(rdma_ports.rdma_devices(machine))),
        "RDMA firmware": _join_distinct(
            machine.read(f"{rdma_ports.ROOT}/{port.device}/fw_ver") for port in ports.values()
        ),
        "RDMA rate": _join_distinct(machine.read(f"{port.path}/rate") for port in ports.values()),
        "RDMA MTU": _join_distinct(machine.read(f"/sys/class/net/{name}/mtu") for name in interfaces),
        "RDMA driver": machine.read("/sys/module/mlx5_core/version"),
        "clock source": machine.read("/sys/devices/system/clocksource/clocksource0/current_clocksource"),
        **_gpu_facts(machine),
        **_torch_facts(machine),
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


def _gpu_facts(machine: Machine) -> dict[str, str | None]:
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


def _torch_facts(machine: Machine) -> dict[str, str | None]:
    try:
        facts = software.torch_facts(machine)
    except (CheckSkipped, CommandTimeout, software.NotImportedError):
        return {}
    return {"PyTorch": facts["torch"], "CUDA of PyTorch": facts["cuda"], "NCCL": facts["nccl"]}


def _first_match(pattern: str, text: str | None) -> str | None:
    match = re.search(pattern, text or "", re.MULTILINE)
    return match[1] if match else None


def _memory_gib(machine: Machine) -> str | None:
    """Return the memory in GiB, rounded because the kernel reserves different amounts."""
    size = _first_match(r"^MemTotal:\s+(\d+) kB", machine.read("/proc/meminfo"))
    return str(round(int(size) / 2**20)) if size else None


def _join_distinct(values: object) -> str | None:
    """Return the distinct values, sorted."""
    return ", ".join(sorted({str(value) for value in values if value})) or None  # type: ignore[attr-defined]
