"""Measure a swarm round on one machine: time without training, memory of the coordinator, and speed of a link.

    python -m benchmarks.swarm_round           # prints the table and writes docs/results/benchmarks/swarm_round.md

The coordinator is `phalanx swarm serve`. Four processes send and receive as nodes do, without training, over loopback
with mutual TLS. The model has 0.27 GB in fp32, half of it experts. The page compares the round with that of the
reference implementation of SPES, which polls every 20 s and has no TLS (measured once).
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc

from benchmarks.pages import write_results
from phalanx.cost.exact.parameters import count_parameters
from phalanx.cost.exact.swarm import encoded_bytes
from phalanx.spec.files.load import load_run, run_from_table
from phalanx.spec.run import RunSpec
from phalanx.spec.swarm import EXPERT_SPLIT_METHODS
from phalanx.swarm.pieces import fragment_pieces, pieces_sent_by
from phalanx.swarm.rpc.certificates import create_certificate_authority, issue_certificate
from phalanx.swarm.rpc.client import SwarmClient
from phalanx.swarm.rpc.protocol import CHUNK_BYTES, OPTIONS
from phalanx.swarm.tensor_files import TensorFile
from phalanx.swarm.update_files import Feedback, decode_piece, write_update

PAGE = Path(__file__).parents[1] / "docs" / "results" / "benchmarks" / "swarm_round.md"
NODES, ROUNDS = ("ann", "bob", "cid", "dee"), 8
GOAL_SECONDS, GOAL_UP, GOAL_DOWN = 5.0, 0.6e9, 0.4e9
REFERENCE_SECONDS, REFERENCE_MODELS = 46.7, 10.8
MIB, CHUNKS = 2**20, 256
RUN = """
name = "round"
[model]
vocab_size = 16384
hidden_size = 1024
num_layers = 2
num_heads = 8
num_kv_heads = 1
ffn_hidden_size = 1024
max_seq_len = 64
tie_embeddings = false
moe = {{ num_experts = 8, top_k = 2, expert_ffn_size = 682 }}
[training]
steps = {rounds}
seq_len = 64
tokens_per_step = 64
[optimizer]
warmup_steps = 0
[swarm]
method = "{method}"
codec = "{codec}"
nodes = 4
every = 1
outlier = 0.0
"""


def run_node(name: str, address: str, folder: str, results: Any) -> None:
    """Run a node without training, which sends slightly changed weights and writes the received weights."""
    directory = Path(folder)
    link = SwarmClient(address, directory / "certs" / name)
    run = run_from_table(tomllib.loads(link.join(capacity=2, text="none")["run"]))
    round_seconds = []
    feedback: Feedback = {}
    base_path, update, down = (directory / f"{name}.{kind}" for kind in ("base", "update", "down"))
    for number in range(ROUNDS):
        task = link.wait(round=number)
        if not number:
            from phalanx.spec.parameter_shapes import parameter_shapes

            link.download_round(base_path, None, (), parameter_shapes(run.model).__getitem__)
        start, seconds = time.perf_counter(), {}
        round_seconds.append(_round(run, name, task.owned, number, link, (base_path, update, down), feedback, seconds))
        round_seconds[-1]["seconds"] = time.perf_counter() - start
    link.leave()
    results.put(round_seconds)


def _round(
    run: RunSpec,
    name: str,
    owned: tuple[int, ...],
    number: int,
    link: SwarmClient,
    paths: tuple[Path, Path, Path],
    feedback: Feedback,
    seconds: dict[str, float],
) -> dict[str, float]:
    swarm, (base_path, update, down) = run.swarm, paths
    assert swarm is not None
    assert run.model.moe is not None
    split = swarm.method in EXPERT_SPLIT_METHODS
    owners = tuple((name,) if expert in owned else () for expert in range(run.model.moe.num_experts)) if split else None
    pieces = fragment_pieces(run.model, 0, 1)
    sent_pieces = pieces_sent_by(pieces, owners, name)
    marks = [time.perf_counter()]
    with TensorFile(base_path) as base:
        write_update(
            update, sent_pieces, swarm.effective_codec, lambda item: base.read(item) + 1e-3, base.read, feedback
        ).close()
    marks.append(time.perf_counter())
    link.upload_update(update, number, 64, 1)
    marks.append(time.perf_counter())
    link.wait(committed=number + 1)
    marks.append(time.perf_counter())
    own_keys = [item.key for item in sent_pieces if item.expert is not None] if swarm.method == "spes+" else []
    sizes = {item.key: (encoded_bytes(item.num_elements, swarm.effective_codec),) for item in pieces}
    link.download_round(down, number, own_keys, sizes.__getitem__)
    marks.append(time.perf_counter())
    with TensorFile(base_path, writable=True) as base, TensorFile(down) as received, TensorFile(update) as sent:
        for item in pieces:
            source = sent if item.key in own_keys else received
            base.write(item, decode_piece(item, source.raw(item.key), swarm.effective_codec, base.read))
    marks.append(time.perf_counter())
    names = ("encode", "send", "wait", "receive", "decode")
    seconds |= {part: after - before for part, before, after in zip(names, marks, marks[1:], strict=False)}
    return dict(seconds)


def start_coordinator(folder: Path, run: str) -> tuple[subprocess.Popen[str], str]:
    """Start a coordinator; return its process and its address."""
    file = folder / "swarm.toml"
    file.write_text(run)
    arguments = ["serve", str(file), "--certs", str(folder / "certs" / "lead"), "--listen", "127.0.0.1:0"]
    command = [sys.executable, "-m", "phalanx", "swarm", *arguments, "--set", f"output_dir={folder / 'runs'}"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    match = next(filter(None, (re.search(r"join (127\.0\.0\.1:\d+)", line) for line in process.stderr)), None)
    assert match is not None
    return process, match[1]


def peak_memory(process: subprocess.Popen[str]) -> int:
    """Return the peak memory of a process so far."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    match = re.search(r"VmHWM:\s+(\d+) kB", status)
    assert match is not None
    return int(match[1]) * 1024


def measure(method: str, codec: str) -> dict[str, Any]:
    """Measure the rounds of four nodes."""
    folder = Path(tempfile.mkdtemp(prefix="phalanx-swarm-"))
    try:
        create_certificate_authority(folder / "certs")
        issue_certificate(folder / "certs", "lead", ["127.0.0.1"])
        for name in NODES:
            issue_certificate(folder / "certs", name, [])
        process, address = start_coordinator(folder, RUN.format(rounds=ROUNDS, method=method, codec=codec))
        idle, context = peak_memory(process), multiprocessing.get_context("spawn")
        results = context.Queue()
        members = [context.Process(target=run_node, args=(name, address, str(folder), results)) for name in NODES]
        for member in members:
            member.start()
        node_results = [results.get(timeout=600) for _ in members]
        peak = peak_memory(process)
        for member in members:
            member.join(60)
        process.wait(60)
        model = count_parameters(load_run(folder / "swarm.toml").model).total * 4
        sizes = {kind: (folder / f"ann.{kind}").stat().st_size for kind in ("update", "down")}
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    rounds = [max(node_result[number]["seconds"] for node_result in node_results) for number in range(1, ROUNDS)]
    parts = {
        part: statistics.median(node_result[n][part] for node_result in node_results for n in range(1, ROUNDS))
        for part in node_results[0][0]
    }
    return {
        "way": f"{method}, {codec}",
        "model": model,
        "seconds": statistics.median(rounds),
        "idle": idle,
        "most": peak,
        "parts": parts,
        "sizes": sizes,
    }


def measure_model_transfer() -> tuple[float, float]:
    """Return the median bytes per second of the upload and the download of a model by a single node."""
    folder = Path(tempfile.mkdtemp(prefix="phalanx-swarm-"))
    try:
        create_certificate_authority(folder / "certs")
        issue_certificate(folder / "certs", "lead", ["127.0.0.1"])
        issue_certificate(folder / "certs", "ann", [])
        text = RUN.format(rounds=ROUNDS, method="fedavg", codec="fp32").replace("nodes = 4", "nodes = 1")
        process, address = start_coordinator(folder, text)
        context = multiprocessing.get_context("spawn")
        results = context.Queue()
        member = context.Process(target=run_node, args=("ann", address, str(folder), results))
        member.start()
        rounds = results.get(timeout=600)
        member.join(60)
        process.wait(60)
        model = count_parameters(load_run(folder / "swarm.toml").model).total * 4
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return tuple(
        model / statistics.median(round_seconds[part] for round_seconds in rounds[1:]) for part in ("send", "receive")
    )  # type: ignore[return-value]


def measure_wire() -> tuple[float, float]:
    """Return the median bytes per second of the wire, the limit: chunks over mutual TLS without checks."""
    folder = Path(tempfile.mkdtemp(prefix="phalanx-swarm-"))
    try:
        create_certificate_authority(folder)
        issue_certificate(folder, "lead", ["127.0.0.1"])
        issue_certificate(folder, "ann", [])
        context = multiprocessing.get_context("spawn")
        ports = context.Queue()
        server = context.Process(target=_serve_chunks, args=(str(folder), ports))
        server.start()
        key, own, authority = _credentials(folder, "ann")
        credentials = grpc.ssl_channel_credentials(authority, key, own)
        chunk = os.urandom(CHUNK_BYTES)
        with grpc.secure_channel(f"127.0.0.1:{ports.get(timeout=60)}", credentials, OPTIONS) as channel:
            send, receive = channel.stream_unary("/wire/put"), channel.unary_stream("/wire/get")
            times = [
                (_seconds(lambda: send(iter([chunk] * CHUNKS))), _seconds(lambda: list(map(len, receive(b"")))))
                for _ in range(ROUNDS)
            ]
        server.kill()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    up, down = (CHUNK_BYTES * CHUNKS / statistics.median(seconds) for seconds in zip(*times, strict=True))
    return up, down


def _seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _credentials(folder: Path, name: str) -> tuple[bytes, bytes, bytes]:
    key, own, authority = ((folder / name / file).read_bytes() for file in ("key.pem", "cert.pem", "ca.pem"))
    return key, own, authority


def _serve_chunks(folder: str, ports: Any) -> None:
    chunk = os.urandom(CHUNK_BYTES)
    handlers = {
        "put": grpc.stream_unary_rpc_method_handler(lambda chunks, _: str(sum(map(len, chunks))).encode()),
        "get": grpc.unary_stream_rpc_method_handler(lambda _, __: iter([chunk] * CHUNKS)),
    }
    server = grpc.server(ThreadPoolExecutor(2), options=OPTIONS)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("wire", handlers),))
    key, own, authority = _credentials(Path(folder), "lead")
    ports.put(server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([(key, own)], authority, True)))
    server.start()
    server.wait_for_termination()


def page(results: list[dict[str, Any]], wire_alone: tuple[float, float], up: float, down: float) -> str:
    """Return the page with the table and the targets."""
    lines = [
        "| method, codec | round, s | encode, s | send, s | wait, s | receive, s | decode, s | up, MB | down, MB "
        "| coordinator, MB | share of its limit |",
        "|---|" + "---:|" * 10,
    ]
    for result in results:
        limit = 1.5 * result["model"] + 256 * MIB
        parts = " | ".join(f"{result['parts'][part]:.2f}" for part in ("encode", "send", "wait", "receive", "decode"))
        sizes = " | ".join(f"{result['sizes'][kind] / 1e6:.0f}" for kind in ("update", "down"))
        memory = f"{result['most'] / 1e6:.0f} ({result['idle'] / 1e6:.0f} idle) | {result['most'] / limit:.2f}"
        lines.append(f"| {result['way']} | {result['seconds']:.2f} | {parts} | {sizes} | {memory} |")
    model = results[0]["model"]
    met = ", ".join(
        f"{result['way']}: {'met' if result['seconds'] <= GOAL_SECONDS else 'missed'}" for result in results
    )
    return f"""# A round of a swarm on one machine

Written by `python -m benchmarks.swarm_round`. Four nodes that do not train and a coordinator share {os.cpu_count()}
cores and communicate over loopback with mutual TLS. The model has {model / 1e9:.2f} GB in fp32, half of it experts.
Times are medians over {ROUNDS - 1} rounds. The time of a round is that of its slowest node, and the times of its parts
are medians over nodes. "Encode" and "decode" write weights to a file and read them from a file, on four nodes at once.

{chr(10).join(lines)}

- Target: a round takes at most {GOAL_SECONDS:.0f} s ({met}). A round of spes in fp32 in the reference implementation
  took {REFERENCE_SECONDS} s.
- Target: the coordinator uses at most its limit, 1.5 models + 256 MB. The coordinator of the reference implementation
  used {REFERENCE_MODELS} models.
- At other times, the same program takes half as long again. On this virtual machine, the cost of the wire, the page
  cache and new memory varies. The speed of a single stream in the same run shows the state of the machine.
- A single stream over mutual TLS reaches {wire_alone[0] / 1e9:.2f} GB/s up (target {GOAL_UP / 1e9:.1f}:
  {"met" if wire_alone[0] >= GOAL_UP else "missed"}) and {wire_alone[1] / 1e9:.2f} GB/s down (target
  {GOAL_DOWN / 1e9:.1f}: {"met" if wire_alone[1] >= GOAL_DOWN else "missed"}).
- The upload of a model reaches {up / wire_alone[0]:.0%} of this limit ({up / 1e9:.2f} GB/s). It includes the checksum,
  the checks of values and size, and the write to disk. The download reaches {down / wire_alone[1]:.0%}
  ({down / 1e9:.2f} GB/s), including the checksum of each piece and the write to a file.
- Machine: {platform.machine()}, Python {platform.python_version()}.
"""


def main() -> None:
    """Measure, print the table and write the page."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # as for nodes that share cores
    results = [measure(method, codec) for method, codec in (("spes", "fp32"), ("spes+", "int8"), ("diloco", "fp32"))]
    text = page(results, measure_wire(), *measure_model_transfer())
    print(text)
    print(json.dumps([result["parts"] for result in results]), file=sys.stderr)
    write_results(PAGE, text)


if __name__ == "__main__":
    main()
