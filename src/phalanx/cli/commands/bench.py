"""`phalanx bench`: the machine's matrix products, memory and collectives at the sizes of a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option

from phalanx.cli.commands.auto_layout import choose_layout_for
from phalanx.cli.common.optional_part import command_with_part, split_part
from phalanx.cli.common.options import Json, Overrides
from phalanx.cli.common.output_file import check_replaceable, write_file
from phalanx.spec.errors import UserError
from phalanx.spec.formatting import WRITTEN_BY
from phalanx.spec.resolved_run import ResolvedRun
from phalanx.spec.run import RunSpec

PARTS = ("matmul", "attention", "bandwidth", "collectives")
UNITS = {"": 1, "K": 2**10, "KiB": 2**10, "M": 2**20, "MiB": 2**20, "G": 2**30, "GiB": 2**30}
"""Units, spelled as in nccl-tests and in full."""


def bench(
    first: Annotated[
        str,
        Argument(
            help="A run file. A part before it restricts the measurement to that part.", metavar="[PART] RUN.toml"
        ),
    ],
    second: Annotated[str | None, Argument(hidden=True, metavar="RUN.toml")] = None,
    nproc: Annotated[
        int | None, Option(help="Ranks on this machine; default: one per GPU, or one.", min=1, metavar="N")
    ] = None,
    sweep: Annotated[
        str | None,
        Option(help="Range of additional message sizes for collectives, in powers of two.", metavar="4KiB:16MiB"),
    ] = None,
    iterations: Annotated[int, Option(help="Timed calls per measurement, after one warm-up call.", min=1)] = 20,
    out: Annotated[Path | None, Option(help="Also write the results to this JSON file.", metavar="FILE")] = None,
    set_: Overrides = None,
    json_: Json = False,
) -> None:
    """Measure this machine with the operations of a run.

    These are the matrix products and the attention that one rank of its layout computes, its memory, and each
    collective that the layout uses. No data are needed.

    The collectives are those of an update, by group and size, on the run's own groups of ranks; with --sweep also
    other sizes, to which latency and bandwidth are fitted. Text and JSON have the format of nccl-tests. The exit code
    is 1 if received numbers are wrong.

    Examples:

        phalanx bench run.toml --nproc 2

        phalanx bench collectives run.toml --nproc 2 --sweep 4KiB:16MiB --out measured.json

        phalanx bench attention run.toml --nproc 2 --set layout.cp=2
    """
    from phalanx.spec.files.load import load_run

    fix = f"write `phalanx bench run.toml`, with one of {', '.join(PARTS)} before the file to measure only that"
    part, path = split_part("bench", first, second, PARTS, "PART", fix)
    parts = [part] if part else list(PARTS)
    sizes = parse_size_sweep(sweep) if sweep is not None else []
    if sizes and "collectives" not in parts:
        raise UserError("--sweep", sweep, f"does not apply to {parts[0]}", fix="remove it, or measure collectives")
    if out is not None:
        check_replaceable("--out", out, "json")
    run = load_run(path, set_ or [])
    if nproc == 1 and parts == ["collectives"]:
        raise UserError("--nproc", 1, "leaves no peer to communicate with", fix="start 2 ranks or more")
    options = ["--parts", *parts, "--iterations", str(iterations), "--sweep", *map(str, sizes)]
    results = _measure_run(run, nproc, max(sizes, default=0), options)
    if out is not None:
        write_file("--out", out, json.dumps({"comment": WRITTEN_BY, **results}, indent=1))
    if json_:
        print(json.dumps(results, indent=2))
    else:
        from phalanx.cli.views.bench import print_benchmarks

        print_benchmarks(results)
    error_counts = [collective["nccl_tests"]["out_of_bounds"]["count"] for collective in results.get("collectives", [])]
    raise typer.Exit(any(error_counts))


def parse_size_sweep(text: str) -> list[int]:
    """Return the sizes in bytes of a range, each twice the previous: "4KiB:16MiB".

    Raises UserError if the text is not such a range.
    """
    start, colon, end = text.partition(":")
    smallest = _parse_size(start)
    largest = _parse_size(end)
    if not colon or not smallest or not largest or smallest > largest:
        raise UserError("--sweep", text, "is not a range of sizes", fix="write, for example, 4KiB:16MiB")
    return [smallest << doublings for doublings in range((largest // smallest).bit_length())]


def _parse_size(text: str) -> int:
    """Return a size in bytes; 0 if the text is not a size."""
    digits = text.rstrip("KMGiB")
    unit = text[len(digits) :]
    return int(digits) * UNITS[unit] if digits.isdecimal() and unit in UNITS else 0


def _measure_run(run: RunSpec, nproc: int | None, largest: int, options: list[str]) -> dict[str, Any]:
    """Return the results of all ranks for sizes up to `largest` bytes.

    Errors of the ranks are printed and end this process.
    """
    from phalanx.cost.exact.layout_checks import assume_no_recomputation, check_layout
    from phalanx.spec.torch_compat import check_torch_supports

    if run.cluster.nodes > 1:
        fix = "start each node with torchrun -m phalanx.bench.ranks, or set cluster.nodes = 1"
        raise UserError(
            "cluster.nodes", run.cluster.nodes, "is more than the one node whose ranks phalanx bench starts", fix=fix
        )
    known_nproc = nproc or run.cluster.nproc_per_node
    if run.auto_layout:
        run, _ = choose_layout_for(run, known_nproc)
    run = assume_no_recomputation(run)
    # Before the import of torch, which takes a second
    if known_nproc is not None:
        check_layout(ResolvedRun(run, known_nproc))
    check_torch_supports(run.layout)
    if run.training.precision == "fp8":
        problem = "is not measured: calibrations do not support it"
        raise UserError("training.precision", "fp8", problem, fix="add --set training.precision=bf16")
    import torch

    from phalanx.bench.ranks import launch_benchmarks
    from phalanx.launch.process import select_device, select_nproc
    from phalanx.parallel.comm.device_memory import device_memory_bytes

    ranks = select_nproc(run, nproc)
    check_layout(ResolvedRun(run, ranks))
    # Each rank has an input and an output: on a GPU in its memory, else all ranks in that of the machine.
    device_type = select_device(run)
    memory_bytes = device_memory_bytes(torch.device(device_type))
    needed_bytes = 2 * largest * (1 if device_type == "cuda" else ranks)
    if needed_bytes > memory_bytes / 2:
        problem = f"takes {needed_bytes / 1e9:.3g} GB of memory, more than half of {memory_bytes / 1e9:.3g} GB"
        raise UserError("--sweep", f"...:{largest}", problem, fix="use a smaller maximum size")
    results = launch_benchmarks(run, ranks, options)
    if isinstance(results, int):
        raise typer.Exit(results)
    return results


app = typer.Typer(add_completion=False, rich_markup_mode="markdown", pretty_exceptions_enable=False)
app.command("bench", cls=command_with_part("|".join(PARTS)))(bench)
