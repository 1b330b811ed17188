"""The decision after a failure, as a function of the report and the counters."""

from __future__ import annotations

from typing import Any

import pytest

from phalanx.launch.elastic_agent import FailureAction
from phalanx.launch.failure_report import FailureCounters, FailureReport, decide, describe_restart

RESTART, LEAVE, STOP = FailureAction.RESTART, FailureAction.LEAVE, FailureAction.STOP


def make_report(step: int = 5, is_local: bool = True, **first: Any) -> FailureReport:
    return FailureReport(
        first_failure={"rank": 1, "code": 1, "reason": "an error", **first},
        step=step,
        is_local=is_local,
        lost_peer=False,
        suspects=frozenset({1}),
        in_first_step=False,
    )


@pytest.mark.parametrize(
    ("first", "local", "essential", "expected"),
    [
        ({}, 1, False, (RESTART, 1, False)),
        ({}, 4, False, (LEAVE, 1, False)),  # one node fails again and again: the others continue
        ({}, 4, True, (STOP, 1, False)),
        ({"code": 2}, 1, False, (STOP, 2, True)),  # an error that the user must fix, on every node
        ({"code": 2, "storage": "full"}, 1, False, (LEAVE, 1, True)),  # the disk of this node alone
        ({"code": 2, "storage": "full"}, 1, True, (STOP, 2, True)),
        ({"final": True}, 1, False, (STOP, 1, True)),
        ({"final": True, "lost_peer": 3}, 1, False, (RESTART, 1, False)),
    ],
)
def test_decide_follows_report_and_counters(
    first: dict[str, Any], local: int, essential: bool, expected: tuple[FailureAction, int, bool]
) -> None:
    decision = decide(
        make_report(**first),
        FailureCounters(local_failures=local),
        repeats_out_of_memory=False,
        restart_limit=3,
        num_nodes=2,
        is_essential=essential,
    )
    assert (decision.action, decision.exit_code, decision.is_permanent) == expected


def test_counters_restart_when_the_run_gets_further() -> None:
    counters = FailureCounters()
    counters.count(make_report(step=5))
    counters.count(make_report(step=5))
    counters.count(make_report(step=5, is_local=False))
    assert (counters.local_failures, counters.remote_failures, counters.suspects) == (2, 1, {1})
    counters.count(make_report(step=6, is_local=False))
    assert (counters.local_failures, counters.remote_failures, counters.suspects) == (0, 1, set())


def test_out_of_memory_again_needs_the_same_step_twice() -> None:
    counters = FailureCounters(last_step_reached=2)
    report = make_report(step=5, out_of_memory=True)
    assert not counters.repeats_out_of_memory(report)
    assert counters.repeats_out_of_memory(report)
    assert not counters.repeats_out_of_memory(make_report(step=5))


def test_describe_restart_names_source_lost_steps_and_count() -> None:
    text = describe_restart(
        make_report(step=5), FailureCounters(local_failures=2), [], has_memory_copies=False, restart_limit=3
    )
    assert text == "restarting from the beginning (consecutive failure 2 of 3)"
