"""Output of `phalanx bench`: tables of products and memory, and collectives in nccl-tests' format."""

from __future__ import annotations

from typing import Any

from rich.table import Column, Table

from phalanx.bench.latency_bandwidth_fit import WARN_ABOVE
from phalanx.bench.nccl_tests_format import format_table
from phalanx.cli.common.text import text_table
from phalanx.spec.formatting import format_si
from phalanx.spec.terminal import Terminal

Facts = dict[str, Any]


def print_benchmarks(results: Facts) -> None:
    """Print all measurements. Lines among collectives that are not in nccl-tests' format start with #."""
    console = Terminal(width=max(Terminal().width, 110), highlight=False)
    ranks_note = f"{results['world_size']} concurrent ranks, each {results['device']}; times of the slowest"
    ranks = ranks_note if results["world_size"] > 1 else f"1 rank, {results['device']}"
    parts = {"matmul": _build_matmul_table, "attention": _build_attention_table, "bandwidth": _build_bandwidth_table}
    print(f"# {results['run']} on {ranks}")
    for part, view in parts.items():
        if part in results:
            console.print()
            console.print(view(results), soft_wrap=True)
    if "collectives" in results:
        print("\n" + collectives(results))


def _build_matmul_table(results: Facts) -> Table:
    passes = [column for name in ("forward", "inputs", "weights") for column in (name, "FLOP/s")]
    title = Column(f"product, {results['precision']}", no_wrap=True)
    grid = text_table(title, numbers=("times", "m", "n", "k", *passes))
    for row in results["matmul"]:
        batch = f"{row['batch']} x " if row["batch"] > 1 else ""
        sizes = f"{batch}{row['m']:,}", f"{row['n']:,}", f"{row['k']:,}"
        timed = [row[f"{pass_name}_seconds"] for pass_name in ("forward", "inputs", "weights")]
        timing_cells = [cell for seconds in timed for cell in _format_timing(row["flops"], seconds)]
        grid.add_row(", ".join(row["layers"]), f"{row['count']}", *sizes, *timing_cells)
    return grid


def _build_attention_table(results: Facts) -> Table:
    passes = "forward", "FLOP/s", "backward", "FLOP/s"
    title = Column(f"attention, {results['precision']}", no_wrap=True)
    grid = text_table(title, numbers=("times", "heads", "tokens", *passes))
    for row in results["attention"]:
        mask = "masked" if row["masked"] else "causal"
        mask = mask if row["causal"] else "unmasked"
        dials = {"window": row["window"], "cap": row["softcap"]}
        mask += "".join(f", {name} {value:g}" for name, value in dials.items() if value)
        heads = f"{row['heads']}" + (f" ({row['kv_heads']} kv)" if row["kv_heads"] < row["heads"] else "")
        tokens = f"{row['batch']} x {row['queries']:,} x {row['keys']:,}"
        forward = _format_timing(row["flops"], row["forward_seconds"])
        backward = _format_timing(2 * row["flops"], row["backward_seconds"])
        grid.add_row(mask, f"{row['count']}", heads, tokens, *forward, *backward)
    return grid


def _build_bandwidth_table(results: Facts) -> Table:
    numbers = ("read and written", "in", "a rank", "all ranks")
    grid = text_table(Column("memory", no_wrap=True), numbers=numbers)
    for row in results["bandwidth"]:
        speeds = row["bytes_per_second"], results["world_size"] * row["bytes_per_second"]
        moved = f"{format_si(row['moved_bytes'])}B"
        time = f"{1e3 * row['seconds']:.3g} ms"
        grid.add_row(row["kernel"], moved, time, *(f"{format_si(speed)}B/s" for speed in speeds))
    return grid


def _format_timing(flops: float, seconds: float) -> tuple[str, str]:
    return f"{1e3 * seconds:.3g} ms", format_si(flops / seconds)


def collectives(results: Facts) -> str:
    """Return a table in nccl-tests' format per operation and group, with traffic per update and fit."""
    if not results["collectives"]:
        return "# this run has no collectives"
    lines = []
    for collective in results["collectives"]:
        ranks = collective["ranks"]
        groups = collective["groups"]
        groups_text = ", ".join("-".join(map(str, group)) for group in groups[:4]) + (
            ", ..." if len(groups) > 4 else ""
        )
        sent = ", ".join(f"{size['calls']} x {size['size_bytes']:,} B" for size in collective["sizes"] if size["calls"])
        name = f"{collective['operation']} among {collective['among']}"
        lines.append(f"# {name}: {ranks} ranks ({groups_text}); an update calls {sent}")
        lines += [format_table(collective["nccl_tests"]), *_format_fit(collective["fit"], ranks), "#"]
    return "\n".join(lines)


def _format_fit(fit: Facts | None, ranks: int) -> list[str]:
    if fit is None:
        return ["# one size does not determine latency and bandwidth: see --sweep"]
    pieces = []
    for piece in fit["pieces"]:
        speed = piece["bytes_per_second"]
        transfer = "" if speed is None else f" + S / {speed / 1e9:.4g} GB/s"
        pieces.append(f"{1e6 * piece['latency_seconds']:.1f} us{transfer}")
    time = pieces[0] if len(pieces) == 1 else f"{fit['joined']}({', '.join(pieces)})"
    sizes = f"{fit['from_bytes']:,.0f} to {fit['to_bytes']:,.0f} B"
    times = fit["times"].replace("_", "-")
    lines = [
        f"# t = {time}: medians of {times} times, mean error {fit['mean_error']:.0%}, maximum {fit['max_error']:.0%}",
        f"# valid for {sizes} among {ranks} ranks only",
    ]
    return [*lines, f"# warning: the error of some size exceeds {WARN_ABOVE:.0%}"] if fit["doubtful"] else lines
