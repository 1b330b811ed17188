"""Launchers that meet."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from phalanx.launch import rendezvous as places
from phalanx.launch.elastic_agent import ElasticAgent, FailureAction, run_until_done
from phalanx.launch.rendezvous import SINGLE_NODE, Rendezvous, RendezvousError, interface_of, local_address
from phalanx.spec.errors import UserError
from phalanx.testing.processes import WAIT_SECONDS

NOOP_WORKER_COMMAND = ("platform",)
"""A module that ends well as a rank."""


class NonHostRendezvous(Rendezvous):
    """On this machine there is room for one launcher of a run where nodes meet; the other says that it is not there."""

    is_host = False


def launch(who: str, port: str) -> None:
    """A launcher. The second node is lost when both have met, before it has said how many ranks it has."""
    kind, assign = {"first": Rendezvous, "second": NonHostRendezvous}[who], ElasticAgent._assign_worker_ranks

    def lost(agent: ElasticAgent, store: Any, rank: int, nodes: int, spec: Any) -> Any:
        if nodes == 2 and who == "second":
            os.kill(os.getpid(), signal.SIGKILL)
        return assign(agent, store, rank, nodes, spec)

    ElasticAgent._assign_worker_ranks = lost  # type: ignore[method-assign]
    meeting = kind(
        name="run", host="127.0.0.1", port=int(port), min_nodes=1, max_nodes=2, join_seconds=60, last_call_seconds=5
    )
    sys.exit(0 if run_until_done(1, lambda _: NOOP_WORKER_COMMAND, lambda *_: FailureAction.STOP, meeting) else 1)


def test_local_address_is_not_loopback_for_host_name_mapped_to_loopback() -> None:
    """As Debian's installer has it. A machine in no network has none."""
    meeting = Rendezvous(
        name="run", host="127.0.1.1", port=29_400, min_nodes=1, max_nodes=2, join_seconds=60, last_call_seconds=5
    )
    routes = [line.split()[1] for line in Path("/proc/net/route").read_text().splitlines()[1:]]
    assert (interface_of(local_address(meeting)) != "lo") is ("00000000" in routes)
    assert local_address(SINGLE_NODE) == "127.0.0.1"


def test_elastic_agent_rejects_endpoint_that_is_not_a_rendezvous(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a service that is silent, for which PyTorch's store would wait for good; and of nobody."""
    monkeypatch.setattr(places, "ANSWER_SECONDS", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        meeting = NonHostRendezvous(
            name="run",
            host="127.0.0.1",
            port=silent.getsockname()[1],
            min_nodes=1,
            max_nodes=2,
            join_seconds=1,
            last_call_seconds=1,
        )
        with pytest.raises(UserError, match="is not a Phalanx rendezvous") as other:
            run_until_done(1, lambda _: NOOP_WORKER_COMMAND, lambda *_: FailureAction.STOP, meeting)
    assert not isinstance(other.value, RendezvousError)
    with pytest.raises(RendezvousError, match="no answer within 1 s"):
        run_until_done(1, lambda _: NOOP_WORKER_COMMAND, lambda *_: FailureAction.STOP, meeting)


def test_elastic_agent_starts_without_node_lost_after_rendezvous() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    places = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    program = "import sys; from tests.launch.test_elastic_agent import launch; launch(*sys.argv[1:])"
    launchers = [
        subprocess.Popen([sys.executable, "-c", program, who, str(port)], stderr=subprocess.PIPE, text=True, env=places)
        for who in ("first", "second")
    ]
    try:
        first, second = (launcher.communicate(timeout=WAIT_SECONDS)[1] for launcher in launchers)
    finally:
        for launcher in launchers:
            launcher.kill()
    assert [launcher.returncode for launcher in launchers] == [0, -signal.SIGKILL], first + second
    assert "repeating the rendezvous" in first


SIGTERM_IGNORING_PROGRAM = (
    "import signal, time; signal.signal(signal.SIGTERM, lambda *_: print(end='heard', flush=True)); "
)
SIGTERM_IGNORING_PROGRAM += "print(end='ready', flush=True); time.sleep(1000)"


def test_elastic_agent_stop_returns_when_a_rank_was_killed_by_the_signal() -> None:
    """One has no signal handler yet, and is killed; the other received it, and waits for that one."""
    ended = subprocess.Popen(
        [sys.executable, "-c", "import time; print(end='ready', flush=True); time.sleep(1000)"], stdout=subprocess.PIPE
    )
    waits = subprocess.Popen([sys.executable, "-c", SIGTERM_IGNORING_PROGRAM], stdout=subprocess.PIPE)
    try:
        for process in (ended, waits):
            assert process.stdout is not None
            assert process.stdout.read(5) == b"ready"
        agent = object.__new__(ElasticAgent)
        agent._pcontext = SimpleNamespace(pids=lambda: {0: ended.pid, 1: waits.pid})
        agent._stop(signal.SIGTERM)  # STOP_SECONDS are more than a test may take
        assert waits.stdout is not None
        assert waits.stdout.read(5) == b"heard"
        assert (ended.wait(timeout=WAIT_SECONDS), waits.poll()) == (-signal.SIGTERM, None)
    finally:
        waits.kill()
        ended.kill()
        waits.wait()


def test_supervisor_import_does_not_load_rank_only_modules() -> None:
    """Which takes seconds on a slow machine."""
    program = "import sys, phalanx.launch.supervisor; print(*sys.modules)"
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=True)
    assert not {"torch.distributed.tensor", "torch._dynamo", "sympy", "tokenizers"} & set(said.stdout.split())
