"""Assignment of experts to nodes, equal for every layer.

Each node owns experts in proportion to its capacity. Each expert has `replication` owners, but at most
one per node. Ownership is kept if possible, because the optimizer's moments of an expert are on its owner.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import networkx

Owners = tuple[tuple[str, ...], ...]
"""The nodes that train each expert, in order."""


def proportional_shares(num_slots: int, max_per_node: int, capacities: Mapping[str, float]) -> dict[str, int]:
    """Return the number of slots per node, proportional to capacities, with at most `max_per_node` each.

    Each node gets the integer part of its share, and nodes with the largest remainders get one more (Hamilton's
    method). With integer capacities that suffice for all slots, no node gets more than its capacity.
    """
    counts: dict[str, int] = {}
    shares = _fair_shares(num_slots, counts, capacities)
    while max(shares.values(), default=0.0) > max_per_node:
        saturated = [node for node, share in shares.items() if share > max_per_node]
        counts |= dict.fromkeys(saturated, max_per_node)
        shares = _fair_shares(num_slots, counts, capacities)
    counts |= {node: int(share) for node, share in shares.items()}
    num_unassigned = num_slots - sum(counts.values())
    by_remainder = sorted(shares, key=lambda node: int(shares[node]) - shares[node])
    for node in by_remainder[:num_unassigned]:
        counts[node] += 1
    return {node: counts[node] for node in capacities}


def _fair_shares(num_slots: int, counts: Mapping[str, int], capacities: Mapping[str, float]) -> dict[str, float]:
    """Divide the slots that are not yet assigned among the nodes without a count, in proportion to their capacities."""
    remaining = {node: capacity for node, capacity in capacities.items() if node not in counts}
    num_remaining_slots = num_slots - sum(counts.values())
    total = sum(remaining.values())
    return {node: num_remaining_slots * capacity / total for node, capacity in remaining.items()}


def assign_experts(
    num_experts: int, capacities: Mapping[str, float], replication: int = 1, previous_owners: Owners | None = None
) -> Owners:
    """Return the owners of each expert, in the order of the nodes.

    Without previous owners, nodes own consecutive experts, as in SPES's code. Otherwise the number of changes is
    minimal. Capacities are above 0, in any unit. `replication` is the number of owners per expert.
    """
    num_copies = min(replication, len(capacities))
    counts = proportional_shares(num_experts * num_copies, num_experts, capacities)
    # Nodes own experts in order, starting over after the last expert.
    if previous_owners is None:
        slots = [node for node, count in counts.items() for _ in range(count)]
        return tuple(tuple(slots[expert::num_experts]) for expert in range(num_experts))
    return _assign_with_fewest_changes(num_experts, num_copies, counts, previous_owners)


def _assign_with_fewest_changes(
    num_experts: int, num_copies: int, counts: Mapping[str, int], previous_owners: Owners
) -> Owners:
    """Assign experts with the minimal number of new owners, as a flow of minimal cost.

    The capacities of the edges are in brackets; only the edge of a new owner costs 1:

        from --[num_copies]--> each expert --[1]--> each node --[its count]--> to
    """
    nodes = list(counts)
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
    """Return owners in which each node's experts move to the next node.

    This is the rolling ownership of FedRolex (arXiv 2212.01548).
    """
    successors = {node: nodes[(index + 1) % len(nodes)] for index, node in enumerate(nodes)}
    moved = ([successors[node] for node in expert_owners] for expert_owners in owners)
    return tuple(tuple(sorted(expert_owners, key=nodes.index)) for expert_owners in moved)


def experts_of(owners: Owners, node: str) -> tuple[int, ...]:
    """Return the experts of a node."""
    return tuple(expert for expert, expert_owners in enumerate(owners) if node in expert_owners)
