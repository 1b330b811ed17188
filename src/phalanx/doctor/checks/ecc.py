"""ECC errors in the memory of GPUs."""

from __future__ import annotations

from phalanx.doctor.expectations import Expectations
from phalanx.doctor.finding import CheckRule, CheckSkipped, DoctorFinding, check_values
from phalanx.doctor.machine import Machine
from phalanx.doctor.probes import nvidia_smi

MAX_CORRECTED_ERRORS = 50_000_000
"""GCM (Meta): corrected errors > 50 million."""
UNCORRECTED_RULE = CheckRule(
    id="ecc.uncorrected",
    quantity="uncorrectable ECC errors since the driver was loaded",
    severity="FAIL",
    threshold="0",
    unit="errors",
    source="Imbue, GCM (volatile uncorrected > 0)",
    remedy="drain the node and reset {device}; replace it if the errors recur",
    command="nvidia-smi -q -d ECC,ROW_REMAPPER",
)
CORRECTED_RULE = CheckRule(
    id="ecc.corrected",
    quantity="corrected ECC errors since the driver was loaded",
    severity="WARN",
    threshold=f"at most {MAX_CORRECTED_ERRORS:,}",
    unit="errors",
    source="GCM (corrected > 50 M)",
    remedy="have {device} tested at the next maintenance",
    command="dcgmi diag -r 3",
)
PENDING = CheckRule(
    id="ecc.remap_pending",
    quantity="rows pending remapping",
    severity="FAIL",
    threshold="none",
    unit="",
    source="NVIDIA, GPU Memory Error Management; OCI (row remap)",
    remedy="reset the GPU when no process uses it: the reset remaps rows",
    command="nvidia-smi --gpu-reset -i {device}",
)
FAILED = CheckRule(
    id="ecc.remap_failed",
    quantity="rows that could not be remapped",
    severity="FAIL",
    threshold="none",
    unit="",
    source="NVIDIA, GPU Memory Error Management (RMA criterion)",
    remedy="replace the GPU: it has no spare rows left",
    command="nvidia-smi -q -d ROW_REMAPPER -i {device}",
)
RULES = (UNCORRECTED_RULE, CORRECTED_RULE, PENDING, FAILED)


def check(machine: Machine, _: Expectations) -> list[DoctorFinding]:
    """Check the ECC counters and the state of row remapping."""
    volatile = "ecc.errors.{}.volatile.total".format
    rows = nvidia_smi.query_gpus(machine, "smi_ecc", "gpu", "index", volatile("corrected"), volatile("uncorrected"))
    return [
        *check_values(
            UNCORRECTED_RULE, nvidia_smi.numeric_field(rows, volatile("uncorrected")), lambda count: count > 0
        ),
        *check_values(
            CORRECTED_RULE,
            nvidia_smi.numeric_field(rows, volatile("corrected")),
            lambda count: count > MAX_CORRECTED_ERRORS,
        ),
        *_check_row_remapping(machine),
    ]


def _check_row_remapping(machine: Machine) -> list[DoctorFinding]:
    """Check drivers and GPUs that remap rows (since Ampere)."""
    pending = "remapped_rows.pending"
    failure = "remapped_rows.failure"
    try:
        rows = nvidia_smi.query_gpus(machine, "smi_remapped", "remapped-rows", "gpu_bus_id", pending, failure)
    except CheckSkipped as skipped:
        return [rule.skip(str(skipped)) for rule in (PENDING, FAILED)]
    return [
        *check_values(PENDING, nvidia_smi.text_field(rows, pending), _is_set),
        *check_values(FAILED, nvidia_smi.text_field(rows, failure), _is_set),
    ]


def _is_set(value: str) -> bool:
    """Return whether a flag is set: drivers print Yes and No, or numbers."""
    return value not in ("No", "0")
