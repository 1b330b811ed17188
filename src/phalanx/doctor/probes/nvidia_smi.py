"""Parser of nvidia-smi's output."""

from __future__ import annotations

import re

from phalanx.doctor.finding import CheckSkipped
from phalanx.doctor.machine import CommandTimeout, Machine
from phalanx.doctor.probes import pci
from phalanx.doctor.probes.text import first_line, leading_number

Row = dict[str, str]
GPU_LINE = re.compile(r"GPU (\d+):")
NO_VALUE_PATTERN = re.compile(r"^\[|N/A")
SUCCESS_CODES = (0, 14)
"""Exit codes with a valid output: 14 means that an infoROM is corrupted (nvidia-smi's manual)."""
CORRUPTED_PATTERN = re.compile(r"infoROM is corrupted at gpu ([0-9a-fA-F:.]+)")
FAILURE_PATTERN = re.compile(r"requires reset|is lost|Unknown Error")
"""Text in place of a value, for a GPU that does not respond."""
NVLINK_ERROR_PATTERN = re.compile(r"Link (\d+): .*(?:Errors?|Total link recovery events|Tx discards): (\d+)")
"""Recovery events are Blackwell's; their total contains failed and successful ones."""
UNCORRECTED_ECC_FIELD = "ecc.errors.uncorrected.volatile.total"


def run_nvidia_smi(machine: Machine, name: str, *args: str) -> str:
    """Return the output of nvidia-smi.

    Raises CheckSkipped if nvidia-smi failed, which the check of GPUs reports.
    """
    try:
        output = machine.run(name, "nvidia-smi", *args)
    except CommandTimeout as error:
        raise CheckSkipped(str(error)) from None
    if output is None:
        raise CheckSkipped("no NVIDIA GPU" if not pci.nvidia_gpus(machine) else "no nvidia-smi")
    if output.code not in SUCCESS_CODES:
        raise CheckSkipped(f"nvidia-smi {' '.join(args)}: {first_line(output.text)}")
    return output.text


def query_gpus(machine: Machine, name: str, query: str, *fields: str) -> dict[str, Row]:
    """Return the values of some fields by GPU."""
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
    """Return the GPUs that do not respond, each with the error that the driver shows in place of a value."""
    return {gpu: cell.strip("[]") for gpu, row in rows.items() for cell in row.values() if FAILURE_PATTERN.search(cell)}


def nvlink_lines(machine: Machine, name: str, flag: str) -> dict[str, list[str]]:
    """Return the lines that `nvidia-smi nvlink` prints below each "GPU 0: ...", by GPU."""
    lines_by_gpu: dict[str, list[str]] = {}
    for line in run_nvidia_smi(machine, name, "nvlink", flag).splitlines():
        match = GPU_LINE.match(line.strip())
        if match:
            lines_by_gpu[f"GPU{match[1]}"] = gpu_lines = []
        elif lines_by_gpu:
            gpu_lines.append(line.strip())
    return lines_by_gpu


def nvlink_errors(machine: Machine) -> dict[str, int]:
    """Return the errors of all kinds by link, such as "GPU0 link 3".

    Raises CheckSkipped if nvidia-smi does not report them.
    """
    counts: dict[str, int] = {}
    for gpu, lines in nvlink_lines(machine, "smi_nvlink_errors", "-e").items():
        for link, count in NVLINK_ERROR_PATTERN.findall("\n".join(lines)):
            counts[f"{gpu} link {link}"] = counts.get(f"{gpu} link {link}", 0) + int(count)
    return counts


def topology_matrix(machine: Machine) -> str:
    """Return the output of nvidia-smi topo -m.

    Raises CheckSkipped if the machine has no GPU.
    """
    return run_nvidia_smi(machine, "smi_topology", "topo", "-m")
