"""Links of GPUs and network cards: the matrix of `nvidia-smi topo -m`.

`phalanx placement --topology` reads the same matrix.
"""

from __future__ import annotations

from phalanx.doctor.checks import rdma_ports
from phalanx.doctor.expectations import Expectations
from phalanx.doctor.finding import CheckRule, DoctorFinding, check_values
from phalanx.doctor.machine import Machine
from phalanx.doctor.probes import nvidia_smi
from phalanx.spec.errors import UserError
from phalanx.spec.topology.node import PCIE_PATHS
from phalanx.spec.topology.nvidia_smi import parse_matrix

MAX_GDR_DISTANCE = "PXB"
"""Maximum distance at which NCCL uses GPUDirect RDMA by default (NCCL_NET_GDR_LEVEL).

The path crosses PCIe bridges, not the CPU.
"""
READABLE = CheckRule(
    id="topology.readable",
    quantity="the matrix of nvidia-smi topo -m",
    severity="WARN",
    threshold="has the known format",
    unit="",
    source="phalanx.spec.topology.nvidia_smi",
    remedy="inspect it: `phalanx placement` cannot use it",
    command="nvidia-smi topo -m",
)
ISLANDS = CheckRule(
    id="topology.nvlink",
    quantity="GPUs that NVLinks connect",
    severity="FAIL",
    threshold="groups of one size, and equal numbers of links per GPU",
    unit="",
    source="NVIDIA, NVSwitch (every pair connected)",
    remedy="drain the node: some GPUs communicate over PCIe; reset GPUs and fabric manager",
    command="nvidia-smi topo -m",
)
LOCALITY = CheckRule(
    id="topology.nic",
    quantity="path from each GPU to its nearest network card",
    severity="WARN",
    threshold=f"PIX or {MAX_GDR_DISTANCE}",
    unit="",
    source="NCCL (NCCL_NET_GDR_LEVEL, default PXB)",
    remedy="give each GPU a card below its own PCIe switch, or have it moved there: data of {device} goes "
    "through the CPU",
    command="nvidia-smi topo -m; phalanx placement RUN.toml --topology FILE",
)
RULES = (READABLE, ISLANDS, LOCALITY)


def check(machine: Machine, _: Expectations) -> list[DoctorFinding]:
    """Check the matrix, if there are GPUs."""
    text = matrix(machine)
    try:
        node = parse_matrix(text)
    except UserError as error:
        return [READABLE.violation("", error.problem)]
    domains = node.nvlink_domains()
    linked = [count for count in node.nvlinks if count is not None]
    sizes = sorted(len(domain) for domain in domains)
    uneven = len(set(sizes)) > 1 or len(set(linked)) > 1
    weakest = min(range(len(linked)), key=linked.__getitem__, default=0)
    groups = ", ".join(map(str, sizes))
    islands = f"groups of {groups}; {min(linked, default=0)} to {max(linked, default=0)} links"
    nearest = {
        gpu: min(paths, key=PCIE_PATHS.index) for gpu, paths in zip(node.gpus, node.nic_paths, strict=True) if paths
    }
    distant_paths = PCIE_PATHS[PCIE_PATHS.index(MAX_GDR_DISTANCE) + 1 :]
    return [
        READABLE.ok(f"{len(node.gpus)} GPUs, {len(node.nics)} network cards"),
        ISLANDS.violation(node.gpus[weakest], islands) if uneven else ISLANDS.ok(islands),
        *(
            check_values(LOCALITY, nearest, distant_paths.__contains__)
            if rdma_ports.rdma_devices(machine)
            else [LOCALITY.skip(rdma_ports.NO_DEVICE)]
        ),
    ]


def matrix(machine: Machine) -> str:
    """Return the output of nvidia-smi topo -m.

    Raises:
        CheckSkipped: The machine has no GPU.
    """
    return nvidia_smi.run_nvidia_smi(machine, "smi_topology", "topo", "-m")
