"""Bytes between all pairs of ranks in one optimizer update.

`cost.exact.traffic` counts the bytes of each rank. They are distributed over the members of its groups by the algorithm
that the count assumes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from phalanx.cost.exact.traffic import server_loads, traffic_by_group
from phalanx.cost.formulas.collectives import Operation, Traffic
from phalanx.schedule.registry import layout_schedule
from phalanx.spec.communication_groups import GroupKind, communication_groups
from phalanx.spec.parallel_dims import ParallelDims, pipeline_stage_groups
from phalanx.spec.parameter_shapes import trained_shapes
from phalanx.spec.resolved_run import ResolvedRun
from phalanx.spec.run import RunSpec

Ranks = NDArray[np.int64]
Sizes = NDArray[np.float64]
AXIS_BY_GROUP_KIND: dict[GroupKind, str] = {
    "data": "dp",
    "replicas": "dp",
    "same_experts": "dp",
    "expert_replicas": "dp",
    "tp": "tp",
    "copies": "tp",
    "cp": "cp",
    "ep": "ep",
    "pp": "pp",
    "ends": "pp",
    "servers": "servers",
}
"""Parallel axis of each kind of group."""
RING_OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter")
"""Operations with ring algorithms."""


@dataclass(frozen=True)
class TrafficMatrix:
    """Bytes between ranks (or nodes), as three columns with one row per communicating pair."""

    ranks: int
    source: Ranks
    target: Ranks
    bytes: Sizes

    @property
    def total(self) -> float:
        """Sum of all sent bytes."""
        return float(self.bytes.sum())

    def to_dense(self) -> Sizes:
        """Return the bytes as a matrix, [sender, receiver]."""
        cells = np.zeros((self.ranks, self.ranks))
        np.add.at(cells, (self.source, self.target), self.bytes)
        return cells

    def aggregated(self, size: int) -> TrafficMatrix:
        """Return the traffic between blocks of `size` neighbors, such as nodes; the diagonal is internal."""
        blocks = TrafficMatrix(self.ranks, self.source // size, self.target // size, self.bytes)
        return merge_matrices(-(-self.ranks // size), [blocks])


def merge_matrices(ranks: int, matrices: list[TrafficMatrix]) -> TrafficMatrix:
    """Return the sum of several matrices, with one row per pair."""
    if not matrices:
        no_ranks = np.zeros(0, np.int64)
        return TrafficMatrix(ranks, no_ranks, no_ranks, np.zeros(0))
    pair_index = np.concatenate([matrix.source * ranks + matrix.target for matrix in matrices])
    unique_pairs, row = np.unique(pair_index, return_inverse=True)
    sums = np.zeros(len(unique_pairs))
    np.add.at(sums, row, np.concatenate([matrix.bytes for matrix in matrices]))
    return TrafficMatrix(ranks, unique_pairs // ranks, unique_pairs % ranks, sums)


def traffic_matrices(resolved: ResolvedRun, island: int) -> dict[str, TrafficMatrix]:
    """Return the traffic of a run by axis, for the axes with traffic.

    The axes are "tp", "cp", "ep", "pp", "dp" and "servers". Rows below a kilobyte are not included, and experts are
    balanced, as in `traffic_by_role`. `island` is a number of consecutive ranks that are close: a node, or a fast
    domain of several. Rings pass through an island before they leave it. Raises UserError if the ranks cannot run the
    layout.
    """
    run = resolved.run
    sizes = resolved.dims
    world_size = resolved.world_size
    rows = traffic_by_group(resolved)
    if sizes.servers:
        return {"servers": merge_matrices(world_size, list(_parameter_server_transfers(run, sizes, rows["worker"])))}
    matrices: dict[str, list[TrafficMatrix]] = {}
    stages = pipeline_stage_groups(sizes)

    @cache
    def group_members(kind: GroupKind) -> Ranks:
        return np.array(communication_groups(run, sizes, kind))

    for role_index, role in enumerate(rows):
        for row in _merge_rows(rows[role]):
            if row.group_kind in ("pp", "ends"):
                sent = _stage_transfers(resolved, group_members("pp"), role_index, row)
            else:
                groups = group_members(row.group_kind)
                members = groups[np.isin(groups[:, 0], stages[role_index])]
                if row.operation == "all_to_all":
                    sent = _all_to_all_transfers(members, row.bytes)
                elif row.operation == "send":
                    sent = _next_neighbor_transfers(members, row.bytes)
                else:
                    sent = _ring_transfers(members, row.bytes, island)
            matrices.setdefault(AXIS_BY_GROUP_KIND[row.group_kind], []).append(TrafficMatrix(world_size, *sent))
    return {
        axis: merge_matrices(world_size, matrices[axis]) for axis in ("tp", "cp", "ep", "pp", "dp") if axis in matrices
    }


def _merge_rows(rows: list[Traffic]) -> list[Traffic]:
    """Return the sums of rows that use the same links."""
    total = defaultdict[tuple[Operation, GroupKind], float](float)
    for row in rows:
        total["all_reduce" if row.operation in RING_OPERATIONS else row.operation, row.group_kind] += row.bytes
    return [Traffic(operation, size, "", group_kind) for (operation, group_kind), size in total.items()]


Transfers = tuple[Ranks, Ranks, Sizes]


def _next_neighbor_transfers(members: Ranks, bytes_per_rank: float | Sizes, axis: int = 1) -> Transfers:
    """Return the transfers of rings in which each member sends to the next one along an axis."""
    return members.ravel(), np.roll(members, -1, axis).ravel(), np.full(members.size, bytes_per_rank)


def _all_to_all_transfers(members: Ranks, bytes_per_pair: float) -> Transfers:
    """Return the transfers of an all-to-all, which sends evenly to all other members."""
    count = members.shape[1]
    senders, receivers = np.nonzero(~np.eye(count, dtype=bool))
    source = members[:, senders].ravel()
    return source, members[:, receivers].ravel(), np.full(source.size, bytes_per_pair / (count - 1))


def _ring_transfers(members: Ranks, bytes_per_rank: float, island: int) -> Transfers:
    """Return the transfers of rings: one inside each island, and several between islands.

    The number of rings equals the number of members per island. Each member is where one ring leaves, to its
    counterpart on the next island (NCCL's channels, aligned with the rails: `rail_fabric.flat_ring_all_reduce`). A
    group with unequal numbers of members on its islands has one ring.
    """
    transfers: list[Transfers] = []
    islands = members // island
    members_in_first_island = (islands == islands[:, :1]).sum(1)
    for width in np.unique(members_in_first_island):
        has_width = members_in_first_island == width
        groups = members[has_width]
        is_even = _is_even(islands[has_width], width)
        transfers.append(_next_neighbor_transfers(groups[~is_even], bytes_per_rank))
        # [group, island, member on the island]
        even_groups = groups[is_even].reshape(int(is_even.sum()), groups.shape[1] // width, width)
        transfers.append(_next_neighbor_transfers(even_groups, bytes_per_rank / width))
        if width > 1:
            transfers.append(_next_neighbor_transfers(even_groups, bytes_per_rank - bytes_per_rank / width, axis=2))
    source, target, sent = zip(*transfers, strict=True)
    return np.concatenate(source), np.concatenate(target), np.concatenate(sent)


def _is_even(islands: Ranks, width: int) -> NDArray[np.bool_]:
    """Return which groups have `width` consecutive members on each of several islands.

    `islands` has the island of each member, one row per group.
    """
    num_groups, num_members = islands.shape
    if num_members % width or width == num_members:
        return np.zeros(num_groups, bool)
    blocks = islands.reshape(num_groups, -1, width)
    return np.asarray((blocks == blocks[:, :, :1]).all((1, 2)) & (np.diff(blocks[:, :, 0]) > 0).all(1))


def _stage_transfers(resolved: ResolvedRun, pipelines: Ranks, stage: int, row: Traffic) -> Transfers:
    """Return the transfers to ranks of other stages with the same shard, by the messages of the schedule."""
    schedule = layout_schedule(resolved.layout, resolved.micro_batches)
    if row.group_kind == "ends":
        messages = dict.fromkeys(set(schedule.end_ranks) - {stage}, 1)
    else:
        messages = schedule.messages_by_receiver(stage)
    counts = messages.values()
    sent = [np.full(len(pipelines), row.bytes * count / sum(counts)) for count in counts]
    return (
        np.tile(pipelines[:, stage], len(messages)),
        np.concatenate([pipelines[:, receiver] for receiver in messages]),
        np.concatenate(sent),
    )


def _parameter_server_transfers(run: RunSpec, sizes: ParallelDims, worker: list[Traffic]) -> Iterator[TrafficMatrix]:
    """Yield the traffic of parameter servers.

    Weights go from each server down a chain of workers, or asynchronously to each worker. Gradients go directly back.
    """
    total_bytes = next(row.bytes for row in worker if row.operation == "send")
    loads = np.array(server_loads(trained_shapes(run.model), sizes.servers), float)
    ranks = sizes.world_size
    bytes_by_server = total_bytes * loads / loads.sum()
    servers = np.arange(sizes.servers)
    workers = np.arange(sizes.servers, sizes.world_size)
    all_workers = np.repeat(workers, len(servers))
    all_servers = np.tile(servers, len(workers))
    yield TrafficMatrix(ranks, all_workers, all_servers, np.tile(bytes_by_server, len(workers)))
    if run.layout.max_staleness is not None:
        yield TrafficMatrix(ranks, all_servers, all_workers, np.tile(bytes_by_server, len(workers)))
    else:
        yield TrafficMatrix(ranks, servers, np.full(len(servers), workers[0]), bytes_by_server)
        yield TrafficMatrix(ranks, workers[:-1], workers[1:], np.full(len(workers) - 1, total_bytes))
