"""A rank of a pipeline knows the shapes of its messages from those that it receives, and no pipeline deadlocks under
the ordering rules of NCCL and CUDA (tests/helpers/nccl_model.py)."""

from __future__ import annotations

import pytest

from phalanx.schedule.published import PUBLISHED
from phalanx.schedule.registry import layout_schedule
from phalanx.schedule.schedule import Schedule
from phalanx.spec.layout import Layout
from tests.helpers.nccl_model import Message, communicators, deadlock, record_calls, record_connections

PIPELINES = [(name, pp) for name in PUBLISHED for pp in (2, 4, 8)]


def pipeline_schedule(name: str, pp: int) -> Schedule:
    return layout_schedule(Layout(pp=pp, schedule=name, virtual_stages=2 if name == "interleaved" else 1), 4 * pp)


@pytest.mark.parametrize(("name", "pp"), PIPELINES)
def test_pipeline_ends_with_kernels_loaded_and_group_per_direction(
    name: str, pp: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert deadlock(record_calls(monkeypatch, pipeline_schedule(name, pp)), loads_kernels=False) is None


@pytest.mark.parametrize(("name", "pp"), PIPELINES)
def test_pipeline_deadlocks_where_first_kernel_meets_posted_receive(
    name: str, pp: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This happened on an H100, and is why a pipeline rehearses its stages."""
    assert deadlock(record_calls(monkeypatch, pipeline_schedule(name, pp)), loads_kernels=True) is not None


@pytest.mark.parametrize("name", ["1f1b", "zb-v"])
def test_pipeline_deadlocks_in_one_group_for_both_directions(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = record_calls(monkeypatch, pipeline_schedule(name, 2), groups=("world", "world"))
    assert deadlock(ranks, loads_kernels=False) is not None


def test_missing_send_of_pipeline_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = record_calls(monkeypatch, pipeline_schedule("1f1b", 2))
    send = next(call for call in ranks[0].calls if isinstance(call, Message) and call.is_send)
    ranks[0].calls.remove(send)
    assert deadlock(ranks, loads_kernels=False) is not None


@pytest.mark.parametrize(("name", "pp"), PIPELINES)
def test_peers_connect_in_one_order_and_have_all_communicators_of_a_step(
    name: str, pp: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    schedule = pipeline_schedule(name, pp)
    ranks = record_connections(monkeypatch, schedule)
    assert deadlock(ranks, loads_kernels=True) is None
    used = communicators(record_calls(monkeypatch, schedule))
    first, last = sorted(schedule.end_ranks)  # send each other a tied embedding
    for rank in {first, last} if first != last else ():
        used[rank] |= {("forward", first, last), ("backward", first, last)}
    assert all(step <= connected for step, connected in zip(used, communicators(ranks), strict=True))


def test_peers_that_connect_in_another_order_deadlock(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = record_connections(monkeypatch, pipeline_schedule("1f1b", 4))
    middle = len(ranks[1].calls) // 2
    ranks[1].calls = ranks[1].calls[middle:] + ranks[1].calls[:middle]  # backward ahead of forward
    assert deadlock(ranks, loads_kernels=True) is not None
