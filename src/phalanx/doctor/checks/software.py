"""Drivers and libraries of one node and their compatibility.

The comparison of nodes checks whether all nodes have the same versions.
"""

from __future__ import annotations

import json
import re
import sys
from itertools import takewhile
from typing import Any

from phalanx.doctor.checks import rdma_ports
from phalanx.doctor.expectations import Expectations
from phalanx.doctor.finding import CheckRule, CheckSkipped, DoctorFinding, check_values
from phalanx.doctor.machine import CommandTimeout, Machine
from phalanx.doctor.probes import nvidia_smi, pci

TORCH_SECONDS = 40
"""PyTorch's libraries take long to load from a cold network disk."""
IMPORTS = CheckRule(
    id="software.torch",
    quantity="PyTorch",
    severity="FAIL",
    threshold=f"is imported within {TORCH_SECONDS} s",
    unit="",
    source="ours",
    remedy="install it, or move the environment to a faster disk",
    command="python -X importtime -c 'import torch'",
)
CUDA = CheckRule(
    id="software.cuda",
    quantity="GPUs that PyTorch can use",
    severity="FAIL",
    threshold="all that nvidia-smi lists, or CUDA_VISIBLE_DEVICES names",
    unit="GPUs",
    source="Primus (torch count = smi count)",
    remedy="install a PyTorch for this driver's CUDA, or a newer driver",
    command="python -c 'import torch; print(torch.version.cuda, torch.cuda.device_count())'",
)
CUDA_STARTS = CheckRule(
    id="software.cuda_starts",
    quantity="a tensor on a GPU, by PyTorch",
    severity="FAIL",
    threshold="is created",
    unit="",
    source="CUDA (errors of its initialization: driver too old, system not yet initialized)",
    remedy="install a PyTorch for this driver's CUDA, or a newer driver; at error 802 start the fabric manager",
    command="python -c 'import torch; torch.zeros(1).cuda()'; nvidia-smi; systemctl status nvidia-fabricmanager",
)
PEER = CheckRule(
    id="software.peer_memory",
    quantity="nvidia_peermem, or dma-buf by the open kernel module",
    severity="WARN",
    threshold="one of them is available",
    unit="",
    source="NVIDIA, GPUDirect RDMA",
    remedy="load it; otherwise RDMA goes through host memory",
    command="modprobe nvidia_peermem",
)
RULES = (IMPORTS, CUDA, CUDA_STARTS, PEER)
GPU_ID_PATTERN = re.compile(r"\d+|(GPU|MIG)-\S+")
PROBE_PROGRAM = """
import json, torch
gpus, error = torch.cuda.device_count(), None  # by the driver: CUDA itself need not work
try:
    torch.zeros(1).cuda() if gpus else None
except Exception as raised:
    error = f"{type(raised).__name__}: {raised}".splitlines()[0]
nccl = torch.cuda.nccl.version() if torch.cuda.is_available() else ()
known = {"torch": torch.__version__, "cuda": torch.version.cuda, "gpus": gpus, "error": error}
print(json.dumps(known | {"nccl": ".".join(map(str, nccl)) or None}))
"""


class NotImportedError(Exception):
    """Failure to import PyTorch, with the last line of its output."""


def check(machine: Machine, expected: Expectations) -> list[DoctorFinding]:
    """Check PyTorch and, on nodes with GPUs, the driver."""
    try:
        facts = torch_facts(machine)
    except CommandTimeout:
        return [IMPORTS.violation("torch", f"no answer in {TORCH_SECONDS} s")]
    except NotImportedError as error:
        return [IMPORTS.violation("torch", str(error))]
    imported = IMPORTS.ok(str(facts["torch"]))
    if not pci.pci_devices(machine, pci.GPU, pci.NVIDIA) and not facts["gpus"]:
        return [imported, *(rule.skip("no NVIDIA GPU") for rule in (CUDA, CUDA_STARTS, PEER))]
    if expected.gpus == 0:
        cuda_findings = [rule.skip("the run is for CPUs") for rule in (CUDA, CUDA_STARTS)]
    else:
        cuda_findings = [*_check_cuda(machine, facts), _check_cuda_starts(facts)]
    return [imported, *cuda_findings, *_check_peer_memory(machine)]


def torch_facts(machine: Machine) -> dict[str, Any]:
    """Return the versions of PyTorch, its CUDA and NCCL, the number of its GPUs, and its CUDA error.

    A child process determines them.

    Raises:
        NotImportedError: PyTorch cannot be imported; the message is the last line of its output.
        CheckSkipped: The snapshot does not contain the facts.
        CommandTimeout: The child process did not finish in time.
    """
    output = machine.run("torch", sys.executable, "-c", PROBE_PROGRAM, seconds=TORCH_SECONDS)
    if output is None:
        raise CheckSkipped("not recorded")
    line = output.text.strip().rpartition("\n")[2]
    try:
        facts = json.loads(line)
        return {name: facts[name] for name in ("torch", "cuda", "nccl", "gpus")} | {"error": facts.get("error")}
    except (ValueError, KeyError, TypeError):
        raise NotImportedError(line or "nothing") from None


def _check_cuda(machine: Machine, facts: dict[str, Any]) -> list[DoctorFinding]:
    visible = machine.environment.get("CUDA_VISIBLE_DEVICES")
    try:
        num_gpus = len(nvidia_smi.query_gpus(machine, "smi_names", "gpu", "index", "name"))
    except CheckSkipped as skipped:
        return [CUDA.skip(str(skipped))]
    expected_gpus = num_gpus if visible is None else min(num_gpus, _count_visible(visible))
    return check_values(
        CUDA, {"torch": int(facts["gpus"])}, lambda count: count < expected_gpus, threshold=f"{expected_gpus}"
    )


def _check_cuda_starts(facts: dict[str, Any]) -> DoctorFinding:
    if not facts["gpus"]:
        return CUDA_STARTS.skip("PyTorch sees no GPU")
    return CUDA_STARTS.violation("torch", str(facts["error"])) if facts["error"] else CUDA_STARTS.ok("yes")


def _count_visible(listed: str) -> int:
    """Return the number of GPUs in CUDA_VISIBLE_DEVICES before an invalid one (-1; Slurm's NoDevFiles)."""
    return len(list(takewhile(GPU_ID_PATTERN.fullmatch, (name.strip() for name in listed.split(",")))))


def _check_peer_memory(machine: Machine) -> list[DoctorFinding]:
    if not rdma_ports.rdma_devices(machine):
        return [PEER.skip(rdma_ports.NO_DEVICE)]
    opened = "Open Kernel Module" in (machine.read("/proc/driver/nvidia/version") or "")
    loaded = "nvidia_peermem" in (machine.read("/proc/modules") or "")
    return (
        [PEER.ok("nvidia_peermem" if loaded else "dma-buf")]
        if loaded or opened
        else [PEER.violation("nvidia_peermem", "not loaded")]
    )
