from pathlib import Path

import pytest

from phalanx.spec.errors import UserError
from phalanx.spec.topology.read import infer_cluster, parse_topology, read_topology

# Output of real machines, from public reports. Rows of NICs, which are not read, are left out of some files.
# a100-nv12: Lightning-AI/litgpt tests/test_utils.py. h100-nv18: NVIDIA/nccl#1453 (without rows of NICs).
# rtx4090-pcie: NVIDIA/go-gpuallocator#17. k40-soc: tensorflow/tensorflow tensorflow/contrib/gdr/README.md (2017).
# v100-cube-mesh: Oneflow-Inc/DLPerf, HugeCTR report (driver 470, tabs added by hand).
# h20-virtual-functions: sgl-project/sglang#14092 (without rows of NICs; its wide terminal ran columns together).
# h200-nccl.xml: NVIDIA/nccl-tests#256 (the three GPUs that it shows of a node's first CPU).
TOPOLOGIES = Path(__file__).parent / "topologies"

MACHINES = [
    # file, GPUs, NICs, NVLinks of a GPU, domain, GPU 2's nearest NICs, NUMA nodes
    ("a100-nv12.txt", 8, 10, 12, 8, "mlx5_0 mlx5_1", [0] * 4 + [1] * 4),
    ("h100-nv18.txt", 8, 9, 18, 8, "NIC6", [0] * 4 + [1] * 4),
    ("rtx4090-pcie.txt", 8, 2, 0, 1, "NIC0 NIC1", [0] * 4 + [1] * 4),
    ("k40-soc.txt", 4, 1, 0, 1, "mlx4_0", [None] * 4),
    ("v100-cube-mesh.txt", 8, 2, 6, 8, "mlx5_0", [0] * 4 + [1] * 4),
    (
        "h20-virtual-functions.txt",
        8,
        36,
        18,
        8,
        "mlx5_8 mlx5_9 mlx5_10 mlx5_11 mlx5_12 mlx5_13 mlx5_14 mlx5_15 mlx5_bond_2",
        [0] * 4 + [1] * 4,
    ),
    ("h200-nccl.xml", 3, 3, 18, 3, "mlx5_2", [0] * 3),
]


@pytest.mark.parametrize(("file", "gpus", "nics", "nvlinks", "domain", "nearest", "numa"), MACHINES)
def test_read_topology_parses_output_of_real_machines(file, gpus, nics, nvlinks, domain, nearest, numa):
    node = read_topology(TOPOLOGIES / file)
    assert node.gpus == tuple(f"GPU{i}" for i in range(gpus))
    assert len(node.nics) == nics
    assert node.nvlinks == (nvlinks,) * gpus
    assert " ".join(node.nearest_nics(2)) == nearest
    assert node.numa_nodes == tuple(numa)
    fields = infer_cluster(node).fields
    assert (fields["nproc_per_node"], fields["fast_link_domain"]) == (gpus, domain)


def test_read_topology_returns_link_kinds_of_gpus_and_nics():
    assert read_topology(TOPOLOGIES / "v100-cube-mesh.txt").links[0] == (
        "X",
        "NV1",
        "NV2",
        "NV1",
        "SYS",
        "SYS",
        "SYS",
        "NV2",
    )
    assert read_topology(TOPOLOGIES / "k40-soc.txt").links[0] == ("X", "PHB", "SYS", "SYS")
    node = read_topology(TOPOLOGIES / "h200-nccl.xml")
    assert node.links[0] == ("X", "NV18", "NV18")
    assert node.nic_paths == (("PIX", "PHB", "PHB"), ("PHB", "PIX", "PHB"), ("PHB", "PHB", "PIX"))


@pytest.mark.parametrize(
    ("file", "preset", "speed"),
    [
        ("a100-nv12.txt", "a100", 300e9),
        ("h100-nv18.txt", "h100", 450e9),
        ("h100-nv18.txt", "b200", 900e9),
        ("v100-cube-mesh.txt", "v100-16gb", 150e9),
        ("h200-nccl.xml", None, 450e9),
    ],
)
def test_infer_cluster_link_bandwidth_is_nvlink_count_times_per_link_rate(file, preset, speed):
    assert infer_cluster(read_topology(TOPOLOGIES / file), preset).fields["link_bytes_per_second"] == speed


def test_topology_without_nvlinks_leaves_pcie_of_preset_as_it_is():
    """A domain of one device would send all traffic over the network."""
    inferred = infer_cluster(read_topology(TOPOLOGIES / "rtx4090-pcie.txt"), "rtx4090")
    assert (
        inferred.unknown["fast_link_domain"] == "the GPUs have no NVLinks; PCIe connects the GPUs of a node (rtx4090)"
    )
    assert not {"fast_link_domain", "link_bytes_per_second"} & set(inferred.fields)


def test_infer_cluster_reports_undetermined_fields_with_reason():
    assert infer_cluster(read_topology(TOPOLOGIES / "h100-nv18.txt")).unknown == {
        "link_bytes_per_second": "the speed of 18 NVLinks depends on the GPU: set cluster.preset",
        "network_bytes_per_second": "the speed of the network devices is not in the file",
    }
    unknown = infer_cluster(read_topology(TOPOLOGIES / "rtx4090-pcie.txt")).unknown
    assert unknown["link_bytes_per_second"] == "the GPUs have no NVLinks"
    tray = topology_matrix("GPU0 X NV18", "GPU1 NV18 X")
    assert (
        "72 GPUs of several nodes (gb200)" in infer_cluster(parse_topology(tray), "gb200").unknown["fast_link_domain"]
    )
    bridged = parse_topology(topology_matrix("GPU0 X NV4 NODE", "GPU1 NV4 X NODE", "GPU2 NODE NODE X"))
    assert bridged.nvlink_domains() == ((0, 1), (2,))
    assert infer_cluster(bridged).unknown == {
        "fast_link_domain": "NVLinks connect GPUs in groups of different sizes: 1, 2",
        "link_bytes_per_second": "GPUs have different numbers of NVLinks: 0, 4",
        "network_bytes_per_second": "no network devices are listed",
    }


def test_infer_cluster_network_bandwidth_is_that_of_nearest_nics():
    text = (TOPOLOGIES / "h200-nccl.xml").read_text()
    assert infer_cluster(parse_topology(text)).fields["network_bytes_per_second"] == 50e9
    storage = '<nic><net name="eth0" speed="10000"/></nic></cpu>'
    node = parse_topology(text.replace("</cpu>", storage))
    assert node.nic_paths[0] == ("PIX", "PHB", "PHB", "PHB")
    assert infer_cluster(node).fields["network_bytes_per_second"] == 50e9
    unrated = parse_topology(text.replace('speed="400000"', 'speed="0"'))
    assert "network_bytes_per_second" in infer_cluster(unrated).unknown


def test_parse_topology_handles_escape_codes_and_blank_cpu_affinity():
    node = parse_topology(
        "driver 550\n\t\x1b[4mGPU0\tGPU1\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m\n"
        "GPU0\t X \tNV18\t44-51,148-155\t0\t\tN/A\nGPU1\tNV18\t X \t\t1\t\tN/A\n"
    )
    assert (node.gpus, node.numa_nodes, node.links) == (("GPU0", "GPU1"), (0, 1), (("X", "NV18"), ("NV18", "X")))
    topology = parse_topology("[4mGPU0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID[0m\nGPU0\t X \t\t\t\tN/A\n")
    assert (topology.numa_nodes, topology.nvlinks, topology.nvlink_domains()) == ((None,), (0,), ((0,),))


def test_parse_topology_counts_nvlinks_of_switchless_4_gpu_node():
    """In an HGX A100 4-GPU, each pair has 4 NVLinks, so each GPU has 12."""
    rows = [f"GPU{i} " + " ".join("X" if i == j else "NV4" for j in range(4)) for i in range(4)]
    assert parse_topology(topology_matrix(*rows)).nvlinks == (12,) * 4


def test_parse_topology_leaves_nvlinks_unknown_for_pcie_only_matrix():
    legend = "\nLegend:\n  X    = Self\n  PIX  = Connection traversing at most a single PCIe bridge\n"
    node = parse_topology(topology_matrix("GPU0 X PIX", "GPU1 PIX X") + legend)
    assert node.nvlinks == (None, None)
    assert "the file lists no NVLinks" in infer_cluster(node).unknown["fast_link_domain"]


def test_parse_topology_splits_merged_column_headers():
    node = parse_topology("GPU0GPU1mlx5_0\tCPU Affinity\nGPU0\t X NV1\tPIX\t1-1\nGPU1\tNV1 X \tPHB\t1-1\n")
    assert (node.nics, node.nic_paths) == (("mlx5_0",), (("PIX",), ("PHB",)))


def topology_matrix(*rows: str) -> str:
    return "\n".join([" ".join(row.split()[0] for row in rows), *rows])


CLOUD_XML = """<system version="1">
  <cpu numaid="{numa}">
    <pci busid="ffff:ff:01.0" class="0x060400">
      <pci busid="0001:00:00.0" class="0x030200"/>
      <pci busid="0101:00:00.0" class="0x020700"/>
      <pci busid="ffff:ff:03.0" class="0x060400">
        <pci busid="0002:00:00.0" class="0x030200"/>
      </pci>
    </pci>
  </cpu>
  <cpu numaid="1"><pci busid="0003:00:00.0" class="0x030200"/></cpu>
</system>"""


def test_parse_topology_reads_cloud_xml_without_nvlinks():
    """The file is like Azure/azhpc-images topology/ndv5-topo.xml: devices have a class, and NVLinks are missing."""
    node = parse_topology(CLOUD_XML.format(numa=-1))
    assert (node.nics, node.numa_nodes) == (("0101:00:00.0",), (None, None, 1))
    assert (node.links[0], node.nic_paths) == (("X", "PXB", "SYS"), (("PIX",), ("PXB",), ("SYS",)))
    assert set(infer_cluster(node).unknown) == {"fast_link_domain", "link_bytes_per_second", "network_bytes_per_second"}


def gpu_element(busid: str, dev: int, *links: str) -> str:
    inner = "".join(f"<nvlink {link}/>" for link in links)
    return f'<pci busid="{busid}" class="0x030200"><gpu dev="{dev}" sm="70">{inner}</gpu></pci>'


def test_parse_topology_reads_nvlinks_to_gpu_switch_and_cpu():
    direct = gpu_element("b", 1, 'target="A" count="3" tclass="0x030200"', 'target="c" count="3" tclass="0x068001"')
    direct += gpu_element("a", 0, 'target="B" count="3" tclass="0x030200"', 'target="c" count="3" tclass="0x068001"')
    node = parse_topology(f'<system><cpu numaid="0">{direct}</cpu></system>')
    assert (node.links, node.nvlinks) == ((("X", "NV3"), ("NV3", "X")), (3, 3))
    assert infer_cluster(node).fields["link_bytes_per_second"] == 75e9
    hidden = 'target="fffffff:ff:ff.0" count="6" tclass="0x068000"'
    node = parse_topology(f"<system><cpu>{gpu_element('a', 0, hidden)}{gpu_element('b', 1, hidden)}</cpu></system>")
    assert (node.links[0], node.nvlinks) == (("X", "NV6"), (6, 6))


def test_parse_topology_reads_rails_of_nics():
    """NVIDIA/nccl src/graph/xml.cc writes these attributes if a network plugin defines them."""
    nets = "".join(f'<net name="n{i}" speed="400000" rail="{i}"/>' for i in range(2)) + '<net name="n2"/>'
    node = parse_topology(f"<system><cpu>{gpu_element('a', 0)}<pci busid='b'><nic>{nets}</nic></pci></cpu></system>")
    assert node.rails == (0, 1, None)


XML_WITH_ENTITY = '<?xml version="1.0"?>\n<!DOCTYPE system [<!ENTITY a "ha">]>\n<system>&a;</system>'
INVALID_TOPOLOGIES = [
    ("", "has no header line"),
    ("GPU 0: NVIDIA H100\nGPU0 works", "has no header line"),
    (
        topology_matrix("GPU0 X PIX", "GPU1 PIX X").replace("\nGPU1 PIX X", ""),
        "line 1, has a column GPU1 without a row",
    ),
    (topology_matrix("GPU0 X PIX", "GPU1 PIX"), "line 3, has nothing from GPU1 to GPU1"),
    (topology_matrix("GPU0 X PIX 0-7", "GPU1 OK X"), "line 1, has a column GPU1 without a row"),
    (topology_matrix("GPU0 X LAN 0-7", "GPU1 PIX X"), "line 2, has LAN from GPU0 to GPU1"),
    (topology_matrix("GPU0 X X", "GPU1 PIX X"), "line 2, has X from GPU0 to GPU1"),
    (topology_matrix("GPU0 X NV4", "GPU1 NV2 X"), "line 3, has NV2 from GPU1 to GPU0, but line 2 has NV4"),
    ("GPU0 NIC0\nGPU0 X NV4", "line 2, has NV4 from GPU0 to NIC0"),
    ("GPU0 GPU0\nGPU0 X X", "line 1, contains a device twice"),
    (XML_WITH_ENTITY, r"line 2, has a document type \(DTD\)"),
    ("<system>\n<cpu>\n</system>", "line 3, is not XML: mismatched tag"),
    ("<system>\n<cpu/>&a;</system>", "line 2, is not XML: undefined entity"),
    ("\ufeff<graphs/>", "line 1, has <graphs> in place of a <system> with <cpu>"),
    ("<system><cpu/></system>", "has no GPUs"),
    ("<system>\n<cpu>\n<pci><gpu/></pci></cpu></system>", "line 3, has a <pci> without busid"),
    (CLOUD_XML.format(numa="left"), 'line 2, has numaid="left" in <cpu>, which is not a whole number'),
    ('<system><cpu host_hash="1"/><cpu host_hash="2"/></system>', "contains the CPUs of several nodes"),
]


@pytest.mark.parametrize(("text", "problem"), INVALID_TOPOLOGIES)
def test_parse_topology_reports_line_of_invalid_input(text, problem):
    with pytest.raises(UserError, match=problem):
        parse_topology(text)


def test_topology_rejects_missing_file_and_unknown_preset(tmp_path):
    with pytest.raises(UserError, match="cannot be read: No such file"):
        read_topology(tmp_path / "none.xml")
    with pytest.raises(UserError, match="is not a known preset"):
        infer_cluster(read_topology(TOPOLOGIES / "k40-soc.txt"), "k40")
