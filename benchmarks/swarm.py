"""Compare swarm methods over slow links: loss, traffic, memory and waiting time.

    python -m benchmarks.swarm                                   # all methods: about an hour and a half on 2 cores
    python -m benchmarks.swarm --ways spes diloco --seeds 0      # some methods; the page shows all recorded rows
    python -m benchmarks.swarm --page                            # only rewrites docs/results/benchmarks/swarm.md

Four nodes (`phalanx swarm join`) and a coordinator (`phalanx swarm serve`) run in network namespaces of their own, with
mutual TLS. The kernel shapes their links (`phalanx.testing.network_namespaces`), which requires root and iproute2. The
nodes train a small mixture of experts on real text. Central training is `phalanx train` with four times the batch.

Seed 0 runs at both speeds, and the other seeds at the faster speed, because the loss does not depend on the speed. ddp,
which is slow, also runs at the faster speed only.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.pages import write_results
from phalanx.cost.exact.parameters import count_parameters
from phalanx.cost.exact.swarm import WEIGHT_BYTES, node_share, round_bytes, round_time, state_bytes
from phalanx.data.prepare import prepare
from phalanx.runs.metrics import read_metrics
from phalanx.spec.files.load import load_run
from phalanx.spec.run import RunSpec
from phalanx.spec.swarm import EXPERT_SPLIT_METHODS
from phalanx.testing.network_namespaces import StarNetwork, star_network
from phalanx.testing.swarm_processes import swarm_processes

PAGE = Path(__file__).parents[1] / "docs" / "results" / "benchmarks" / "swarm.md"
ROWS = PAGE.with_suffix(".jsonl")
NODES, SPEEDS, SEEDS = ("ann", "bob", "cid", "dee"), (20, 100), (0, 1, 2)
SECONDS = 1800
RUN = """
name = "swarm"
output_dir = "{out}"
[model]
vocab_size = 257
hidden_size = 64
num_layers = 2
num_heads = 4
ffn_hidden_size = 128
max_seq_len = 64
tie_embeddings = false
moe = {{ num_experts = 8, top_k = 2, expert_ffn_size = 128 }}
[data]
train = {text}
tokenizer = "bytes"
cache = "{cache}"
[training]
steps = {steps}
seq_len = 64
tokens_per_step = {tokens}
precision = "fp32"
seed = {seed}
[optimizer]
learning_rate = 2e-3
warmup_steps = 50
[evaluation]
tokens = 131072
[cluster]
device = "cpu"
"""
EVERY = 25
SWARM = "\n[swarm]\nnodes = 4\nevery = {every}\n"
DDP = 'method = "ddp"'
OVERLAP = "delay = 10"
WAYS = {
    "central": "",
    "ddp": DDP,
    "fedavg": 'method = "fedavg"',
    "diloco": 'method = "diloco"',
    "spes": 'method = "spes"',
    "spes, merging": 'method = "spes"\nmerge = { every = 25, alpha = 0.1, steps = 240, nearest = 2 }',
    "spes+ bf16": 'method = "spes+"\ncodec = "bf16"\nfrozen_expert_codec = "bf16"',
    "spes+ int8": 'method = "spes+"\ncodec = "int8"\nfrozen_expert_codec = "bf16"',
    "spes+ int4": 'method = "spes+"\ncodec = "int4"\nfrozen_expert_codec = "int8"',
    "spes+ int8, twice": 'method = "spes+"\ncodec = "int8"\nreplication = 2',
    "spes+ int8, overlap": f'method = "spes+"\ncodec = "int8"\nfrozen_expert_codec = "bf16"\n{OVERLAP}',
}
"""Lines of [swarm]. Each expert is trained by one node, or by two nodes in "twice"."""
Row = dict[str, Any]
NOTES = (
    f"- The {len(NODES)} nodes are processes in network namespaces of their own. They share {os.cpu_count()} cores, so",
    "  the steps of a node are faster while other nodes wait. The kernel shapes the links, and nodes use mutual TLS.",
    "- A run has 600 steps in 24 rounds of 25, with 1,024 tokens per step and node. Central training has the same",
    "  tokens, 4,096 per step.",
    "- The held-out loss is the mean over seeds (minimum to maximum), compared with spes for the same seeds.",
    "- MB are those of one node in the complete run, without its initial weights. MB on the wire are all bytes on its",
    "  link, including TLS, TCP and control messages.",
    "- With overlap, a node trains ten of the 25 steps of a round during the exchange, and adds them to the result.",
    "- The state consists of the weights, gradients and AdamW moments of a node's trainer in a step.",
    '- Seconds are those from the start of the second round to the end of the last round. "Training" is the share of',
    "  time in which nodes train, without the first round. The formula uses the measured step time, and the bytes at",
    "  the link speed.",
    "- Rows were measured on several days. Other work on these cores increases the seconds, but not losses and bytes.",
    f"- Written by `python -m benchmarks.swarm` from docs/results/benchmarks/swarm.jsonl; {platform.machine()}, torch "
    f"{torch.__version__}.",
)


def write_run_file(folder: Path, swarm: str, seed: int, steps: int = 600) -> Path:
    """Write a run file with these lines of [swarm], or for central training without lines; return its path."""
    library = Path(sysconfig.get_paths()["stdlib"])
    text = [str(library / name) for name in ("asyncio", "email", "http", "json", "unittest", "xml", "multiprocessing")]
    file = folder / "swarm.toml"
    table = RUN.format(
        out=folder / "runs",
        text=json.dumps(text),
        cache=folder.parent / "cache",
        tokens=1024 * (1 if swarm else len(NODES)),
        seed=seed,
        steps=steps,
    )
    steps_per_round = 1 if swarm == DDP else EVERY
    file.write_text(table + SWARM.format(every=steps_per_round) + swarm if swarm else table)
    return file


def train_centrally(folder: Path, seed: int) -> Row:
    """Train one process with the batches of all nodes."""
    start = time.perf_counter()
    command = [sys.executable, "-m", "phalanx", "train", str(write_run_file(folder, "", seed)), "--nproc", "1"]
    subprocess.run(command, check=True, capture_output=True, timeout=SECONDS)
    seconds = time.perf_counter() - start
    return {"loss": held_out_loss(folder / "runs" / "swarm"), "seconds": seconds}


def held_out_loss(directory: Path) -> float:
    """Return the last held-out loss of a run."""
    return float([record["held_out_loss"] for record in read_metrics(directory) if "held_out_loss" in record][-1])


def train_swarm(folder: Path, method: str, seed: int, mbit: float) -> Row:
    """Train four nodes with a coordinator on links of `mbit` Mbit/s."""
    file, lead = write_run_file(folder, WAYS[method], seed), folder / "runs" / "swarm"
    prepare(load_run(file).data)
    with star_network(NODES, mbit) as network, swarm_processes(network, folder, file, lead) as swarm:
        swarm.start_all()
        swarm.wait_all(SECONDS)
        wire = {name: _link_bytes(network, name) for name in NODES}
        times = [event["at"] for event in swarm.events("opened", "committed")]
    rounds = {name: _read_json_lines(folder / "nodes" / name / "swarm.jsonl") for name in NODES}
    later = [line for lines in rounds.values() for line in lines[1:]]  # nodes may join during the first round
    initial_bytes = WEIGHT_BYTES * count_parameters(load_run(file).model).total
    return {
        "loss": held_out_loss(folder / "nodes" / NODES[0]),
        "seconds": times[-1] - times[2],
        "rounds": len(times) // 2,
        "up": statistics.median(sum(line["sent_bytes"] for line in lines) for lines in rounds.values()),
        "down": statistics.median(sum(line["received_bytes"] for line in lines) for lines in rounds.values())
        - initial_bytes,
        "carried": statistics.median(wire.values()),
        "utilization": sum(line["train_seconds"] for line in later) / sum(line["seconds"] for line in later),
        "held": max(line["held_bytes"] for lines in rounds.values() for line in lines),
        "step_seconds": sum(line["train_seconds"] for line in later) / sum(line["steps"] for line in later),
    }


def _link_bytes(network: StarNetwork, name: str) -> int:
    """Return all bytes on a host's link, in both directions."""
    host = network.hosts[name]
    counters = [f"/sys/class/net/{host.interface}/statistics/{direction}_bytes" for direction in ("rx", "tx")]
    command = [*host.prefix, "cat", *counters]
    return sum(map(int, subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()))


def _read_json_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def num_owned_experts(run: RunSpec) -> int:
    """Return the number of experts per layer that a node trains."""
    assert run.model.moe is not None
    return run.model.moe.num_experts * (run.swarm.replication if run.swarm else len(NODES)) // len(NODES)


def predict_row(run: RunSpec, mbit: float, row: Row) -> Row:
    """Predict the row with cost/exact/swarm.py."""
    swarm = run.swarm
    assert swarm is not None
    node = node_share(run.model, swarm.method, num_owned_experts(run))
    traffic = round_bytes(node, swarm.method, swarm.effective_codec, swarm.replication)
    rounds = run.training.steps // swarm.steps_per_round
    speed = mbit * 1e6 / 8
    times = round_time(traffic, speed, speed, swarm.steps_per_round, row["step_seconds"], swarm.delay)
    return {
        "up": traffic.up * rounds,
        "down": traffic.down * rounds,
        "utilization": times.utilization,
        "state": state_bytes(node, swarm.frozen_expert_codec if swarm.method in EXPERT_SPLIT_METHODS else "fp32"),
    }


def measure(method: str, seed: int, mbit: float) -> Row:
    """Measure a run; return its row."""
    with tempfile.TemporaryDirectory(prefix="phalanx-swarm-") as folder:
        run_folder = Path(folder) / "one"
        run_folder.mkdir()
        row = train_centrally(run_folder, seed) if method == "central" else train_swarm(run_folder, method, seed, mbit)
        run = load_run(run_folder / "swarm.toml")
        row["predicted"] = predict_row(run, mbit, row) if run.swarm else {}
    return {"way": method, "seed": seed, "mbit": 0 if method == "central" else mbit, **row}


def rows_of(method: str) -> list[Row]:
    """Return the recorded rows of a method, the last one for each seed and speed."""
    lines = _read_json_lines(ROWS) if ROWS.exists() else []
    return list({(row["seed"], row["mbit"]): row for row in lines if row["way"] == method}.values())


def losses(rows: Sequence[Row]) -> dict[int, float]:
    """Return the loss by seed, each at its fastest measured link."""
    best = {row["seed"]: row["loss"] for row in sorted(rows, key=lambda row: row["mbit"])}
    return {seed: best[seed] for seed in sorted(best)}


def loss_difference(rows: Sequence[Row], others: Sequence[Row]) -> float:
    """Return the relative difference of losses over the seeds of both."""
    losses_of_rows, losses_of_others = losses(rows), losses(others)
    seeds = losses_of_rows.keys() & losses_of_others.keys()
    return sum(losses_of_rows[seed] for seed in seeds) / sum(losses_of_others[seed] for seed in seeds) - 1


def table() -> Iterator[str]:
    """Yield the table with a row for each method."""
    yield (
        "| method | held-out loss | relative to spes | MB up + down | relative to diloco | formula | MB on the wire "
        "| state, MB | formula | s at 20 Mbit/s | training | formula | s at 100 Mbit/s | training | formula |"
    )
    yield "|---|" + "---:|" * 14
    spes, diloco = (rows_of(method) for method in ("spes", "diloco"))
    for method in WAYS:
        rows = rows_of(method)
        if not rows:
            continue
        method_losses = [*losses(rows).values()]
        cells = [f"{statistics.mean(method_losses):.3f} ({min(method_losses):.3f} to {max(method_losses):.3f})"]
        cells.append(f"{loss_difference(rows, spes):+.2%}" if spes else "")
        cells += _bytes(rows[0], diloco[0] if diloco else None)
        for mbit in SPEEDS:
            cells += _times([row for row in rows if row["mbit"] == mbit])
        yield f"| {method} | " + " | ".join(cells) + " |"


def _bytes(row: Row, diloco: Row | None) -> list[str]:
    state_mb = f"{row['held'] / 1e6:.2f}" if "held" in row else ""
    if not row["predicted"]:
        return ["", "", "", "", state_mb, ""]
    total, predicted_bytes = row["up"] + row["down"], row["predicted"]["up"] + row["predicted"]["down"]
    ratio = f"{total / (diloco['up'] + diloco['down']):.3f}" if diloco else ""
    return [
        f"{total / 1e6:.2f}",
        ratio,
        f"{predicted_bytes / 1e6:.2f}",
        f"{row['carried'] / 1e6:.1f}",
        state_mb,
        f"{row['predicted']['state'] / 1e6:.2f}",
    ]


def _times(rows: Sequence[Row]) -> list[str]:
    if not rows:
        return ["", "", ""]
    return [
        f"{statistics.median(row['seconds'] for row in rows):.0f}",
        f"{statistics.median(row['utilization'] for row in rows):.1%}",
        f"{statistics.median(row['predicted']['utilization'] for row in rows):.1%}",
    ]


def main() -> None:
    """Measure, print the table and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ways", nargs="*", default=list(WAYS), choices=list(WAYS), metavar="WAY")
    parser.add_argument("--seeds", nargs="*", type=int, default=list(SEEDS))
    parser.add_argument("--page", action="store_true", help="write the page without measuring")
    args = parser.parse_args()
    for seed in () if args.page else args.seeds:
        for method in args.ways:
            speeds = SPEEDS[1:] if seed or method in ("central", "ddp") else SPEEDS
            for mbit in speeds:
                row = measure(method, seed, mbit)
                print(json.dumps(row), file=sys.stderr, flush=True)
                with ROWS.open("a") as file:
                    file.write(json.dumps(row) + "\n")
    text = page()
    print(text)
    write_results(PAGE, text)


def page() -> str:
    """Return the page with the table and the targets."""
    spes, int8, overlap, central = (
        rows_of(method) for method in ("spes", "spes+ int8", "spes+ int8, overlap", "central")
    )
    diloco = rows_of("diloco")
    lines = ["# Comparison of swarm methods", "", *table(), ""]
    if spes and int8 and diloco and central and overlap:
        sent_bytes = {name: rows[0]["up"] + rows[0]["down"] for name, rows in (("spes", spes), ("int8", int8))}
        diloco_bytes = diloco[0]["up"] + diloco[0]["down"]
        loss = loss_difference(int8, spes)
        slow = [row["utilization"] for row in overlap if row["mbit"] == SPEEDS[0]]
        gap = loss_difference(spes, central)
        lines += [
            f"- spes sends {1 - sent_bytes['spes'] / diloco_bytes:.1%} less than diloco (target 33 %; "
            "formula for this model "
            f"{1 - _predicted_bytes(spes[0]) / _predicted_bytes(diloco[0]):.1%}).",
            f"- spes+ in int8 sends {sent_bytes['int8'] / diloco_bytes:.3f} of diloco's bytes (target 0.17). "
            f"Its loss differs by {loss:+.2%} from that of spes in fp32 (target 0.5 %).",
            f"- At {SPEEDS[0]} Mbit/s with overlap, nodes train {statistics.median(slow):.1%} of the time "
            "(target 90 %).",
            f"- The loss of spes is {gap:.1%} above that of central training. Each of its experts sees a quarter of",
            "  its tokens, and nodes train separately for 25 steps. Experts of fedavg see all tokens, so its loss",
            "  shows the effect of separate training.",
        ]
    return "\n".join([*lines, *NOTES, ""])


def _predicted_bytes(row: Row) -> float:
    return float(row["predicted"]["up"] + row["predicted"]["down"])


if __name__ == "__main__":
    main()
