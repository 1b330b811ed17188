"""Which nodes train which experts, the same of every layer.

Nodes own as many as their capacity allows; each expert has `replication` owners, or as many as there are nodes; and
who owned an expert keeps it if it can, for its optimizer's moments are there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import networkx

Owners = tuple[tuple[str, ...], ...]
"""Of each expert, the nodes that train it, in order."""


def proportional_shares(places: int, most: int, capacities: Mapping[str, float]) -> dict[str, int]:
    """`places` shared out among nodes in proportion to their capacities, none with more than `most`: each its whole
    part, and one more for those with the largest remainders (Hamilton's method). With whole capacities that are enough
    for all places, no node gets more than its capacity."""
    found: dict[str, int] = {}
    while full := [node for node in capacities if node not in found and _exact(places, found, capacities, node) > most]:
        found |= dict.fromkeys(full, most)
    exact = {node: _exact(places, found, capacities, node) for node in capacities if node not in found}
    found |= {node: int(part) for node, part in exact.items()}
    left = places - sum(found.values())
    for node in sorted(exact, key=lambda node: int(exact[node]) - exact[node])[:left]:
        found[node] += 1
    return {node: found[node] for node in capacities}


def _exact(places: int, found: Mapping[str, int], capacities: Mapping[str, float], node: str) -> float:
    """A node's part of what those that have theirs leave."""
    total = sum(weight for other, weight in capacities.items() if other not in found)
    return (places - sum(found.values())) * capacities[node] / total


def assign_experts(
    experts: int, capacities: Mapping[str, float], replication: int = 1, before: Owners | None = None
) -> Owners:
    """Owners of each of `experts`, from nodes with their capacities (any unit, above 0), in the order of the nodes.

    Without `before` nodes own runs of neighbouring experts, as in SPES's own code; else as few change hands as can.
    """
    nodes, copies = list(capacities), min(replication, len(capacities))
    count = proportional_shares(experts * copies, experts, capacities)
    if before is None:
        owners: list[list[str]] = [[] for _ in range(experts)]
        place = 0
        for node in nodes:
            for _ in range(count[node]):
                owners[place % experts].append(node)
                place += 1
        return tuple(map(tuple, owners))
    graph = networkx.DiGraph()
    graph.add_node("from", demand=-experts * copies)
    graph.add_node("to", demand=experts * copies)
    for expert in range(experts):
        graph.add_edge("from", expert, capacity=copies, weight=0)
        for node in nodes:
            graph.add_edge(expert, f"node {node}", capacity=1, weight=int(node not in before[expert]))
    for node in nodes:
        graph.add_edge(f"node {node}", "to", capacity=count[node], weight=0)
    flow = networkx.min_cost_flow(graph)
    return tuple(tuple(node for node in nodes if flow[expert][f"node {node}"]) for expert in range(experts))


def rotate_owners(owners: Owners, nodes: Sequence[str]) -> Owners:
    """Each node's experts handed to the node after it (rolling ownership, as FedRolex has it: arXiv 2212.01548)."""
    after = {node: nodes[(place + 1) % len(nodes)] for place, node in enumerate(nodes)}
    order = {node: place for place, node in enumerate(nodes)}
    return tuple(tuple(sorted((after[node] for node in of), key=order.__getitem__)) for of in owners)


def experts_of(owners: Owners, node: str) -> tuple[int, ...]:
    """The experts of a node."""
    return tuple(expert for expert, of in enumerate(owners) if node in of)
