"""Parser of NCCL's topology files, as NVIDIA/nccl src/graph/xml.cc and topo.cc write and read them."""

from __future__ import annotations

from xml.etree import ElementTree
from xml.etree.ElementTree import Element
from xml.parsers import expat

from phalanx.spec.topology.node import NodeTopology, topology_error


def parse_nccl(text: str) -> NodeTopology:
    """Parse a topology file of NCCL.

    The file is a dump (NCCL_TOPO_DUMP_FILE), or one of a cloud for NCCL_TOPO_FILE, which has no <gpu>. It has no NODE
    paths between host bridges of a NUMA node: these are PHB.
    """
    root = _parse_tree(text)
    if root.tag != "system" or not root.findall("cpu"):
        fix = "use a file that NCCL wrote to NCCL_TOPO_DUMP_FILE"
        topology_error(_line_index(root), f"has <{root.tag}> in place of a <system> with <cpu>", fix)
    if len({cpu.get("host_hash") for cpu in root.iter("cpu")}) > 1:
        fix = "dump one node with NCCL_MNNVL_ENABLE=0"
        topology_error(_line_index(root), "contains the CPUs of several nodes", fix)
    parents = {child: parent for parent in root.iter() for child in parent}
    gpus, has_gpu_elements = _find_gpus(root)
    nets = list(root.iter("net")) or [pci for pci in root.iter("pci") if pci.get("class", "").startswith("0x02")]
    # A virtual card has no <pci>.
    devices = [next((item for item in (net, *_list_ancestors(net, parents)) if item.tag == "pci"), net) for net in nets]
    ports = [_count_nvlinks(gpu) for gpu in gpus]

    def link(i: int, j: int) -> str:
        """Return the path between two GPUs: direct NVLinks, else NVLinks to switches, else PCIe."""
        count = ports[i].get(gpus[j].get("busid", "").lower(), 0) or min(ports[i].get("", 0), ports[j].get("", 0))
        return "X" if i == j else f"NV{count}" if count else _classify_pcie_path(gpus[i], gpus[j], parents)

    cpus = (next((item for item in _list_ancestors(gpu, parents) if item.tag == "cpu"), None) for gpu in gpus)
    numa_nodes = [None if cpu is None else _read_int(cpu, "numaid") for cpu in cpus]
    capabilities = {_read_int(gpu, "sm") for pci in gpus for gpu in pci.iter("gpu")}
    speeds = [_read_int(net, "speed") for net in nets]
    return NodeTopology(
        gpus=tuple(f"GPU{i}" for i in range(len(gpus))),
        nics=tuple(net.get("name") or net.get("busid") or f"NIC{i}" for i, net in enumerate(nets)),
        links=tuple(tuple(link(i, j) for j in range(len(gpus))) for i in range(len(gpus))),
        nic_paths=tuple(tuple(_classify_pcie_path(gpu, device, parents) for device in devices) for gpu in gpus),
        numa_nodes=tuple(None if node is None or node < 0 else node for node in numa_nodes),
        nvlinks=tuple(sum(counts.values()) if has_gpu_elements else None for counts in ports),
        capability=capabilities.pop() if len(capabilities) == 1 else None,
        nic_bytes_per_second=tuple(speed * 1e6 / 8 if speed and speed > 0 else None for speed in speeds),
        rails=tuple(_read_int(net, "rail") for net in nets),
    )


def _find_gpus(root: Element) -> tuple[list[Element], bool]:
    """Return the <pci> elements of the GPUs by their `dev`, and whether the file has <gpu> elements.

    Without <gpu>, the elements are selected by their PCI class.
    """
    dumped_gpus = [pci for pci in root.iter("pci") if pci.find("gpu") is not None]
    gpus = dumped_gpus or [pci for pci in root.iter("pci") if pci.get("class", "").startswith("0x0302")]
    if not gpus:
        topology_error(_line_index(root), "has no GPUs", "use a file that NCCL wrote to NCCL_TOPO_DUMP_FILE")
    for pci in gpus:
        if not pci.get("busid"):
            topology_error(_line_index(pci), "has a <pci> without busid", "use the file as NCCL wrote it")
    gpus = sorted(gpus, key=lambda pci: max((_read_int(gpu, "dev") or 0 for gpu in pci.iter("gpu")), default=0))
    return gpus, bool(dumped_gpus)


def _count_nvlinks(pci: Element) -> dict[str, int]:
    """Count the NVLinks of a GPU by the bus id of their other end, "" for a switch.

    Links to a CPU (POWER9) are excluded.
    """
    ports: dict[str, int] = {}
    for link in pci.iter("nvlink"):
        kind = link.get("tclass", "")
        target = "" if kind.startswith("0x0680") else link.get("target", "").lower()
        if kind != "0x068001":
            ports[target] = ports.get(target, 0) + (_read_int(link, "count") or 0)
    return ports


def _classify_pcie_path(device: Element, other: Element, parents: dict[Element, Element]) -> str:
    """Return the PCIe path type between two devices from their common ancestors."""
    ancestors = _list_ancestors(device, parents)
    other_ancestors = _list_ancestors(other, parents)
    common_ancestor = next((element for element in ancestors if element in other_ancestors), None)
    if common_ancestor is None or common_ancestor.tag == "system":
        return "SYS"
    if common_ancestor.tag == "cpu":
        return "PHB"
    return "PIX" if ancestors[0] is other_ancestors[0] else "PXB"


def _list_ancestors(element: Element, parents: dict[Element, Element]) -> list[Element]:
    """Return the ancestors of an element, nearest first."""
    ancestors = []
    while element in parents:
        element = parents[element]
        ancestors.append(element)
    return ancestors


def _parse_tree(text: str) -> Element:
    """Parse an XML text into elements with their lines.

    A document type, and with it every entity, is rejected.
    """
    builder = ElementTree.TreeBuilder()
    parser = expat.ParserCreate()

    def start_element(tag: str, attributes: dict[str, str]) -> None:
        builder.start(tag, {**attributes, "#line": str(parser.CurrentLineNumber)})

    def reject_doctype(*_: object) -> None:
        topology_error(parser.CurrentLineNumber - 1, "has a document type (DTD)", "use the file as NCCL wrote it")

    parser.StartElementHandler = start_element
    parser.EndElementHandler = builder.end
    parser.StartDoctypeDeclHandler = reject_doctype
    try:
        parser.Parse(text.lstrip("\ufeff \t\r\n").encode(errors="replace"), True)
    except expat.ExpatError as error:
        problem = f"is not XML: {expat.ErrorString(error.code)}"
        topology_error(error.lineno - 1, problem, "use the file as NCCL wrote it")
    return builder.close()


def _read_int(element: Element, key: str) -> int | None:
    """Return an integer attribute of an element, decimal or 0x hexadecimal; None if it is absent."""
    text = element.get(key)
    try:
        return int(text, 0) if text else None
    except ValueError:
        problem = f'has {key}="{text}" in <{element.tag}>, which is not a whole number'
        topology_error(_line_index(element), problem, "use the file as NCCL wrote it")


def _line_index(element: Element) -> int:
    return int(element.attrib["#line"]) - 1
