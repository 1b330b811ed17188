"""A swarm's state, computed from its events: rounds open and close at the right time, text is assigned once, and the
same events give the same state."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.runs.swarm_records import decode_journal_event
from phalanx.spec.errors import UserError
from phalanx.spec.swarm import RoundSpec
from phalanx.swarm.coordinator.journal import Journal
from phalanx.swarm.coordinator.node_task import node_task
from phalanx.swarm.coordinator.open_round import RECONNECT_SECONDS, deadline_offset
from phalanx.swarm.coordinator.swarm_state import Event, SwarmState, replay, summary
from tests.helpers.local_swarm import NODES, tiny_swarm_run

NOWHERE = Path("/nowhere")


def make_state(steps: int = 12, **swarm: Any) -> SwarmState:
    return SwarmState(tiny_swarm_run(NOWHERE, {"training.steps": steps}, **swarm))


def join_nodes(state: SwarmState, *names: str, capacity: float = 4) -> None:
    for name in names:
        state.record({"kind": "joined", "node": name, "capacity": capacity, "text": "t", "at": 0.0})


def open_round(state: SwarmState, now: float = 0.0) -> Event:
    event = state.next_round_event(now)
    assert event is not None
    state.record(event)
    return event


def accept_update(state: SwarmState, node: str, at: float) -> None:
    state.record({"kind": "accepted", "node": node, "tokens": 1, "steps": 1, "bytes": 1, "norm": 1.0, "at": at})


def test_swarm_state_opens_with_enough_nodes_and_is_done_after_last_round():
    state = make_state(steps=6, nodes=2)
    join_nodes(state, "ann")
    assert (state.next_round_event(0.0), state.waiting_for) == (None, "one more node")
    join_nodes(state, "bob")
    for number in range(2):
        assert open_round(state)["round"] == number
        state.record({"kind": "committed"})
    assert state.done
    assert state.next_round_event(0.0) is None


def test_swarm_state_closes_round_after_grace_when_updates_were_rejected():
    """The round stays open for the grace period, because a rejected node may send another update. It closes with the
    updates that were accepted, or with none."""
    state = make_state(nodes=2, round={"grace_seconds": 5, "quorum": 1.0})
    join_nodes(state, "ann", "bob")
    for number, sender in enumerate([None, "ann"]):
        open_round(state)
        if sender is not None:
            accept_update(state, sender, 1.0)
        for node in {"ann", "bob"} - {sender}:
            assert not state.should_close(100.0)
            state.record({"kind": "refused", "round": number, "node": node, "reason": "not finite"})
        assert not state.should_close(4.9)
        assert state.should_close(6.1)
        state.record({"kind": "committed"})
    open_round(state)
    state.record({"kind": "refused", "round": 0, "node": "ann", "reason": "closed"})  # of a round long past
    accept_update(state, "bob", 1.0)
    assert not state.should_close(100.0)
    accept_update(state, "ann", 1.0)
    assert state.should_close(1.0)


def test_swarm_state_waits_for_all_members_and_closes_when_missing_one_leaves():
    state = make_state()
    join_nodes(state, *NODES[:3])
    open_round(state)
    accept_update(state, "ann", 1.0)
    accept_update(state, "bob", 1.0)
    assert not state.should_close(2.0)
    state.record({"kind": "left", "node": "cid", "reason": "no heartbeat"})
    assert state.should_close(2.0)


def test_swarm_state_does_not_close_round_without_updates():
    state = make_state()
    join_nodes(state, *NODES[:2])
    open_round(state)
    assert not state.should_close(1e9)


def test_swarm_state_closes_round_after_quorum_and_grace_period():
    """A quorum of 0.3 of four nodes is two nodes."""
    state = make_state(nodes=4, round={"quorum": 0.3, "grace_seconds": 10.0, "timeout_multiplier": 3.0})
    join_nodes(state, *NODES)
    open_round(state, 100.0)
    accept_update(state, "ann", 110.0)
    assert state.closes_at() is None
    accept_update(state, "bob", 112.0)
    assert state.closes_at() == 100 + 11 + 10
    assert not state.should_close(120.9)
    assert state.should_close(121.0)


def test_swarm_state_derives_round_deadline_from_previous_rounds():
    """The deadline is known when the round opens, so that a slow node can plan its steps."""
    state = make_state(nodes=4, steps=24, round={"grace_seconds": 1.0, "timeout_multiplier": 3.0})
    join_nodes(state, *NODES)
    for opened_at in (0.0, 100.0):
        open_round(state, opened_at)
        for node, seconds in zip(NODES, (10.0, 12.0, 14.0, 70.0), strict=True):
            accept_update(state, node, opened_at + seconds)
        state.record({"kind": "committed"})
    open_round(state, 200.0)
    assert state.closes_at() == 200 + 13 + 3 * 2


def test_swarm_state_round_deadline_excludes_downtime_of_coordinator():
    state = make_state(nodes=2, steps=24, round={"grace_seconds": 20.0, "timeout_multiplier": 3.0})
    join_nodes(state, *NODES[:2])
    for opened_at in (0.0, 100.0):
        open_round(state, opened_at)
        for node in NODES[:2]:
            accept_update(state, node, opened_at + 10)
        state.record({"kind": "committed"})
    open_round(state, 200.0)
    assert state.closes_at() == 200 + 10 + 20
    state.record({"kind": "resumed", "down": 500.0, "at": 705.0})
    assert state.closes_at() == 200 + 500 + RECONNECT_SECONDS + 10 + 20
    accept_update(state, "ann", 711.0)
    assert state.round.updates["ann"].arrival_seconds == 11.0
    assert not state.should_close(729.9 + RECONNECT_SECONDS)
    assert state.should_close(731 + RECONNECT_SECONDS)


def test_swarm_state_round_remains_open_after_downtime_until_nodes_have_reconnected():
    """The coordinator was killed just before the deadline."""
    state = make_state(nodes=2, round={"grace_seconds": 5.0, "timeout_multiplier": 3.0})
    join_nodes(state, *NODES[:2])
    open_round(state)
    accept_update(state, "ann", 10.0)
    assert state.closes_at() == 15.0
    state.record({"kind": "resumed", "down": 100.0, "at": 114.9})
    assert state.closes_at() == 115.0 + RECONNECT_SECONDS


def test_swarm_state_round_opened_after_downtime_waits_for_nodes_to_reconnect():
    for opened_at, delay in ((101.0, RECONNECT_SECONDS), (100.0 + RECONNECT_SECONDS, 0.0)):
        state = make_state(nodes=2, round={"grace_seconds": 5.0, "timeout_multiplier": 3.0})
        join_nodes(state, *NODES[:2])
        state.record({"kind": "resumed", "down": 50.0, "at": 100.0})
        open_round(state, opened_at)
        accept_update(state, "ann", opened_at + 2)
        assert state.closes_at() == opened_at + 2 + 5 + delay


def test_swarm_state_text_is_free_until_a_node_has_trained():
    state = make_state()
    assert state.required_text("ann") is None
    state.record({"kind": "joined", "node": "ann", "capacity": 4, "text": "wrong", "at": 0.0})
    assert (state.required_text("ann"), state.required_text("bob")) == (None, "wrong")
    state.record({"kind": "left", "node": "ann", "reason": "on request", "at": 0.0})
    assert state.required_text("bob") is None
    join_nodes(state, "bob", "cid")
    open_round(state)
    state.record({"kind": "left", "node": "bob", "reason": "no heartbeat", "at": 0.0})
    assert state.required_text("ann") == "t"  # its update may still arrive
    accept_update(state, "bob", 1.0)
    for node in ("bob", "cid"):
        state.record({"kind": "left", "node": node, "reason": "on request", "at": 0.0})
    state.record({"kind": "committed"})
    assert state.required_text("ann") == "t"
    state.record({"kind": "text", "text": "right", "at": 0.0})
    assert state.required_text("ann") == "right"


def test_swarm_state_weight_digests_are_those_of_each_fragments_last_round():
    state = make_state(steps=12, every=3, fragments=3)
    assert state.weight_digests(0) == [None, None, None]
    state.record({"kind": "initialized", "base": ["a", "b", "c"]})
    join_nodes(state, *NODES[:2])
    for number in range(4):
        open_round(state)
        state.record({"kind": "committed", "base": f"base {number}", "broadcast": ""})
    assert state.weight_digests(0) == ["a", "b", "c"]
    assert state.weight_digests(2) == ["base 0", "base 1", "c"]
    assert state.weight_digests(4) == ["base 3", "base 1", "base 2"]


@given(st.lists(st.floats(0.0, 1e4), min_size=1, max_size=20), st.floats(0, 100), st.floats(0, 10))
def test_deadline_offset_includes_at_least_half_of_the_updates(offsets, grace, patience_factor):
    """This holds for all settings."""
    spec = RoundSpec(grace_seconds=grace, timeout_multiplier=patience_factor)
    limit = deadline_offset(offsets, spec)
    assert sum(offset <= limit for offset in offsets) >= len(offsets) / 2


@given(
    actions=st.lists(st.sampled_from(["join", "leave", "tell", "close", "open", "restart"]), max_size=60),
    data=st.data(),
    delay=st.integers(0, 2),
)
@settings(deadline=None, max_examples=60)
def test_swarm_state_assigns_data_once_and_owns_all_experts_for_random_events(actions, data, delay):
    state, events, assigned = make_state(steps=300, nodes=1, delay=delay), [], []

    def record(event: Event) -> None:
        state.record(event)
        events.append(event)

    for now, action in enumerate(actions):
        node = data.draw(st.sampled_from(NODES))
        if action == "join":
            record({"kind": "joined", "node": node, "capacity": 4, "text": "t", "at": now})
        elif action == "leave":
            record({"kind": "left", "node": node, "reason": "x", "at": now})
        elif action == "tell" and state.rejection_reason(node, state.committed) is None:
            record({"kind": "accepted", "node": node, "tokens": 1, "steps": 1, "bytes": 1, "norm": 1, "at": now})
        elif action == "close" and state.should_close(now):
            record({"kind": "committed"})
        elif action == "restart":
            record({"kind": "resumed", "down": data.draw(st.floats(-5, 1e4)), "at": now})
        elif action == "open" and (event := state.next_round_event(float(now))) is not None:
            record(event)
            assert all(owners and set(owners) <= set(state.members) for owners in event["owners"])
            for first, count in event["text"].values():
                assigned += range(first, first + count)
    assert len(assigned) == len(set(assigned)) == state.steps_assigned
    replayed = replay(state.run, events)
    assert summary(replayed, {}, 0.0) == summary(state, {}, 0.0)
    assert (replayed.arrivals, replayed.closes_at()) == (state.arrivals, state.closes_at())
    assert (replayed.steps_assigned, replayed.owners, replayed.members) == (
        state.steps_assigned,
        state.owners,
        state.members,
    )


def test_swarm_state_rejects_early_unknown_duplicate_and_late_updates():
    state = make_state()
    join_nodes(state, *NODES[:2])
    assert state.rejection_reason("ann", 0) == "not open yet"
    open_round(state)
    assert state.rejection_reason("ann", 0) is None
    assert state.rejection_reason("eve", 0) == "not of this round"
    assert state.rejection_reason("ann", 1) == "not open yet"
    accept_update(state, "ann", 1.0)
    assert state.rejection_reason("ann", 0) == "already sent"
    state.record({"kind": "committed"})
    assert state.rejection_reason("bob", 0) == "closed"


def test_node_task_is_of_the_next_round_while_the_open_one_closes():
    """Steps for the closing round would be wasted."""
    state = make_state()
    join_nodes(state, *NODES[:2])
    open_round(state)
    assert (node_task(state, "ann", 1.0).round, node_task(state, "ann", 1.0).steps) == (0, 3)
    closing = node_task(state, "ann", 1.0, closing=True)
    assert (closing.round, closing.first_step, closing.member) == (1, None, True)


# -- the journal -------------------------------------------------------------------------------------------------------


def test_journal_drops_truncated_last_line_on_reopen(tmp_path):
    path = tmp_path / "journal.jsonl"
    journal = Journal(path)
    for number in range(3):
        journal.append({"kind": "committed", "round": number, "at": 1.0})
    journal.close()
    content = path.read_bytes()
    path.write_bytes(content[:-5])
    reopened = Journal(path)
    assert [event["round"] for event in reopened.events] == [0, 1]
    reopened.append({"kind": "committed", "round": 9, "at": 1.0})
    reopened.close()
    assert [event["round"] for event in Journal(path).events] == [0, 1, 9]


def test_journal_contains_event_once_when_its_first_write_failed(tmp_path, monkeypatch):
    """The disk was full in the middle of a line, or after it."""
    journal = Journal(tmp_path / "journal.jsonl")
    journal.append({"kind": "text", "text": "t", "at": 1.0})
    os.write(journal._file.fileno(), b'{"kind":"comm')
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", _raise_disk_full)
        with pytest.raises(OSError, match="full"):
            journal.append({"kind": "committed", "at": 2.0})
    journal.append({"kind": "committed", "at": 2.0})
    journal.close()
    assert [event["kind"] for event in Journal(tmp_path / "journal.jsonl").events] == ["text", "committed"]


def _raise_disk_full(descriptor: int) -> None:
    raise OSError(errno.ENOSPC, "full")


@pytest.mark.parametrize("marker", [None, b"", b"x", b"nan", b"8.0", b"1e999", b"1e300"])
def test_journal_last_alive_is_the_last_event_or_a_later_marker(tmp_path, marker):
    path = tmp_path / "journal.jsonl"
    journal = Journal(path)
    journal.append({"kind": "text", "text": "t", "at": 5.0})
    journal.mark_alive(2.0)
    if marker is not None:
        (tmp_path / "alive").write_bytes(marker)
    journal.close()
    assert Journal(path).last_alive() == (8.0 if marker == b"8.0" else 5.0)


@pytest.mark.parametrize(
    "line",
    [
        b"{}\n",
        b"[1]\n",
        b"x\n",
        b"3\n",
        b"[" * 100_000 + b"\n",
        b"\xff\n",
        b'{"kind":"committed"}\n',
        b'{"kind":"joined","node":[],"capacity":4,"text":"t","at":1}\n',
        b'{"kind":"left","node":"a","at":1e400}\n',
        b'{"kind":"acceqted","round":0,"node":"a","tokens":1,"steps":1,"bytes":1,"norm":1.0,"at":1}\n',
    ],
)
def test_journal_rejects_lines_that_are_not_events(tmp_path, line):
    path = tmp_path / "journal.jsonl"
    event = b'{"kind":"committed","round":0,"at":1}\n'
    path.write_bytes(event + line + event)
    with pytest.raises(UserError, match=r"line 2.*is not an event"):
        Journal(path)


@pytest.mark.parametrize(
    "event",
    [
        {"kind": "acceqted", "at": 1.0},
        {"kind": "text", "text": "\ud800", "at": 1.0},
        {"kind": "resumed", "down": 1e300, "at": 1.0},
        {"kind": "text", "text": "t", "at": float("nan")},
    ],
)
def test_journal_does_not_write_events_that_a_restart_could_not_read(tmp_path, event):
    path = tmp_path / "journal.jsonl"
    journal = Journal(path)
    with pytest.raises(ValueError, match=r"validation error|no event"):
        journal.append(event)
    journal.append({"kind": "text", "text": "t", "at": 1.0})
    journal.close()
    assert [event["text"] for event in Journal(path).events] == ["t"]


def test_journal_does_not_follow_links(tmp_path):
    (tmp_path / "other").write_bytes(b"")
    (tmp_path / "journal.jsonl").symlink_to(tmp_path / "other")
    with pytest.raises(UserError, match=r"journal = .*cannot be opened"):
        Journal(tmp_path / "journal.jsonl")
    (tmp_path / "journal.jsonl").unlink()
    (tmp_path / "alive.part").symlink_to(tmp_path / "other")
    journal = Journal(tmp_path / "journal.jsonl")
    journal.mark_alive(2.0)
    journal.close()
    assert ((tmp_path / "alive").read_text(), (tmp_path / "other").read_bytes()) == ("2.0", b"")


@pytest.mark.parametrize(
    "event",
    [
        {"kind": "committed", "round": 0},
        {"kind": "accepted", "round": 0, "node": "ann", "tokens": 1, "steps": 1, "bytes": 1, "norm": 1.0},
        {"kind": "dropped", "round": 0, "node": "ann", "reason": "outlying"},
        {"kind": "opened", "round": 3, "owners": None, "text": {}},
        {"kind": "opened", "round": 0, "owners": [["nobody"]] * 4, "text": {}},
    ],
)
def test_replay_rejects_event_that_does_not_follow_from_earlier_ones(event, tmp_path):
    with pytest.raises(UserError, match=r"line 1.*does not follow from the lines before it"):
        replay(tiny_swarm_run(tmp_path), [{**event, "at": 1.0}])


def test_journal_accepts_keys_of_earlier_versions() -> None:
    line = b'{"what":"refused","round":1,"node":"bob","why":"closed","said":"closed: round 1","at":1.0}'
    event = {"kind": "refused", "round": 1, "node": "bob", "reason": "closed", "message": "closed: round 1", "at": 1.0}
    assert decode_journal_event(line) == event


def test_journal_leaves_node_with_name_of_old_key() -> None:
    event = {"kind": "joined", "node": "ann", "capacity": 4, "text": "t", "at": 1.0, "extra": {"what": 1, "why": 2}}
    assert decode_journal_event(json.dumps(event).encode()) == event
