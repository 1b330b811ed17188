"""Which nodes train which experts, the same of every layer.

Nodes own as many as their capacity allows; each expert has `replication` owners, or as many as there are nodes; and
who owned an expert keeps it if it can, for its optimizer's moments are there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import networkx

Owners = tuple[tuple[str, ...], ...]
"""Of each expert, the nodes that train it, in order."""


def proportional_shares(num_slots: int, max_per_node: int, capacities: Mapping[str, float]) -> dict[str, int]:
    """`num_slots` shared out among nodes in proportion to their capacities, none with more than `max_per_node`: each
    its whole part, and one more for those with the largest remainders (Hamilton's method). With whole capacities that
    are enough for all slots, no node gets more than its capacity."""
    counts: dict[str, int] = {}
    while saturated := [
        node
        for node in capacities
        if node not in counts and _fair_share(num_slots, counts, capacities, node=node) > max_per_node
    ]:
        counts |= dict.fromkeys(saturated, max_per_node)
    exact_shares = {
        node: _fair_share(num_slots, counts, capacities, node=node) for node in capacities if node not in counts
    }
    counts |= {node: int(share) for node, share in exact_shares.items()}
    num_unassigned = num_slots - sum(counts.values())
    for node in sorted(exact_shares, key=lambda node: int(exact_shares[node]) - exact_shares[node])[:num_unassigned]:
        counts[node] += 1
    return {node: counts[node] for node in capacities}


def _fair_share(num_slots: int, counts: Mapping[str, int], capacities: Mapping[str, float], node: str) -> float:
    """A node's part of what those that have theirs leave."""
    total = sum(weight for other_node, weight in capacities.items() if other_node not in counts)
    return (num_slots - sum(counts.values())) * capacities[node] / total


def assign_experts(
    num_experts: int, capacities: Mapping[str, float], replication: int = 1, previous_owners: Owners | None = None
) -> Owners:
    """Owners of each of `num_experts`, from nodes with their capacities (any unit, above 0), in the order of the nodes.

    Without `previous_owners` nodes own runs of neighbouring experts, as in SPES's own code; else as few change hands as
    can.
    """
    nodes = list(capacities)
    num_copies = min(replication, len(capacities))
    counts = proportional_shares(num_experts * num_copies, num_experts, capacities)
    if previous_owners is None:
        owners: list[list[str]] = [[] for _ in range(num_experts)]
        slot = 0
        for node in nodes:
            for _ in range(counts[node]):
                owners[slot % num_experts].append(node)
                slot += 1
        return tuple(map(tuple, owners))
    graph = networkx.DiGraph()
    graph.add_node("from", demand=-num_experts * num_copies)
    graph.add_node("to", demand=num_experts * num_copies)
    for expert in range(num_experts):
        graph.add_edge("from", expert, capacity=num_copies, weight=0)
        for node in nodes:
            graph.add_edge(expert, f"node {node}", capacity=1, weight=int(node not in previous_owners[expert]))
    for node in nodes:
        graph.add_edge(f"node {node}", "to", capacity=counts[node], weight=0)
    flow = networkx.min_cost_flow(graph)
    return tuple(tuple(node for node in nodes if flow[expert][f"node {node}"]) for expert in range(num_experts))


def rotate_owners(owners: Owners, nodes: Sequence[str]) -> Owners:
    """Each node's experts handed to the node after it (rolling ownership, as FedRolex has it: arXiv 2212.01548)."""
    successors = {node: nodes[(index + 1) % len(nodes)] for index, node in enumerate(nodes)}
    order = {node: index for index, node in enumerate(nodes)}
    return tuple(
        tuple(sorted((successors[node] for node in expert_owners), key=order.__getitem__)) for expert_owners in owners
    )


def experts_of(owners: Owners, node: str) -> tuple[int, ...]:
    """The experts of a node."""
    return tuple(expert for expert, expert_owners in enumerate(owners) if node in expert_owners)
