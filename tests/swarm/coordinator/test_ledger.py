"""A swarm's state from its events: rounds open and close when they should, text is given out once, and the same events
give the same state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.spec.errors import UserError
from phalanx.spec.swarm import RoundSpec
from phalanx.swarm.coordinator.journal import Journal
from phalanx.swarm.coordinator.ledger import Event, Ledger, deadline_offset, replay, summary
from tests.helpers.local_swarm import NODES, tiny_swarm_run

NOWHERE = Path("/nowhere")


def make_ledger(steps: int = 12, **swarm: Any) -> Ledger:
    return Ledger(tiny_swarm_run(NOWHERE, {"training.steps": steps}, **swarm))


def join_nodes(ledger: Ledger, *names: str, capacity: float = 4) -> None:
    for name in names:
        ledger.record({"what": "joined", "node": name, "capacity": capacity, "text": "t", "at": 0.0})


def open_round(ledger: Ledger, now: float = 0.0) -> Event:
    event = ledger.next_round_event(now)
    assert event is not None
    ledger.record(event)
    return event


def accept_update(ledger: Ledger, node: str, at: float) -> None:
    ledger.record({"what": "accepted", "node": node, "tokens": 1, "steps": 1, "bytes": 1, "norm": 1.0, "at": at})


def test_ledger_opens_with_enough_nodes_and_is_done_after_last_round():
    ledger = make_ledger(steps=6, nodes=2)
    join_nodes(ledger, "ann")
    assert (ledger.next_round_event(0.0), ledger.waiting_for) == (None, "one more node")
    join_nodes(ledger, "bob")
    for number in range(2):
        assert open_round(ledger)["round"] == number
        ledger.record({"what": "committed"})
    assert ledger.done
    assert ledger.next_round_event(0.0) is None


def test_ledger_closes_round_after_grace_when_updates_were_rejected():
    """After the grace, for another word may come; with those who told, or with nobody."""
    ledger = make_ledger(nodes=2, round={"grace_seconds": 5, "quorum": 1.0})
    join_nodes(ledger, "ann", "bob")
    for number, teller in enumerate([None, "ann"]):
        open_round(ledger)
        if teller is not None:
            accept_update(ledger, teller, 1.0)
        for node in {"ann", "bob"} - {teller}:
            assert not ledger.should_close(100.0)
            ledger.record({"what": "refused", "round": number, "node": node, "why": "not finite"})
        assert not ledger.should_close(4.9)
        assert ledger.should_close(6.1)
        ledger.record({"what": "committed"})
    open_round(ledger)
    ledger.record({"what": "refused", "round": 0, "node": "ann", "why": "closed"})  # of a round long past
    accept_update(ledger, "bob", 1.0)
    assert not ledger.should_close(100.0)
    accept_update(ledger, "ann", 1.0)
    assert ledger.should_close(1.0)


def test_ledger_waits_for_all_members_and_closes_when_missing_one_leaves():
    ledger = make_ledger()
    join_nodes(ledger, *NODES[:3])
    open_round(ledger)
    accept_update(ledger, "ann", 1.0)
    accept_update(ledger, "bob", 1.0)
    assert not ledger.should_close(2.0)
    ledger.record({"what": "left", "node": "cid", "why": "not heard of"})
    assert ledger.should_close(2.0)


def test_ledger_does_not_close_round_without_updates():
    ledger = make_ledger()
    join_nodes(ledger, *NODES[:2])
    open_round(ledger)
    assert not ledger.should_close(1e9)


def test_ledger_closes_round_after_quorum_and_grace_period():
    ledger = make_ledger(nodes=4, round={"quorum": 0.5, "grace_seconds": 10.0, "timeout_multiplier": 3.0})
    join_nodes(ledger, *NODES)
    open_round(ledger, 100.0)
    accept_update(ledger, "ann", 110.0)
    assert ledger.closes_at() is None
    accept_update(ledger, "bob", 112.0)
    assert ledger.closes_at() == 100 + 11 + 10
    assert not ledger.should_close(120.9)
    assert ledger.should_close(121.0)


def test_ledger_derives_round_deadline_from_previous_rounds():
    """From its beginning on, so that a slow node knows how long it has."""
    ledger = make_ledger(nodes=4, steps=24, round={"grace_seconds": 1.0, "timeout_multiplier": 3.0})
    join_nodes(ledger, *NODES)
    for begun in (0.0, 100.0):
        open_round(ledger, begun)
        for node, seconds in zip(NODES, (10.0, 12.0, 14.0, 70.0), strict=True):
            accept_update(ledger, node, begun + seconds)
        ledger.record({"what": "committed"})
    open_round(ledger, 200.0)
    assert ledger.closes_at() == 200 + 13 + 3 * 2


@given(st.lists(st.floats(0.0, 1e4), min_size=1, max_size=20), st.floats(0, 100), st.floats(0, 10))
def test_deadline_offset_includes_at_least_half_of_the_updates(offsets, grace, patience_factor):
    """At least half, whatever the settings; and one that is very late changes little."""
    spec = RoundSpec(grace_seconds=grace, timeout_multiplier=patience_factor)
    limit = deadline_offset(offsets, spec)
    assert sum(offset <= limit for offset in offsets) >= len(offsets) / 2


@given(
    actions=st.lists(st.sampled_from(["join", "leave", "tell", "close", "open"]), max_size=60),
    data=st.data(),
    delay=st.integers(0, 2),
)
@settings(deadline=None, max_examples=60)
def test_ledger_assigns_data_once_and_owns_all_experts_for_random_events(actions, data, delay):
    """Whoever comes and goes; and the same events, read again, give the same state."""
    ledger, events, read = make_ledger(steps=300, nodes=1, delay=delay), [], []

    def record(event: Event) -> None:
        ledger.record(event)
        events.append(event)

    for now, what in enumerate(actions):
        node = data.draw(st.sampled_from(NODES))
        if what == "join":
            record({"what": "joined", "node": node, "capacity": 4, "text": "t", "at": now})
        elif what == "leave":
            record({"what": "left", "node": node, "why": "x", "at": now})
        elif what == "tell" and ledger.rejection_reason(node, ledger.committed) is None:
            record({"what": "accepted", "node": node, "tokens": 1, "steps": 1, "bytes": 1, "norm": 1, "at": now})
        elif what == "close" and ledger.should_close(now):
            record({"what": "committed"})
        elif what == "open" and (event := ledger.next_round_event(float(now))) is not None:
            record(event)
            assert all(of and set(of) <= set(ledger.members) for of in event["owners"])
            for first, count in event["text"].values():
                read += range(first, first + count)
    assert len(read) == len(set(read)) == ledger.steps_assigned
    again = replay(ledger.run, events)
    assert summary(again, {}, 0.0) == summary(ledger, {}, 0.0)
    assert (again.steps_assigned, again.owners, again.members) == (ledger.steps_assigned, ledger.owners, ledger.members)


def test_ledger_rejects_early_unknown_duplicate_and_late_updates():
    ledger = make_ledger()
    join_nodes(ledger, *NODES[:2])
    assert ledger.rejection_reason("ann", 0) == "not open yet"
    open_round(ledger)
    assert ledger.rejection_reason("ann", 0) is None
    assert ledger.rejection_reason("eve", 0) == "not of this round"
    assert ledger.rejection_reason("ann", 1) == "not open yet"
    accept_update(ledger, "ann", 1.0)
    assert ledger.rejection_reason("ann", 0) == "already told"
    ledger.record({"what": "committed"})
    assert ledger.rejection_reason("bob", 0) == "closed"


# -- the journal -------------------------------------------------------------------------------------------------------


def test_journal_drops_truncated_last_line_on_reopen(tmp_path):
    path = tmp_path / "journal.jsonl"
    journal = Journal(path)
    for number in range(3):
        journal.append({"what": "opened", "round": number})
    journal.close()
    content = path.read_bytes()
    path.write_bytes(content[:-5])
    again = Journal(path)
    assert [event["round"] for event in again.events] == [0, 1]
    again.append({"what": "opened", "round": 9})
    again.close()
    assert [event["round"] for event in Journal(path).events] == [0, 1, 9]


@pytest.mark.parametrize("line", [b"{}\n", b"[1]\n", b"x\n", b"3\n"])
def test_journal_rejects_lines_that_are_not_events(tmp_path, line):
    path = tmp_path / "journal.jsonl"
    path.write_bytes(b'{"what":"opened"}\n' + line + b'{"what":"opened"}\n')
    with pytest.raises(UserError, match=r"line 2.*is no event"):
        Journal(path)
