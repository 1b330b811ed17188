"""Coordinators that were down or have damaged files, and swarms whose first member had the wrong text."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from phalanx.spec.errors import UserError
from phalanx.spec.log import log_to_stderr
from phalanx.spec.parameter_shapes import parameter_shapes
from phalanx.swarm.coordinator.update_checks import UpdateRejected
from phalanx.swarm.rpc.client import RoundExpired
from phalanx.swarm.rpc.link_errors import rejection_error
from phalanx.testing.fault_injection import flip_bit, truncate_file
from phalanx.testing.processes import wait_until
from tests.helpers.cli_runner import command_output
from tests.helpers.local_swarm import LocalSwarm, certificates, read_pieces, serve_local_swarm, tiny_swarm_run
from tests.helpers.simulated_coordinator import SimulatedCoordinator
from tests.helpers.swarm_updates import join_and_wait_for_round, write_node_update

# -- downtime ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def simulated_coordinator(tmp_path: Path) -> Iterator[SimulatedCoordinator]:
    """A coordinator in its second round, after a first round with updates after ten seconds."""
    run = tiny_swarm_run(tmp_path, round={"grace_seconds": 5.0, "lease_seconds": 60.0})
    simulated = SimulatedCoordinator(run, tmp_path)
    simulated.tick_until(10.0)
    for node in ("ann", "bob"):
        simulated.send_update(node)
    simulated.tick_until(12.0)
    assert simulated.committed_nodes == [["ann", "bob"]]
    yield simulated
    simulated.coordinator.journal.close()


def test_coordinator_downtime_does_not_shorten_the_open_round(simulated_coordinator: SimulatedCoordinator) -> None:
    simulated_coordinator.now += 1000.0
    simulated_coordinator.start()
    simulated_coordinator.tick_until(1013.0)
    simulated_coordinator.send_update("ann")
    simulated_coordinator.tick_until(1022.0)
    simulated_coordinator.send_update("bob")
    simulated_coordinator.tick_until(1023.0)
    assert simulated_coordinator.committed_nodes == [["ann", "bob"]] * 2
    state = simulated_coordinator.coordinator.state
    assert all(offset < 13 for offsets in state.arrivals for offset in offsets)
    assert state.closes_at() - simulated_coordinator.now > 10  # nor the next one


def test_frozen_coordinator_does_not_close_round_or_end_leases_when_it_continues(
    simulated_coordinator: SimulatedCoordinator,
) -> None:
    simulated_coordinator.send_update("ann")
    simulated_coordinator.now += 1000.0
    simulated_coordinator.coordinator.tick()
    assert set(simulated_coordinator.coordinator.state.members) == {"ann", "bob"}
    simulated_coordinator.tick_until(1015.0)
    simulated_coordinator.send_update("bob")
    simulated_coordinator.tick_until(1016.0)
    assert simulated_coordinator.committed_nodes == [["ann", "bob"]] * 2


def test_upload_duration_excludes_downtime_of_coordinator(tmp_path: Path) -> None:
    """A node reserves this time before the next deadline, and would otherwise train one step."""
    run = tiny_swarm_run(tmp_path)
    swarm = LocalSwarm(run, tmp_path / "lead")
    link = join_and_wait_for_round(run, swarm)["ann"]
    path = write_node_update(swarm, tmp_path, "ann")
    swarm.stop()
    attempts: list[float] = []
    link._gives_up = lambda seconds, details: attempts.append(seconds) is not None
    sending = threading.Thread(target=link.upload_update, args=(path, 0, 100, 3))
    sending.start()
    wait_until(lambda: attempts and attempts[-1] > 1.0, "the node has tried for a second")
    swarm = LocalSwarm(run, tmp_path / "lead", swarm.port)
    try:
        sending.join(60)
        assert not sending.is_alive()
        assert link.upload_seconds < attempts[-1]
    finally:
        swarm.stop()


# -- damaged files -----------------------------------------------------------------------------------------------------


def remove_file(path: Path) -> None:
    path.unlink()


DAMAGES = [truncate_file, flip_bit, remove_file]


def train_round(swarm: LocalSwarm, folder: Path) -> None:
    """Train a round with two nodes."""
    links = join_and_wait_for_round(swarm.run, swarm)
    for name, link in links.items():
        link.upload_update(write_node_update(swarm, folder, name), 0, 10, 1)
    links["ann"].wait(committed=1)  # the answer comes when the model is the round's result
    for link in links.values():
        link.close()


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("fragments", [1, 3])
def test_coordinator_refuses_to_start_with_damaged_model_until_it_is_restored(
    tmp_path: Path, damage: Callable[[Path], None], fragments: int
) -> None:
    run = tiny_swarm_run(tmp_path, fragments=fragments)
    with serve_local_swarm(run, tmp_path) as swarm:
        train_round(swarm, tmp_path)
        base = swarm.coordinator.store.base
        swarm.client("cid").download_round(tmp_path / "copy", None, (), parameter_shapes(run.model).__getitem__)
    damage(base)
    with pytest.raises(UserError, match=r"model = .* is damaged: .*base.safetensors.*\n.*restore the file from a copy"):
        LocalSwarm(run, tmp_path / "lead")
    shutil.copyfile(tmp_path / "copy", base)
    LocalSwarm(run, tmp_path / "lead").stop()


@pytest.mark.parametrize("damage", DAMAGES)
def test_coordinator_does_not_send_damaged_weights_and_says_so(
    tmp_path: Path, damage: Callable[[Path], None], capsys: pytest.CaptureFixture[str]
) -> None:
    """The joining node ends with an error instead of asking forever; after a repair the same command succeeds."""
    log_to_stderr()
    run = tiny_swarm_run(tmp_path, {"training.steps": 12})
    shapes = parameter_shapes(run.model)
    with serve_local_swarm(run, tmp_path) as swarm:
        train_round(swarm, tmp_path)
        base = swarm.coordinator.store.base
        shutil.copyfile(base, tmp_path / "copy")
        expected = swarm.base()
        damage(base)
        with pytest.raises(UpdateRejected, match=r"damaged model|no weights") as rejected:
            swarm.client("cid").download_round(tmp_path / "weights", None, (), shapes.__getitem__)
        if damage is not remove_file:
            assert "base.safetensors" in swarm.coordinator.status()["problem"]
            assert "ask the operator to restore" in str(rejection_error("host:1", rejected.value))
            capsys.readouterr()
            swarm.joined_client("ann").heartbeat()
            assert "nodes cannot receive" in capsys.readouterr().err
        shutil.copyfile(tmp_path / "copy", base)
        swarm.client("cid").download_round(tmp_path / "weights", None, (), shapes.__getitem__)
        received = read_pieces(run, tmp_path / "weights")
        assert all((received[key] == value).all() for key, value in expected.items())
        assert not swarm.coordinator.status()["problem"]


@pytest.mark.parametrize("damage", DAMAGES)
def test_node_receives_all_weights_when_a_rounds_broadcast_is_damaged(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    run = tiny_swarm_run(tmp_path)
    with serve_local_swarm(run, tmp_path) as swarm:
        train_round(swarm, tmp_path)
        damage(swarm.coordinator.store.broadcast_path(0))
        with pytest.raises(RoundExpired):
            swarm.client("ann").download_round(tmp_path / "down", 0, (), lambda key: (1,))


def test_update_is_not_rejected_when_the_coordinators_model_is_damaged(tmp_path: Path) -> None:
    """The node tries again until the operator has restored the model."""
    run = tiny_swarm_run(tmp_path)
    with serve_local_swarm(run, tmp_path) as swarm:
        links = join_and_wait_for_round(run, swarm)
        updates = {name: write_node_update(swarm, tmp_path, name) for name in links}
        base = swarm.coordinator.store.base
        shutil.copyfile(base, tmp_path / "copy")
        truncate_file(base)
        tries: list[float] = []
        links["ann"]._gives_up = lambda seconds, details: tries.append(seconds) is not None
        sending = threading.Thread(target=links["ann"].upload_update, args=(updates["ann"], 0, 100, 3))
        sending.start()
        wait_until(lambda: len(tries) >= 2, "the node has tried twice")
        shutil.copyfile(tmp_path / "copy", base)
        sending.join(60)
        assert set(swarm.coordinator.state.round.updates) == {"ann"}
        assert not swarm.coordinator.state.refused


# -- the text ----------------------------------------------------------------------------------------------------------


def test_operator_corrects_the_text_of_a_swarm(tmp_path: Path) -> None:
    """Both first members had the wrong text, and have trained with it."""
    run = tiny_swarm_run(tmp_path)
    with serve_local_swarm(run, tmp_path) as swarm:
        train_round(swarm, tmp_path)
        with pytest.raises(UpdateRejected, match="text: right differs from the other nodes' text text") as rejected:
            swarm.joined_client("cid", text="right")
        address = f"127.0.0.1:{swarm.port}"
        assert f"phalanx swarm text {address} CHECKSUM" in str(rejection_error(address, rejected.value))
        with pytest.raises(UserError, match="not permitted: only the coordinator's certificate, lead"):
            command_output("swarm", "text", address, "right", "--certs", certificates() / "ann")
        assert "right" in command_output("swarm", "text", address, "right", "--certs", certificates() / "lead")
        swarm.joined_client("cid", text="right")
        assert "text right" in command_output("swarm", "status", address, "--certs", certificates() / "ann")
        assert [*swarm.coordinator.state.members] == ["cid"]
        assert {event["reason"] for event in swarm.events("left")} == {"another text"}
        wrong = swarm.client("ann")
        wrong.join_message = {"capacity": 4, "text": "text"}
        with pytest.raises(UpdateRejected, match="text: text differs from the other nodes' text right"):
            wrong.poll(round=2)
    with serve_local_swarm(run, tmp_path) as swarm:  # also after a restart
        assert swarm.coordinator.state.required_text("ann") == "right"


def test_member_that_never_trained_does_not_determine_the_text(tmp_path: Path) -> None:
    run = tiny_swarm_run(tmp_path, round={"lease_seconds": 1.0, "grace_seconds": 30})
    with serve_local_swarm(run, tmp_path) as swarm:
        swarm.joined_client("ann", text="wrong").leave()
        swarm.joined_client("bob", text="right")
        with pytest.raises(UpdateRejected, match="text: wrong differs"):
            swarm.joined_client("ann", text="wrong")
        swarm.joined_client("ann", text="right")
        wait_until(lambda: swarm.coordinator.state.round is not None, "the first round opens")
