"""What joins the GPUs and network cards of a node, read from `nvidia-smi topo -m` or from a topology file of NCCL.

Sources: the legend that nvidia-smi prints; NVIDIA/nccl src/graph/xml.cc and topo.cc (NCCL_TOPO_DUMP_FILE).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn
from xml.etree import ElementTree
from xml.etree.ElementTree import Element
from xml.parsers import expat

from phalanx.spec.errors import UserError
from phalanx.spec.load import load_machine

PATHS = ("PIX", "PXB", "PHB", "NODE", "SYS")
"""Ways over PCIe, nearest first: over one bridge, several, the CPU, a NUMA node's host bridges, between NUMA nodes."""
NVLINKS = 18
"""Most NVLinks that a GPU has (Hopper, Blackwell)."""
NODE_GPUS = 16
"""Most GPUs that NVLinks join inside a node (DGX-2); of larger domains a node shows but a part."""
NVLINK_BYTES_PER_SECOND = {60: 20e9, 70: 25e9, 80: 25e9, 86: 14.0625e9, 90: 25e9, 100: 50e9, 103: 50e9}
"""What one NVLink carries in one direction, by compute capability (data sheets)."""
CAPABILITY = {
    "v100": 70, "a100": 80, "a800": 80, "rtx3090": 86, "h100": 90, "h200": 90, "h800": 90, "h20": 90,
    "b200": 100, "gb200": 100, "b300": 103, "gb300": 103,
}  # fmt: skip
"""Compute capability by the preset's name up to its first dash."""

ESCAPE = re.compile(r"\x1b?\[[0-9;]*m")
CELL = re.compile(r"\s*(NV\d+|NODE|SYS|SOC|PHB|PXB|PIX|X)")
DEVICE = re.compile(r"GPU\d+|NIC\d+|\S+")
GPU = re.compile(r"GPU\d+")
BLIND = "NVLinks are not shown: give what nvidia-smi topo -m prints, or a dump of NCCL (NCCL_TOPO_DUMP_FILE)"


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
    numa: tuple[int | None, ...]
    """NUMA node of each GPU; None where it is not known or not one."""
    nvlinks: tuple[int | None, ...]
    """NVLinks of each GPU to other GPUs and to switches; None where they are not known."""
    capability: int | None = None
    """Compute capability of the GPUs (90 is 9.0); only NCCL tells."""
    nic_bytes_per_second: tuple[float | None, ...] = ()
    """Speed of each network device in one direction; only NCCL tells."""
    rails: tuple[int | None, ...] = ()
    """Rail of each network device (of those whose switches are one); only NCCL tells, since 2.28."""
    planes: tuple[int | None, ...] = ()
    """Plane of each network device; as for rails."""

    def nearest_nics(self, gpu: int) -> tuple[str, ...]:
        """The network devices that no other is nearer to than this GPU's way to them: several if they are as near."""
        paths = self.nic_paths[gpu]
        best = min(map(PATHS.index, paths), default=0)
        return tuple(nic for nic, path in zip(self.nics, paths, strict=True) if path == PATHS[best])

    def domains(self) -> tuple[tuple[int, ...], ...]:
        """The GPUs that NVLinks join, directly or over others: by index, each in one domain."""
        found: list[tuple[int, ...]] = []
        for start in range(len(self.gpus)):
            if any(start in domain for domain in found):
                continue
            domain, new = {start}, {start}
            while new:
                new = {j for i in new for j, way in enumerate(self.links[i]) if way.startswith("NV")} - domain
                domain |= new
            found.append(tuple(sorted(domain)))
        return tuple(found)


@dataclass(frozen=True)
class Determined:
    """What a topology says of a Cluster."""

    fields: dict[str, int | float] = field(default_factory=dict)
    """Cluster fields and their values."""
    unknown: dict[str, str] = field(default_factory=dict)
    """Cluster fields that it does not determine, and why."""


def read_topology(path: str | Path) -> NodeTopology:
    """The topology in a file. Raises UserError that names the file or its wrong line."""
    try:
        return parse_topology(Path(path).read_text(errors="replace"))
    except OSError as error:
        raise UserError("topology", str(path), f"cannot be read: {error.strerror}", "check the path") from None


def parse_topology(text: str) -> NodeTopology:
    """The topology that a text gives: NCCL's XML, or the matrix of `nvidia-smi topo -m`."""
    return parse_nccl(text) if text.lstrip("\ufeff \t\r\n").startswith("<") else parse_matrix(text)


def cluster_fields(node: NodeTopology, preset: str | None = None) -> Determined:
    """Fields of the Cluster of such nodes; `preset` names the machine where the topology alone does not say which."""
    known: dict[str, int | float] = {"nproc": len(node.gpus)}
    unknown: dict[str, str] = {}
    for name, value in (
        ("domain", _domain(node, preset)),
        ("link_bytes_per_second", _link_speed(node, preset)),
        ("network_bytes_per_second", _network_speed(node)),
    ):
        if isinstance(value, str):
            unknown[name] = value
        else:
            known[name] = value
    return Determined(known, unknown)


def _domain(node: NodeTopology, preset: str | None) -> int | str:
    sizes = sorted({len(domain) for domain in node.domains()})
    beyond = (load_machine(preset).domain or 0) if preset else 0
    if None in node.nvlinks:
        return BLIND
    if len(sizes) > 1:
        return f"NVLinks join GPUs in groups of different sizes: {_listed(sizes)}"
    if beyond > NODE_GPUS:
        return f"NVLinks join up to {beyond} GPUs of several nodes ({preset}), and this is one node"
    return sizes[0]


def _link_speed(node: NodeTopology, preset: str | None) -> float | str:
    counts = sorted({count for count in node.nvlinks if count is not None})
    capability = node.capability or (CAPABILITY.get(preset.partition("-")[0]) if preset else None)
    if None in node.nvlinks:
        return BLIND
    if counts == [0]:
        return "the GPUs have no NVLinks"
    if len(counts) > 1:
        return f"GPUs have different numbers of NVLinks: {_listed(counts)}"
    if capability not in NVLINK_BYTES_PER_SECOND:
        return f"{counts[0]} NVLinks, whose speed depends on the GPU: name its preset"
    return counts[0] * NVLINK_BYTES_PER_SECOND[capability]


def _network_speed(node: NodeTopology) -> float | str:
    if not node.nics:
        return "no network devices are listed"
    near = {nic for gpu in range(len(node.gpus)) for nic in node.nearest_nics(gpu)}
    speeds = [speed for nic, speed in zip(node.nics, node.nic_bytes_per_second, strict=False) if nic in near]
    rated = [speed for speed in speeds if speed]
    if not rated or len(rated) < len(speeds):
        return "the speed of the network devices is not given"
    return sum(rated) / len(node.gpus)


def parse_matrix(text: str) -> NodeTopology:
    """The matrix of `nvidia-smi topo -m`, with escapes, without NUMA or NIC columns, or amid other text.

    Through switches each pair shows all of a GPU's NVLinks, else its own: a sum above NVLINKS is taken for switches.
    `topo -mp` shows none, and its legend no NV#.
    """
    lines = [ESCAPE.sub("", line) for line in text.splitlines()]
    head = _header(lines)
    devices = DEVICE.findall(lines[head].partition("CPU Affinity")[0])
    gpus = [name for name in devices if GPU.fullmatch(name)]
    if len(set(devices)) < len(devices):
        _refuse(head, "names a device twice", "give it as nvidia-smi topo -m prints it")
    numbers = _rows(lines, head, gpus)
    cells, numa = [], []
    for name in gpus:
        row, rest = _cells(lines[numbers[name]], numbers[name], name, devices)
        cells.append(row)
        numa.append(_numa(rest, lines[head]))
    named = dict(re.findall(r"^\s*(NIC\d+):\s*(\S+)", "\n".join(lines[head:]), re.MULTILINE))
    links = [[row[devices.index(gpu)] for gpu in gpus] for row in cells]
    _check_symmetry(links, gpus, numbers)
    nics = [i for i, name in enumerate(devices) if name not in gpus]
    counts = [[int(way[2:]) for way in row if way.startswith("NV")] for row in links]
    shown = "NV#" in text or "Legend:" not in text
    return NodeTopology(
        gpus=tuple(gpus),
        nics=tuple(named.get(devices[i], devices[i]) for i in nics),
        links=tuple(map(tuple, links)),
        nic_paths=tuple(tuple(row[i] for i in nics) for row in cells),
        numa=tuple(numa),
        nvlinks=tuple((sum(row) if sum(row) <= NVLINKS else max(row)) if shown else None for row in counts),
    )


def _header(lines: Sequence[str]) -> int:
    """The index of the line that names the columns: of devices, with the first GPU's row below."""
    for number, line in enumerate(lines):
        words = line.split()
        below = next((row for row in lines[number + 1 :] if row.strip()), "").split()
        if words and GPU.match(words[0]) and len(below) > 1 and CELL.match(below[1]) and not _is_row(words):
            return number
    raise UserError("topology", None, "has no line of columns (GPU0 GPU1 ...)", "give what nvidia-smi topo -m prints")


def _is_row(words: Sequence[str]) -> bool:
    return len(words) > 1 and CELL.match(words[1]) is not None


def _rows(lines: Sequence[str], head: int, gpus: Sequence[str]) -> dict[str, int]:
    """The index of each GPU's line."""
    found: dict[str, int] = {}
    for number, line in enumerate(lines[head + 1 :], head + 1):
        words = line.split()
        if words[:1] == ["Legend:"]:
            break
        if words and words[0] in gpus and _is_row(words):
            found.setdefault(words[0], number)
    for name in gpus:
        if name not in found:
            _refuse(head, f"names {name}, which has no row", "give all of what nvidia-smi topo -m prints")
    return found


def _cells(line: str, number: int, name: str, devices: Sequence[str]) -> tuple[list[str], str]:
    """The ways of a GPU's row, and what follows them. A wide terminal may leave no space between two."""
    rest, cells = line.strip("\r\n ")[len(name) :], []
    for device in devices:
        match = CELL.match(rest)
        if match is None or (match[1].startswith("NV") and not GPU.fullmatch(device)):
            word = (rest.split() or ["nothing"])[0]
            allowed = f"X, NV# or one of {_listed(PATHS)}" if GPU.fullmatch(device) else f"one of {_listed(PATHS)}"
            _refuse(number, f"{name} to {device} is {word}", f"it must be {allowed}")
        own = match[1] == "X"
        if own != (device == name):
            _refuse(number, f"{name} to {device} is {match[1]}", "X is for a device and itself, and nothing else is")
        cells.append(match[1].replace("SOC", "SYS"))  # before driver 384
        rest = rest[match.end() :]
    return cells, rest


def _numa(rest: str, header: str) -> int | None:
    """The NUMA node at the end of a row, whose CPU affinity may be blank."""
    if "NUMA Affinity" not in header:
        return None
    words = rest.split()[: -1 if "GPU NUMA ID" in header else None]
    columns = rest.lstrip(" ").split("\t")
    word = words[1] if len(words) > 1 else columns[2].strip() if len(columns) > 2 else ""
    return int(word) if word.isdecimal() else None


def _check_symmetry(links: Sequence[Sequence[str]], gpus: Sequence[str], numbers: dict[str, int]) -> None:
    for i, one in enumerate(gpus):
        for j, other in enumerate(gpus[:i]):
            if links[i][j] != links[j][i]:
                problem = f"{one} to {other} is {links[i][j]}, but line {numbers[other] + 1} has {links[j][i]}"
                _refuse(numbers[one], problem, "give it as nvidia-smi topo -m prints it")


def parse_nccl(text: str) -> NodeTopology:
    """A topology file of NCCL: a dump (NCCL_TOPO_DUMP_FILE), or one of a cloud for NCCL_TOPO_FILE, which has no <gpu>.

    Between host bridges of a NUMA node it knows no NODE: that is PHB.
    """
    root = _tree(text)
    if root.tag != "system" or not root.findall("cpu"):
        _refuse(_line(root), f"<{root.tag}> is not a <system> with <cpu>", "give a file that NCCL_TOPO_DUMP_FILE names")
    if len({cpu.get("host_hash") for cpu in root.iter("cpu")}) > 1:
        _refuse(_line(root), "has the CPUs of several nodes", "dump one node's, with NCCL_MNNVL_ENABLE=0")
    parents = {child: parent for parent in root.iter() for child in parent}
    gpus, dumped = _gpus(root)
    nets = list(root.iter("net")) or [pci for pci in root.iter("pci") if pci.get("class", "").startswith("0x02")]
    devices = [_device(net, parents) for net in nets]
    capabilities = {_number(gpu, "sm") for pci in gpus for gpu in pci.iter("gpu")}
    speeds = [_number(net, "speed") for net in nets]
    return NodeTopology(
        gpus=tuple(f"GPU{i}" for i in range(len(gpus))),
        nics=tuple(net.get("name") or net.get("busid") or f"NIC{i}" for i, net in enumerate(nets)),
        links=_nvlinks(gpus, parents),
        nic_paths=tuple(tuple(_path(gpu, device, parents) for device in devices) for gpu in gpus),
        numa=tuple(_numa_of(gpu, parents) for gpu in gpus),
        nvlinks=tuple(sum(_ports(gpu).values()) if dumped else None for gpu in gpus),
        capability=capabilities.pop() if len(capabilities) == 1 else None,
        nic_bytes_per_second=tuple(speed * 1e6 / 8 if speed and speed > 0 else None for speed in speeds),
        rails=tuple(_number(net, "rail") for net in nets),
        planes=tuple(_number(net, "plane") for net in nets),
    )


def _gpus(root: Element) -> tuple[list[Element], bool]:
    """The <pci> of the GPUs by their `dev`, or where there is no <gpu>, those of their class; and whether there was."""
    dumped = [pci for pci in root.iter("pci") if pci.find("gpu") is not None]
    gpus = dumped or [pci for pci in root.iter("pci") if pci.get("class", "").startswith("0x0302")]
    if not gpus:
        _refuse(_line(root), "has no GPUs", "give a file that NCCL_TOPO_DUMP_FILE names")
    for pci in gpus:
        if not pci.get("busid"):
            _refuse(_line(pci), "<pci> has no busid", "give the file as NCCL wrote it")
    return sorted(gpus, key=lambda pci: max((_number(gpu, "dev") or 0 for gpu in pci.iter("gpu")), default=0)), bool(
        dumped
    )


def _ports(pci: Element) -> dict[str, int]:
    """NVLinks of a GPU by the bus id at their other end, "" for a switch; those to a CPU (POWER9) are left out."""
    ports: dict[str, int] = {}
    for link in pci.iter("nvlink"):
        kind = link.get("tclass", "")
        target = "" if kind.startswith("0x0680") else link.get("target", "").lower()
        if kind != "0x068001":
            ports[target] = ports.get(target, 0) + (_number(link, "count") or 0)
    return ports


def _nvlinks(gpus: Sequence[Element], parents: dict[Element, Element]) -> tuple[tuple[str, ...], ...]:
    """The way between each two GPUs: NVLinks between them, else those of both to switches, else PCIe."""
    ports = [_ports(gpu) for gpu in gpus]

    def way(i: int, j: int) -> str:
        count = ports[i].get(gpus[j].get("busid", "").lower(), 0) or min(ports[i].get("", 0), ports[j].get("", 0))
        return "X" if i == j else f"NV{count}" if count else _path(gpus[i], gpus[j], parents)

    return tuple(tuple(way(i, j) for j in range(len(gpus))) for i in range(len(gpus)))


def _path(one: Element, other: Element, parents: dict[Element, Element]) -> str:
    """The way over PCIe between two devices, by what is above both."""
    above, others = _above(one, parents), _above(other, parents)
    shared = next((element for element in above if element in others), None)
    if shared is None or shared.tag == "system":
        return "SYS"
    if shared.tag == "cpu":
        return "PHB"
    return "PIX" if above[0] is others[0] else "PXB"


def _above(element: Element, parents: dict[Element, Element]) -> list[Element]:
    """The elements that hold this one, from the nearest."""
    above = []
    while element in parents:
        element = parents[element]
        above.append(element)
    return above


def _device(net: Element, parents: dict[Element, Element]) -> Element:
    """The <pci> of a <net>, which a virtual card lacks."""
    return next((element for element in (net, *_above(net, parents)) if element.tag == "pci"), net)


def _numa_of(gpu: Element, parents: dict[Element, Element]) -> int | None:
    node = next((_number(cpu, "numaid") for cpu in _above(gpu, parents) if cpu.tag == "cpu"), None)
    return None if node is None or node < 0 else node


def _tree(text: str) -> Element:
    """The elements of an XML text, each with its line. A document type is refused, and with it all entities."""
    builder, parser = ElementTree.TreeBuilder(), expat.ParserCreate()

    def start(tag: str, attributes: dict[str, str]) -> None:
        builder.start(tag, {**attributes, "#line": str(parser.CurrentLineNumber)})

    def refuse(*_: object) -> None:
        _refuse(parser.CurrentLineNumber - 1, "has a document type (DTD)", "remove it: NCCL writes none")

    parser.StartElementHandler = start
    parser.EndElementHandler = builder.end
    parser.StartDoctypeDeclHandler = refuse
    try:
        parser.Parse(text.lstrip("\ufeff \t\r\n").encode(errors="replace"), True)
    except expat.ExpatError as error:
        _refuse(error.lineno - 1, f"is not XML: {expat.ErrorString(error.code)}", "give the file as NCCL wrote it")
    return builder.close()


def _number(element: Element, key: str) -> int | None:
    """A whole number of an element, decimal or 0x hexadecimal; None where it is not given."""
    text = element.get(key)
    try:
        return int(text, 0) if text else None
    except ValueError:
        _refuse(_line(element), f'{key}="{text}" of <{element.tag}> is not a whole number', "give it as NCCL wrote it")


def _line(element: Element) -> int:
    return int(element.attrib["#line"]) - 1


def _listed(values: Sequence[object]) -> str:
    return ", ".join(map(str, values))


def _refuse(index: int, problem: str, fix: str) -> NoReturn:
    raise UserError("topology", None, f"line {index + 1}: {problem}", fix)
