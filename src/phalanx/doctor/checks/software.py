"""Drivers and libraries of one node and their compatibility.

The comparison of nodes checks whether all nodes have the same versions.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from itertools import takewhile
from typing import Any

from phalanx.doctor.expectations import Expectations
from phalanx.doctor.finding import CheckSkipped, DoctorFinding
from phalanx.doctor.machine import CommandTimeout, Machine
from phalanx.doctor.probes import nvidia_smi, pci, rdma
from phalanx.doctor.probes.text import last_line
from phalanx.doctor.rules import RULES, skip_rules

TORCH_SECONDS = RULES["software.torch"].limit
"""PyTorch's libraries take long to load from a cold network disk."""
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


def check_software(machine: Machine, expected: Expectations) -> Iterator[DoctorFinding]:
    """Check PyTorch and, on nodes with GPUs, the driver."""
    try:
        facts = torch_facts(machine)
    except CommandTimeout:
        yield RULES["software.torch"].violation("torch", f"no answer in {TORCH_SECONDS} s")
        return
    except NotImportedError as error:
        yield RULES["software.torch"].violation("torch", str(error))
        return
    yield RULES["software.torch"].ok(str(facts["torch"]))
    cuda_rules = ("software.cuda", "software.cuda_starts")
    if not pci.nvidia_gpus(machine) and not facts["gpus"]:
        yield from skip_rules("no NVIDIA GPU", *cuda_rules, "software.peer_memory")
        return
    if expected.gpus == 0:
        yield from skip_rules("the run is for CPUs", *cuda_rules)
    else:
        yield from _check_cuda(machine, facts)
    yield _check_peer_memory(machine)


def torch_facts(machine: Machine) -> dict[str, Any]:
    """Return the versions of PyTorch, its CUDA and NCCL, the number of its GPUs, and its CUDA error.

    A child process determines them. Raises NotImportedError if PyTorch cannot be imported; the message is the last line
    of its output. Raises CheckSkipped if the snapshot does not contain the facts. Raises CommandTimeout if the child
    process did not finish in time.
    """
    output = machine.run("torch", sys.executable, "-c", PROBE_PROGRAM, seconds=TORCH_SECONDS)
    if output is None:
        raise CheckSkipped("not recorded")
    line = last_line(output.text)
    try:
        facts = json.loads(line)
        return {name: facts[name] for name in ("torch", "cuda", "nccl", "gpus")} | {"error": facts.get("error")}
    except (ValueError, KeyError, TypeError):
        raise NotImportedError(line or "nothing") from None


def _check_cuda(machine: Machine, facts: dict[str, Any]) -> Iterator[DoctorFinding]:
    visible = machine.environment.get("CUDA_VISIBLE_DEVICES")
    try:
        num_gpus = len(nvidia_smi.query_gpus(machine, "smi_names", "gpu", "index", "name"))
    except CheckSkipped as skipped:
        yield RULES["software.cuda"].skip(str(skipped))
    else:
        expected_gpus = num_gpus
        if visible is not None:
            # GPUs in CUDA_VISIBLE_DEVICES before an invalid one (-1; Slurm's NoDevFiles).
            names = (name.strip() for name in visible.split(","))
            expected_gpus = min(num_gpus, len(list(takewhile(GPU_ID_PATTERN.fullmatch, names))))
        yield from RULES["software.cuda"].check({"torch": int(facts["gpus"])}, limit=expected_gpus)
    if not facts["gpus"]:
        yield RULES["software.cuda_starts"].skip("PyTorch sees no GPU")
        return
    errors = [("torch", str(facts["error"]))] if facts["error"] else []
    yield from RULES["software.cuda_starts"].report(errors, ok="yes")


def _check_peer_memory(machine: Machine) -> DoctorFinding:
    rule = RULES["software.peer_memory"]
    if not rdma.rdma_devices(machine):
        return rule.skip(rdma.NO_DEVICE)
    if "nvidia_peermem" in (machine.read("/proc/modules") or ""):
        return rule.ok("nvidia_peermem")
    if "Open Kernel Module" in (machine.read("/proc/driver/nvidia/version") or ""):
        return rule.ok("dma-buf")
    return rule.violation("nvidia_peermem", "not loaded")
