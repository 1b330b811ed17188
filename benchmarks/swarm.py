"""Methods of a swarm beside each other, over slow links: what they learn, send, hold, and how long they wait.

    python -m benchmarks.swarm                                   # everything: about an hour and a half on 2 cores
    python -m benchmarks.swarm --ways spes diloco --seeds 0      # some; the page shows all that was ever measured
    python -m benchmarks.swarm --page                            # only writes docs/results/benchmarks/swarm.md again

Four nodes and a coordinator are `phalanx swarm join` and `serve`, each in a network namespace of its own, on links
that the kernel shapes (`phalanx.testing.network_namespaces`: root and iproute2 are needed), with mutual TLS. They
learn a small mixture of experts from real text. Central training is `phalanx train` with four times the batch.
Seed 0 runs at both speeds, the others at the faster one, for what is learned does not depend on it;
so does ddp, which is slow.
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
"""Lines of [swarm]. Experts are trained by one node each, but where it says twice."""
Row = dict[str, Any]
NOTES = (
    f"- {len(NODES)} nodes, each a process in a network namespace of its own, on {os.cpu_count()} cores that they",
    "  share, so that a node's steps are faster while others wait; links shaped by the kernel, mutual TLS. 600 steps,",
    "  24 rounds of 25, 1,024 tokens a step and node; central training has the same tokens, 4,096 a step.",
    "- Held-out loss: mean over seeds (the least and the largest); beside that of spes with the same seeds. Bytes",
    "  are a node's, of the whole run, without the weights that it begins with; on the wire is all that its link",
    "  carried, with TLS, TCP and words between.",
    "- Overlap: ten of a round's 25 steps are learned while it is told and heard of, and added to what came of it.",
    "- Held: weights, gradients and AdamW's moments of a node's trainer, summed as they are in a step.",
    "- Seconds: from the second round's opening to the last one's end; \"learning\": the part of them in which nodes",
    "  train, without the first round; the formula has the measured time of a step, and the bytes above at the link's",
    "  speed. Rows are of several days: beside other work on these cores seconds are more, losses and bytes are not.",
    f"- Written by `python -m benchmarks.swarm` from docs/results/benchmarks/swarm.jsonl; {platform.machine()}, torch "
    f"{torch.__version__}.",
)


def described(folder: Path, swarm: str, seed: int, steps: int = 600) -> Path:
    """A run file with these lines of [swarm]; without any, of central training."""
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
    every = 1 if swarm == DDP else EVERY
    file.write_text(table + SWARM.format(every=every) + swarm if swarm else table)
    return file


def central(folder: Path, seed: int) -> Row:
    """One process, with the batches of all nodes together."""
    begun = time.perf_counter()
    command = [sys.executable, "-m", "phalanx", "train", str(described(folder, "", seed)), "--nproc", "1"]
    subprocess.run(command, check=True, capture_output=True, timeout=SECONDS)
    seconds = time.perf_counter() - begun
    return {"loss": held_out_loss(folder / "runs" / "swarm"), "seconds": seconds}


def held_out_loss(directory: Path) -> float:
    """The last."""
    return float([record["held_out_loss"] for record in read_metrics(directory) if "held_out_loss" in record][-1])


def together(folder: Path, way: str, seed: int, mbit: float) -> Row:
    """Four nodes and their coordinator, on links of so many Mbit/s."""
    file, lead = described(folder, WAYS[way], seed), folder / "runs" / "swarm"
    prepare(load_run(file).data)
    with star_network(NODES, mbit) as made, swarm_processes(made, folder, file, lead) as under_way:
        under_way.start_all()
        under_way.wait_all(SECONDS)
        wire = {name: _carried(made, name) for name in NODES}
        at = [event["at"] for event in under_way.events("opened", "committed")]
    rounds = {name: _lines(folder / "nodes" / name / "swarm.jsonl") for name in NODES}
    later = [line for lines in rounds.values() for line in lines[1:]]  # the first begins before all are there
    whole = WEIGHT_BYTES * count_parameters(load_run(file).model).total  # which all begin with
    return {
        "loss": held_out_loss(folder / "nodes" / NODES[0]),
        "seconds": at[-1] - at[2],
        "rounds": len(at) // 2,
        "up": statistics.median(sum(line["sent_bytes"] for line in lines) for lines in rounds.values()),
        "down": statistics.median(sum(line["received_bytes"] for line in lines) for lines in rounds.values()) - whole,
        "carried": statistics.median(wire.values()),
        "utilisation": sum(line["train_seconds"] for line in later) / sum(line["seconds"] for line in later),
        "held": max(line["held_bytes"] for lines in rounds.values() for line in lines),
        "step_seconds": sum(line["train_seconds"] for line in later) / sum(line["steps"] for line in later),
    }


def _carried(made: StarNetwork, name: str) -> int:
    """All bytes on a host's link, both ways."""
    host = made.hosts[name]
    counters = [f"/sys/class/net/{host.interface}/statistics/{way}_bytes" for way in ("rx", "tx")]
    inside = [*host.prefix, "cat", *counters]
    return sum(map(int, subprocess.run(inside, check=True, capture_output=True, text=True).stdout.split()))


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def owned(run: RunSpec) -> int:
    """Experts of each layer that a node trains."""
    assert run.model.moe is not None
    return run.model.moe.num_experts * (run.swarm.replication if run.swarm else len(NODES)) // len(NODES)


def predicted(run: RunSpec, mbit: float, row: Row) -> Row:
    """What cost/exact/swarm.py says of the same."""
    swarm = run.swarm
    assert swarm is not None
    node = node_share(run.model, swarm.method, owned(run))
    each = round_bytes(node, swarm.method, swarm.effective_codec, swarm.replication)
    rounds = run.training.steps // swarm.steps_per_round
    speed = mbit * 1e6 / 8
    time_of = round_time(each, speed, speed, swarm.steps_per_round, row["step_seconds"], swarm.delay)
    return {
        "up": each.up * rounds,
        "down": each.down * rounds,
        "utilisation": time_of.utilisation,
        "state": state_bytes(node, swarm.frozen_expert_codec if swarm.method in EXPERT_SPLIT_METHODS else "fp32"),
    }


def measure(way: str, seed: int, mbit: float) -> Row:
    """A run, and its numbers."""
    with tempfile.TemporaryDirectory(prefix="phalanx-swarm-") as folder:
        place = Path(folder) / "one"
        place.mkdir()
        row = central(place, seed) if way == "central" else together(place, way, seed, mbit)
        run = load_run(place / "swarm.toml")
        row["predicted"] = predicted(run, mbit, row) if run.swarm else {}
    return {"way": way, "seed": seed, "mbit": 0 if way == "central" else mbit, **row}


def rows_of(way: str) -> list[Row]:
    """All that was measured of a way: of each seed and speed the last."""
    lines = _lines(ROWS) if ROWS.exists() else []
    return list({(row["seed"], row["mbit"]): row for row in lines if row["way"] == way}.values())


def losses(rows: Sequence[Row]) -> dict[int, float]:
    """Of each seed, at the fastest link that it was measured at."""
    best = {row["seed"]: row["loss"] for row in sorted(rows, key=lambda row: row["mbit"])}
    return {seed: best[seed] for seed in sorted(best)}


def beyond(rows: Sequence[Row], others: Sequence[Row]) -> float:
    """How much more loss, of the seeds of both."""
    found, compared = losses(rows), losses(others)
    seeds = found.keys() & compared.keys()
    return sum(found[seed] for seed in seeds) / sum(compared[seed] for seed in seeds) - 1


def table() -> Iterator[str]:
    """Of every way a line."""
    yield (
        "| | held-out loss | of spes | MB up + down | of diloco's | formula | on the wire | MB held | formula "
        "| s at 20 | learning | formula | s at 100 | learning | formula |"
    )
    yield "|---|" + "---:|" * 14
    spes, diloco = (rows_of(way) for way in ("spes", "diloco"))
    for way in WAYS:
        rows = rows_of(way)
        if not rows:
            continue
        found = [*losses(rows).values()]
        cells = [f"{statistics.mean(found):.3f} ({min(found):.3f} to {max(found):.3f})"]
        cells.append(f"{beyond(rows, spes):+.2%}" if spes else "")
        cells += _bytes(rows[0], diloco[0] if diloco else None)
        for mbit in SPEEDS:
            cells += _times([row for row in rows if row["mbit"] == mbit])
        yield f"| {way} | " + " | ".join(cells) + " |"


def _bytes(row: Row, diloco: Row | None) -> list[str]:
    held = f"{row['held'] / 1e6:.2f}" if "held" in row else ""
    if not row["predicted"]:
        return ["", "", "", "", held, ""]
    total, said = row["up"] + row["down"], row["predicted"]["up"] + row["predicted"]["down"]
    ratio = f"{total / (diloco['up'] + diloco['down']):.3f}" if diloco else ""
    return [
        f"{total / 1e6:.2f}",
        ratio,
        f"{said / 1e6:.2f}",
        f"{row['carried'] / 1e6:.1f}",
        held,
        f"{row['predicted']['state'] / 1e6:.2f}",
    ]


def _times(rows: Sequence[Row]) -> list[str]:
    if not rows:
        return ["", "", ""]
    return [
        f"{statistics.median(row['seconds'] for row in rows):.0f}",
        f"{statistics.median(row['utilisation'] for row in rows):.1%}",
        f"{statistics.median(row['predicted']['utilisation'] for row in rows):.1%}",
    ]


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ways", nargs="*", default=list(WAYS), choices=list(WAYS), metavar="WAY")
    parser.add_argument("--seeds", nargs="*", type=int, default=list(SEEDS))
    parser.add_argument("--page", action="store_true", help="measure nothing")
    asked = parser.parse_args()
    for seed in () if asked.page else asked.seeds:
        for way in asked.ways:
            speeds = SPEEDS[1:] if seed or way in ("central", "ddp") else SPEEDS
            for mbit in speeds:
                row = measure(way, seed, mbit)
                print(json.dumps(row), file=sys.stderr, flush=True)
                with ROWS.open("a") as file:
                    file.write(json.dumps(row) + "\n")
    text = page()
    print(text)
    PAGE.write_text(text)


def page() -> str:
    """The table, and what it is held against."""
    spes, int8, overlap, alone = (rows_of(way) for way in ("spes", "spes+ int8", "spes+ int8, overlap", "central"))
    diloco = rows_of("diloco")
    lines = ["# A swarm's methods beside each other", "", *table(), ""]
    if spes and int8 and diloco and alone and overlap:
        sent = {name: rows[0]["up"] + rows[0]["down"] for name, rows in (("spes", spes), ("int8", int8))}
        whole = diloco[0]["up"] + diloco[0]["down"]
        loss = beyond(int8, spes)
        slow = [row["utilisation"] for row in overlap if row["mbit"] == SPEEDS[0]]
        gap = beyond(spes, alone)
        lines += [
            f"- spes sends {1 - sent['spes'] / whole:.1%} less than diloco (target 33 %; this model's formula says "
            f"{1 - _said(spes[0]) / _said(diloco[0]):.1%}).",
            f"- spes+ in int8: {sent['int8'] / whole:.3f} of diloco's bytes (target 0.17), its loss {loss:+.2%} of "
            "spes' in fp32 (target 0.5 %).",
            f"- Learning at {SPEEDS[0]} Mbit/s with overlap: {statistics.median(slow):.1%} of the time (target 90 %).",
            f"- spes is {gap:.1%} behind central training: its experts see a quarter of their tokens each, and nodes "
            "learn apart for 25 steps; fedavg, whose experts see all, shows how much of it is the second.",
        ]
    return "\n".join([*lines, *NOTES, ""])


def _said(row: Row) -> float:
    return float(row["predicted"]["up"] + row["predicted"]["down"])


if __name__ == "__main__":
    main()
