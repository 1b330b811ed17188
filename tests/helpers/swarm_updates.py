"""Updates of swarm nodes in one process, written and sent by a test."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from phalanx.spec.run import RunSpec
from phalanx.swarm.expert_ownership import experts_of
from phalanx.swarm.pieces import pieces_sent_by, round_pieces
from phalanx.swarm.rpc.client import SwarmClient
from phalanx.swarm.tensor_files import TensorFile
from phalanx.swarm.update_files import write_update
from tests.helpers.local_swarm import NODES, LocalSwarm

ExpertIds = tuple[int, ...]


def current_owners(swarm: LocalSwarm) -> Any:
    return swarm.coordinator.state.owners


def write_node_update(
    swarm: LocalSwarm, folder: Path, node: str, change: float = 0.01, experts: ExpertIds | None = None
) -> Path:
    """Write an update of a node that moves all trained weights equally; optionally with the experts of another node."""
    experts = experts_of(current_owners(swarm), node) if experts is None else experts
    owners = tuple((node,) if expert in experts else () for expert in range(4))
    path = folder / f"{node}.told"
    with TensorFile(swarm.coordinator.store.base) as base:
        items = pieces_sent_by(round_pieces(swarm.run, swarm.coordinator.state.committed), owners, node)
        coded = swarm.run.swarm.effective_codec
        write_update(path, items, coded, lambda item: base.read(item) + change, base.read, {}).close()
    return path


def join_and_wait_for_round(
    run: RunSpec, swarm: LocalSwarm, names: tuple[str, ...] = NODES[:2]
) -> dict[str, SwarmClient]:
    links = {name: swarm.joined_client(name) for name in names}
    for link in links.values():
        link.wait(round=0)
    return links
