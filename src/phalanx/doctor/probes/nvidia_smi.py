"""nvidia-smi's answers."""

from __future__ import annotations

import re

from phalanx.doctor.finding import CheckSkipped
from phalanx.doctor.machine import CommandTimeout, Machine
from phalanx.doctor.probes import pci

Row = dict[str, str]
GPU_LINE = re.compile(r"GPU (\d+):")
NO_VALUE_PATTERN = re.compile(r"^\[|N/A")
SUCCESS_CODES = (0, 14)
"""Exit codes with an answer: 14 where some infoROM is corrupted (nvidia-smi's manual)."""
CORRUPTED_PATTERN = re.compile(r"infoROM is corrupted at gpu ([0-9a-fA-F:.]+)")
FAILURE_PATTERN = re.compile(r"requires reset|is lost|Unknown Error")
"""In place of a value, of a GPU that does not answer."""


def run_nvidia_smi(machine: Machine, name: str, *args: str) -> str:
    """What nvidia-smi says; raises Skip where it says nothing, which is for the check of GPUs to judge."""
    try:
        output = machine.run(name, "nvidia-smi", *args)
    except CommandTimeout as error:
        raise CheckSkipped(str(error)) from None
    if output is None:
        raise CheckSkipped("no NVIDIA GPU" if not pci.pci_devices(machine, pci.GPU, pci.NVIDIA) else "no nvidia-smi")
    if output.code not in SUCCESS_CODES:
        raise CheckSkipped(f"nvidia-smi {' '.join(args)}: {first_line(output.text)}")
    return output.text


def query_gpus(machine: Machine, name: str, query: str, *fields: str) -> dict[str, Row]:
    """Some fields of each GPU."""
    return parse_csv(
        run_nvidia_smi(machine, name, f"--query-{query}={','.join(fields)}", "--format=csv,nounits"), fields
    )


def parse_csv(text: str, fields: tuple[str, ...]) -> dict[str, Row]:
    """Rows of --format=csv,nounits by GPU: GPU0 by `index`, else by the first field. By order: what heads a column is
    not always what was asked for (clocks_throttle_reasons of new drivers). A row that is cut off has what it has."""
    lines = [[cell.strip() for cell in line.split(",")] for line in text.splitlines() if "," in line][1:]
    if not lines:
        raise CheckSkipped(f"nvidia-smi has no table: {first_line(text)}")
    rows = [dict(zip(fields, line, strict=False)) for line in lines]
    return {f"GPU{row['index']}" if "index" in row else row[fields[0]]: row for row in rows}


def numeric_field(rows: dict[str, Row], field: str) -> dict[str, float]:
    """A field of each GPU that has a number there (not "[N/A]")."""
    numbers = {gpu: leading_number(row.get(field, "")) for gpu, row in rows.items()}
    return {gpu: value for gpu, value in numbers.items() if value is not None}


def text_field(rows: dict[str, Row], field: str) -> dict[str, str]:
    """A field of each GPU that has one (not "[N/A]" or "[Not Supported]")."""
    return {gpu: row[field] for gpu, row in rows.items() if row.get(field) and not NO_VALUE_PATTERN.search(row[field])}


def unresponsive_gpus(rows: dict[str, Row]) -> dict[str, str]:
    """GPUs that the driver lists and that do not answer, with what stands in place of a value."""
    return {gpu: cell.strip("[]") for gpu, row in rows.items() for cell in row.values() if FAILURE_PATTERN.search(cell)}


def split_by_gpu(text: str) -> dict[str, list[str]]:
    """The lines below each "GPU 0: ..." of nvidia-smi nvlink."""
    lines_by_gpu: dict[str, list[str]] = {}
    for line in text.splitlines():
        match = GPU_LINE.match(line.strip())
        if match:
            lines_by_gpu[f"GPU{match[1]}"] = gpu_lines = []
        elif lines_by_gpu:
            gpu_lines.append(line.strip())
    return lines_by_gpu


def leading_number(text: str) -> float | None:
    """The number that a text begins with."""
    match = re.match(r"\s*(-?\d+(\.\d+)?)", text)
    return float(match[1]) if match else None


def first_line(text: str) -> str:
    """The first line that says something."""
    return next((line.strip() for line in text.splitlines() if line.strip()), "nothing")
