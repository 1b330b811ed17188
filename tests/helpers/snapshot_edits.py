"""Edits of a machine's snapshot: faults, and states that are common on other machines."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

SnapshotEdit = Callable[[Path], None]


def replace_text(path: str, old: str, new: str, count: int = 1) -> SnapshotEdit:
    """Replace a text in a file, in which it must occur this many times."""

    def plant(root: Path) -> None:
        text = (root / path).read_text()
        assert old in text
        (root / path).write_text(text.replace(old, new, count))

    return plant


def overwrite_file(path: str, text: str) -> SnapshotEdit:
    """Replace the content of a file."""

    def plant(root: Path) -> None:
        assert (root / path).exists()
        (root / path).write_text(text + "\n")

    return plant


def append_line(path: str, line: str) -> SnapshotEdit:
    """Append a line to a file."""

    def plant(root: Path) -> None:
        text = (root / path).read_text()
        (root / path).write_text(f"{text}{line}\n")

    return plant


def create_file(path: str, text: str) -> SnapshotEdit:
    """Create a file that does not exist."""

    def plant(root: Path) -> None:
        assert not (root / path).exists()
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text + "\n")

    return plant


def delete_paths(pattern: str) -> SnapshotEdit:
    """Delete files or directories."""

    def plant(root: Path) -> None:
        paths = list(root.glob(pattern))
        assert paths
        for path in paths:
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    return plant


def limit_gpu_rows(query: str, gpus: int) -> SnapshotEdit:
    """Keep only the first GPUs in an output of nvidia-smi."""

    def plant(root: Path) -> None:
        path = root / f"commands/smi_{query}.txt"
        path.write_text("\n".join(path.read_text().splitlines()[: gpus + 1]) + "\n")

    return plant


def combine_edits(*plants: SnapshotEdit) -> SnapshotEdit:
    def plant(root: Path) -> None:
        for edit in plants:
            edit(root)

    return plant


def edit_gpu_row(query: str, gpu: int, old: str, new: str) -> SnapshotEdit:
    """Change the row of one GPU in an output of nvidia-smi."""

    def plant(root: Path) -> None:
        path = root / f"commands/smi_{query}.txt"
        lines = path.read_text().splitlines()
        assert old in lines[gpu + 1]
        lines[gpu + 1] = lines[gpu + 1].replace(old, new, 1)
        path.write_text("\n".join(lines) + "\n")

    return plant


def remove_gpu(gpu: int) -> SnapshotEdit:
    """Remove a GPU from nvidia-smi and PyTorch."""

    def plant(root: Path) -> None:
        for path in (root / "commands").glob("smi_*.txt"):
            lines = path.read_text().splitlines()
            if path.stem in ("smi_identity", "smi_state", "smi_ecc", "smi_remapped", "smi_names"):
                path.write_text("\n".join(lines[: gpu + 1] + lines[gpu + 2 :]) + "\n")
        facts = json.loads((root / "commands/torch.txt").read_text())
        (root / "commands/torch.txt").write_text(json.dumps(facts | {"gpus": 7}))

    return plant


def append_xid(number: int) -> SnapshotEdit:
    return append_line(
        "commands/kernel_log.txt", f"NVRM: Xid (PCI:0000:52:00): {number}, pid=4021, name=python, Ch 00000008"
    )


def set_pci_attribute(address: str, name: str, value: str) -> SnapshotEdit:
    return overwrite_file(f"sys/bus/pci/devices/{address}/{name}", value)


def add_upstream_port(address: str, speed: str, width: str = "16") -> SnapshotEdit:
    """Add the port of a PCIe switch above a device."""
    above = f"sys/bus/pci/devices/{address.replace(':00.0', ':1f.0')}"
    return combine_edits(
        create_file(f"{above}/class", "0x060400"),
        create_file(f"{above}/max_link_speed", speed),
        create_file(f"{above}/max_link_width", width),
        create_file(f"{above}/{address}/class", ""),
    )


def set_rdma_port(number: int, name: str, value: str) -> SnapshotEdit:
    return overwrite_file(f"sys/class/infiniband/mlx5_{number}/ports/1/{name}", value)


def set_variable(name: str, value: str) -> SnapshotEdit:
    """Set an environment variable."""

    def plant(root: Path) -> None:
        lines = (root / "environment").read_text().splitlines()
        other_lines = [line for line in lines if not line.startswith(f"{name}=")]
        (root / "environment").write_text("\n".join([*other_lines, f"{name}={value}"]) + "\n")

    return plant


def append_to_nvidia_smi_outputs(line: str) -> SnapshotEdit:
    """Append a line to all outputs of nvidia-smi."""

    def plant(root: Path) -> None:
        for path in (root / "commands").glob("smi_*.txt"):
            append_line(str(path.relative_to(root)), line)(root)

    return plant


def unset_variable(name: str) -> SnapshotEdit:
    """Remove an environment variable."""
    return replace_text("environment", f"{name}=", f"NOT_{name}=")


def edit_all_nics(plant: Callable[[int], SnapshotEdit]) -> SnapshotEdit:
    return combine_edits(*(plant(card) for card in range(8)))
