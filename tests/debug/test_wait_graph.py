"""The graph of ranks that wait for others, and the ranks that block them."""

from __future__ import annotations

from typing import Any

from phalanx.debug.hang_evidence import Evidence
from phalanx.spec.parallel_dims import ParallelDims
from tests.helpers.hang_dumps import BUSY, WAITING, make_dump

SIZES = ParallelDims(dp_replicate=3)


def pending_call(group: str) -> dict[str, Any]:
    call = {"group": group, "number": 1, "operation": "all_reduce", "inputs": [[4]], "outputs": [], "dtypes": ["Float"]}
    return {**call, "over": False, "at": ("mine/model.py", 1, "step")}


def make_pair_dump(rank: int, *groups: str, busy: bool = False) -> Any:
    """Make the dump of a rank that is in a collective of each of these pairs of ranks."""
    dump = make_dump(rank, SIZES, [pending_call(group) for group in groups], BUSY if busy else WAITING)
    return {**dump, "groups": {pair: [int(member) for member in pair] for pair in ("01", "12", "20")}}


def test_blocker_is_the_end_of_a_chain_of_waiting_ranks() -> None:
    dumps = {0: make_pair_dump(0, "01"), 1: make_pair_dump(1, "12"), 2: make_pair_dump(2, busy=True)}
    graph = Evidence(dumps, {}, SIZES).wait_graph
    assert (graph.ranks_waiting, graph.ranks_busy, graph.ranks_silent) == ([0, 1], [2], [])
    assert graph.ranks_missing == {1: {0}, 2: {1}}
    assert graph.blockers == [2]


def test_silent_rank_blocks_the_ranks_that_wait_for_it() -> None:
    graph = Evidence({0: make_pair_dump(0, "01"), 1: make_pair_dump(1, "12")}, {}, SIZES).wait_graph
    assert (graph.ranks_silent, graph.blockers) == ([2], [2])


def test_cycle_of_waiting_ranks_has_no_blocker() -> None:
    dumps = {0: make_pair_dump(0, "01"), 1: make_pair_dump(1, "12"), 2: make_pair_dump(2, "20")}
    graph = Evidence(dumps, {}, SIZES).wait_graph
    assert graph.ranks_missing == {1: {0}, 2: {1}, 0: {2}}
    assert graph.blockers == []


def test_busy_rank_blocks_ranks_that_wait_for_pipeline_messages() -> None:
    dumps = {0: make_pair_dump(0), 1: make_pair_dump(1, busy=True), 2: make_pair_dump(2)}
    graph = Evidence(dumps, {}, SIZES).wait_graph
    assert (graph.ranks_missing, graph.blockers) == ({}, [1])
