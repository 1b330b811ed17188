"""Topology files of a node, and the cluster fields that follow from them."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from phalanx.spec.cluster import ClusterSpec
from phalanx.spec.errors import UserError
from phalanx.spec.files.load import load_machine
from phalanx.spec.topology.nccl_xml import parse_nccl
from phalanx.spec.topology.node import NodeTopology
from phalanx.spec.topology.nvidia_smi import parse_matrix

MAX_NVLINK_GPUS_PER_NODE = 16
"""Maximum number of GPUs that NVLinks join inside a node (DGX-2). Of larger domains a node contains only a part."""
NVLINK_BYTES_PER_SECOND = {60: 20e9, 70: 25e9, 80: 25e9, 86: 14.0625e9, 90: 25e9, 100: 50e9, 103: 50e9}
"""Bandwidth of one NVLink in one direction, by compute capability (data sheets)."""
COMPUTE_CAPABILITY = {
    "v100": 70,
    "a100": 80,
    "a800": 80,
    "rtx3090": 86,
    "h100": 90,
    "h200": 90,
    "h800": 90,
    "h20": 90,
    "b200": 100,
    "gb200": 100,
    "b300": 103,
    "gb300": 103,
}
"""Compute capability by the preset's name up to its first dash."""
NO_NVLINKS = "the GPUs have no NVLinks"
NO_NVLINK_DATA = "the file lists no NVLinks: use the output of nvidia-smi topo -m, or NCCL's dump (NCCL_TOPO_DUMP_FILE)"


@dataclass(frozen=True)
class InferredCluster:
    """Cluster fields inferred from a topology."""

    fields: dict[str, int | float] = field(default_factory=dict)
    """Cluster fields and their values."""
    unknown: dict[str, str] = field(default_factory=dict)
    """Cluster fields that the topology does not determine, with the reasons."""


def read_topology(path: str | Path) -> NodeTopology:
    """Return the topology in a file.

    Raises UserError if the topology is invalid. The message names the file or its wrong line.
    """
    try:
        return parse_topology(Path(path).read_text(errors="replace"))
    except OSError as error:
        raise UserError("topology", str(path), f"cannot be read: {error.strerror}", "check the path") from None


def parse_topology(text: str) -> NodeTopology:
    """Parse a topology from text: NCCL's XML, or the matrix of `nvidia-smi topo -m`."""
    return parse_nccl(text) if text.lstrip("\ufeff \t\r\n").startswith("<") else parse_matrix(text)


def infer_cluster(node: NodeTopology, preset: str | None = None) -> InferredCluster:
    """Return the cluster fields of nodes with this topology.

    `preset` names the machine if the topology alone does not determine it.
    """
    fields: dict[str, int | float] = {"nproc_per_node": len(node.gpus)}
    unknown: dict[str, str] = {}
    for name, value in (
        ("fast_link_domain", _infer_domain(node, preset)),
        ("link_bytes_per_second", _infer_link_speed(node, preset)),
        ("network_bytes_per_second", _infer_network_speed(node)),
    ):
        if isinstance(value, str):
            unknown[name] = value
        else:
            fields[name] = value
    return InferredCluster(fields, unknown)


def _infer_domain(node: NodeTopology, preset: str | None) -> int | str:
    sizes = sorted({len(domain) for domain in node.nvlink_domains()})
    machine = load_machine(preset) if preset else ClusterSpec()
    preset_domain = machine.fast_link_domain or 0
    if sizes == [1] and machine.link_bytes_per_second is not None and not preset_domain:
        return f"{NO_NVLINKS}; PCIe connects the GPUs of a node ({preset})"
    if None in node.nvlinks:
        return NO_NVLINK_DATA
    if len(sizes) > 1:
        return f"NVLinks connect GPUs in groups of different sizes: {', '.join(map(str, sizes))}"
    if preset_domain > MAX_NVLINK_GPUS_PER_NODE:
        return f"NVLinks connect up to {preset_domain} GPUs of several nodes ({preset}), but the file is of one node"
    return sizes[0]


def _infer_link_speed(node: NodeTopology, preset: str | None) -> float | str:
    counts = sorted({count for count in node.nvlinks if count is not None})
    capability = node.capability or (COMPUTE_CAPABILITY.get(preset.partition("-")[0]) if preset else None)
    if None in node.nvlinks:
        return NO_NVLINK_DATA
    if counts == [0]:
        return NO_NVLINKS
    if len(counts) > 1:
        return f"GPUs have different numbers of NVLinks: {', '.join(map(str, counts))}"
    if capability not in NVLINK_BYTES_PER_SECOND:
        return f"the speed of {counts[0]} NVLinks depends on the GPU: set cluster.preset"
    return counts[0] * NVLINK_BYTES_PER_SECOND[capability]


def _infer_network_speed(node: NodeTopology) -> float | str:
    if not node.nics:
        return "no network devices are listed"
    nearest = {nic for gpu in range(len(node.gpus)) for nic in node.nearest_nics(gpu)}
    speeds = [speed for nic, speed in zip(node.nics, node.nic_bytes_per_second, strict=False) if nic in nearest]
    known_speeds = [speed for speed in speeds if speed]
    if not known_speeds or len(known_speeds) < len(speeds):
        return "the speed of the network devices is not in the file"
    return sum(known_speeds) / len(node.gpus)
