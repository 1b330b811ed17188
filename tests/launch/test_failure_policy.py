"""Decisions of a launcher after failures, from the records that ranks left."""

from __future__ import annotations

import errno
import json
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from phalanx.launch.elastic_agent import FailureAction
from phalanx.launch.failure_policy import FailurePolicy
from phalanx.launch.failures import as_user_error
from phalanx.launch.rendezvous import SINGLE_NODE, Rendezvous
from phalanx.runs.events import FAILED, RANK_DROPPED, STARTED, append_event, read_events
from phalanx.runs.hang_dumps import write_dump
from phalanx.spec.errors import EXIT_STOPPED, UserError
from phalanx.spec.layout import Layout
from phalanx.spec.parallel_dims import ParallelDims
from phalanx.spec.recovery import RecoverySpec
from tests.helpers.hang_dumps import WAITING, make_dump

REMOTE_RENDEZVOUS = Rendezvous(
    name="run", host="192.0.2.1", port=29500, min_nodes=1, max_nodes=2, join_seconds=1, last_call_seconds=1
)
"""Two nodes whose rendezvous host is not this machine."""
PEER_LOSS_REASON = "RuntimeError: Connection closed by peer [10.0.0.2]:1234"


@dataclass(frozen=True)
class FakeProcessFailure:
    """A failed rank as torchrun reports it."""

    exitcode: int
    timestamp: float = 0.0
    pid: int = 0


def write_failure_record(directory: Path, rank: int, reason: str, **fields: Any) -> None:
    """Write the record that a failed rank leaves."""
    (directory / "failures").mkdir(exist_ok=True)
    record = {"rank": rank, "step": 7, "time": time.time(), "reason": reason, "code": 1, **fields}
    (directory / "failures" / f"rank-{rank:05d}.json").write_text(json.dumps(record))


def make_failure_policy(directory: Path, rendezvous: Rendezvous = SINGLE_NODE, restarts: int = 1) -> FailurePolicy:
    return FailurePolicy(directory, RecoverySpec(max_restarts=restarts), rendezvous)


def test_failure_policy_restarts_when_steps_progress_without_failure_records(tmp_path: Path) -> None:
    """All ranks are killed again and again, but each start resumes at a later step."""
    policy = make_failure_policy(tmp_path)
    for step in range(0, 60, 15):
        append_event(tmp_path, STARTED, ranks=2, step=step)
        assert policy.decide({0: FakeProcessFailure(-9), 1: FakeProcessFailure(-9)}) is FailureAction.RESTART
    assert policy.decide({0: FakeProcessFailure(-9), 1: FakeProcessFailure(-9)}) is FailureAction.STOP


def test_failure_policy_ends_run_of_stopped_ranks_on_single_node_only(tmp_path: Path) -> None:
    """On several nodes, only one may have received the signal, and the others continue."""
    policy = make_failure_policy(tmp_path)
    assert (
        policy.decide({0: FakeProcessFailure(EXIT_STOPPED), 1: FakeProcessFailure(EXIT_STOPPED)}) is FailureAction.STOP
    )
    assert policy.exit_code == EXIT_STOPPED
    assert (
        make_failure_policy(tmp_path, REMOTE_RENDEZVOUS).decide({0: FakeProcessFailure(EXIT_STOPPED)})
        is FailureAction.RESTART
    )


def test_failure_policy_ignores_records_of_earlier_failures(tmp_path: Path) -> None:
    """Times of records do not matter, because the clocks of nodes differ."""
    write_failure_record(tmp_path, 5, "ValueError: of another day", final=True, time=time.time() + 1000)
    policy = make_failure_policy(tmp_path)
    write_failure_record(tmp_path, 0, "RuntimeError: first", time=100.0)
    assert policy.decide({0: FakeProcessFailure(1)}) is FailureAction.RESTART
    write_failure_record(tmp_path, 1, "RuntimeError: second", time=50.0)
    policy.decide({1: FakeProcessFailure(1)})
    assert [event["reason"] for event in read_events(tmp_path)] == ["RuntimeError: first", "RuntimeError: second"]


def test_failure_policy_ends_run_when_failure_is_a_user_error(tmp_path: Path) -> None:
    policy = make_failure_policy(tmp_path, restarts=9)
    write_failure_record(tmp_path, 1, "training.steps is wrong", code=2)
    assert policy.decide({1: FakeProcessFailure(2)}) is FailureAction.STOP
    assert policy.exit_code == 2


@pytest.mark.parametrize("starts", [[(7, 7)], [(4, 7), (4, 9), (6, 9)]])
def test_failure_policy_ends_run_when_memory_would_be_too_little_again(
    starts: list[tuple[int, int]], tmp_path: Path
) -> None:
    """The rank fails in the first step after a start, or in the same step as before. Each start has the step after
    which it began, and the last step that it finished."""
    policy = make_failure_policy(tmp_path, restarts=9)
    actions = []
    for began_after, failed_after in starts:
        append_event(tmp_path, STARTED, ranks=2, step=began_after)
        write_failure_record(tmp_path, 1, "out of memory: it held 9 GB", step=failed_after, out_of_memory=True)
        actions.append(policy.decide({1: FakeProcessFailure(1)}))
    assert actions == [FailureAction.RESTART] * (len(starts) - 1) + [FailureAction.STOP]
    assert policy.exit_code == 2


def test_failure_policy_restarts_when_memory_was_too_little_only_after_another_failure(tmp_path: Path) -> None:
    """The step succeeded before with the same memory, of which other processes may now use a part."""
    policy = make_failure_policy(tmp_path, restarts=9)
    append_event(tmp_path, STARTED, ranks=2, step=0)
    write_failure_record(tmp_path, 1, "RuntimeError: a link is down", step=9)
    assert policy.decide({1: FakeProcessFailure(1)}) is FailureAction.RESTART
    append_event(tmp_path, STARTED, ranks=2, step=8)
    write_failure_record(tmp_path, 1, "out of memory: it held 9 GB", step=8, out_of_memory=True)
    assert policy.decide({1: FakeProcessFailure(1)}) is FailureAction.RESTART


def test_failure_policy_makes_node_with_full_disk_leave_at_once(tmp_path: Path) -> None:
    """The other nodes may continue without it; a single node ends the run."""
    for rendezvous, action, code in ((REMOTE_RENDEZVOUS, FailureAction.LEAVE, 1), (SINGLE_NODE, FailureAction.STOP, 2)):
        policy = make_failure_policy(tmp_path, rendezvous, restarts=3)
        write_failure_record(tmp_path, 1, "file = '/d/x' cannot be used: No space left on device", code=2, storage=True)
        assert policy.decide({1: FakeProcessFailure(2)}) is action
        assert policy.exit_code == code


def test_failure_policy_restarts_rank_killed_for_memory_once_when_its_step_is_unknown(tmp_path: Path) -> None:
    policy = make_failure_policy(tmp_path, restarts=9)
    append_event(tmp_path, STARTED, ranks=1, step=0)
    assert policy.decide({0: FakeProcessFailure(-9)}, 1) is FailureAction.RESTART
    assert policy.decide({0: FakeProcessFailure(-9)}, 1) is FailureAction.STOP
    assert policy.exit_code == 2


@pytest.mark.parametrize(
    ("error", "expected_text"),
    [
        (
            OSError(errno.ENOSPC, "No space left on device"),
            "run directory = '/runs/a' cannot be used: No space left on device",
        ),
        (OSError(errno.EDQUOT, "x", "/data/t.bin"), "file = '/data/t.bin' cannot be used: Disk quota exceeded"),
        (
            FileNotFoundError(errno.ENOENT, "x", "/data/t.bin"),
            "file = '/data/t.bin' cannot be used: No such file",
        ),
        (PermissionError(errno.EACCES, "x", "/data/t.bin"), "file = '/data/t.bin' cannot be used: Permission denied"),
    ],
)
def test_as_user_error_describes_storage_error_that_would_come_again(error: OSError, expected_text: str) -> None:
    user_error = as_user_error(error, Path("/runs/a"))
    assert isinstance(user_error, UserError)
    assert expected_text in str(user_error)
    assert "--resume" in str(user_error)


@pytest.mark.parametrize(
    "error",
    [ConnectionResetError(errno.ECONNRESET, "x"), OSError(errno.EIO, "x", "f"), PermissionError(errno.EPERM, "kill")],
)
def test_as_user_error_leaves_errors_that_may_pass(error: OSError) -> None:
    assert as_user_error(error, Path("/runs/a")) is error


def test_failure_policy_blames_failed_rank_not_rank_aborted_by_nccl(tmp_path: Path) -> None:
    """NCCL aborts ranks whose peers are gone."""
    policy = make_failure_policy(tmp_path, restarts=9)
    write_failure_record(tmp_path, 1, "DivergenceError: step 7: loss nan", final=True)
    assert policy.decide({0: FakeProcessFailure(-6), 1: FakeProcessFailure(1)}) is FailureAction.STOP
    assert [(event["rank"], event["reason"][:15]) for event in read_events(tmp_path)] == [(1, "DivergenceError")]


def test_failure_policy_blames_first_killed_rank_not_aborted_rank(tmp_path: Path) -> None:
    """The kernel killed rank 5 because memory ran out, NCCL aborted rank 0 because rank 5 was gone, and neither left a
    record."""
    policy = make_failure_policy(tmp_path, REMOTE_RENDEZVOUS)
    assert (
        policy.decide({0: FakeProcessFailure(-6, 2.0), 5: FakeProcessFailure(-9, 1.0), 4: FakeProcessFailure(-9, 3.0)})
        is FailureAction.RESTART
    )
    (failed,) = read_events(tmp_path)
    assert (failed["rank"], failed["local"]) == (5, True)


@pytest.mark.parametrize(
    "reason",
    [
        PEER_LOSS_REASON,
        "checkpoint could not be written: Connection reset by peer",
        "DistNetworkError: Failed to recv, got 0 bytes. Connection was likely closed. Did the remote server shutdown?",
        "DistStoreError: wait timeout after 600000ms, keys: /default_pg/0//cpu//0/1",
    ],
)
def test_failure_policy_does_not_blame_ranks_that_lost_peers(reason: str, tmp_path: Path) -> None:
    """Some reasons look like an error of the user. No node leaves, or records a failure of its own."""
    policy = make_failure_policy(tmp_path, REMOTE_RENDEZVOUS)
    for _ in range(2):
        write_failure_record(tmp_path, 0, reason, code=2 if "checkpoint" in reason else 1)
        assert policy.decide({0: FakeProcessFailure(1)}) is FailureAction.RESTART
    action = policy.decide({0: FakeProcessFailure(-6), 1: FakeProcessFailure(-6)})
    assert action is FailureAction.STOP, "NCCL aborts, and the limit of restarts is reached"
    assert {event["local"] for event in read_events(tmp_path) if event["kind"] == FAILED} == {False}


def test_failure_policy_makes_node_leave_after_repeated_failures(tmp_path: Path) -> None:
    for rendezvous, restarts, expected in (
        (REMOTE_RENDEZVOUS, 1, FailureAction.LEAVE),
        (
            replace(REMOTE_RENDEZVOUS, host="127.0.0.1"),
            1,
            FailureAction.STOP,
        ),  # the others cannot continue without the rendezvous host
        (REMOTE_RENDEZVOUS, 0, FailureAction.STOP),
        (SINGLE_NODE, 1, FailureAction.STOP),
    ):
        policy = make_failure_policy(tmp_path, rendezvous, restarts)
        for number in range(restarts + 1):
            write_failure_record(tmp_path, 1, f"RuntimeError: an ECC error, the {number}th of {rendezvous}")
            action = policy.decide({1: FakeProcessFailure(1)})
        assert action is expected


@pytest.mark.parametrize("has_hang_dump", [True, False])
def test_drop_failing_rank_drops_hung_rank_not_reporting_rank(has_hang_dump: bool, tmp_path: Path) -> None:
    """Without a dump it is not known which rank hung, and none is dropped."""
    policy = make_failure_policy(tmp_path, restarts=2)
    (tmp_path / "run.toml").write_text('name = "first"\n[model]\npreset = "tiny"\n')
    if has_hang_dump:
        write_dump(
            tmp_path,
            make_dump(
                0,
                ParallelDims(dp_replicate=3),
                [],
                WAITING,
                sibling_states={"1": "T", "2": "S"},
            ),
        )
    for number in range(3):
        write_failure_record(
            tmp_path, 0, f"RuntimeError: [gloo/unbound_buffer.cc:81] Timed out waiting {number}ms", traceback="..."
        )
        action = policy.decide({0: FakeProcessFailure(1)})
    assert action is FailureAction.STOP
    assert policy.drop_failing_rank(3, lambda _: Layout()) == (2 if has_hang_dump else None)
    assert [event["rank"] for event in read_events(tmp_path) if event["kind"] == RANK_DROPPED] == (
        [1] if has_hang_dump else []
    )


def test_failure_policy_does_not_count_stopped_ranks_as_failures(tmp_path: Path) -> None:
    policy = make_failure_policy(tmp_path, REMOTE_RENDEZVOUS)
    assert (
        policy.decide({0: FakeProcessFailure(EXIT_STOPPED), 1: FakeProcessFailure(EXIT_STOPPED)})
        is FailureAction.RESTART
    )
    assert policy.counters.local_failures == policy.counters.remote_failures == 0
