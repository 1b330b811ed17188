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
    `world_size` is the number of ranks of the node. Without a run, nothing is predicted.
    """
    if not rounds:
        return
    total = _sum_rounds(rounds)
    count = len(rounds)
    received_bytes = total.received_bytes - total.initial_bytes
    measured = {
        (PER_ROUND, "sent", "B"): total.sent_bytes / count,
        (PER_ROUND, "received", "B"): received_bytes / count,
        (PER_ROUND, "whole round", "s"): total.seconds / count,
        **{(PER_ROUND, name, "s"): getattr(total, field) / count for name, field in SECONDS.items()},
        (PER_ROUND, "utilization", ""): total.train_seconds / total.seconds,
        (PER_ROUND, "state held", "B"): rounds[-1].held_bytes,
        (ALL_ROUNDS, "sent", "B"): total.sent_bytes,
        (ALL_ROUNDS, "received", "B"): received_bytes,
        (ALL_ROUNDS, "initial weights", "B"): total.initial_bytes,
        (ALL_ROUNDS, "communication", "B"): total.sent_bytes + total.received_bytes,
    }
    predictions = {}
    if run is not None and run.swarm is not None:
        predictions = _predict_rounds(run, run.swarm, world_size, rounds, total)
    for (role, name, unit), value in measured.items():
        yield Comparison(role=role, quantity=name, unit=unit, predicted=predictions.get((role, name)), measured=value)


def _predict_rounds(
    run: RunSpec, swarm: SwarmSpec, world_size: int, rounds: Sequence[RoundRecord], total: RoundRecord
) -> dict[tuple[str, str], float]:
    """Return the predictions of the formulas for these rounds, by role and name.

    A node's experts may change between rounds. Fragments of the model take turns, and count as equal in size. The
    memory of a node with several ranks depends on the layout, and is not predicted.
    """
    count = len(rounds)
    nodes = [node_share(run.model, swarm.method, record.experts) for record in rounds]
    traffic = [round_bytes(node, swarm.method, swarm.effective_codec, swarm.replication) for node in nodes]
    sent = sum(node_traffic.up for node_traffic in traffic) / swarm.fragments
    received = sum(node_traffic.down for node_traffic in traffic) / swarm.fragments
    num_downloads = sum(record.initial_bytes > 0 for record in rounds)
    full_model_bytes = num_downloads * WEIGHT_BYTES * count_parameters(run.model).total
    predictions = {
        (PER_ROUND, "sent"): sent / count,
        (PER_ROUND, "received"): received / count,
        (ALL_ROUNDS, "sent"): sent,
        (ALL_ROUNDS, "received"): received,
        (ALL_ROUNDS, "initial weights"): full_model_bytes,
        (ALL_ROUNDS, "communication"): sent + received + full_model_bytes,
    }
    if world_size == 1:
        predictions[PER_ROUND, "state held"] = state_bytes(nodes[-1], swarm.frozen_expert_codec)
    if total.steps and total.sent_bytes and total.received_bytes:
        estimate = round_time(
            RoundBytes(sent / count, received / count),
            total.sent_bytes / total.send_seconds,
            total.received_bytes / total.receive_seconds,
            swarm.steps_per_round,
            step_seconds=total.train_seconds / total.steps,
            delay=swarm.delay,
        )
        predictions[PER_ROUND, "whole round"] = estimate.total
        predictions[PER_ROUND, "utilization"] = estimate.utilization
    return predictions


def _sum_rounds(rounds: Sequence[RoundRecord]) -> RoundRecord:
    """Return the sums over rounds, except of values that are not additive."""
    names = ("steps", "tokens", "seconds", "initial_bytes", *SECONDS.values(), *BYTES.values())
    return RoundRecord(
        round=rounds[-1].round, **{name: sum(getattr(record, name) for record in rounds) for name in names}
    )


def node_rounds(rounds: Sequence[RoundRecord]) -> Facts:
    """Return a node's rounds one by one, and their totals."""
    total = _sum_rounds(rounds)
    return {
        "round": [record.round for record in rounds],
        "steps": [record.steps for record in rounds],
        "total_seconds": [record.seconds for record in rounds],
        "seconds": {name: [getattr(record, field) for record in rounds] for name, field in SECONDS.items()},
        "bytes": {name: [getattr(record, field) for record in rounds] for name, field in BYTES.items()},
        "refused": [record.refused for record in rounds],
        "sent_bytes": total.sent_bytes,
        "received_bytes": total.received_bytes,
        "utilization": total.train_seconds / total.seconds,
    }


def updates_per_round(events: Sequence[Facts]) -> list[Facts]:
    """Return each round that a coordinator opened.

    A round has the bytes and tokens by node, the number of refused updates by node, and its duration, None while it is
    open.
    """
    rows: dict[int, Facts] = {}
    for event in events:
        row = rows.get(event.get("round", -1))
        if event["kind"] == "opened":
            empty: Facts = {"bytes": {}, "tokens": {}, "refused": Counter()}
            rows[event["round"]] = {"round": event["round"], "nodes": len(event["text"]), **empty, "seconds": None}
            opened_at = event["at"]
        elif row is None:
            continue
        elif event["kind"] == "accepted":
            row["bytes"][event["node"]] = event["bytes"]
            row["tokens"][event["node"]] = event["tokens"]
        elif event["kind"] == "refused":
            row["refused"][event["node"]] += 1
        elif event["kind"] == "committed":
            row["seconds"] = event["at"] - opened_at
    return list(rows.values())
