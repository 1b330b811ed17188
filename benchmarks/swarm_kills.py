"""Kill the coordinator and the nodes of a swarm at random, and check that nothing accepted is lost.

    python -m benchmarks.swarm_kills --seconds 1800 --seed 0     # prints the figures, writes the page with --page

A coordinator and three nodes run on this machine, with mutual TLS. Each step of a node lasts at least `STEP_SECONDS`,
most of which it sleeps, so that the machine is nearly idle. About every `KILL_SECONDS` one of the four is killed
(SIGKILL) and restarted some seconds later. These are the checks, on the journal, the records of the nodes and the times
of the kills as this program has seen them:

- Each accepted update is in the result of its round, and so is each one that its node believes to be accepted.
- A round that closed without a present node was open for as long as its deadline says, without the coordinator's
  downtime.
- Each accepted update has all steps of the round, unless its node was restarted in the round, or computed too slowly
  for the deadline (on a machine with other work).
- The weights of the coordinator and of each node are those that the journal has for their round.
- No process exits by itself.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.pages import write_results
from benchmarks.swarm import PAGE, write_run_file
from phalanx.data.prepare import prepare
from phalanx.runs.jsonl import read_jsonl
from phalanx.runs.swarm_records import ROUNDS_FILE, SHARED_WEIGHTS_FILE
from phalanx.spec.files.load import load_run
from phalanx.spec.parameter_shapes import parameter_shapes
from phalanx.spec.run import RunSpec
from phalanx.swarm.coordinator.open_round import deadline_offset
from phalanx.swarm.coordinator.swarm_state import SwarmState
from phalanx.swarm.tensor_files import TensorFile
from phalanx.swarm.worker.worker import DEADLINE_MARGIN_SECONDS
from phalanx.testing.network_namespaces import Host, StarNetwork
from phalanx.testing.processes import start_python
from phalanx.testing.swarm_processes import COORDINATOR, SwarmProcesses

KILLS_PAGE = PAGE.with_name("swarm_kills.md")
NODES = ("ann", "bob", "cid")
STEP_SECONDS = 0.25
KILL_SECONDS, DOWN_SECONDS = 8.0, 8.0
"""Mean time between kills, and maximum time until the restart."""
WAIT_SECONDS = 120.0
EVERY = 8
SWARM = f"""
[swarm]
nodes = 2
every = {EVERY}
codec = "int8"
round = {{ grace_seconds = 8.0, lease_seconds = 10.0 }}
"""
Interval = tuple[float, float]


class KilledSwarm(SwarmProcesses):
    """Processes of a swarm on this machine, and when the coordinator was down."""

    def __init__(self, folder: Path, run_file: Path, run: RunSpec) -> None:
        here = {name: Host(name=name, namespace="", address="", hub="127.0.0.1", interface="") for name in NODES}
        hub = Host(name=COORDINATOR, namespace="", address="", hub="127.0.0.1", interface="")
        super().__init__(StarNetwork(hub, here), folder, run_file, Path(run.output_dir) / run.name)
        self.run = run
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.port = listener.getsockname()[1]
        self.kills: Counter[str] = Counter()
        self.downtimes: list[Interval] = []
        self._killed_at = 0.0

    def start(self, name: str) -> None:
        """Start or restart the coordinator or a node, forked from a process that has imported PyTorch."""
        address = f"127.0.0.1:{self.port}"
        args = ["join", address, "--out", str(self.folder / "nodes"), "--nproc", "1"]
        if name == COORDINATOR:
            args = ["serve", str(self.run_file), "--listen", address]
        command = [sys.executable, "-m", "benchmarks.swarm_kills", "member", *args]
        with (self.folder / f"{name}.txt").open("ab") as log:
            self.process_by_name[name] = start_python(
                [*command, "--certs", str(self.folder / "certs" / name)],
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )

    def kill_and_restart(self, name: str, down_seconds: float) -> None:
        """Kill the coordinator or a node, and restart it after some seconds."""
        self.kill(name)
        self.kills[name] += 1
        killed_at = time.time()
        num_events = len(self.events())
        time.sleep(down_seconds)
        self.start(name)
        if name == COORDINATOR:
            self.wait_until(self._serves, "the coordinator serves again", WAIT_SECONDS)
            resumed = self.events()[num_events : num_events + 1]
            self.downtimes.append((killed_at, resumed[0]["at"] if resumed else time.time()))

    def _serves(self) -> bool:
        with socket.socket() as connection:
            return connection.connect_ex(("127.0.0.1", self.port)) == 0


def kill_at_random(swarm: KilledSwarm, seconds: float, chance: random.Random) -> None:
    """Kill processes for some time, then wait until all nodes train again, and end the swarm."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(chance.expovariate(1 / KILL_SECONDS))
        name = chance.choice((COORDINATOR, *NODES))
        swarm.kill_and_restart(name, chance.choice((0.0, chance.uniform(0, DOWN_SECONDS))))
        swarm.wait_until(lambda: True, "no process has failed", 1)
    num_rounds = swarm.committed_rounds()

    def complete_rounds() -> int:
        return sum(set(event["nodes"]) == set(NODES) for event in swarm.events("committed")[num_rounds:])

    swarm.wait_until(lambda: complete_rounds() >= 2, "two rounds with all nodes", WAIT_SECONDS)
    for name in (*NODES, COORDINATOR):
        swarm.signal(name, signal.SIGTERM)
        swarm.process_by_name[name].wait(WAIT_SECONDS)


@dataclass(kw_only=True)
class Findings:
    """Figures of a soak, and violations of the checks."""

    rounds: int = 0
    incomplete_rounds: int = 0
    """Rounds that closed without a node that was in them."""
    accepted: int = 0
    slow_updates: int = 0
    """Updates with fewer steps than assigned, because the steps lasted too long."""
    unrecorded_updates: int = 0
    """Updates with fewer steps than assigned whose node was killed before it wrote the duration of the steps."""
    refused: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)


def check_journal(swarm: KilledSwarm, findings: Findings) -> None:
    """Check the rounds of the journal against the kills."""
    state = SwarmState(swarm.run)
    absent: set[str] = set()
    for event in swarm.events():
        open_round = state.round
        if event["kind"] == "opened":
            absent.clear()
        elif event["kind"] == "left":
            absent.add(event["node"])
        elif event["kind"] == "accepted":
            findings.accepted += 1
            if event["steps"] != state.assigned_steps(event["node"]) and event["node"] not in absent:
                findings.violations += _short_update(swarm, state, event, findings)
        elif event["kind"] == "refused":
            findings.refused[event["reason"]] += 1
        elif event["kind"] == "committed" and open_round is not None:
            findings.rounds += 1
            findings.incomplete_rounds += open_round.updates.keys() != open_round.data_assignments.keys()
            if set(event["nodes"]) != open_round.updates.keys():
                findings.violations.append(f"accepted of {sorted(open_round.updates)}: {event}")
            missing = open_round.data_assignments.keys() - absent - set(event["nodes"])
            arrivals = [*open_round.arrival_offsets, *(offset for offsets in state.arrivals for offset in offsets)]
            up_seconds = up_time(open_round.opened_at, event["at"], swarm.downtimes)
            if missing and up_seconds < deadline_offset(arrivals or [0.0], state.swarm.round):
                findings.violations.append(f"open for {up_seconds:.2f} s without {missing}: {event}")
        state.record(event)


def _short_update(swarm: KilledSwarm, state: SwarmState, event: dict[str, Any], findings: Findings) -> list[str]:
    """Return the violation by an update with too few steps; none if the steps were too slow for the deadline."""
    assigned = state.assigned_steps(event["node"])
    arrivals = [offset for offsets in state.arrivals for offset in offsets]
    available_seconds = deadline_offset(arrivals or [0.0], state.swarm.round) - DEADLINE_MARGIN_SECONDS
    for record in read_jsonl(swarm.folder / "nodes" / event["node"] / ROUNDS_FILE):
        if record["round"] == event["round"] and record["steps"] == event["steps"]:
            break
    else:
        findings.unrecorded_updates += 1
        return []
    # A node ends its steps when a second one from now would end after the deadline (`SwarmWorker._train_steps`).
    if (event["steps"] + 2) * record["train_seconds"] / record["steps"] > available_seconds:
        findings.slow_updates += 1
        return []
    return [f"{event['steps']} of {assigned} steps in {available_seconds:.1f} s: {event}"]


def up_time(start: float, end: float, downtimes: list[Interval]) -> float:
    """Return the seconds from `start` to `end` outside of downtimes."""
    return end - start - sum(max(0.0, min(end, up) - max(start, down)) for down, up in downtimes)


def check_nodes(swarm: KilledSwarm, findings: Findings) -> None:
    """Check what nodes have recorded, and the weights of all."""
    accepted = {(event["round"], event["node"]) for event in swarm.events("accepted")}
    digests = {event["base"] for event in swarm.events("committed")}
    for name in NODES:
        for record in read_jsonl(swarm.folder / "nodes" / name / ROUNDS_FILE):
            if not record["refused"] and (record["round"], name) not in accepted:
                findings.violations.append(f"{name} believes its update to be accepted: {record}")
    directories = [swarm.folder / "nodes" / name for name in NODES]
    for path in [directory / SHARED_WEIGHTS_FILE for directory in (*directories, swarm.coordinator_folder / "model")]:
        with TensorFile(path) as file:
            if file.digest(parameter_shapes(swarm.run.model)) not in digests:
                findings.violations.append(f"{path} has weights of no round")


@contextmanager
def started_swarm(folder: Path) -> Iterator[KilledSwarm]:
    """Start a coordinator and nodes, and end them on exit."""
    folder.mkdir()
    file = write_run_file(folder, "", seed=0, steps=1000 * EVERY)
    small = {"tokens_per_step = 4096": "tokens_per_step = 512", "tokens = 131072": "tokens = 2048"}
    text = file.read_text()
    for old, new in small.items():
        text = text.replace(old, new)
    file.write_text(text + SWARM)
    run = load_run(file)
    prepare(run.data)
    swarm = KilledSwarm(folder, file, run)
    try:
        swarm.start_all()
        swarm.wait_until(lambda: swarm.committed_rounds() >= 2, "two rounds", WAIT_SECONDS)
        yield swarm
    finally:
        for name in swarm.process_by_name:
            swarm.kill(name)


def soak(folder: Path, seconds: float, seed: int) -> dict[str, Any]:
    """Run a swarm with kills, and return figures and what the checks have found."""
    with started_swarm(folder) as swarm:
        kill_at_random(swarm, seconds, random.Random(seed))
        findings = Findings()
        check_journal(swarm, findings)
        check_nodes(swarm, findings)
    down_seconds = sum(up - down for down, up in swarm.downtimes)
    kills = dict(swarm.kills)
    return {"seed": seed, "seconds": seconds, "kills": kills, "down_seconds": down_seconds, **vars(findings)}


def run_member(args: list[str]) -> None:
    """Run `phalanx swarm` with slow steps."""
    from phalanx.cli.main import main as phalanx
    from phalanx.train.trainer import Trainer

    train_step = Trainer.train_step

    def slow_step(*step_args: Any) -> Any:
        time.sleep(STEP_SECONDS)
        return train_step(*step_args)

    Trainer.train_step = slow_step  # type: ignore[method-assign, assignment]
    sys.argv = ["phalanx", "swarm", *args]
    phalanx()


def page(figures: dict[str, Any]) -> str:
    """Return the page of the benchmark."""
    kills = ", ".join(f"{name} {count}" for name, count in sorted(figures["kills"].items()))
    refused = ", ".join(f"{count} {why}" for why, count in sorted(figures["refused"].items())) or "none"
    violations = "\n".join(f"  - {violation}" for violation in figures["violations"]) or "  - none"
    return f"""# Kills of a coordinator and of nodes

| | |
|---|---:|
| duration | {figures["seconds"]:,.0f} s |
| seed | {figures["seed"]} |
| kills (SIGKILL), of which {COORDINATOR} is the coordinator | {kills} |
| downtime of the coordinator | {figures["down_seconds"]:.0f} s |
| rounds, of which without a node that was in them | {figures["rounds"]}, {figures["incomplete_rounds"]} |
| accepted updates | {figures["accepted"]} |
| of these, with fewer steps because steps were slow; because of unknown steps of a killed node | \
{figures["slow_updates"]}; {figures["unrecorded_updates"]} |
| rejected updates | {refused} |

- Violations of the checks (`benchmarks/swarm_kills.py` lists them):
{violations}
- The method is spes+ in int8 with {len(NODES)} nodes and rounds of {EVERY} steps, on one machine with mutual TLS.
- Written by `python -m benchmarks.swarm_kills --page`.
"""


def main() -> None:
    """Run the soak and print its figures; exit with 1 if a check has failed."""
    if sys.argv[1:2] == ["member"]:
        run_member(sys.argv[2:])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=75)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--page", action="store_true", help=f"write {KILLS_PAGE.name}")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="phalanx-kills-") as folder:
        figures = soak(Path(folder) / "one", args.seconds, args.seed)
    print(json.dumps(figures, indent=1))
    if args.page:
        write_results(KILLS_PAGE, page(figures))
    raise SystemExit(bool(figures["violations"]))


if __name__ == "__main__":
    main()
