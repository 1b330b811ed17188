"""`phalanx swarm`: training of one model at several sites over slow links."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from importlib.util import find_spec
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from phalanx.cli.common.options import Json, Overrides
from phalanx.spec.errors import UserError
from phalanx.spec.extras import missing_package
from phalanx.spec.formatting import format_si

if TYPE_CHECKING:
    from phalanx.spec.run import RunSpec
    from phalanx.spec.swarm import Codec, Method, SwarmSpec
    from phalanx.swarm.rpc.client import SwarmClient

logger = logging.getLogger(__name__)

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    help="Train one model at several sites over slow links.",
)
Certificates = Annotated[
    Path, Option("--certs", help="Folder of this member, created by `phalanx swarm certs`.", metavar="DIR")
]
Address = Annotated[str, Argument(help="Address of the coordinator.", metavar="HOST:PORT")]


@app.command()
def certs(
    folder: Annotated[
        Path, Argument(help="Folder of the certificate authority; created if missing.", metavar="FOLDER")
    ],
    members: Annotated[
        list[str] | None, Argument(help="Members that receive a certificate.", metavar="NAME...")
    ] = None,
    host: Annotated[
        list[str] | None, Option(help="Host name or address of this member, for a coordinator.", metavar="HOST")
    ] = None,
    days: Annotated[int, Option(help="Validity of the certificates in days.", min=1)] = 365,
) -> None:
    """Create a certificate authority for a swarm, and certificates for its members.

    Keep the folder's ca.key private: its owner can admit anyone. Send each member the folder with its name over a
    trusted channel. The certificate identifies the member, which can only send updates of what it trains.

    Examples:

        phalanx swarm certs certs lead --host 203.0.113.7

        phalanx swarm certs certs ann bob eve
    """
    _check_installed()
    from phalanx.swarm.rpc.certificates import create_certificate_authority, issue_certificate

    if not (folder / "ca.key").exists():
        create_certificate_authority(folder)
        print(f"{folder}/ca.key: keep this key private")
    elif not members:
        raise UserError("NAME", None, "is missing", fix=f"list the members: phalanx swarm certs {folder} ann bob")
    for member in members or []:
        print(f"{issue_certificate(folder, member, host or [], days)}: for {member}")


@app.command()
def serve(
    run: Annotated[Path, Argument(help="A run file with a [swarm] table.", metavar="SWARM.toml")],
    certificates: Certificates,
    listen: Annotated[str, Option(help="Address and port to listen on.", metavar="HOST:PORT")] = "0.0.0.0:7077",
    set_: Overrides = None,
) -> None:
    """Coordinate a swarm: wait for nodes, assign experts and text to them, and merge their updates, round by round.

    The coordinator saves the model and a journal in the run directory; after a crash and a restart it continues with
    the same round. It exits when the last round is done and the nodes have left. It computes only means (and updates
    of ddp), and needs no GPU; it holds a few tensors in memory, not models.

    Examples:

        phalanx swarm serve swarm.toml --certs certs/lead --listen 0.0.0.0:7077

        phalanx swarm serve swarm.toml --certs certs/lead --set swarm.every=50 --set swarm.codec=int4
    """
    from phalanx.spec.files.load import load_run
    from phalanx.spec.learning_rate import learning_rate_note
    from phalanx.spec.run import require_settings_of_weights

    run_spec = load_run(run, set_ or [])
    _require_swarm(run_spec)
    require_settings_of_weights(run_spec)
    if (line := learning_rate_note(run_spec)) is not None:
        logger.info("%s", line)
    _check_address(listen, "--listen")
    _check_installed()
    from phalanx.swarm.rpc.certificates import certificate_member
    from phalanx.swarm.serve import serve_swarm

    certificate_member(certificates)
    raise typer.Exit(serve_swarm(run_spec, listen, certificates))


@app.command()
def join(
    address: Address,
    certificates: Certificates,
    nproc: Annotated[
        int | None, Option(help="Ranks of this node; default: one per GPU, or one.", min=1, metavar="N")
    ] = None,
    out: Annotated[Path, Option(help="Parent of the node's directory.", metavar="DIR")] = Path("nodes"),
    set_: Overrides = None,
) -> None:
    """Take part in a swarm with this machine, from its next round on, until the last or Ctrl-C.

    The coordinator sends the model and the training settings. With --set a node chooses its text, layout and cluster.
    All nodes read different parts of the same text. The node only opens outgoing connections, and continues after the
    link was interrupted.

    Examples:

        phalanx swarm join 203.0.113.7:7077 --certs ann

        phalanx swarm join host:7077 --certs ann --nproc 2 --set layout.data_parallel=zero1 --set 'data.train=["text"]'
    """
    _check_address(address, "ADDRESS")
    _check_installed()
    from phalanx.swarm.join import join_swarm as take_part

    raise typer.Exit(take_part(address, certificates, nproc, out, overrides=set_ or []))


@app.command()
def status(address: Address, certificates: Certificates, json_: Json = False) -> None:
    """Show the progress and the nodes of a swarm.

    Examples:

        phalanx swarm status 203.0.113.7:7077 --certs ann
    """
    swarm_status = _connect(address, certificates).status()
    print(json.dumps(swarm_status, indent=2) if json_ else _format_status(swarm_status))


@app.command()
def text(
    address: Address,
    checksum: Annotated[str, Argument(help="Checksum of the right text; the rejected node prints it.")],
    certificates: Certificates,
) -> None:
    """Set the text that all nodes of a swarm must read, as its operator.

    All nodes read the same text, and the first node that trains decides which. If it was the wrong one, this command
    corrects it: nodes with another text are removed. It needs the certificate of the coordinator.

    Examples:

        phalanx swarm text 203.0.113.7:7077 1f0c2a9be47d5d31-8c1de0a95b7742f6 --certs certs/lead
    """
    client = _connect(address, certificates)
    from phalanx.swarm.coordinator.update_checks import UpdateRejected
    from phalanx.swarm.rpc.link_errors import rejection_error

    try:
        client.set_text(checksum)
    except UpdateRejected as rejected:
        raise rejection_error(address, rejected) from None
    print(f"nodes of this swarm must read text {checksum}")


METHOD_CODECS: tuple[tuple[Method, Codec], ...] = (
    ("ddp", "fp32"),
    ("diloco", "fp32"),
    ("diloco", "int8"),
    ("spes", "fp32"),
    ("spes+", "bf16"),
    ("spes+", "int8"),
    ("spes+", "int4"),
)
MBIT = 1e6 / 8
"""Bytes per second of one Mbit/s."""


@app.command()
def plan(
    run: Annotated[Path, Argument(help="A run file with a [swarm] table.", metavar="SWARM.toml")],
    link: Annotated[
        str, Option(help="Bandwidth of a node in Mbit/s: upload, and download if different.", metavar="UP[:DOWN]")
    ] = "20:100",
    nodes: Annotated[int | None, Option(help="Number of nodes; default: swarm.nodes.", min=1)] = None,
    step_seconds: Annotated[
        float | None, Option(help="Measured time of one step on a node.", min=1e-9, metavar="S")
    ] = None,
    set_: Overrides = None,
    json_: Json = False,
) -> None:
    """Predict the cost of a round for a node, per method: bytes, memory, transfer time and the share of time to train.

    With it a group can choose `every` and `codec` before the start. DiLoCo sends the same bytes as fedavg; ddp
    exchanges after each step of the round.

    Examples:

        phalanx swarm plan swarm.toml --link 20:100 --nodes 4

        phalanx swarm plan swarm.toml --link 1000 --step-seconds 2.5 --set swarm.every=50 --set swarm.delay=10
    """
    from phalanx.spec.files.load import load_run

    run_spec = load_run(run, set_ or [])
    swarm = _require_swarm(run_spec)
    upload, _, download = link.partition(":")
    try:
        speeds = float(upload) * MBIT, float(download or upload) * MBIT
    except ValueError:
        speeds = 0.0, 0.0
    if not 0 < min(speeds) <= max(speeds) < inf:
        fix = "write Mbit/s of upload, and of download if different: 20:100"
        raise UserError("--link", link, "is not a bandwidth", fix=fix)
    rows = list(_predict_rounds(run_spec, swarm, nodes or swarm.nodes, speeds, step_seconds))
    if json_:
        print(json.dumps(rows, indent=2))
        return
    from rich.table import Column

    from phalanx.cli.common.text import text_table
    from phalanx.spec.terminal import Terminal

    headers = ("up", "down", "state held", "on the wire", "of a round", "learning")
    columns = [Column(header, justify="right", no_wrap=True) for header in headers]
    table = text_table(Column(f"{swarm.steps_per_round} steps, {link} Mbit/s", no_wrap=True), *columns)
    for row in rows:
        byte_cells = (f"{format_si(row[name])}B" for name in ("up_bytes", "down_bytes", "state_bytes"))
        has_times = row["round_seconds"] is not None
        time = (f"{row['round_seconds']:,.3g} s", f"{row['utilization']:.0%}") if has_times else ("", "")
        name = f"{row['method']}, {row['codec']}{' (chosen)' if row['chosen'] else ''}"
        table.add_row(name, *byte_cells, f"{row['wire_seconds']:,.3g} s", *time)
    Terminal(width=max(Terminal().width, 100), highlight=False).print(table)


def _require_swarm(run: RunSpec) -> SwarmSpec:
    if run.swarm is None:
        raise UserError("swarm", None, "is missing", fix="add a [swarm] table to the run file (phalanx init shows it)")
    return run.swarm


def _predict_rounds(
    run: RunSpec, swarm: SwarmSpec, nodes: int, link: tuple[float, float], step_seconds: float | None
) -> Iterator[dict[str, Any]]:
    """Yield a row for each method and codec, including the run file's own.

    `link` is the upload and download bandwidth in bytes per second.
    """
    from phalanx.cost.exact.swarm import RoundBytes, node_share, round_bytes, round_time, state_bytes
    from phalanx.spec.swarm import EXPERT_SPLIT_METHODS

    experts = run.model.moe.num_experts if run.model.moe else 0
    configured = swarm.method, swarm.effective_codec
    for method, codec in [*(combination for combination in METHOD_CODECS if combination != configured), configured]:
        if method in EXPERT_SPLIT_METHODS and not experts:
            continue
        owned = min(experts, -(-experts * swarm.replication // nodes))
        node = node_share(run.model, method, owned)
        exchange = round_bytes(node, method, codec, swarm.replication)
        exchanges, delay = (swarm.steps_per_round, 0) if method == "ddp" else (1 / swarm.fragments, swarm.delay)
        sent = RoundBytes(exchange.up * exchanges, exchange.down * exchanges)
        time = round_time(sent, *link, swarm.steps_per_round, step_seconds or 0.0, delay)
        yield {
            "method": method,
            "codec": codec,
            "chosen": (method, codec) == configured,
            "up_bytes": sent.up,
            "down_bytes": sent.down,
            "state_bytes": state_bytes(node, swarm.frozen_expert_codec if method in EXPERT_SPLIT_METHODS else "fp32"),
            "wire_seconds": time.wire,
            "round_seconds": time.total if step_seconds else None,
            "utilization": time.utilization if step_seconds else None,
        }


def _format_status(swarm_status: dict[str, Any]) -> str:
    """Format the status of a swarm in lines."""
    method = f"{swarm_status['method']} in {swarm_status['codec']}"
    lines = [f"round {swarm_status['round']} of {swarm_status['rounds']}, {method}"]
    if swarm_status["text"]:
        lines.append(f"text {swarm_status['text']}")
    if swarm_status["problem"]:
        lines.append(f"problem: {swarm_status['problem']}")
    if swarm_status["waits_for"]:
        lines.append(f"waiting for {swarm_status['waits_for']}")
    if swarm_status["open_seconds"] is not None:
        closes = swarm_status["closes_in_seconds"]
        lines[0] += f", open for {swarm_status['open_seconds']:.0f} s"
        lines[0] += f", closes within {max(0.0, closes):.0f} s" if closes is not None else ""
    for node in swarm_status["nodes"]:
        last_seen_seconds = node["last_seen_seconds"]
        parts = [f"  {node['node']:16} {'sent' if node['has_update'] else 'trains':6}"]
        parts.append(f"experts {', '.join(map(str, node['experts']))}" if node["experts"] else "")
        parts.append(f"last contact {last_seen_seconds:.0f} s ago" if last_seen_seconds is not None else "")
        parts += [f"rejected {count} x: {reason}" for reason, count in node["refused"].items()]
        lines.append("  ".join(part for part in parts if part))
    return "\n".join(lines)


def _connect(address: str, certificates: Path) -> SwarmClient:
    """Return a connection to a coordinator. Raises UserError for an invalid address or certificate."""
    _check_address(address, "ADDRESS")
    _check_installed()
    from phalanx.swarm.rpc.certificates import certificate_member
    from phalanx.swarm.rpc.client import SwarmClient

    certificate_member(certificates)
    return SwarmClient(address, certificates)


def _check_installed() -> None:
    for package in ("grpc", "cryptography", "xxhash"):
        if find_spec(package) is None:
            raise missing_package("phalanx swarm", None, package)


def _check_address(address: str, field: str) -> None:
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise UserError(field, address, "is not an address", fix="write host and port: 203.0.113.7:7077")
