"""Parser of the matrix that `nvidia-smi topo -m` prints, found by the legend below it."""

from __future__ import annotations

import re
from collections.abc import Sequence

from phalanx.spec.errors import UserError
from phalanx.spec.topology.node import PCIE_PATHS, NodeTopology, topology_error

MAX_NVLINKS = 18
"""Maximum number of NVLinks of a GPU (Hopper, Blackwell)."""
ESCAPE = re.compile(r"\x1b?\[[0-9;]*m")
CELL = re.compile(r"\s*(NV\d+|NODE|SYS|SOC|PHB|PXB|PIX|X)")
DEVICE = re.compile(r"GPU\d+|NIC\d+|\S+")
GPU = re.compile(r"GPU\d+")


def parse_matrix(text: str) -> NodeTopology:
    """Parse the matrix of `nvidia-smi topo -m`.

    The text may have escape sequences, lack NUMA or NIC columns, or be amid other text. With switches, each pair shows
    all of a GPU's NVLinks, else its own: a sum above MAX_NVLINKS means switches. `topo -mp` shows no NVLinks, and its
    legend lacks NV#.
    """
    lines = [ESCAPE.sub("", line) for line in text.splitlines()]
    header_index = _find_header(lines)
    devices = DEVICE.findall(lines[header_index].partition("CPU Affinity")[0])
    gpus = [name for name in devices if GPU.fullmatch(name)]
    if len(set(devices)) < len(devices):
        topology_error(header_index, "contains a device twice", "use the unmodified output of nvidia-smi topo -m")
    row_indices = _find_rows(lines, header_index, gpus)
    cells = []
    numa = []
    for name in gpus:
        row, remainder = _parse_cells(lines[row_indices[name]], row_indices[name], name, devices)
        cells.append(row)
        numa.append(_parse_numa_node(remainder, lines[header_index]))
    links = [[row[devices.index(gpu)] for gpu in gpus] for row in cells]
    for i, gpu in enumerate(gpus):
        for j, other_gpu in enumerate(gpus[:i]):
            if links[i][j] != links[j][i]:
                problem = f"has {links[i][j]} from {gpu} to {other_gpu}"
                problem += f", but line {row_indices[other_gpu] + 1} has {links[j][i]}"
                topology_error(row_indices[gpu], problem, "use the unmodified output of nvidia-smi topo -m")
    nics = [i for i, name in enumerate(devices) if name not in gpus]
    legend = dict(re.findall(r"^\s*(NIC\d+):\s*(\S+)", "\n".join(lines[header_index:]), re.MULTILINE))
    shows_nvlinks = "NV#" in text or "Legend:" not in text
    return NodeTopology(
        gpus=tuple(gpus),
        nics=tuple(legend.get(devices[i], devices[i]) for i in nics),
        links=tuple(map(tuple, links)),
        nic_paths=tuple(tuple(row[i] for i in nics) for row in cells),
        numa_nodes=tuple(numa),
        nvlinks=tuple(_count_nvlinks(row) if shows_nvlinks else None for row in links),
    )


def _count_nvlinks(paths: Sequence[str]) -> int:
    """Return the NVLinks of a GPU from its paths to all GPUs: their sum, or with switches the number in each path."""
    counts = [int(path[2:]) for path in paths if path.startswith("NV")]
    return sum(counts) if sum(counts) <= MAX_NVLINKS else max(counts)


def _find_header(lines: Sequence[str]) -> int:
    """Return the index of the line with the column names, which the first GPU's row follows."""
    for index, line in enumerate(lines):
        words = line.split()
        next_row = next((row for row in lines[index + 1 :] if row.strip()), "").split()
        if words and GPU.match(words[0]) and len(next_row) > 1 and CELL.match(next_row[1]) and not _is_row(words):
            return index
    raise UserError("topology", None, "has no header line (GPU0 GPU1 ...)", "use the output of nvidia-smi topo -m")


def _is_row(words: Sequence[str]) -> bool:
    return len(words) > 1 and CELL.match(words[1]) is not None


def _find_rows(lines: Sequence[str], header_index: int, gpus: Sequence[str]) -> dict[str, int]:
    """Return the line index of each GPU's row."""
    row_indices: dict[str, int] = {}
    for index, line in enumerate(lines[header_index + 1 :], header_index + 1):
        words = line.split()
        if words[:1] == ["Legend:"]:
            break
        if words and words[0] in gpus and _is_row(words):
            row_indices.setdefault(words[0], index)
    for name in gpus:
        if name not in row_indices:
            fix = "use the complete output of nvidia-smi topo -m"
            topology_error(header_index, f"has a column {name} without a row", fix)
    return row_indices


def _parse_cells(line: str, line_index: int, name: str, devices: Sequence[str]) -> tuple[list[str], str]:
    """Return the paths in a GPU's row, and the text after them.

    A wide terminal may leave no space between two cells.
    """
    remainder = line.strip("\r\n ")[len(name) :]
    cells = []
    for device in devices:
        match = CELL.match(remainder)
        if match is None or (match[1].startswith("NV") and not GPU.fullmatch(device)):
            word = (remainder.split() or ["nothing"])[0]
            allowed = f"{'X, NV# or ' if GPU.fullmatch(device) else ''}one of {', '.join(PCIE_PATHS)}"
            topology_error(line_index, f"has {word} from {name} to {device}", f"use {allowed}")
        if (match[1] == "X") != (device == name):
            fix = "use X for a device and itself, and only there"
            topology_error(line_index, f"has {match[1]} from {name} to {device}", fix)
        cells.append(match[1].replace("SOC", "SYS"))  # before driver 384
        remainder = remainder[match.end() :]
    return cells, remainder


def _parse_numa_node(remainder: str, header: str) -> int | None:
    """Return the NUMA node at the end of a row, whose CPU affinity may be blank."""
    if "NUMA Affinity" not in header:
        return None
    words = remainder.split()[: -1 if "GPU NUMA ID" in header else None]
    columns = remainder.lstrip(" ").split("\t")
    word = words[1] if len(words) > 1 else columns[2].strip() if len(columns) > 2 else ""
    return int(word) if word.isdecimal() else None
