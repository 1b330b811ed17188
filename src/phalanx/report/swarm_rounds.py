"""Facts of a swarm's rounds.

For a node: traffic, waiting times and memory, compared with the predictions of `cost/exact/swarm.py`. For a
coordinator: the reports of all nodes.
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
PER_ROUND = "round"
ALL_ROUNDS = "rounds"
"""Roles of rows: means over rounds, and sums over rounds."""
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

    Args:
        run: The run, or None if it is unknown.
        world_size: The number of ranks of the node.
        rounds: The rounds.
    """
    if not rounds:
        return
    predictions = (
        _predicted_rows(run, run.swarm, rounds, world_size=world_size)
        if run is not None and run.swarm is not None
        else {}
    )
    for role, name, unit, value in _measured_rows(rounds):
        yield Comparison(role=role, quantity=name, unit=unit, predicted=predictions.get((role, name)), measured=value)


def _measured_rows(rounds: Sequence[RoundRecord]) -> Iterator[tuple[str, str, str, float]]:
    total = _sum_rounds(rounds)
    count = len(rounds)
    update_bytes = total.received_bytes - total.whole_bytes
    yield PER_ROUND, "sent", "B", total.sent_bytes / count
    yield PER_ROUND, "received", "B", update_bytes / count
    yield PER_ROUND, "whole round", "s", total.seconds / count
    for name, field in SECONDS.items():
        yield PER_ROUND, name, "s", getattr(total, field) / count
    yield PER_ROUND, "utilisation", "", total.train_seconds / total.seconds
    yield PER_ROUND, "state held", "B", rounds[-1].held_bytes
    yield ALL_ROUNDS, "sent", "B", total.sent_bytes
    yield ALL_ROUNDS, "received", "B", update_bytes
    yield ALL_ROUNDS, "initial weights", "B", total.whole_bytes
    yield ALL_ROUNDS, "communication", "B", total.sent_bytes + total.received_bytes


def _predicted_rows(
    run: RunSpec, swarm: SwarmSpec, rounds: Sequence[RoundRecord], world_size: int
) -> dict[tuple[str, str], float]:
    """Return the predictions of the formulas for these rounds, by role and name.

    A node's experts may change between rounds. Fragments of the model take turns, and count as equal in size. The
    memory of a node with several ranks depends on the layout, and is not predicted.
    """
    total = _sum_rounds(rounds)
    count = len(rounds)
    nodes = [node_share(run.model, swarm.method, record.experts) for record in rounds]
    bytes_per_round = [
        round_bytes(node, swarm.method, swarm.effective_codec, replication=swarm.replication) for node in nodes
    ]
    up, down = (
        sum(sent) / swarm.fragments
        for sent in ([traffic.up for traffic in bytes_per_round], [traffic.down for traffic in bytes_per_round])
    )
    full_model_bytes = (
        sum(record.whole_bytes > 0 for record in rounds) * WEIGHT_BYTES * count_parameters(run.model).total
    )
    predictions = {
        (PER_ROUND, "sent"): up / count,
        (PER_ROUND, "received"): down / count,
        (ALL_ROUNDS, "sent"): up,
        (ALL_ROUNDS, "received"): down,
    }
    predictions |= {
        (ALL_ROUNDS, "initial weights"): full_model_bytes,
        (ALL_ROUNDS, "communication"): up + down + full_model_bytes,
    }
    if world_size == 1:
        predictions[PER_ROUND, "state held"] = state_bytes(nodes[-1], swarm.frozen_expert_codec)
    if total.steps and total.sent_bytes and total.received_bytes:
        speeds = total.sent_bytes / total.send_seconds, total.received_bytes / total.receive_seconds
        mean = RoundBytes(up / count, down / count)
        estimate = round_time(mean, *speeds, swarm.steps_per_round, total.train_seconds / total.steps, swarm.delay)
        predictions |= {(PER_ROUND, "whole round"): estimate.total, (PER_ROUND, "utilisation"): estimate.utilisation}
    return predictions


def _sum_rounds(rounds: Sequence[RoundRecord]) -> RoundRecord:
    """Return the sums over rounds, except of values that are not additive."""
    names = ("steps", "tokens", "seconds", "whole_bytes", *SECONDS.values(), *BYTES.values())
    return RoundRecord(rounds[-1].round, **{name: sum(getattr(record, name) for record in rounds) for name in names})


def node_rounds(rounds: Sequence[RoundRecord]) -> Facts:
    """Return a node's rounds one by one, and their totals."""
    total = _sum_rounds(rounds)
    return {
        "round": [record.round for record in rounds],
        "steps": [record.steps for record in rounds],
        "whole": [record.seconds for record in rounds],
        "seconds": {name: [getattr(record, field) for record in rounds] for name, field in SECONDS.items()},
        "bytes": {name: [getattr(record, field) for record in rounds] for name, field in BYTES.items()},
        "refused": [record.refused for record in rounds],
        "sent_bytes": total.sent_bytes,
        "received_bytes": total.received_bytes,
        "utilisation": total.train_seconds / total.seconds,
    }


def updates_per_round(events: Sequence[Facts]) -> list[Facts]:
    """Return each round that a coordinator opened.

    A round has the bytes and tokens by node, the number of refused updates by node, and its duration, None while it is
    open.
    """
    rows: dict[int, Facts] = {}
    for event in events:
        row = rows.get(event.get("round", -1))
        if event["what"] == "opened":
            empty: Facts = {"bytes": {}, "tokens": {}, "refused": Counter()}
            rows[event["round"]] = {"round": event["round"], "nodes": len(event["text"]), **empty, "seconds": None}
            opened_at = event["at"]
        elif row is None:
            continue
        elif event["what"] == "accepted":
            row["bytes"][event["node"]] = event["bytes"]
            row["tokens"][event["node"]] = event["tokens"]
        elif event["what"] == "refused":
            row["refused"][event["node"]] += 1
        elif event["what"] == "committed":
            row["seconds"] = event["at"] - opened_at
    return list(rows.values())
