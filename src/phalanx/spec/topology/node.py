"""Topology of one node: GPUs, network cards and the links between them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NoReturn

from phalanx.spec.errors import UserError

PCIE_PATHS = ("PIX", "PXB", "PHB", "NODE", "SYS")
"""PCIe path types, nearest first: over one bridge, several, the CPU, a NUMA node's host bridges, between NUMA nodes."""


@dataclass(frozen=True, kw_only=True)
class NodeTopology:
    """GPUs and network devices of one node and the paths between them.

    A path is NV# (# NVLinks) or one of PCIE_PATHS.
    """

    gpus: tuple[str, ...]
    """GPU0, GPU1, ..."""
    nics: tuple[str, ...]
    """Network devices by their system names where known (mlx5_0)."""
    links: tuple[tuple[str, ...], ...]
    """Path from each GPU to each GPU; X to itself."""
    nic_paths: tuple[tuple[str, ...], ...]
    """Path from each GPU to each network device."""
    numa_nodes: tuple[int | None, ...]
    """NUMA node of each GPU; None if it is unknown or not unique."""
    nvlinks: tuple[int | None, ...]
    """NVLinks of each GPU to other GPUs and to switches; None if unknown."""
    capability: int | None = None
    """Compute capability of the GPUs (90 is 9.0); only NCCL files contain it."""
    nic_bytes_per_second: tuple[float | None, ...] = ()
    """Speed of each network device in one direction; only NCCL files contain it."""
    rails: tuple[int | None, ...] = ()
    """Rail of each network device (devices with common switches); only NCCL files contain it, since 2.28."""

    def nearest_nics(self, gpu: int) -> tuple[str, ...]:
        """Return the network devices nearest to this GPU; several if they are equally near."""
        paths = self.nic_paths[gpu]
        best_index = min(map(PCIE_PATHS.index, paths), default=0)
        return tuple(nic for nic, path in zip(self.nics, paths, strict=True) if path == PCIE_PATHS[best_index])

    def nvlink_domains(self) -> tuple[tuple[int, ...], ...]:
        """Return the NVLink domains as indices of GPUs, which links join directly or over other GPUs."""
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
    """Raise UserError about a line of a topology. `index` counts from 0, the message from 1."""
    raise UserError(f"topology, line {index + 1},", None, problem, fix)
