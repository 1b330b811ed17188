"""Measure the loss of a swarm with a fault every few rounds, compared with the same rounds without faults.

    python -m benchmarks.swarm_soak       # an hour; prints the table; writes docs/results/benchmarks/swarm_soak.md

Four nodes and a coordinator run as in benchmarks/swarm.py, on links of 100 Mbit/s, for two hundred rounds. These are
the faults: a node is killed and restarted, a node is stopped for some seconds, the coordinator is killed and restarted,
a link is cut and restored, a member sends an update with NaN, a stranger sends an update.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.pages import write_results
from benchmarks.swarm import EVERY, NODES, PAGE, held_out_loss, write_run_file
from phalanx.data.prepare import prepare
from phalanx.spec.files.load import load_run
from phalanx.swarm.coordinator.update_checks import UpdateRejected
from phalanx.swarm.rpc.certificates import issue_certificate
from phalanx.swarm.rpc.client import SwarmClient
from phalanx.swarm.tensor_files import TensorFile
from phalanx.testing.network_namespaces import star_network
from phalanx.testing.swarm_processes import COORDINATOR, SwarmProcesses, swarm_processes

SOAK_PAGE = PAGE.with_name("swarm_soak.md")
ROUNDS, FAULT_EVERY, MBIT, SECONDS, LIMIT = 200, 4, 100, 3600, 0.01
STOPPED_SECONDS, CUT_SECONDS = 5.0, 8.0
STRANGER = "eve"
SOAK = """
codec = "int8"
method = "spes+"
replication = {replication}
round = {{ grace_seconds = 4.0, lease_seconds = 12.0 }}
"""


def node_killed(swarm: SwarmProcesses, name: str) -> None:
    """Kill the processes of a node, and restart it at once."""
    swarm.kill(name)
    swarm.start(name)


def coordinator_killed(swarm: SwarmProcesses, name: str) -> None:
    """Kill the coordinator, and restart it at once."""
    node_killed(swarm, COORDINATOR)


def node_stopped(swarm: SwarmProcesses, name: str) -> None:
    """Stop a node and continue it."""
    swarm.signal(name, signal.SIGSTOP)
    time.sleep(STOPPED_SECONDS)
    swarm.signal(name, signal.SIGCONT)


def link_cut(swarm: SwarmProcesses, name: str) -> None:
    """Disconnect the link of a node for some seconds."""
    swarm.network.disconnect(name)
    time.sleep(CUT_SECONDS)
    swarm.network.reconnect(name)


def invalid_update_of_member(swarm: SwarmProcesses, name: str) -> None:
    """Send an invalid update with the certificate of a member."""
    _send_from_host(swarm, name, name)


def update_of_stranger(swarm: SwarmProcesses, name: str) -> None:
    """Send an invalid update with a certificate of the authority, from a node that has not joined."""
    _send_from_host(swarm, STRANGER, name)


FAULTS: tuple[Callable[[SwarmProcesses, str], None], ...] = (
    node_killed,
    coordinator_killed,
    node_stopped,
    link_cut,
    invalid_update_of_member,
    update_of_stranger,
)


def _send_from_host(swarm: SwarmProcesses, sender: str, host_name: str) -> None:
    """Send an invalid update from the network namespace of a host."""
    host = swarm.network.hosts[host_name]
    arguments = swarm.address(host), str(swarm.folder), sender, host_name
    code = f"from benchmarks.swarm_soak import send_invalid_update; send_invalid_update(*{arguments!r})"
    subprocess.run([*host.prefix, sys.executable, "-c", code], check=True, timeout=120)


def send_invalid_update(address: str, folder: str, sender: str, host_name: str) -> None:
    """Send the last update of a node to the open round, with all bits of its values set, which makes scales NaN."""
    last_update, path = Path(folder) / "nodes" / host_name / "update", Path(folder) / "lie"
    if not last_update.exists():
        return
    path.write_bytes(last_update.read_bytes())
    with TensorFile(path, writable=True) as file:
        for key, shape in file.shapes.items():
            file.write_raw(key, b"\xff" * shape[0])
    link = SwarmClient(address, Path(folder) / "certs" / sender)
    with suppress(UpdateRejected):
        link.upload_update(path, link.heartbeat().round, 1024, 1)


def run_rounds(seed: int, replication: int, faults: bool) -> dict[str, Any]:
    """Run all rounds, and return the measurements."""
    with tempfile.TemporaryDirectory(prefix="phalanx-soak-") as scratch:
        folder = Path(scratch) / "one"
        folder.mkdir()
        file = write_run_file(folder, SOAK.format(replication=replication), seed, steps=EVERY * ROUNDS)
        prepare(load_run(file).data)
        done: Counter[str] = Counter()
        with (
            star_network(NODES, MBIT) as network,
            swarm_processes(network, folder, file, folder / "runs" / "swarm") as swarm,
        ):
            issue_certificate(folder / "certs", STRANGER, [])
            swarm.start_all()
            if faults:
                _inject_faults(swarm, random.Random(seed), done)
            swarm.wait_all(SECONDS)
            events = swarm.events()
        refused = Counter(event["reason"] for event in events if event["kind"] == "refused")
        updates = [len(event["nodes"]) for event in events if event["kind"] == "committed"]
        times = [event["at"] for event in events if event["kind"] in ("opened", "committed")]
        return {
            "loss": held_out_loss(folder / "nodes" / NODES[0]),
            "rounds": len(updates),
            "updates": statistics.mean(updates),
            "seconds": times[-1] - times[0],
            "faults": done,
            "refused": refused,
        }


def _inject_faults(swarm: SwarmProcesses, chance: random.Random, done: Counter[str]) -> None:
    """Cause a fault every FAULT_EVERY rounds, except in the last rounds."""
    for number in range(FAULT_EVERY, ROUNDS - FAULT_EVERY, FAULT_EVERY):
        swarm.wait_until(lambda at=number: swarm.committed_rounds() >= at, f"round {number}", SECONDS)  # type: ignore[misc]
        fault = chance.choice(FAULTS)
        fault(swarm, chance.choice(NODES))
        done[fault.__name__.replace("_", " ")] += 1


def page(pairs: list[tuple[int, int, dict[str, Any], dict[str, Any]]]) -> str:
    """Return the page of the benchmark."""
    lines = [
        "| nodes per expert | seed | loss | loss with faults | difference | nodes per round | s | s with faults "
        "| faults | rejected updates |",
        "|---|" + "---:|" * 7 + "---|---|",
    ]
    for replication, seed, calm, rough in pairs:
        counts = (
            ", ".join(f"{count} {name}" for name, count in sorted(rough[kind].items()))
            for kind in ("faults", "refused")
        )
        lines.append(
            f"| {replication} | {seed} | {calm['loss']:.4f} | {rough['loss']:.4f} | "
            f"{rough['loss'] / calm['loss'] - 1:+.2%} | {rough['updates']:.2f} | {calm['seconds']:.0f} | "
            f"{rough['seconds']:.0f} | " + " | ".join(counts) + " |"
        )
    worst = max(rough["loss"] / calm["loss"] - 1 for _, _, calm, rough in pairs)
    return f"""# Two hundred rounds with faults

{chr(10).join(lines)}

- All {ROUNDS} rounds were committed in each run. Target: the loss is at most {LIMIT:.0%} above that without faults. The
  worst difference is {worst:+.2%} ({"met" if worst <= LIMIT else "missed"}).
- The method is spes+ in int8 with rounds of {EVERY} steps and a fault every {FAULT_EVERY} rounds.
- A killed node is restarted at once. It rejoins some rounds later, when it has loaded Python and PyTorch.
- Written by `python -m benchmarks.swarm_soak`.
"""


def main() -> None:
    """Measure, print the table and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", nargs="*", type=int, default=[0])
    parser.add_argument("--replication", nargs="*", type=int, default=[1, 2], help="nodes that train each expert")
    args = parser.parse_args()
    pairs = []
    for seed in args.seeds:
        for replication in args.replication:
            calm, rough = (run_rounds(seed, replication, faults) for faults in (False, True))
            print(json.dumps([calm, rough]), file=sys.stderr, flush=True)
            assert calm["rounds"] == rough["rounds"] == ROUNDS
            pairs.append((replication, seed, calm, rough))
    text = page(pairs)
    print(text)
    write_results(SOAK_PAGE, text)


if __name__ == "__main__":
    main()
