"""A swarm of five hosts, each in a network of its own, on links of 20 Mbit/s: real processes, real TLS, and a rough
night. Whatever happens to one of them, the others go on, and nothing that was accepted is lost."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from phalanx.data.prepare import prepare
from phalanx.spec.files.load import load_run
from phalanx.spec.files.write import to_toml
from phalanx.swarm.coordinator.swarm_state import SwarmState
from phalanx.testing.network_namespaces import NamespacesUnavailable, star_network
from phalanx.testing.swarm_processes import COORDINATOR, SwarmProcesses, swarm_processes
from tests.helpers.local_swarm import NODES, tiny_swarm_run

TIMEOUT_SECONDS, MBIT = 120, 20
LATE_SECONDS = 10.0
"""That a round may take beyond its deadline, to be put together on a machine that does much else."""
ROUND = {"grace_seconds": 6, "lease_seconds": 12}
MODEL = {
    "vocab_size": 257,
    "hidden_size": 128,
    "num_layers": 2,
    "num_heads": 4,
    "ffn_hidden_size": 256,
    "max_seq_len": 64,
    "tie_embeddings": False,
    "moe": {"num_experts": 8, "top_k": 2, "expert_ffn_size": 256, "bias_update_rate": 0.0},
}


@pytest.fixture
def multi_host_swarm(tmp_path: Path) -> Iterator[SwarmProcesses]:
    """Four nodes and a coordinator that nobody started yet."""
    lines = {"training.steps": 100_000, "model": MODEL, "evaluation.tokens": 1024}
    run = tiny_swarm_run(tmp_path, lines, method="spes", nodes=4, every=4, round=ROUND)
    file = tmp_path / "swarm.toml"
    file.write_text(to_toml(run))
    prepare(run.data)  # once, not by four nodes at the same time
    try:
        with (
            star_network(NODES, MBIT) as network,
            swarm_processes(network, tmp_path, file, Path(run.output_dir) / run.name) as found,
        ):
            yield found
    except NamespacesUnavailable as none:
        pytest.skip(f"this process may not make networks: {none}")


@pytest.mark.alone
@pytest.mark.timeout(600)
def test_swarm_survives_node_and_coordinator_crash_link_cut_and_slow_node(multi_host_swarm: SwarmProcesses) -> None:
    def until(true: Callable[[], bool], what: str) -> None:
        multi_host_swarm.wait_until(true, what, TIMEOUT_SECONDS)

    def rounds(more: int) -> None:
        wanted = multi_host_swarm.committed_rounds() + more
        until(lambda: multi_host_swarm.committed_rounds() >= wanted, f"round {wanted}")

    def tells(name: str) -> None:
        until(lambda: name in multi_host_swarm.events("committed")[-1]["nodes"], f"{name} tells again")

    def coming(name: str) -> bool:
        """Whether some of a node's update is there, and not all."""
        with suppress(FileNotFoundError):  # a round that is over meanwhile is removed
            return any(
                path.stat().st_size for path in multi_host_swarm.coordinator_folder.glob(f"rounds/*/{name}.*.part")
            )
        return False

    multi_host_swarm.start_all()
    until(lambda: multi_host_swarm.committed_rounds() >= 2, "two rounds")

    # A node dies while it sends: its round ends without it, its experts go to the others.
    until(lambda: coming("dee"), "an update of dee's under way")
    multi_host_swarm.kill("dee")
    died_in = multi_host_swarm.committed_rounds()
    until(lambda: any(event["node"] == "dee" for event in multi_host_swarm.events("left")), "dee is taken for gone")
    rounds(2)
    assert "dee" not in multi_host_swarm.events("committed")[died_in]["nodes"]
    last = multi_host_swarm.events("opened")[-1]
    assert set(last["text"]) == {"ann", "bob", "cid"}
    assert {owner for of in last["owners"] for owner in of} == {"ann", "bob", "cid"}

    # It comes back, late.
    multi_host_swarm.start("dee")
    tells("dee")

    # The coordinator dies while an update comes, and goes on with the same round.
    until(lambda: any(map(coming, NODES)), "an update under way")
    multi_host_swarm.kill(COORDINATOR)
    before = multi_host_swarm.events()
    multi_host_swarm.start(COORDINATOR)
    rounds(2)
    assert multi_host_swarm.events()[: len(before)] == before

    # A link is cut for half a minute: the others do not wait for it, and then all are there again.
    multi_host_swarm.network.disconnect("bob")
    cut_at, since = time.monotonic(), multi_host_swarm.committed_rounds()
    until(lambda: time.monotonic() > cut_at + 30, "half a minute")
    multi_host_swarm.network.reconnect("bob")
    assert any("bob" not in event["nodes"] for event in multi_host_swarm.events("committed")[since:])
    tells("bob")

    # One computes five times as slowly: nobody waits for it beyond the deadline.
    since = multi_host_swarm.committed_rounds()
    while multi_host_swarm.committed_rounds() < since + 4:
        multi_host_swarm.signal("cid", signal.SIGSTOP)
        time.sleep(0.4)
        multi_host_swarm.signal("cid", signal.SIGCONT)
        time.sleep(0.1)
    rounds(1)

    check_journal_of_rounds(multi_host_swarm)


def check_journal_of_rounds(night: SwarmProcesses) -> None:
    """Of all rounds: whose word was accepted counted, and no other's; none stayed open beyond its deadline."""
    state, told, late = SwarmState(load_run(night.run_file)), set[str](), []
    for event in night.events():
        if event["kind"] == "accepted":
            assert event["round"] == state.committed
            told.add(event["node"])
        if event["kind"] == "committed":
            assert set(event["nodes"]) == told
            told.clear()
            assert state.round is not None
            arrived = [telling.at for telling in state.round.updates.values()]
            late.append(event["at"] - max([state.closes_at() or event["at"], *arrived]))
        state.record(event)
    print(f"{len(late)} rounds; {max(late):.1f} s beyond the deadline at most")
    assert sum(seconds > LATE_SECONDS for seconds in late) <= 1  # that in which the coordinator was dead
