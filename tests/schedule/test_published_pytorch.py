"""Schedules that PyTorch's pipelining creates and reads, compared with those of Phalanx."""

from __future__ import annotations

import csv
import io
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.pipelining import schedules as torch_schedules

from phalanx.schedule.published import dualpipe_v, interleaved, zb_h1, zb_v
from phalanx.schedule.schedule import Schedule, read_csv, to_csv
from phalanx.schedule.validate import violations


def pytorch_orders(name: str, p: int, m: int, stages_per_rank: int = 2) -> dict[int, list[Any]]:
    """Return the order of every rank that a schedule class of PyTorch computes."""
    settings = SimpleNamespace(
        pp_group_size=p,
        n_local_stages=stages_per_rank,
        _n_microbatches=m,
        num_stages=stages_per_rank * p,
        number_of_rounds=max(1, m // p),
        microbatches_per_round=p,
    )
    order = getattr(torch_schedules, name)._calculate_single_rank_operations
    return {rank: order(settings, rank) for rank in range(p)}


@pytest.mark.parametrize(("p", "m"), [(2, 4), (2, 7), (4, 8), (4, 11), (8, 32), (4, 3)])
def test_zb_v_schedule_equals_pytorch(p: int, m: int) -> None:
    orders = pytorch_orders("ScheduleZBVZeroBubble", p, m)
    assert to_csv(zb_v(p, m)) == to_csv(Schedule.from_rows(orders.values()))  # type: ignore[arg-type]


@pytest.mark.parametrize(("p", "m"), [(2, 4), (3, 8), (4, 8), (4, 11), (8, 32)])
def test_dualpipe_v_schedule_equals_pytorch(p: int, m: int) -> None:
    assert to_csv(dualpipe_v(p, m)) == to_csv(Schedule.from_rows(pytorch_orders("ScheduleDualPipeV", p, m).values()))  # type: ignore[arg-type]


@pytest.mark.parametrize(("p", "m", "v"), [(2, 4, 2), (4, 8, 2), (4, 8, 3), (8, 16, 4)])
def test_interleaved_1f1b_schedule_equals_pytorch(p: int, m: int, v: int) -> None:
    orders = pytorch_orders("ScheduleInterleaved1F1B", p, m, v)
    assert to_csv(interleaved(p, m, v)) == to_csv(Schedule.from_rows(orders.values()))  # type: ignore[arg-type]


def test_schedule_csv_is_readable_by_pytorch() -> None:
    for schedule in (zb_h1(4, 8), zb_v(4, 8), dualpipe_v(4, 8)):
        rows = list(csv.reader(io.StringIO(to_csv(schedule))))
        read = [[torch_schedules._Action.from_str(cell) for cell in row] for row in rows]
        assert [[str(action) for action in row] for row in read] == [list(map(str, row)) for row in schedule.orders]
        mapping = torch_schedules._validate_schedule(
            dict(enumerate(read)), schedule.ranks, schedule.stages, schedule.micro_batches
        )
        assert mapping == schedule.rank_of


def test_read_csv_accepts_pytorch_schedule_with_send_recv() -> None:
    schedule = zb_h1(4, 8)
    computing = {
        rank: [torch_schedules._Action.from_str(str(step)) for step in order]
        for rank, order in enumerate(schedule.orders)
    }
    lowered = torch_schedules._add_send_recv(computing, schedule.rank_of.__getitem__, schedule.stages)
    text = "\n".join(",".join(map(str, row)) for row in lowered.values())
    assert "SEND_F" in text
    assert Schedule.from_rows(read_csv(text)) == schedule
    assert violations(schedule) == []
