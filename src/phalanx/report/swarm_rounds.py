"""Collect the facts of a swarm's rounds.

Of a node: traffic, waiting times and memory, compared with the predictions of `cost/exact/swarm.py`. Of a coordinator:
the reports of all nodes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from phalanx.cost.exact.parameters import count_parameters
from phalanx.cost.exact.swarm import WEIGHT_BYTES, RoundBytes, node_share, round_bytes, round_time, state_bytes
from phalanx.plan.predicted_vs_measured import Comparison
from phalanx.runs.swarm_records import RoundRecord
from phalanx.spec.run import RunSpec
from phalanx.spec.swarm import SwarmSpec

Facts = dict[str, Any]
EACH, ALL = "round", "rounds"
"""Roles of rows: means over rounds, and sums of them."""
SECONDS = {
    "training": "train_seconds",
    "coding": "code_seconds",
    "sending": "send_seconds",
    "waiting": "wait_seconds",
    "receiving": "receive_seconds",
}
BYTES = {"sent": "sent_bytes", "received": "received_bytes"}


def round_rows(run: RunSpec | None, world_size: int, rounds: Sequence[RoundRecord]) -> Iterator[Comparison]:
    """Compare the bytes, memory and times of a node's rounds with the formulas.

    The predicted time of a round has neither coding nor waiting; its step time and link speeds are the measured ones.
    """
    if not rounds:
        return
    said = _predicted(run, run.swarm, rounds, world_size) if run is not None and run.swarm is not None else {}
    for role, what, unit, value in _measured(rounds):
        yield Comparison(role, what, unit, said.get((role, what)), value)


def _measured(rounds: Sequence[RoundRecord]) -> Iterator[tuple[str, str, str, float]]:
    total, count = _summed(rounds), len(rounds)
    news = total.received_bytes - total.whole_bytes
    yield EACH, "sent", "B", total.sent_bytes / count
    yield EACH, "received", "B", news / count
    yield EACH, "whole round", "s", total.seconds / count
    for what, name in SECONDS.items():
        yield EACH, what, "s", getattr(total, name) / count
    yield EACH, "utilisation", "", total.train_seconds / total.seconds
    yield EACH, "state held", "B", rounds[-1].held_bytes
    yield ALL, "sent", "B", total.sent_bytes
    yield ALL, "received", "B", news
    yield ALL, "all weights, to begin with", "B", total.whole_bytes
    yield ALL, "communication", "B", total.sent_bytes + total.received_bytes


def _predicted(
    run: RunSpec, swarm: SwarmSpec, rounds: Sequence[RoundRecord], world_size: int
) -> dict[tuple[str, str], float]:
    """What formulas say of these rounds, by role and name. A node's experts may change from one to the next; fragments
    of the model come in turn, and are alike here. What several ranks of a node hold is the layout's affair."""
    total, count = _summed(rounds), len(rounds)
    nodes = [node_share(run.model, swarm.method, spent.experts) for spent in rounds]
    each = [round_bytes(node, swarm.method, swarm.effective_codec, swarm.replication) for node in nodes]
    up, down = (sum(sent) / swarm.fragments for sent in ([one.up for one in each], [one.down for one in each]))
    whole = sum(spent.whole_bytes > 0 for spent in rounds) * WEIGHT_BYTES * count_parameters(run.model).total
    said = {(EACH, "sent"): up / count, (EACH, "received"): down / count, (ALL, "sent"): up, (ALL, "received"): down}
    said |= {(ALL, "all weights, to begin with"): whole, (ALL, "communication"): up + down + whole}
    if world_size == 1:
        said[EACH, "state held"] = state_bytes(nodes[-1], swarm.frozen_expert_codec)
    if total.steps and total.sent_bytes and total.received_bytes:
        speeds = total.sent_bytes / total.send_seconds, total.received_bytes / total.receive_seconds
        mean = RoundBytes(up / count, down / count)
        time = round_time(mean, *speeds, swarm.steps_per_round, total.train_seconds / total.steps, swarm.delay)
        said |= {(EACH, "whole round"): time.total, (EACH, "utilisation"): time.utilisation}
    return said


def _summed(rounds: Sequence[RoundRecord]) -> RoundRecord:
    """What rounds come to together, but for what is of each."""
    names = ("steps", "tokens", "seconds", "whole_bytes", *SECONDS.values(), *BYTES.values())
    return RoundRecord(rounds[-1].round, **{name: sum(getattr(spent, name) for spent in rounds) for name in names})


def node_rounds(rounds: Sequence[RoundRecord]) -> Facts:
    """A node's rounds one by one, and what they come to so far."""
    total = _summed(rounds)
    return {
        "round": [spent.round for spent in rounds],
        "steps": [spent.steps for spent in rounds],
        "whole": [spent.seconds for spent in rounds],
        "seconds": {what: [getattr(spent, name) for spent in rounds] for what, name in SECONDS.items()},
        "bytes": {what: [getattr(spent, name) for spent in rounds] for what, name in BYTES.items()},
        "refused": [spent.refused for spent in rounds],
        "sent_bytes": total.sent_bytes,
        "received_bytes": total.received_bytes,
        "utilisation": total.train_seconds / total.seconds,
    }


def updates_per_round(events: Sequence[Facts]) -> list[Facts]:
    """Of each round that a coordinator opened: who told, in bytes and tokens, who was refused how often, and how long
    it was open; None while it is."""
    found: dict[int, Facts] = {}
    for event in events:
        row = found.get(event.get("round", -1))
        if event["what"] == "opened":
            nobody: Facts = {"bytes": {}, "tokens": {}, "refused": Counter()}
            found[event["round"]] = {"round": event["round"], "nodes": len(event["text"]), **nobody, "seconds": None}
            began = event["at"]
        elif row is None:
            continue
        elif event["what"] == "accepted":
            row["bytes"][event["node"]], row["tokens"][event["node"]] = event["bytes"], event["tokens"]
        elif event["what"] == "refused":
            row["refused"][event["node"]] += 1
        elif event["what"] == "committed":
            row["seconds"] = event["at"] - began
    return list(found.values())
