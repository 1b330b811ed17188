"""`phalanx info`: parameters, FLOPs per token and training state of a model."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated, Any, get_args

from rich.table import Table
from typer import Argument, Option

from phalanx.cli.common.options import complete_presets
from phalanx.cli.common.text import print_line
from phalanx.cost.exact.flops import forward_flops_per_token, training_flops_per_token
from phalanx.cost.exact.model_state import Optimizer, model_state_bytes
from phalanx.cost.exact.parameters import ParameterCount, count_parameters
from phalanx.spec.cluster import ClusterSpec
from phalanx.spec.errors import UserError
from phalanx.spec.files.load import load_machine, load_model_spec, preset_names
from phalanx.spec.formatting import COUNT_PREFIXES, GIB, format_si
from phalanx.spec.layers import check_sequence, longest_sequence
from phalanx.spec.model import ModelSpec
from phalanx.spec.terminal import Terminal

PARTS = (
    *("embedding", "per_layer_inputs", "attention", "mlp", "experts", "shared_experts", "router", "merge", "norms"),
    *("head", "carried"),
)
MACHINE_FIELDS = (
    "peak_flops",
    "memory_bytes",
    "hbm_bytes_per_second",
    "link_bytes_per_second",
    "fast_link_domain",
    "network_bytes_per_second",
    "watts_per_device",
    "host_watts_per_device",
)
FLOPS_NOTE = "training: 6 x parameters in matrix products + 12 L H head_dim T (causal: half; windows: less)"
STATE_NOTE = "in fp32, before sharding; in bf16 the same sum; twice that for fp64; without activations"


def info(
    model: Annotated[
        str | None,
        Argument(
            help="A preset, a Hugging Face config.json, its directory or a name on the hub, or a TOML file.",
            autocompletion=complete_presets("models"),
        ),
    ] = None,
    sequence: Annotated[int | None, Option(help="Tokens per sequence; default: the model's context.", min=1)] = None,
    list_: Annotated[bool, Option("--list", help="List the presets of models and machines.")] = False,
    json_: Annotated[bool, Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show a model's parameters, FLOPs per token, and bytes of training state.

    Examples:

        phalanx info llama3-8b

        phalanx info mixtral-8x7b --sequence 4096

        phalanx info path/to/config.json --json

        phalanx info --list
    """
    if list_:
        models = {name: count_parameters(load_model_spec(name)) for name in preset_names("models")}
        machines = {name: load_machine(name) for name in preset_names("machines")}
        if json_:
            facts: dict[str, Any] = {"models": {}, "machines": {}}
            for name, count in models.items():
                facts["models"][name] = {"total": count.total, "active": count.active}
            for name, machine in machines.items():
                values = {field: getattr(machine, field) for field in MACHINE_FIELDS}
                facts["machines"][name] = {field: value for field, value in values.items() if value is not None}
            print(json.dumps(facts, indent=2))
        else:
            _print_presets(models, machines)
        return
    if model is None:
        raise UserError("MODEL", None, "is missing", fix="give a model, such as phalanx info llama3-8b, or use --list")
    spec = load_model_spec(model)
    if sequence is not None:
        check_sequence(spec, "--sequence", sequence)
    tokens = sequence or longest_sequence(spec)
    if json_:
        print(json.dumps(model_info(spec, tokens), indent=2))
    else:
        _print_model(model, spec, tokens)


def model_info(spec: ModelSpec, sequence: int) -> dict[str, Any]:
    """Return the output of `phalanx info --json`: parameter counts, FLOPs per token, bytes of state."""
    count = count_parameters(spec)
    state = {name: model_state_bytes(count, name, "bf16") for name in get_args(Optimizer)}
    return {
        "parameters": {
            **{part: getattr(count, part) for part in PARTS},
            "total": count.total,
            "active": count.active,
            "matmul": count.matmul,
        },
        "sequence": sequence,
        "flops_per_token": {
            "forward_causal": forward_flops_per_token(spec, sequence),
            "forward_full": forward_flops_per_token(spec, sequence, causal=False),
            "training_causal": training_flops_per_token(spec, sequence),
            "training_full": training_flops_per_token(spec, sequence, causal=False),
        },
        "state_bytes": {name: {**asdict(part), "total": part.total} for name, part in state.items()},
    }


def _print_model(name: str, spec: ModelSpec, sequence: int) -> None:
    console = Terminal()
    facts = model_info(spec, sequence)
    console.print(name, style="bold", end="  ", highlight=False, markup=False)
    print_line(console, describe(spec))

    counts = facts["parameters"]
    table = _make_table("", "parameters", "share")
    for part in PARTS:
        if counts[part]:
            table.add_row(part.replace("_", " "), f"{counts[part]:,}", f"{counts[part] / counts['total']:.1%}")
    table.add_row()
    table.add_row("total", f"{counts['total']:,}", "100.0%", style="bold")
    for part, label in (("active", "active per token"), ("matmul", "in matrix products")):
        table.add_row(label, f"{counts[part]:,}", f"{counts[part] / counts['total']:.1%}")
    console.print()
    console.print(table)

    flops = facts["flops_per_token"]
    table = _make_table(f"FLOPs per token at {sequence:,} tokens", "forward", "training")
    for row, kind in (("causal attention", "causal"), ("full attention, as PaLM counts", "full")):
        table.add_row(row, format_si(flops[f"forward_{kind}"]), format_si(flops[f"training_{kind}"]))
    console.print()
    console.print(table)
    console.print(FLOPS_NOTE, style="dim", highlight=False)

    table = _make_table("bytes of training state", "parameters", "gradients", "optimizer", "total")
    for optimizer, state in facts["state_bytes"].items():
        table.add_row(optimizer, *(f"{format_si(size)}B" for size in state.values()))
    console.print()
    console.print(table)
    console.print(STATE_NOTE, style="dim", highlight=False)


def _print_presets(models: dict[str, ParameterCount], machines: dict[str, ClusterSpec]) -> None:
    model_table = _make_table("model", "parameters", "active per token")
    for name, count in models.items():
        model_table.add_row(name, format_si(count.total, COUNT_PREFIXES), format_si(count.active, COUNT_PREFIXES))
    machine_table = _make_table("machine", "TFLOP/s", "GiB", "memory GB/s", "link GB/s", "domain", "NIC GB/s", "W")
    for name, machine in machines.items():
        machine_table.add_row(
            name,
            _format_scaled(machine.peak_flops, 1e12),
            _format_scaled(machine.memory_bytes, GIB),
            _format_scaled(machine.hbm_bytes_per_second, 1e9),
            _format_scaled(machine.link_bytes_per_second, 1e9),
            _format_scaled(machine.fast_link_domain, 1) or "node",
            _format_scaled(machine.network_bytes_per_second, 1e9),
            _format_scaled(machine.watts_per_device, 1),
        )
    Terminal().print(model_table, machine_table, sep="\n\n")


def describe(spec: ModelSpec) -> str:
    """Return a one-line description of the model's shape."""
    heads = f"{spec.num_heads} heads of {spec.head_dim}"
    heads += f" ({spec.num_kv_heads} key/value)" if spec.num_kv_heads != spec.num_heads else ""
    if spec.layers:
        heads = f"in the order {spec.layers}, {heads}"
    text = f"{spec.num_layers} layers, width {spec.hidden_size}, {heads}, vocabulary {spec.vocab_size:,}"
    return f"{text}, {spec.moe.top_k} of {spec.moe.num_experts} experts" if spec.moe else text


def _format_scaled(number: float | None, unit: float) -> str:
    return "" if number is None else f"{number / unit:.4g}"


def _make_table(first: str, *columns: str) -> Table:
    table = Table(first, box=None, pad_edge=False, header_style="bold", padding=(0, 3, 0, 0))
    for column in columns:
        table.add_column(column, justify="right")
    return table
