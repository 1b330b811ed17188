"""NVIDIA GPUs: their number, response, free memory, settings and ECC errors."""

from __future__ import annotations

from collections.abc import Iterator

from phalanx.doctor.expectations import Expectations
from phalanx.doctor.finding import CheckSkipped, DoctorFinding, most_common
from phalanx.doctor.machine import CommandTimeout, Machine
from phalanx.doctor.probes import nvidia_smi, pci
from phalanx.doctor.probes.text import first_line
from phalanx.doctor.rules import RULES, skip_rules
from phalanx.runs.throttle_reasons import HARDWARE_SLOWDOWNS
from phalanx.spec.formatting import MIB

SLOWDOWN_FIELDS = tuple(f"clocks_throttle_reasons.{reason}" for reason in HARDWARE_SLOWDOWNS)
IDENTITY_FIELDS = ("index", "name", "pci.bus_id", "memory.total", "memory.used", "driver_version", "vbios_version")
STATE_FIELDS = (
    "index",
    "persistence_mode",
    "mig.mode.current",
    "compute_mode",
    "power.limit",
    "power.default_limit",
    *SLOWDOWN_FIELDS,
)
CORRECTED_ECC_FIELD = "ecc.errors.corrected.volatile.total"


def check_gpus(machine: Machine, expected: Expectations) -> Iterator[DoctorFinding]:
    """Check number, response, free memory and settings of GPUs.

    Raises CheckSkipped if the machine has no NVIDIA GPU, and the run needs none.
    """
    devices = pci.nvidia_gpus(machine)
    if not devices and not expected.gpus:
        # Under WSL, GPUs are on no bus. Machines without GPUs may have the driver too.
        output = machine.run("smi_list", "nvidia-smi", "-L")
        if output is None or output.code not in nvidia_smi.SUCCESS_CODES or "GPU " not in output.text:
            raise CheckSkipped("no NVIDIA GPU")
    text, problem = _query_identity(machine)
    if problem and expected.gpus == 0:
        raise CheckSkipped(f"nvidia-smi: {problem}; the run is for CPUs")
    if problem:
        yield RULES["gpu.answers"].violation("", problem)
        return
    all_rows = nvidia_smi.parse_csv(text, IDENTITY_FIELDS)
    rows = _select_visible_gpus(machine, all_rows)
    yield from RULES["gpu.answers"].report(nvidia_smi.unresponsive_gpus(rows).items(), ok="yes")
    num_gpus = max(expected.gpus or 0, _count_expected_gpus(machine, devices))
    yield from RULES["gpu.count"].check(len(all_rows), limit=num_gpus)
    models = nvidia_smi.text_field(rows, "name")
    yield from RULES["gpu.model"].check(models, limit=most_common(models.values()))
    total = nvidia_smi.numeric_field(rows, "memory.total")
    used = nvidia_smi.numeric_field(rows, "memory.used")
    yield from RULES["gpu.busy"].check(used)
    needed_mib = 0 if expected.gpus == 0 else (expected.rank_bytes or 0) / MIB
    if needed_mib:
        free = {gpu: total[gpu] - used[gpu] for gpu in total if gpu in used}
        yield from RULES["gpu.headroom"].check(free, limit=needed_mib)
    names = {pci.normalize_pci_address(row.get("pci.bus_id", "")): gpu for gpu, row in all_rows.items()}
    corrupted = map(pci.normalize_pci_address, nvidia_smi.CORRUPTED_PATTERN.findall(text))
    corrupted_gpus = ((names.get(address, address), "corrupted") for address in corrupted)
    yield from RULES["gpu.inforom"].report(corrupted_gpus, ok="not corrupted")
    yield from _check_gpu_settings(machine)


def _select_visible_gpus(machine: Machine, rows: dict[str, nvidia_smi.Row]) -> dict[str, nvidia_smi.Row]:
    """Return the rows of the GPUs in CUDA_VISIBLE_DEVICES; all if it lists other names than indices."""
    visible = machine.environment.get("CUDA_VISIBLE_DEVICES")
    names = [name.strip() for name in (visible or "").split(",")]
    if visible is None or not all(name.lstrip("-").isdecimal() for name in names):
        return rows
    return {gpu: row for gpu, row in rows.items() if gpu.removeprefix("GPU") in names}


def _count_expected_gpus(machine: Machine, devices: list[str]) -> int:
    """Return the number of GPUs on the bus that this process should see.

    A container has the device files of its own GPUs only, but sees the whole bus. Slurm sets the number of a job's
    GPUs. A GPU without a driver has no device file, but counts.
    """
    files = len(machine.glob("/dev/nvidia[0-9]*")) or len(devices)
    allocated = machine.environment.get("SLURM_GPUS_ON_NODE", "")
    without_driver = sum(not machine.glob(f"{pci.DEVICES}/{address}/driver") for address in devices)
    return min(len(devices), without_driver + (min(files, int(allocated)) if allocated.isdecimal() else files))


def _query_identity(machine: Machine) -> tuple[str, str]:
    """Return the table of nvidia-smi, and why it has none."""
    query = f"--query-gpu={','.join(IDENTITY_FIELDS)}"
    seconds = RULES["gpu.answers"].limit
    try:
        output = machine.run("smi_identity", "nvidia-smi", query, "--format=csv,nounits", seconds=seconds)
    except CommandTimeout:
        return "", f"no answer in {seconds} s"
    if output is None:
        return "", "not installed"
    is_table = output.code in nvidia_smi.SUCCESS_CODES and "," in output.text
    return output.text, "" if is_table else first_line(output.text)


def _check_gpu_settings(machine: Machine) -> Iterator[DoctorFinding]:
    try:
        rows = _select_visible_gpus(machine, nvidia_smi.query_gpus(machine, "smi_state", "gpu", *STATE_FIELDS))
    except CheckSkipped as skipped:
        ids = ("gpu.persistence", "gpu.mig", "gpu.compute_mode", "gpu.power_limit", "gpu.slowdown")
        yield from skip_rules(str(skipped), *ids)
        return
    yield from RULES["gpu.persistence"].check(nvidia_smi.text_field(rows, "persistence_mode"))
    yield from RULES["gpu.mig"].check(nvidia_smi.text_field(rows, "mig.mode.current"))
    yield from RULES["gpu.compute_mode"].check(nvidia_smi.text_field(rows, "compute_mode"))
    default_limits = nvidia_smi.numeric_field(rows, "power.default_limit")
    yield from RULES["gpu.power_limit"].check(nvidia_smi.numeric_field(rows, "power.limit"), limit=default_limits)
    slow = {
        gpu: " ".join(nvidia_smi.text_field({gpu: row}, field).get(gpu, "") for field in SLOWDOWN_FIELDS)
        for gpu, row in rows.items()
    }
    yield from RULES["gpu.slowdown"].check({gpu: reasons for gpu, reasons in slow.items() if reasons.strip()})


def check_ecc(machine: Machine, _: Expectations) -> Iterator[DoctorFinding]:
    """Check the ECC counters and the state of row remapping, which GPUs since Ampere have."""
    uncorrected = nvidia_smi.UNCORRECTED_ECC_FIELD
    rows = nvidia_smi.query_gpus(machine, "smi_ecc", "gpu", "index", CORRECTED_ECC_FIELD, uncorrected)
    yield from RULES["ecc.uncorrected"].check(nvidia_smi.numeric_field(rows, uncorrected))
    yield from RULES["ecc.corrected"].check(nvidia_smi.numeric_field(rows, CORRECTED_ECC_FIELD))
    pending = "remapped_rows.pending"
    failure = "remapped_rows.failure"
    try:
        rows = nvidia_smi.query_gpus(machine, "smi_remapped", "remapped-rows", "gpu_bus_id", pending, failure)
    except CheckSkipped as skipped:
        yield from skip_rules(str(skipped), "ecc.remap_pending", "ecc.remap_failed")
        return
    yield from RULES["ecc.remap_pending"].check(nvidia_smi.text_field(rows, pending))
    yield from RULES["ecc.remap_failed"].check(nvidia_smi.text_field(rows, failure))
