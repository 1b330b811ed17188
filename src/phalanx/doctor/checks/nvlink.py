"""NVLinks: state, speed and errors, and the fabric manager."""

from __future__ import annotations

import re

from phalanx.doctor.expectations import Expectations
from phalanx.doctor.finding import CheckRule, CheckSkipped, DoctorFinding, check_values, most_common
from phalanx.doctor.machine import Machine
from phalanx.doctor.probes import nvidia_smi, pci

ERROR_THRESHOLD = 5
"""Imbue warns at 5 errors of a link; a few errors since boot are usual."""
MIN_SPEED_RATIO = 0.99
"""Minimum share of the usual speed of a link; reported speeds are rounded."""
ACTIVE = CheckRule(
    id="nvlink.active",
    quantity="inactive links",
    severity="FAIL",
    threshold="none where the GPU has active ones, or there are NVSwitches",
    unit="links",
    source="Imbue (inactive is an error)",
    remedy="drain the node; reset the GPUs, restart the fabric manager, then have {device} reseated",
    command="nvidia-smi nvlink --status",
)
COUNT = CheckRule(
    id="nvlink.count",
    quantity="links of each GPU",
    severity="FAIL",
    threshold="equal to the others",
    unit="links",
    source="OCI (count and speed)",
    remedy="drain the node and have {device} and its baseboard tested",
    command="nvidia-smi nvlink --status; nvidia-smi topo -m",
)
SPEED = CheckRule(
    id="nvlink.speed",
    quantity="slowest link of each GPU",
    severity="FAIL",
    threshold="equal to the others",
    unit="GB/s",
    source="OCI (count and speed)",
    remedy="reset {device}; if the link stays slow, have it replaced",
    command="nvidia-smi nvlink --status",
)
ERRORS_RULE = CheckRule(
    id="nvlink.errors",
    quantity="replay, recovery and CRC errors of a GPU's worst link since the driver was loaded",
    severity="WARN",
    threshold=f"less than {ERROR_THRESHOLD}",
    unit="errors",
    source="Imbue (>= 5 errors warn)",
    remedy="run a benchmark; if the errors increase, have {device} reseated",
    command="nvidia-smi nvlink -e",
)
FABRIC = CheckRule(
    id="nvlink.fabric_manager",
    quantity="nvidia-fabricmanager, on machines with NVSwitches",
    severity="FAIL",
    threshold="active",
    unit="",
    source="NVIDIA, Fabric Manager User Guide",
    remedy="start it in exactly the driver's version: without it CUDA fails on this machine",
    command="systemctl restart nvidia-fabricmanager; journalctl -u nvidia-fabricmanager",
)
RULES = (ACTIVE, COUNT, SPEED, ERRORS_RULE, FABRIC)
LINK_PATTERN = re.compile(r"Link (\d+): (?:(<?inactive>?)|([\d.]+) GB/s)", re.IGNORECASE)
ERROR_PATTERN = re.compile(r"Link (\d+): .*(?:Errors?|Total link recovery events|Tx discards): (\d+)")
"""Recovery events are Blackwell's; their total contains failed and successful ones."""


def check(machine: Machine, _: Expectations) -> list[DoctorFinding]:
    """Check the NVLinks of GPUs, and the fabric manager, without which all links are inactive."""
    fabric = _check_fabric_manager(machine)
    try:
        return [*_check_links(machine), *fabric]
    except CheckSkipped as skipped:
        if fabric[0].severity == "SKIP":
            raise
        return [*(rule.skip(str(skipped)) for rule in RULES if rule is not FABRIC), *fabric]


def _check_links(machine: Machine) -> list[DoctorFinding]:
    status = {
        gpu: LINK_PATTERN.findall("\n".join(lines))
        for gpu, lines in _nvlink_lines(machine, "smi_nvlink", "--status").items()
    }
    speeds = {gpu: [float(speed) for _, down, speed in links if not down] for gpu, links in status.items()}
    if not any(speeds.values()):
        if len(status) < 2 or not pci.pci_devices(machine, pci.BRIDGE, pci.NVIDIA):
            raise CheckSkipped("no NVLink is active, and none is required")
        skipped = (rule.skip("no NVLink is active") for rule in (COUNT, SPEED, ERRORS_RULE))
        return [*(ACTIVE.violation(gpu, "all") for gpu in status), *skipped]
    down = {gpu: sum(bool(off) for _, off, _ in links) for gpu, links in status.items() if speeds[gpu]}
    counts = {gpu: len(links) for gpu, links in status.items()}
    slowest = {gpu: min(link_speeds) for gpu, link_speeds in speeds.items() if link_speeds}
    usual_count = most_common(counts.values())
    usual_speed = most_common(slowest.values()) or 0.0
    return [
        *check_values(ACTIVE, down, lambda count: count > 0),
        *check_values(COUNT, counts, lambda count: count != usual_count, threshold=f"{usual_count}"),
        *check_values(
            SPEED, slowest, lambda speed: speed < MIN_SPEED_RATIO * usual_speed, threshold=f"{usual_speed:g}"
        ),
        *_check_errors(machine),
    ]


def _check_errors(machine: Machine) -> list[DoctorFinding]:
    try:
        return check_values(ERRORS_RULE, worst_errors(machine), lambda count: count >= ERROR_THRESHOLD)
    except CheckSkipped as skipped:
        return [ERRORS_RULE.skip(str(skipped))]


def errors(machine: Machine) -> dict[str, int]:
    """Return the errors of all kinds by link, such as "GPU0 link 3".

    Raises:
        CheckSkipped: nvidia-smi does not report them.
    """
    counts: dict[str, int] = {}
    for gpu, lines in _nvlink_lines(machine, "smi_nvlink_errors", "-e").items():
        for link, count in ERROR_PATTERN.findall("\n".join(lines)):
            counts[f"{gpu} link {link}"] = counts.get(f"{gpu} link {link}", 0) + int(count)
    return counts


def worst_errors(machine: Machine) -> dict[str, int]:
    """Return the errors of each GPU's worst link."""
    worst: dict[str, int] = {}
    for link, count in errors(machine).items():
        gpu = link.partition(" ")[0]
        worst[gpu] = max(worst.get(gpu, 0), count)
    return worst


def _nvlink_lines(machine: Machine, name: str, flag: str) -> dict[str, list[str]]:
    return nvidia_smi.split_by_gpu(nvidia_smi.run_nvidia_smi(machine, name, "nvlink", flag))


def _check_fabric_manager(machine: Machine) -> list[DoctorFinding]:
    if not pci.pci_devices(machine, pci.BRIDGE, pci.NVIDIA):
        return [FABRIC.skip("no NVSwitch")]
    output = machine.run("fabric_manager", "systemctl", "is-active", "nvidia-fabricmanager")
    if output is None or "systemd" in output.text or "bus" in output.text:
        return [FABRIC.skip("systemd does not answer here (in a container?)")]
    return check_values(
        FABRIC, {"nvidia-fabricmanager": nvidia_smi.first_line(output.text)}, lambda state: state != "active"
    )
