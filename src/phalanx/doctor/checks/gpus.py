"""GPUs: their number, response, free memory, and settings."""

from __future__ import annotations

from phalanx.doctor.expectations import Expectations
from phalanx.doctor.finding import CheckRule, CheckSkipped, DoctorFinding, check_values, most_common
from phalanx.doctor.machine import COMMAND_SECONDS, CommandTimeout, Machine
from phalanx.doctor.probes import nvidia_smi, pci
from phalanx.runs.throttle_reasons import HARDWARE_SLOWDOWNS
from phalanx.spec.formatting import MIB

BUSY_MIB = 2048
"""Primus: HBM in use of 2 GiB and more before a run."""
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
ANSWERS = CheckRule(
    id="gpu.answers",
    quantity="nvidia-smi",
    severity="FAIL",
    threshold=f"answers within {COMMAND_SECONDS} s",
    unit="",
    source="Primus (smi latency > 5 s fails)",
    remedy="drain the node and reboot it; if nvidia-smi still hangs or fails, reinstall the driver or replace the GPU",
    command="nvidia-smi; dmesg | grep -i -e nvrm -e xid",
)
COUNT = CheckRule(
    id="gpu.count",
    quantity="GPUs that nvidia-smi lists",
    severity="FAIL",
    threshold="at least the number of the run, and of this process's GPUs on the bus",
    unit="GPUs",
    source="AZNHC, GCM (manifest)",
    remedy="drain the node: a GPU is lost; reboot, then have it reseated or replaced",
    command="nvidia-smi -L; lspci -d 10de:; dmesg | grep -i 'fallen off the bus'",
)
MODEL = CheckRule(
    id="gpu.model",
    quantity="name of each GPU",
    severity="WARN",
    threshold="equal to the others",
    unit="",
    source="Primus (drift against the majority)",
    remedy="use nodes with GPUs of one model: the slowest one limits the run",
    command="nvidia-smi -L",
)
BUSY = CheckRule(
    id="gpu.busy",
    quantity="memory in use",
    severity="WARN",
    threshold=f"less than {BUSY_MIB}",
    unit="MiB",
    source="Primus (HBM busy >= 2 GiB)",
    remedy="stop the processes that an earlier job left on {device}",
    command="nvidia-smi --query-compute-apps=gpu_bus_id,pid,name,used_memory --format=csv",
)
HEADROOM = CheckRule(
    id="gpu.headroom",
    quantity="free memory",
    severity="FAIL",
    threshold="at least the need of the run's largest rank",
    unit="MiB",
    source="the run (`phalanx memory`)",
    remedy="free memory of {device}, or choose a layout that needs less: phalanx advise oom RUN.toml",
    command="phalanx memory RUN.toml; nvidia-smi",
)
PERSISTENCE = CheckRule(
    id="gpu.persistence",
    quantity="persistence mode",
    severity="WARN",
    threshold="Enabled",
    unit="",
    source="NVIDIA, Driver Persistence",
    remedy="keep the driver loaded; otherwise each first use takes seconds",
    command="systemctl enable --now nvidia-persistenced",
)
MIG = CheckRule(
    id="gpu.mig",
    quantity="MIG mode",
    severity="FAIL",
    threshold="Disabled",
    unit="",
    source="NVIDIA, MIG User Guide (no P2P between instances)",
    remedy="switch MIG off on {device} when no process uses its instances",
    command="nvidia-smi -i {gpu} -mig 0",
)
COMPUTE = CheckRule(
    id="gpu.compute_mode",
    quantity="compute mode",
    severity="FAIL",
    threshold="not Prohibited",
    unit="",
    source="nvidia-smi manual (no process may use the GPU)",
    remedy="allow processes on {device}",
    command="nvidia-smi -i {gpu} -c DEFAULT",
)
POWER = CheckRule(
    id="gpu.power_limit",
    quantity="power limit",
    severity="WARN",
    threshold="at least the default",
    unit="W",
    source="DCGM diag (target_power, H100 700 W)",
    remedy="raise the power limit of {device}",
    command="nvidia-smi -i {gpu} -pl DEFAULT_WATTS",
)
SLOWDOWN = CheckRule(
    id="gpu.slowdown",
    quantity="slowdown by heat or by the power supply",
    severity="FAIL",
    threshold="Not Active",
    unit="",
    source="NVML, clocks event reasons (HW thermal slowdown, HW power brake)",
    remedy="fix cooling or power of {device}, and drain the node until then",
    command="nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER",
)
INFOROM = CheckRule(
    id="gpu.inforom",
    quantity="infoROM of each GPU",
    severity="WARN",
    threshold="not corrupted",
    unit="",
    source="nvidia-smi manual (return code 14); DCGM (health watch of the infoROM)",
    remedy="have {device} inspected at the next maintenance: its ECC history is lost, and settings do not persist",
    command="nvidia-smi -q -i {gpu}; nvidia-bug-report.sh",
)
RULES = (ANSWERS, COUNT, MODEL, BUSY, HEADROOM, INFOROM, PERSISTENCE, MIG, COMPUTE, POWER, SLOWDOWN)


def check(machine: Machine, expected: Expectations) -> list[DoctorFinding]:
    """Check the NVIDIA GPUs of a machine.

    Raises:
        CheckSkipped: The machine has no NVIDIA GPU, and the run needs none.
    """
    devices = pci.pci_devices(machine, pci.GPU, pci.NVIDIA)
    if not devices and not expected.gpus and not _has_gpus(machine):
        raise CheckSkipped("no NVIDIA GPU")
    identity = _query_identity(machine)
    if isinstance(identity, DoctorFinding):
        if expected.gpus == 0:
            raise CheckSkipped(f"nvidia-smi: {identity.measured}; the run is for CPUs")
        return [identity]
    all_rows = nvidia_smi.parse_csv(identity, IDENTITY_FIELDS)
    rows = {gpu: row for gpu, row in all_rows.items() if _is_visible(machine, gpu)}
    expected_count = max(expected.gpus or 0, _expected_gpu_count(machine, devices))
    needed_mib = 0 if expected.gpus == 0 else (expected.rank_bytes or 0) / MIB
    total = nvidia_smi.numeric_field(rows, "memory.total")
    used = nvidia_smi.numeric_field(rows, "memory.used")
    free = {gpu: total[gpu] - used[gpu] for gpu in total if gpu in used}
    models = nvidia_smi.text_field(rows, "name")
    return [
        *(
            [ANSWERS.violation(gpu, value) for gpu, value in nvidia_smi.unresponsive_gpus(rows).items()]
            or [ANSWERS.ok("yes")]
        ),
        *check_values(COUNT, {"": len(all_rows)}, lambda count: count < expected_count, threshold=f"{expected_count}"),
        *check_values(
            MODEL,
            models,
            lambda name: name != most_common(models.values()),
            threshold=most_common(models.values()) or "",
        ),
        *check_values(BUSY, used, lambda mib: mib >= BUSY_MIB),
        *(
            check_values(HEADROOM, free, lambda mib: mib < needed_mib, threshold=f"at least {needed_mib:.0f}")
            if needed_mib
            else ()
        ),
        *_check_inforom(identity, all_rows),
        *_check_state(machine),
    ]


def _has_gpus(machine: Machine) -> bool:
    """Return whether nvidia-smi lists GPUs.

    Under WSL, GPUs are on no bus. Machines without GPUs may have the driver too.
    """
    output = machine.run("smi_list", "nvidia-smi", "-L")
    return output is not None and output.code in nvidia_smi.SUCCESS_CODES and "GPU " in output.text


def _is_visible(machine: Machine, gpu: str) -> bool:
    """Return whether CUDA_VISIBLE_DEVICES contains a GPU; true if it lists other names than indices."""
    names = [name.strip() for name in machine.environment.get("CUDA_VISIBLE_DEVICES", gpu).split(",")]
    by_number = all(name.lstrip("-").isdecimal() for name in names)
    return gpu.removeprefix("GPU") in names if by_number else True


def _expected_gpu_count(machine: Machine, devices: list[str]) -> int:
    """Return the number of GPUs on the bus that this process should see.

    A container has the device files of its own GPUs only, but sees the whole bus. Slurm sets the number of a job's
    GPUs. A GPU without a driver has no device file, but counts.
    """
    files = len(machine.glob("/dev/nvidia[0-9]*")) or len(devices)
    allocated = machine.environment.get("SLURM_GPUS_ON_NODE", "")
    without_driver = sum(not machine.glob(f"{pci.DEVICES}/{address}/driver") for address in devices)
    return min(len(devices), without_driver + (min(files, int(allocated)) if allocated.isdecimal() else files))


def _query_identity(machine: Machine) -> str | DoctorFinding:
    fields = ",".join(IDENTITY_FIELDS)
    try:
        output = machine.run("smi_identity", "nvidia-smi", f"--query-gpu={fields}", "--format=csv,nounits")
    except CommandTimeout:
        return ANSWERS.violation("", f"no answer in {COMMAND_SECONDS} s")
    if output is None:
        return ANSWERS.violation("", "not installed")
    if output.code not in nvidia_smi.SUCCESS_CODES or "," not in output.text:
        return ANSWERS.violation("", nvidia_smi.first_line(output.text))
    return output.text


def _check_inforom(output: str, rows: dict[str, nvidia_smi.Row]) -> list[DoctorFinding]:
    names = {pci.normalize_pci_address(row.get("pci.bus_id", "")): gpu for gpu, row in rows.items()}
    corrupted = map(pci.normalize_pci_address, nvidia_smi.CORRUPTED_PATTERN.findall(output))
    return [INFOROM.violation(names.get(address, address), "corrupted") for address in corrupted] or [
        INFOROM.ok("not corrupted")
    ]


def _check_state(machine: Machine) -> list[DoctorFinding]:
    try:
        all_rows = nvidia_smi.query_gpus(machine, "smi_state", "gpu", *STATE_FIELDS)
    except CheckSkipped as skipped:
        return [rule.skip(str(skipped)) for rule in (PERSISTENCE, MIG, COMPUTE, POWER, SLOWDOWN)]
    rows = {gpu: row for gpu, row in all_rows.items() if _is_visible(machine, gpu)}
    limits = nvidia_smi.numeric_field(rows, "power.limit")
    defaults = nvidia_smi.numeric_field(rows, "power.default_limit")
    capped = [
        POWER.violation(gpu, limit, f"at least {defaults[gpu]:g}")
        for gpu, limit in limits.items()
        if limit < defaults.get(gpu, 0)
    ]
    slow = {
        gpu: " ".join(nvidia_smi.text_field({gpu: row}, field).get(gpu, "") for field in SLOWDOWN_FIELDS)
        for gpu, row in rows.items()
    }
    slow = {gpu: reasons for gpu, reasons in slow.items() if reasons.strip()}
    return [
        *check_values(PERSISTENCE, nvidia_smi.text_field(rows, "persistence_mode"), lambda mode: mode == "Disabled"),
        *check_values(MIG, nvidia_smi.text_field(rows, "mig.mode.current"), lambda mode: mode == "Enabled"),
        *check_values(COMPUTE, nvidia_smi.text_field(rows, "compute_mode"), lambda mode: mode == "Prohibited"),
        *(capped or check_values(POWER, limits, lambda _: False)),
        *check_values(SLOWDOWN, slow, lambda reasons: "Active" in reasons.replace("Not Active", "")),
    ]
