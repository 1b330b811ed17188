"""Devices on the PCI bus, from sysfs."""

from __future__ import annotations

from phalanx.doctor.expectations import Expectations
from phalanx.doctor.machine import Machine

DEVICES = "/sys/bus/pci/devices"
NVIDIA = "0x10de"
GPU = ("0x0300", "0x0302")
BRIDGE = ("0x0680",)
"""Prefixes of class codes (PCI Code and ID Assignment Specification); an NVSwitch is a bridge."""


def pci_devices(machine: Machine, class_codes: tuple[str, ...], vendor: str | None = None) -> list[str]:
    """Return the addresses of the devices of some classes, such as 0000:1b:00.0.

    Args:
        machine: The machine.
        class_codes: Prefixes of class codes.
        vendor: The vendor's id; None for all vendors.
    """
    addresses = []
    for path in machine.glob(f"{DEVICES}/*"):
        kind = machine.read(f"{path}/class") or ""
        if kind.startswith(class_codes) and vendor in (None, machine.read(f"{path}/vendor")):
            addresses.append(path.rpartition("/")[2])
    return addresses


def runs_on_cpu(machine: Machine, expected: Expectations) -> bool:
    """Return whether a run uses this machine's CPUs: it requires them, or accepts both and no GPU exists."""
    return expected.gpus == 0 or (expected.gpus is None and not pci_devices(machine, GPU, NVIDIA))


def upstream_bridge(machine: Machine, address: str) -> str | None:
    """Return the address of the bridge above a device, whose sysfs directory contains the device's."""
    paths = machine.glob(f"{DEVICES}/*/{address}")
    return paths[0].split("/")[-2] if paths else None


def normalize_pci_address(text: str) -> str:
    """Return an address of nvidia-smi (00000000:1B:00.0) or a driver's log (0000:1b:00) as sysfs has it."""
    domain, _, rest = text.strip().lower().partition(":")
    return f"{domain[-4:]}:{rest}" + ("" if "." in rest else ".0")
