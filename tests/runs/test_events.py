"""Events of a run between its steps: starts, failures, rollbacks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from phalanx.runs.events import (
    EVENTS_FILE,
    FAILED,
    FINISHED,
    RANK_DROPPED,
    ROLLED_BACK,
    STARTED,
    active_seconds_until,
    append_event,
    changed_settings,
    describe_failures,
    failure_count_and_uptime,
    read_events,
)

EVENT_FIELDS = {"ranks": 2, "rank": 0, "step": 0, "after": 0, "to": 0, "reason": "was killed"}
"""Fields of every kind of event."""


def test_changed_settings_are_those_of_no_start_before(tmp_path: Path) -> None:
    first, second = {"layout.pp": 1}, {"layout.pp": 2}
    assert changed_settings(tmp_path, first) == {"settings": first}
    append_event(tmp_path, STARTED, ranks=2, step=0, settings=first)
    append_event(tmp_path, STARTED, ranks=2, step=4)
    assert changed_settings(tmp_path, first) == {}
    assert changed_settings(tmp_path, second) == {"settings": second}


def test_active_seconds_until_excludes_time_between_finish_and_restart() -> None:
    """The run trains for ten seconds, restarts for five, and trains for twenty; the night after that does not count."""
    times = [(0.0, STARTED), (10.0, FAILED), (15.0, STARTED), (35.0, FINISHED), (9035.0, STARTED), (9040.0, FAILED)]
    events = [{"time": time, "kind": kind} for time, kind in times]
    assert active_seconds_until(events, STARTED) == 35
    assert active_seconds_until(events, FAILED) == 40
    assert active_seconds_until(events[:1], STARTED) == 0
    assert active_seconds_until([], STARTED) == 0


def test_active_seconds_until_excludes_time_without_launcher() -> None:
    """A launcher gave up on Friday, another one was killed on Monday, and both runs were started again by hand."""

    def make_start(time: float, launcher: int, alive_until: float | None = None) -> dict[str, Any]:
        event = {"kind": STARTED, "time": time, "host": "a", "launcher": launcher}
        return event if alive_until is None else {**event, "alive_until": alive_until}

    failed = {"kind": FAILED, "time": 100.0}
    same_launcher = [make_start(0, 1), failed, make_start(103, 1, 99)]
    assert active_seconds_until(same_launcher, STARTED) == 103
    assert active_seconds_until([make_start(0, 1), failed, make_start(9000, 2, 99)], STARTED) == 100
    assert active_seconds_until([make_start(0, 1), make_start(9000, 2, 150)], STARTED) == 150  # killed without a record
    assert active_seconds_until([make_start(0, 1), make_start(9000, 2, -5)], STARTED) == 0


def test_read_events_skips_truncated_line(tmp_path: Path) -> None:
    """A full disk leaves half a line."""
    append_event(tmp_path, STARTED, ranks=2, step=0)
    append_event(tmp_path, FAILED, rank=1, step=7, reason="was killed")
    with (tmp_path / EVENTS_FILE).open("a") as file:
        file.write('{"time": 12')
    assert [(event["kind"], event["step"]) for event in read_events(tmp_path)] == [(STARTED, 0), (FAILED, 7)]
    append_event(tmp_path, STARTED, ranks=2, step=5)
    assert [event["step"] for event in read_events(tmp_path)] == [0, 7, 5]
    count, seconds = failure_count_and_uptime(tmp_path)
    assert count == 1
    assert seconds == pytest.approx(0, abs=60)


@pytest.mark.parametrize(
    ("event_kinds", "count"),
    [
        ([], 0),
        ([STARTED], 0),
        ([STARTED, FAILED], 1),
        ([STARTED, FAILED, STARTED], 1),
        ([STARTED, STARTED], 1),  # a node was killed, and no process was left to record it
        ([STARTED, FAILED, FAILED, STARTED], 2),  # ranks were killed again before they had started
        ([STARTED, FINISHED, STARTED], 0),
        ([STARTED, ROLLED_BACK, STARTED], 0),
        ([FAILED], 1),
        ([FAILED, STARTED], 1),
        ([STARTED, FAILED, RANK_DROPPED], 1),
        ([STARTED, FAILED, RANK_DROPPED, STARTED, FAILED], 2),
    ],
)
def test_failure_count_and_uptime_counts_each_failure_once(event_kinds: list[str], count: int, tmp_path: Path) -> None:
    counts = [0]
    for kind in event_kinds:
        append_event(tmp_path, kind, **EVENT_FIELDS)
        counts.append(failure_count_and_uptime(tmp_path)[0])
    assert counts[-1] == count
    assert counts == sorted(counts)


def test_describe_failures_merges_records_of_several_nodes(tmp_path: Path) -> None:
    append_event(tmp_path, STARTED, ranks=4, step=0)
    append_event(tmp_path, FAILED, rank=0, step=7, reason="lost the ranks of another node", local=False)
    append_event(tmp_path, FAILED, rank=2, step=7, reason="was killed", local=True)
    append_event(tmp_path, FAILED, rank=1, step=7, reason="lost the ranks of another node", local=False)
    assert failure_count_and_uptime(tmp_path)[0] == 1
    append_event(tmp_path, STARTED, ranks=4, step=5)
    append_event(tmp_path, FAILED, rank=0, step=9, reason="lost the ranks of another node", local=False)
    first, second = describe_failures(read_events(tmp_path), exclude_last=False)
    assert first.endswith(": rank 2 was killed, step 7")
    assert second.endswith(": rank 0 lost the ranks of another node, step 9")
    assert describe_failures(read_events(tmp_path), exclude_last=True) == [first]


def test_append_event_ignores_write_errors(tmp_path: Path) -> None:
    append_event(tmp_path / "gone", STARTED, step=0)
    assert read_events(tmp_path / "gone") == []


def test_read_events_skips_damaged_lines(tmp_path: Path) -> None:
    """Readers must not fail, whatever a line contains."""
    append_event(tmp_path, STARTED, ranks=2, step=0)
    with (tmp_path / EVENTS_FILE).open("ab") as file:
        file.write(b'\xff\xfe\n1\n[]\n{"kind": "started", "time": 2.0}\n{"kind": []}\n{"kind": "failed"}\n')
    append_event(tmp_path, FINISHED, step=3)
    assert [event["kind"] for event in read_events(tmp_path)] == [STARTED, FINISHED]


def test_read_events_accepts_keys_of_earlier_versions(tmp_path: Path) -> None:
    line = b'{"time": 2.0, "what": "failed", "rank": 1, "step": 3, "reason": "\\"what\\": lost", "here": false}\n'
    (tmp_path / EVENTS_FILE).write_bytes(line)
    [event] = read_events(tmp_path)
    assert (event["kind"], event["local"], event["reason"]) == ("failed", False, '"what": lost')
