"""A log of NCCL (NCCL_DEBUG=INFO): the network that it selected, and its warnings."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from phalanx.doctor.checks import rdma_ports
from phalanx.doctor.expectations import Expectations
from phalanx.doctor.finding import CheckRule, CheckSkipped, DoctorFinding, check_values, most_common
from phalanx.doctor.machine import Machine

SOCKETS = CheckRule(
    id="nccl.fallback",
    quantity="network that NCCL selected",
    severity="FAIL",
    threshold="not sockets, on machines with RDMA devices",
    unit="",
    source="NCCL (NET/IB to NET/Socket)",
    remedy="find out why RDMA failed: NCCL_IB_HCA, memlock, /dev/infiniband in the container, the lines before "
    "it in the log",
    command="grep -e NET/ -e WARN LOG; NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,NET",
)
DIRECT = CheckRule(
    id="nccl.gdr",
    quantity="channels over the network without GPUDirect RDMA",
    severity="WARN",
    threshold="0",
    unit="channels",
    source="NCCL (via NET/IB/0/GDRDMA)",
    remedy="load nvidia_peermem, or use a kernel and driver with dma-buf; check the path from GPU to card",
    command="modprobe nvidia_peermem; grep 'via NET' LOG",
)
WARNINGS = CheckRule(
    id="nccl.warnings",
    quantity="warnings",
    severity="WARN",
    threshold="none",
    unit="",
    source="NCCL (NCCL WARN)",
    remedy="read NCCL's warnings",
    command="grep 'NCCL WARN' LOG",
)
VERSION = CheckRule(
    id="nccl.version",
    quantity="NCCL version of each host",
    severity="FAIL",
    threshold="equal",
    unit="",
    source="NCCL (ranks of one communicator need one version)",
    remedy="install the same PyTorch on {device}",
    command="python -c 'import torch; print(torch.cuda.nccl.version())'",
)
RULES = (SOCKETS, DIRECT, WARNINGS, VERSION)
LINE_PATTERN = re.compile(r"^(?:.*?[\s:])??([\w.-]+):\d+:\d+ \[\d+\] (?:\S+:\d+ )?NCCL (INFO|WARN) (.*)$")
"""Format of a line: host:pid:tid [device] NCCL INFO ... (NCCL's src/debug.cc).

Warnings also have their source line. Launchers write a prefix: "0: " (srun), "[default0]:" (torchrun), "[1,0]<stdout>:"
(mpirun).
"""
VERSION_PATTERN = re.compile(r"(?:^|[\s:\]>])NCCL version (\S+)")
TIMESTAMP_PREFIX = re.compile(r"^\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(?:\.\d+)?\]\s*")


def check(machine: Machine, expected: Expectations) -> list[DoctorFinding]:
    """Check the given log, or the one that NCCL_DEBUG_FILE names without a pattern."""
    path = expected.nccl_log or machine.environment.get("NCCL_DEBUG_FILE", "")
    if not path:
        raise CheckSkipped("no log: give --nccl-log FILE, of a run with NCCL_DEBUG=INFO")
    text = machine.read(path if machine.root else str(Path(path).absolute()))
    if text is None:
        raise CheckSkipped(f"{path} cannot be read")
    return log_findings(text, bool(rdma_ports.rdma_devices(machine)))


def log_findings(text: str, rdma: bool) -> list[DoctorFinding]:
    """Return the findings of a log.

    Args:
        text: The content of the log.
        rdma: Whether the machine has RDMA devices.
    """
    log_lines = [TIMESTAMP_PREFIX.sub("", line) for line in text.splitlines()]
    lines = [(match[1], match[2], match[3]) for match in map(LINE_PATTERN.match, log_lines) if match]
    if not lines:
        raise CheckSkipped("no line of NCCL in the log")
    rdma_channels = [message for _, _, message in lines if "via NET/" in message and "/Socket" not in message]
    warnings = {host: message for host, level, message in lines if level == "WARN"}
    indirect = sum("GDRDMA" not in message for message in rdma_channels)
    return [
        *_fallback_findings(lines, rdma),
        *(
            check_values(DIRECT, {"": indirect}, lambda count: count > 0)
            if rdma_channels
            else [DIRECT.skip("no channel over RDMA")]
        ),
        *(
            [WARNINGS.violation(host, message, host=host) for host, message in warnings.items()]
            or [WARNINGS.ok("none")]
        ),
        *_version_findings(log_lines),
    ]


def _fallback_findings(lines: Sequence[tuple[str, str, str]], rdma: bool) -> list[DoctorFinding]:
    """Return the hosts that selected sockets, if RDMA devices exist or others selected another network."""
    choices = [(host, message.rpartition(" ")[2]) for host, _, message in lines if message.startswith("Using network ")]
    networks = {network for _, network in choices}
    socket_hosts = dict.fromkeys(host for host, network in choices if network == "Socket")
    no_card = any("NET/IB : No device found" in message for _, _, message in lines)
    measured = "Socket" + (" (NET/IB : No device found)" if no_card else "")
    fallback = (
        [SOCKETS.violation(host, measured, host=host) for host in socket_hosts] if rdma or len(networks) > 1 else []
    )
    return fallback or [SOCKETS.ok(", ".join(sorted(networks)) or "unknown")]


def _version_findings(lines: Sequence[str]) -> list[DoctorFinding]:
    """Return the versions that differ from that of most lines; lines of NCCL up to 2.2x name no host."""
    versions = []
    for line in lines:
        version_match = VERSION_PATTERN.search(line)
        if version_match is not None:
            line_match = LINE_PATTERN.match(line)
            versions.append((line_match[1] if line_match else "", version_match[1]))
    hosts = set(versions)
    majority = most_common(version for _, version in versions) or ""
    other = [
        VERSION.violation(host, version, majority, host=host) for host, version in sorted(hosts) if version != majority
    ]
    return other or check_values(VERSION, dict(hosts), lambda _: False)
