"""Comparison of the logs of collectives of several ranks, with artificial logs."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from phalanx.debug.collective_order import COLLECTIVE, CollectiveOrder, LoggedCall

Calls = list[tuple[tuple[int, ...], str]]
PAIRS = {"a": (0, 1), "b": (1, 2), "c": (0, 2), "all": (0, 1, 2)}


def write_log(file: Path, groups: str | list[str]) -> None:
    """Append a sum over each of these groups."""
    with file.open("a") as log:
        for group in groups:
            call = LoggedCall(
                kind=COLLECTIVE,
                group=group,
                ranks=PAIRS[group],
                signature="all_reduce of 1 float32",
                caller=f"x.py:1 ({group})",
            )
            log.write(call.to_json() + "\n")


@pytest.fixture
def logs(tmp_path: Path) -> dict[int, Path]:
    return {rank: tmp_path / f"{rank}.calls" for rank in range(3)}


def test_three_ranks_that_wait_in_a_ring_of_groups_are_crossed(logs):
    """No two of the ranks share two groups."""
    order = CollectiveOrder(logs)
    for rank, groups in enumerate((["all", "a", "c"], ["all", "b", "a"], ["all", "c", "b"])):
        write_log(logs[rank], groups[:2])
    difference = order.first_difference()
    assert difference is not None
    assert (difference.kind, difference.ranks) == ("crossed", (0, 1, 2))
    assert "rank 1 in all_reduce of 1 float32 of group b (ranks 1, 2) at x.py:1 (b)" in difference.message


def test_rank_that_is_late_is_no_difference(logs):
    order = CollectiveOrder(logs)
    write_log(logs[0], ["a", "c", "all"])
    write_log(logs[1], ["a", "b"])
    assert order.first_difference() is None
    assert order.first_difference() is None
    write_log(logs[2], ["c", "b", "all"])
    difference = order.first_difference()
    assert difference is None
    difference = order.first_difference(finished=[0, 1, 2])
    assert difference is not None
    assert (difference.ranks, difference.kind) == ((1,), "mismatch")
    assert difference.message.startswith(
        "in collective 1 of group all (ranks 0, 1, 2), rank 1 called nothing more, while "
    )


@pytest.mark.parametrize("seed", range(20))
def test_one_order_read_in_parts_has_no_difference(seed, logs):
    """All ranks call a random sequence, each at its own pace."""
    dice = random.Random(seed)
    sequence = dice.choices(sorted(PAIRS), k=60)
    remaining = {rank: [group for group in sequence if rank in PAIRS[group]] for rank in logs}
    order = CollectiveOrder(logs)
    while any(remaining.values()):
        rank = dice.choice([rank for rank, groups in remaining.items() if groups])
        count = dice.randint(1, 5)
        write_log(logs[rank], remaining[rank][:count])
        del remaining[rank][:count]
        assert order.first_difference() is None
    assert order.first_difference(finished=list(logs)) is None


@pytest.mark.parametrize("seed", range(20))
def test_swapped_groups_are_noticed(seed, logs):
    """Rank 0 calls two neighboring collectives of different groups in the other order. If both groups contain the same
    second rank, the two ranks wait for each other."""
    dice = random.Random(seed)
    sequence = dice.choices(sorted(PAIRS), k=30)
    own = [group for group in sequence if 0 in PAIRS[group]]
    candidates = [
        i for i in range(len(own) - 1) if own[i] != own[i + 1] and len(set(PAIRS[own[i]]) & set(PAIRS[own[i + 1]])) > 1
    ]
    index = dice.choice(candidates)
    own[index : index + 2] = own[index + 1], own[index]
    for rank in logs:
        write_log(logs[rank], own if rank == 0 else [group for group in sequence if rank in PAIRS[group]])
    difference = CollectiveOrder(logs).first_difference()
    assert difference is not None
    assert difference.kind == "crossed"
    assert 0 in difference.ranks
