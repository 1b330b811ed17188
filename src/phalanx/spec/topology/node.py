"""The GPUs and network cards of one node, and what joins them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NoReturn

from phalanx.spec.errors import UserError

PCIE_PATHS = ("PIX", "PXB", "PHB", "NODE", "SYS")
"""Ways over PCIe, nearest first: over one bridge, several, the CPU, a NUMA node's host bridges, between NUMA nodes."""


@dataclass(frozen=True)
class NodeTopology:
    """The GPUs and network devices of one node and the ways between them. A way is NV# (# NVLinks) or one of PATHS."""

    gpus: tuple[str, ...]
    """GPU0, GPU1, ..."""
    nics: tuple[str, ...]
    """Network devices by the system's names where they are known (mlx5_0)."""
    links: tuple[tuple[str, ...], ...]
    """The way from each GPU to each; X to itself."""
    nic_paths: tuple[tuple[str, ...], ...]
    """The way from each GPU to each network device."""
    numa_nodes: tuple[int | None, ...]
    """NUMA node of each GPU; None where it is not known or not one."""
    nvlinks: tuple[int | None, ...]
    """NVLinks of each GPU to other GPUs and to switches; None where they are not known."""
    capability: int | None = None
    """Compute capability of the GPUs (90 is 9.0); only NCCL tells."""
    nic_bytes_per_second: tuple[float | None, ...] = ()
    """Speed of each network device in one direction; only NCCL tells."""
    rails: tuple[int | None, ...] = ()
    """Rail of each network device (of those whose switches are one); only NCCL tells, since 2.28."""

    def nearest_nics(self, gpu: int) -> tuple[str, ...]:
        """The network devices that no other is nearer to than this GPU's way to them: several if they are as near."""
        paths = self.nic_paths[gpu]
        best_index = min(map(PCIE_PATHS.index, paths), default=0)
        return tuple(nic for nic, path in zip(self.nics, paths, strict=True) if path == PCIE_PATHS[best_index])

    def nvlink_domains(self) -> tuple[tuple[int, ...], ...]:
        """The GPUs that NVLinks join, directly or over others: by index, each in one domain."""
        domains: list[tuple[int, ...]] = []
        for start in range(len(self.gpus)):
            if any(start in domain for domain in domains):
                continue
            domain = {start}
            frontier = {start}
            while frontier:
                frontier = {
                    j for i in frontier for j, path in enumerate(self.links[i]) if path.startswith("NV")
                } - domain
                domain |= frontier
            domains.append(tuple(sorted(domain)))
        return tuple(domains)


def topology_error(index: int, problem: str, fix: str) -> NoReturn:
    """Raise UserError about a line of a topology, counted from 0."""
    raise UserError("topology", None, f"line {index + 1}: {problem}", fix=fix)
