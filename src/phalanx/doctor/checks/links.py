"""Links within a node: NVLink, the topology of GPUs and network cards, and PCIe."""

from __future__ import annotations

import re
from collections.abc import Iterator

from phalanx.doctor.expectations import Expectations
from phalanx.doctor.finding import CheckSkipped, DoctorFinding, most_common
from phalanx.doctor.machine import Machine
from phalanx.doctor.probes import nvidia_smi, pci, rdma
from phalanx.doctor.probes.host import has_several_numa_nodes
from phalanx.doctor.probes.text import first_line, leading_number
from phalanx.doctor.rules import RULES, skip_rules
from phalanx.spec.errors import UserError
from phalanx.spec.topology.node import PCIE_PATHS
from phalanx.spec.topology.nvidia_smi import parse_matrix

NVLINK_PATTERN = re.compile(r"Link (\d+): (?:(<?inactive>?)|([\d.]+) GB/s)", re.IGNORECASE)


def check_nvlink(machine: Machine, _: Expectations) -> Iterator[DoctorFinding]:
    """Check the NVLinks of GPUs, and the fabric manager, without which all links are inactive."""
    fabric = _check_fabric_manager(machine)
    try:
        findings = list(_check_nvlinks(machine))
    except CheckSkipped as skipped:
        if fabric.severity == "SKIP":
            raise
        findings = skip_rules(str(skipped), "nvlink.active", "nvlink.count", "nvlink.speed", "nvlink.errors")
    yield from (*findings, fabric)


def _check_nvlinks(machine: Machine) -> Iterator[DoctorFinding]:
    lines_by_gpu = nvidia_smi.nvlink_lines(machine, "smi_nvlink", "--status")
    links = {gpu: NVLINK_PATTERN.findall("\n".join(lines)) for gpu, lines in lines_by_gpu.items()}
    speeds = {gpu: [float(speed) for _, inactive, speed in rows if not inactive] for gpu, rows in links.items()}
    if not any(speeds.values()):
        if len(links) < 2 or not pci.nvswitches(machine):
            raise CheckSkipped("no NVLink is active, and none is required")
        yield from (RULES["nvlink.active"].violation(gpu, "all") for gpu in links)
        yield from skip_rules("no NVLink is active", "nvlink.count", "nvlink.speed", "nvlink.errors")
        return
    inactive = {gpu: sum(bool(off) for _, off, _ in rows) for gpu, rows in links.items() if speeds[gpu]}
    counts = {gpu: len(rows) for gpu, rows in links.items()}
    slowest = {gpu: min(link_speeds) for gpu, link_speeds in speeds.items() if link_speeds}
    yield from RULES["nvlink.active"].check(inactive)
    yield from RULES["nvlink.count"].check(counts, limit=most_common(counts.values()))
    yield from RULES["nvlink.speed"].check(slowest, limit=most_common(slowest.values()))
    try:
        worst: dict[str, int] = {}
        for link, count in nvidia_smi.nvlink_errors(machine).items():
            gpu = link.partition(" ")[0]
            worst[gpu] = max(worst.get(gpu, 0), count)
        yield from RULES["nvlink.errors"].check(worst)
    except CheckSkipped as skipped:
        yield RULES["nvlink.errors"].skip(str(skipped))


def _check_fabric_manager(machine: Machine) -> DoctorFinding:
    rule = RULES["nvlink.fabric_manager"]
    if not pci.nvswitches(machine):
        return rule.skip("no NVSwitch")
    output = machine.run("fabric_manager", "systemctl", "is-active", "nvidia-fabricmanager")
    if output is None or "systemd" in output.text or "bus" in output.text:
        return rule.skip("systemd does not answer here (in a container?)")
    (finding,) = rule.check({"nvidia-fabricmanager": first_line(output.text)})
    return finding


def check_topology(machine: Machine, _: Expectations) -> Iterator[DoctorFinding]:
    """Check the matrix of `nvidia-smi topo -m`, which `phalanx placement --topology` reads too."""
    try:
        node = parse_matrix(nvidia_smi.topology_matrix(machine))
    except UserError as error:
        yield RULES["topology.readable"].violation("", error.problem)
        return
    yield RULES["topology.readable"].ok(f"{len(node.gpus)} GPUs, {len(node.nics)} network cards")
    linked = [count for count in node.nvlinks if count is not None]
    sizes = sorted(len(domain) for domain in node.nvlink_domains())
    is_uneven = len(set(sizes)) > 1 or len(set(linked)) > 1
    weakest = min(range(len(linked)), key=linked.__getitem__, default=0)
    islands = f"groups of {', '.join(map(str, sizes))}; {min(linked, default=0)} to {max(linked, default=0)} links"
    yield from RULES["topology.nvlink"].report([(node.gpus[weakest], islands)] if is_uneven else [], ok=islands)
    if not rdma.rdma_devices(machine):
        yield RULES["topology.nic"].skip(rdma.NO_DEVICE)
        return
    paths_by_gpu = zip(node.gpus, node.nic_paths, strict=True)
    nearest = {gpu: min(paths, key=PCIE_PATHS.index) for gpu, paths in paths_by_gpu if paths}
    yield from RULES["topology.nic"].check(nearest)


def check_pcie(machine: Machine, _: Expectations) -> Iterator[DoctorFinding]:
    """Check the PCIe links of NVIDIA GPUs and of network cards with RDMA."""
    cards = rdma.rdma_cards(machine)
    devices = [*pci.nvidia_gpus(machine), *cards]
    if not devices:
        raise CheckSkipped("no GPU and no RDMA card on the PCI bus")
    yield from _check_below_maximum(machine, "pcie.width", devices, "link_width")
    yield from _check_below_maximum(machine, "pcie.speed", cards, "link_speed")
    errors = {address: pci.pcie_errors(machine, address) for address in devices}
    yield from RULES["pcie.errors"].check({address: count for address, count in errors.items() if count is not None})
    if not has_several_numa_nodes(machine):
        yield RULES["pcie.numa"].skip("one NUMA node")
        return
    nodes = {address: machine.read(f"{pci.DEVICES}/{address}/numa_node") or "" for address in devices}
    yield from RULES["pcie.numa"].check(nodes)


def _check_below_maximum(machine: Machine, rule_id: str, addresses: list[str], attribute: str) -> list[DoctorFinding]:
    """Check for devices below the maximum that they and their slots support.

    Virtual devices report 0 or nothing, and are ignored.
    """

    def read(address: str, name: str) -> float:
        return leading_number(machine.read(f"{pci.DEVICES}/{address}/{name}")) or 0.0

    used = {}
    maxima = {}
    for address in addresses:
        value = read(address, f"current_{attribute}")
        bridge = pci.upstream_bridge(machine, address)
        supported = [read(device, f"max_{attribute}") for device in (address, bridge) if device]
        maximum = min((number for number in supported if number > 0), default=0.0)
        if value > 0 and maximum > 0:
            used[address] = value
            maxima[address] = maximum
    return RULES[rule_id].check(used, limit=maxima)
