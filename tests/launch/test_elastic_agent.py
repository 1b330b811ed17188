"""Rendezvous of launchers, and the end of their ranks."""

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

from phalanx.launch import rendezvous as rendezvous_module
from phalanx.launch.elastic_agent import ElasticAgent, FailureAction, run_until_done
from phalanx.launch.rendezvous import SINGLE_NODE, Rendezvous, RendezvousError, interface_of, local_address
from phalanx.spec.errors import UserError
from phalanx.testing.processes import WAIT_SECONDS

NOOP_WORKER_COMMAND = ("platform",)
"""A module that exits with 0 when it runs as a rank."""


class NonHostRendezvous(Rendezvous):
    """The rendezvous of a second launcher on this machine, only one of which can be the host."""

    is_host = False


def launch(name: str, port: str) -> None:
    """Run a launcher. The second node dies after the rendezvous, before it has sent its number of ranks."""
    rendezvous_type = {"first": Rendezvous, "second": NonHostRendezvous}[name]
    assign = ElasticAgent._assign_worker_ranks

    def die_after_rendezvous(agent: ElasticAgent, store: Any, rank: int, nodes: int, spec: Any) -> Any:
        if nodes == 2 and name == "second":
            os.kill(os.getpid(), signal.SIGKILL)
        return assign(agent, store, rank, nodes, spec)

    ElasticAgent._assign_worker_ranks = die_after_rendezvous  # type: ignore[method-assign]
    rendezvous = rendezvous_type(
        name="run", host="127.0.0.1", port=int(port), min_nodes=1, max_nodes=2, join_seconds=60, last_call_seconds=5
    )
    sys.exit(0 if run_until_done(1, lambda _: NOOP_WORKER_COMMAND, lambda *_: FailureAction.STOP, rendezvous) else 1)


def test_local_address_is_not_loopback_for_host_name_mapped_to_loopback() -> None:
    """Debian's installer maps the host name to a loopback address. A machine without a network has no other."""
    rendezvous = Rendezvous(
        name="run", host="127.0.1.1", port=29_400, min_nodes=1, max_nodes=2, join_seconds=60, last_call_seconds=5
    )
    routes = [line.split()[1] for line in Path("/proc/net/route").read_text().splitlines()[1:]]
    assert (interface_of(local_address(rendezvous)) != "lo") is ("00000000" in routes)
    assert local_address(SINGLE_NODE) == "127.0.0.1"


def test_elastic_agent_rejects_endpoint_that_is_not_a_rendezvous(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's store would wait forever for a service that does not answer. The second endpoint has no listener."""
    monkeypatch.setattr(rendezvous_module, "ANSWER_SECONDS", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        rendezvous = NonHostRendezvous(
            name="run",
            host="127.0.0.1",
            port=silent.getsockname()[1],
            min_nodes=1,
            max_nodes=2,
            join_seconds=1,
            last_call_seconds=1,
        )
        with pytest.raises(UserError, match="is the address of a service that is not a Phalanx rendezvous") as caught:
            run_until_done(1, lambda _: NOOP_WORKER_COMMAND, lambda *_: FailureAction.STOP, rendezvous)
    assert not isinstance(caught.value, RendezvousError)
    with pytest.raises(RendezvousError, match="does not answer within 1 s"):
        run_until_done(1, lambda _: NOOP_WORKER_COMMAND, lambda *_: FailureAction.STOP, rendezvous)


def test_elastic_agent_starts_without_node_lost_after_rendezvous() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    program = "import sys; from tests.launch.test_elastic_agent import launch; launch(*sys.argv[1:])"
    launchers = [
        subprocess.Popen(
            [sys.executable, "-c", program, name, str(port)], stderr=subprocess.PIPE, text=True, env=environment
        )
        for name in ("first", "second")
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
    """One rank has no signal handler yet and is killed; the other one has received the signal, and waits for it."""
    killed = subprocess.Popen(
        [sys.executable, "-c", "import time; print(end='ready', flush=True); time.sleep(1000)"], stdout=subprocess.PIPE
    )
    waiting = subprocess.Popen([sys.executable, "-c", SIGTERM_IGNORING_PROGRAM], stdout=subprocess.PIPE)
    try:
        for process in (killed, waiting):
            assert process.stdout is not None
            assert process.stdout.read(5) == b"ready"
        agent = object.__new__(ElasticAgent)
        agent._pcontext = SimpleNamespace(pids=lambda: {0: killed.pid, 1: waiting.pid})
        agent._stop_ranks(signal.SIGTERM)  # STOP_SECONDS are more than a test may take
        assert waiting.stdout is not None
        assert waiting.stdout.read(5) == b"heard"
        assert (killed.wait(timeout=WAIT_SECONDS), waiting.poll()) == (-signal.SIGTERM, None)
    finally:
        waiting.kill()
        killed.kill()
        waiting.wait()


def test_supervisor_import_does_not_load_rank_only_modules() -> None:
    """Their import takes seconds on a slow machine."""
    program = "import sys, phalanx.launch.supervisor; print(*sys.modules)"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=True)
    assert not {"torch.distributed.tensor", "torch._dynamo", "sympy", "tokenizers"} & set(result.stdout.split())
