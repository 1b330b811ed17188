"""Records of the collectives of real ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from phalanx.testing import rank_pool
from phalanx.train.profiling.collective_recorder import CollectiveCall, CollectiveRecorder, exclude_queueing


def record_collectives() -> list[tuple[str, tuple[int, ...], int, bool]]:
    """Run collectives of 1,000 fp32 numbers, and return the records: operation, group, bytes, and whether the end is
    known."""
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (2,))
    half = dist.new_group([0, 1])
    values, doubled = torch.ones(1000), torch.ones(2000)
    split = distribute_tensor(values, mesh, [Shard(0)])
    with CollectiveRecorder() as recorder:
        dist.all_reduce(values)
        dist.all_reduce(values, group=half, async_op=True).wait()  # type: ignore[union-attr]
        dist.all_gather_into_tensor(doubled, values)
        dist.all_to_all_single(torch.empty(2000), doubled)
        dist.broadcast(values, 0)
        dist.reduce_scatter_tensor(values, doubled)
        dist.send(values, 1) if rank == 0 else dist.recv(values, 0)
        split.full_tensor()
        values.add_(1)  # no collective
    dist.barrier()
    return [(call.operation, call.group, call.size_bytes, call.end is not None) for call in recorder.calls]


def test_collective_recorder_records_operations_groups_and_bytes() -> None:
    sender, receiver = rank_pool(2).run(record_collectives)
    expected = [
        ("all_reduce", (0, 1), 4000, True),
        ("all_reduce", (0, 1), 4000, True),
        ("all_gather", (0, 1), 8000, True),
        ("all_to_all", (0, 1), 8000, True),
        ("broadcast", (0, 1), 4000, True),
        ("reduce_scatter", (0, 1), 8000, False),
    ]
    assert sender[:6] == receiver[:6] == expected
    assert sender[6] == ("send", (0, 1), 4000, False)
    assert receiver[6] == ("recv", (0, 1), 4000, False)
    assert sender[7][:2] == ("all_gather", (0, 1))


def test_collective_call_exposed_seconds_counts_only_waited_time() -> None:
    call = CollectiveCall(
        operation="all_reduce", executed_as="all_reduce", group=(0, 1), size_bytes=1, start=10.0, end=14.0
    )
    assert call.exposed_seconds([(0.0, 9.0), (9.5, 11.0), (13.0, 20.0)]) == pytest.approx(2.0)
    assert call.exposed_seconds([]) == 0


def test_exclude_queueing_starts_collectives_of_a_group_one_by_one() -> None:
    def call(operation: str, group_name: str, start: float, end: float | None) -> CollectiveCall:
        return CollectiveCall(
            operation=operation,
            executed_as=operation,
            group=(0, 1),
            size_bytes=1,
            start=start,
            end=end,
            group_name=group_name,
        )

    calls = [
        call("all_reduce", "a", 1.0, 5.0),
        call("all_gather", "a", 2.0, 6.0),  # queued behind the first
        call("all_reduce", "b", 2.0, 3.0),  # of another group of the same ranks
        call("send", "a", 2.0, 4.0),
        call("all_reduce", "a", 7.0, 8.0),
        call("all_reduce", "a", 7.5, None),
    ]
    exclude_queueing(calls)
    assert [recorded.start for recorded in calls] == [1.0, 5.0, 2.0, 2.0, 7.0, 7.5]
