"""Parser of nvidia-smi's output."""

from __future__ import annotations

import re

from phalanx.doctor.finding import CheckSkipped
from phalanx.doctor.machine import CommandTimeout, Machine
from phalanx.doctor.probes import pci

Row = dict[str, str]
GPU_LINE = re.compile(r"GPU (\d+):")
NO_VALUE_PATTERN = re.compile(r"^\[|N/A")
SUCCESS_CODES = (0, 14)
"""Exit codes with a valid output: 14 means that an infoROM is corrupted (nvidia-smi's manual)."""
CORRUPTED_PATTERN = re.compile(r"infoROM is corrupted at gpu ([0-9a-fA-F:.]+)")
FAILURE_PATTERN = re.compile(r"requires reset|is lost|Unknown Error")
"""Text in place of a value, for a GPU that does not respond."""


def run_nvidia_smi(machine: Machine, name: str, *args: str) -> str:
    """Return the output of nvidia-smi.

    Args:
        machine: The machine.
        name: The name of the recorded output.
        args: The arguments of nvidia-smi.

    Raises:
        CheckSkipped: nvidia-smi failed, which the check of GPUs reports.
    """
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
    """Return the values of some fields by GPU.

    Args:
        machine: The machine.
        name: The name of the recorded output.
        query: The kind of query: nvidia-smi's option --query-<query>.
        fields: The names of the fields.
    """
    return parse_csv(
        run_nvidia_smi(machine, name, f"--query-{query}={','.join(fields)}", "--format=csv,nounits"), fields
    )


def parse_csv(text: str, fields: tuple[str, ...]) -> dict[str, Row]:
    """Return the rows of --format=csv,nounits by GPU: GPU0 by `index`, else by the first field.

    Columns are matched by order: their headings differ from the queried names in new drivers (clocks_throttle_reasons).
    A truncated row has only its first fields.
    """
    lines = [[cell.strip() for cell in line.split(",")] for line in text.splitlines() if "," in line][1:]
    if not lines:
        raise CheckSkipped(f"nvidia-smi has no table: {first_line(text)}")
    rows = [dict(zip(fields, line, strict=False)) for line in lines]
    return {f"GPU{row['index']}" if "index" in row else row[fields[0]]: row for row in rows}


def numeric_field(rows: dict[str, Row], field: str) -> dict[str, float]:
    """Return the numbers of a field by GPU, without GPUs that have none, such as "[N/A]"."""
    numbers = {gpu: leading_number(row.get(field, "")) for gpu, row in rows.items()}
    return {gpu: value for gpu, value in numbers.items() if value is not None}


def text_field(rows: dict[str, Row], field: str) -> dict[str, str]:
    """Return the texts of a field by GPU, without "[N/A]" and "[Not Supported]"."""
    return {gpu: row[field] for gpu, row in rows.items() if row.get(field) and not NO_VALUE_PATTERN.search(row[field])}


def unresponsive_gpus(rows: dict[str, Row]) -> dict[str, str]:
    """Return the GPUs that the driver lists and that do not respond, with the text in place of a value."""
    return {gpu: cell.strip("[]") for gpu, row in rows.items() for cell in row.values() if FAILURE_PATTERN.search(cell)}


def split_by_gpu(text: str) -> dict[str, list[str]]:
    """Return the lines below each "GPU 0: ..." of nvidia-smi nvlink, by GPU."""
    lines_by_gpu: dict[str, list[str]] = {}
    for line in text.splitlines():
        match = GPU_LINE.match(line.strip())
        if match:
            lines_by_gpu[f"GPU{match[1]}"] = gpu_lines = []
        elif lines_by_gpu:
            gpu_lines.append(line.strip())
    return lines_by_gpu


def leading_number(text: str) -> float | None:
    """Return the number at the start of a text, or None."""
    match = re.match(r"\s*(-?\d+(\.\d+)?)", text)
    return float(match[1]) if match else None


def first_line(text: str) -> str:
    """Return the first line that is not blank, or "nothing"."""
    return next((line.strip() for line in text.splitlines() if line.strip()), "nothing")
