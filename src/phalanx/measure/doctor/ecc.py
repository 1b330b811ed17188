"""Errors in the memory of GPUs."""

from __future__ import annotations

from phalanx.measure.doctor import smi
from phalanx.measure.doctor.expected import Expected
from phalanx.measure.doctor.finding import Finding, Rule, Skip, judge
from phalanx.measure.doctor.machine import Machine

CORRECTED = 50_000_000
"""GCM (Meta): corrected errors > 50 million."""
UNCORRECTED_RULE = Rule(
    "ecc.uncorrected", "uncorrectable ECC errors since the driver was loaded", "FAIL", "0", "errors",
    "Imbue, GCM (volatile uncorrected > 0)", "drain the node and reset {device}; replace it if they come back",
    "nvidia-smi -q -d ECC,ROW_REMAPPER",
)  # fmt: skip
CORRECTED_RULE = Rule(
    "ecc.corrected", "corrected ECC errors since the driver was loaded", "WARN", f"at most {CORRECTED:,}", "errors",
    "GCM (corrected > 50 M)", "have {device} tested at the next maintenance", "dcgmi diag -r 3",
)  # fmt: skip
PENDING = Rule(
    "ecc.remap_pending", "rows that wait to be remapped", "FAIL", "none", "",
    "NVIDIA, GPU Memory Error Management; OCI (row remap)",
    "reset the GPU when no process uses it: rows are remapped then", "nvidia-smi --gpu-reset -i {device}",
)  # fmt: skip
FAILED = Rule(
    "ecc.remap_failed", "rows that could not be remapped", "FAIL", "none", "",
    "NVIDIA, GPU Memory Error Management (RMA criterion)", "replace the GPU: it has no spare rows left",
    "nvidia-smi -q -d ROW_REMAPPER -i {device}",
)  # fmt: skip
RULES = (UNCORRECTED_RULE, CORRECTED_RULE, PENDING, FAILED)


def check(machine: Machine, _: Expected) -> list[Finding]:
    """ECC's counters and the row remapper's state."""
    volatile = "ecc.errors.{}.volatile.total".format
    rows = smi.query(machine, "smi_ecc", "gpu", "index", volatile("corrected"), volatile("uncorrected"))
    return [
        *judge(UNCORRECTED_RULE, smi.numbers(rows, volatile("uncorrected")), lambda count: count > 0),
        *judge(CORRECTED_RULE, smi.numbers(rows, volatile("corrected")), lambda count: count > CORRECTED),
        *_rows(machine),
    ]


def _rows(machine: Machine) -> list[Finding]:
    """Of drivers and GPUs that remap rows (since Ampere)."""
    pending, failure = "remapped_rows.pending", "remapped_rows.failure"
    try:
        rows = smi.query(machine, "smi_remapped", "remapped-rows", "gpu_bus_id", pending, failure)
    except Skip as skipped:
        return [rule.skipped(str(skipped)) for rule in (PENDING, FAILED)]
    return [*judge(PENDING, smi.words(rows, pending), _said), *judge(FAILED, smi.words(rows, failure), _said)]


def _said(word: str) -> bool:
    """Of some drivers Yes and No, of others numbers."""
    return word not in ("No", "0")
