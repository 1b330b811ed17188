"""Devices on the PCI bus, from sysfs."""

from __future__ import annotations

from phalanx.doctor.expectations import Expectations
from phalanx.doctor.machine import Machine
from phalanx.doctor.probes.text import first_match

DEVICES = "/sys/bus/pci/devices"
NVIDIA = "0x10de"
GPU = ("0x0300", "0x0302")
BRIDGE = ("0x0680",)
"""Prefixes of class codes (PCI Code and ID Assignment Specification); an NVSwitch is a bridge."""


def nvidia_gpus(machine: Machine) -> list[str]:
    """Return the addresses of NVIDIA's GPUs, such as 0000:1b:00.0."""
    return _find_nvidia_devices(machine, GPU)


def nvswitches(machine: Machine) -> list[str]:
    """Return the addresses of NVSwitches."""
    return _find_nvidia_devices(machine, BRIDGE)


def _find_nvidia_devices(machine: Machine, class_codes: tuple[str, ...]) -> list[str]:
    addresses = []
    for path in machine.glob(f"{DEVICES}/*"):
        class_code = machine.read(f"{path}/class") or ""
        if class_code.startswith(class_codes) and machine.read(f"{path}/vendor") == NVIDIA:
            addresses.append(path.rpartition("/")[2])
    return addresses


def runs_on_cpu(machine: Machine, expected: Expectations) -> bool:
    """Return whether a run uses this machine's CPUs: it requires them, or accepts both and no GPU exists."""
    return expected.gpus == 0 or (expected.gpus is None and not nvidia_gpus(machine))


def upstream_bridge(machine: Machine, address: str) -> str | None:
    """Return the address of the bridge above a device, whose sysfs directory contains the device's."""
    paths = machine.glob(f"{DEVICES}/*/{address}")
    return paths[0].split("/")[-2] if paths else None


def pcie_errors(machine: Machine, address: str) -> int | None:
    """Return the fatal and non-fatal errors since boot, or None if uncounted (virtual machines)."""
    files = (machine.read(f"{DEVICES}/{address}/aer_dev_{kind}") for kind in ("nonfatal", "fatal"))
    totals = [int(total) for text in files if (total := first_match(r"^TOTAL_ERR_\w+ (\d+)", text))]
    return sum(totals) if totals else None


def normalize_pci_address(text: str) -> str:
    """Return an address of nvidia-smi (00000000:1B:00.0) or a driver's log (0000:1b:00) as sysfs has it."""
    domain, _, device_address = text.strip().lower().partition(":")
    return f"{domain[-4:]}:{device_address}" + ("" if "." in device_address else ".0")
