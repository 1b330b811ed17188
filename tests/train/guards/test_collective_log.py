"""Collectives and messages that real ranks call in different orders are found and named."""

from __future__ import annotations

import re
import time

import pytest
import torch
import torch.distributed as dist

from phalanx.debug.collective_order import MESSAGE, CollectiveOrder, LoggedCall
from phalanx.debug.explain_run import explain_run
from phalanx.runs.hang_dumps import calls_file
from phalanx.testing import rank_pool
from phalanx.testing.rank_failure import RankError
from phalanx.testing.rank_pool import RankPool
from phalanx.train.guards import collective_log
from phalanx.train.guards.collective_log import OrderGuard
from tests.helpers.faulty_rank import FAULTY_RANK, reorder_messages
from tests.helpers.faulty_runs import create_run_directory, start_faulty_run, wait_for_failure


def swap_all_reduces(*sizes: int) -> None:
    """Call two all-reduces, in the other order on one rank; with equal sizes they end, with wrong numbers."""
    tensors = [torch.ones(size, dtype=dtype) for size, dtype in zip(sizes, (torch.float32, torch.int32), strict=True)]
    for tensor in reversed(tensors) if dist.get_rank() == FAULTY_RANK else tensors:
        dist.all_reduce(tensor)


def swap_groups() -> None:
    """All-reduce in each of two groups, in the other order on one rank: both ranks wait forever."""
    groups = [dist.new_group([0, 1]), dist.new_group([0, 1])]
    for group in reversed(groups) if dist.get_rank() == FAULTY_RANK else groups:
        dist.all_reduce(torch.ones(4), group=group)


def differ_in_root() -> None:
    """Broadcast from this rank; each rank takes itself for the root."""
    dist.broadcast(torch.ones(2), src=dist.get_rank())


def leave_out_last() -> None:
    """Broadcast from rank 0, which does not wait for the other rank; the other one calls nothing."""
    dist.barrier()
    if dist.get_rank() == 0:
        dist.broadcast(torch.ones(2), src=0)


def expect_other_parts() -> None:
    """Run an all-to-all in which one rank expects less than it is sent."""
    rank = dist.get_rank()
    received = torch.empty(3 if rank == FAULTY_RANK else 4)
    dist.all_to_all_single(received, torch.ones(4), [1, 2] if rank == FAULTY_RANK else None, [2, 2])


def call_uneven_collectives() -> None:
    """Call every operation whose number of elements may differ between ranks, and send messages both ways."""
    rank, other = dist.get_rank(), 1 - dist.get_rank()
    sizes = [1 + rank, 2 - rank]
    dist.all_to_all_single(torch.empty(3), torch.ones(3), [1, 2] if rank == 0 else [2, 1], sizes)
    dist.all_gather_object([None, None], "x" * 10 * rank)
    dist.gather(torch.ones(2), [torch.ones(2)] * 2 if rank == 0 else None, dst=0)
    dist.scatter(torch.ones(2), [torch.ones(2)] * 2 if rank == 0 else None, src=0)
    dist.broadcast_object_list([rank], src=1)
    works = dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, torch.ones(1 + rank), other), dist.P2POp(dist.irecv, torch.ones(1 + other), other)]
    )
    for work in works:
        work.wait()
    if rank == 0:  # ahead of time
        dist.irecv(torch.ones(1), other, tag=7)


@pytest.mark.parametrize(
    ("function", "args", "pattern"),
    [
        pytest.param(
            swap_all_reduces,
            (4, 4),
            r"in collective 1 of group \w+ \(ranks 0, 1\), rank 0 called all_reduce of 4 float32 at guards/"
            r"test_collective_log.py:\d+ \(swap_all_reduces\) and rank 1 called all_reduce of 4 int32",
            id="equal sizes",
        ),
        pytest.param(
            swap_all_reduces,
            (4, 400_000),
            "rank 0 called all_reduce of 4 float32 .* rank 1 called all_reduce of 400,000 int32",
            id="abort",
        ),
        pytest.param(
            reorder_messages,
            (),
            r"in message 1 from rank 0 to rank 1 in group \w+, rank 0 sent 4 float32 with tag 1 at .*"
            " and rank 1 received 8 float32 with tag 2",
            id="messages",
        ),
        pytest.param(differ_in_root, (), "float32 with root 0 at .* float32 with root 1 at", id="root"),
        pytest.param(
            expect_other_parts,
            (),
            r"in collective 1 of group \w+ \(ranks 0, 1\), rank 0 sent 2 elements at .* \(expect_other_parts\) and "
            r"rank 1 expected 1 of them at .* \(expect_other_parts\): all_to_all float32",
            id="parts",
        ),
        pytest.param(
            leave_out_last,
            (),
            "in collective 2 of .*rank 0 called broadcast .* and rank 1 called nothing more",
            id="fewer",
        ),
    ],
)
def test_pool_names_first_call_that_differs(function, args, pattern):
    with pytest.raises(RankError) as caught:
        rank_pool(2).run(function, *args, timeout=60)
    assert re.search(pattern, caught.value.order_difference)
    assert caught.value.order_difference in str(caught.value)
    assert max(failure.seconds for failure in caught.value.failures) < 30, "before the call's time is over"


def test_pool_accepts_uneven_collectives_and_receives_ahead():
    rank_pool(2).run(call_uneven_collectives)


def test_pool_names_ranks_that_wait_for_each_other_in_different_groups():
    with pytest.raises(RankError) as caught:
        rank_pool(2).run(swap_groups, timeout=60)
    wait = r"in all_reduce of 4 float32 of group \w+ \(ranks 0, 1\) at .* \(swap_groups\)"
    pattern = rf"ranks wait for each other in different groups: rank \d {wait} and rank \d {wait}"
    assert re.fullmatch(pattern, caught.value.order_difference)
    assert all("it called last: " in failure.summary for failure in caught.value.failures)
    (first, second) = sorted(caught.value.failures, key=lambda failure: failure.rank)
    group = re.compile(r"it called last: .*all_reduce of 4 float32 of group (\w+) \(ranks 0, 1\) at .* \(swap_groups\)")
    assert group.search(first.summary)[1] != group.search(second.summary)[1]


def test_pool_does_not_log_unless_asked(monkeypatch):
    monkeypatch.delenv("PHALANX_CHECK_COLLECTIVES")
    pool = RankPool(2)
    try:
        pool.run(reorder_messages)
    finally:
        pool.close()


def test_run_ends_at_step_in_which_messages_are_reordered(text, tmp_path):
    """Gloo completes them, because they have tags; NCCL would not."""
    directory = create_run_directory(text, tmp_path, 2, {})
    stderr = wait_for_failure(start_faulty_run(directory, 2, "messages", check_order=True))
    assert "phalanx: CollectiveOrderError: in message 1 from rank 0 to rank 1" in stderr
    verdict = explain_run(directory).verdict
    assert (verdict.kind, verdict.ranks) == ("mismatch", (0, 1))
    assert f"why: {verdict.summary}" in stderr
    assert "rank 1 received 8 float32 with tag 2 at helpers/faulty_rank.py" in verdict.summary


def test_debug_names_crossed_messages_of_run_that_hangs(text, tmp_path):
    """A hang ends no step, but the calls are in the files of the ranks."""
    directory = create_run_directory(text, tmp_path, 2, {})
    calls = [
        LoggedCall(
            kind=MESSAGE, group="0", ranks=(0, 1), signature=f"{size} float32 with tag 1", caller=f"a.py:{size} (f)"
        )
        for size in (4, 8)
    ]
    for rank, order in enumerate((calls, calls[::-1])):
        file = calls_file(directory, rank)
        file.parent.mkdir(exist_ok=True)
        file.write_text("".join(f"{call.to_json()}\n" for call in order) + '["half a li')
    verdict = explain_run(directory).verdict
    assert (verdict.kind, verdict.ranks) == ("mismatch", (0, 1))
    assert verdict.summary == (
        "in message 1 from rank 0 to rank 1 in group 0, rank 0 sent 4 float32 with tag 1 at a.py:4 (f) "
        "and rank 1 received 8 float32 with tag 1 at a.py:8 (f)"
    )


@pytest.mark.parametrize("is_shared", [True, False])
def test_end_of_run_compares_files_as_far_as_they_come(is_shared, tmp_path, monkeypatch):
    """A shared file system may show a file late. Without one it never appears; this does not count as a difference."""
    call = LoggedCall(kind="collective", group="0", ranks=(0, 1), signature="all_reduce of 4 float32", caller="a.py:1")
    line = call.to_json() + "\n"
    files = {rank: calls_file(tmp_path, rank) for rank in range(2)}
    files[0].parent.mkdir()
    files[0].write_text(line)
    guard = OrderGuard(tmp_path)
    guard._order = CollectiveOrder(files)
    if is_shared:
        monkeypatch.setattr(time, "sleep", lambda _: files[1].write_text(line))
    else:
        monkeypatch.setattr(collective_log, "LATE_FILE_SECONDS", 0.0)
    guard._check_whole_logs([len(line)] * 2)
    assert guard._order.bytes_read(1) == (len(line) if is_shared else 0)
