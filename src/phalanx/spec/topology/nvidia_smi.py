"""The matrix that `nvidia-smi topo -m` prints, read by the legend below it."""

from __future__ import annotations

import re
from collections.abc import Sequence

from phalanx.spec.errors import UserError
from phalanx.spec.topology.node import PATHS, NodeTopology, join_words, topology_error

NVLINKS = 18
"""Most NVLinks that a GPU has (Hopper, Blackwell)."""
ESCAPE = re.compile(r"\x1b?\[[0-9;]*m")
CELL = re.compile(r"\s*(NV\d+|NODE|SYS|SOC|PHB|PXB|PIX|X)")
DEVICE = re.compile(r"GPU\d+|NIC\d+|\S+")
GPU = re.compile(r"GPU\d+")


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
        topology_error(head, "names a device twice", "give it as nvidia-smi topo -m prints it")
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
        numa_nodes=tuple(numa),
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
            topology_error(head, f"names {name}, which has no row", "give all of what nvidia-smi topo -m prints")
    return found


def _cells(line: str, number: int, name: str, devices: Sequence[str]) -> tuple[list[str], str]:
    """The ways of a GPU's row, and what follows them. A wide terminal may leave no space between two."""
    rest, cells = line.strip("\r\n ")[len(name) :], []
    for device in devices:
        match = CELL.match(rest)
        if match is None or (match[1].startswith("NV") and not GPU.fullmatch(device)):
            word = (rest.split() or ["nothing"])[0]
            allowed = (
                f"X, NV# or one of {join_words(PATHS)}" if GPU.fullmatch(device) else f"one of {join_words(PATHS)}"
            )
            topology_error(number, f"{name} to {device} is {word}", f"it must be {allowed}")
        own = match[1] == "X"
        if own != (device == name):
            topology_error(
                number, f"{name} to {device} is {match[1]}", "X is for a device and itself, and nothing else is"
            )
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
                topology_error(numbers[one], problem, "give it as nvidia-smi topo -m prints it")
