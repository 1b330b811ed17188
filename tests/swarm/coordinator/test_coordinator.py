"""A coordinator in one thread: every event that it records is read again, and no error loses a committed round."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path

import pytest

from phalanx.runs.jsonl import read_jsonl
from phalanx.spec.errors import UserError
from phalanx.swarm.coordinator.coordinator import Coordinator
from phalanx.swarm.coordinator.store import SwarmStore
from phalanx.swarm.coordinator.swarm_state import summary
from phalanx.swarm.coordinator.update_checks import UpdateRejected
from phalanx.swarm.serve import initial_pieces
from phalanx.testing.fault_injection import truncate_file
from tests.helpers.local_swarm import tiny_swarm_run
from tests.helpers.simulated_coordinator import SimulatedCoordinator


def restart(simulated: SimulatedCoordinator) -> None:
    """Read the journal again, which gives the same state."""
    before = simulated.coordinator.state
    simulated.start()
    after = simulated.coordinator.state
    assert summary(after, {}, 0.0) == summary(before, {}, 0.0) | {
        name: summary(after, {}, 0.0)[name] for name in ("open_seconds", "closes_in_seconds")
    }


def fail_once(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Make the next call of a method of the store fail."""
    method = getattr(SwarmStore, name)

    def fail(store: SwarmStore, *arguments: object) -> None:
        monkeypatch.setattr(SwarmStore, name, method)
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(SwarmStore, name, fail)


@pytest.mark.parametrize("round_number", [-1, -5, 0, 7, 10**19, 10**300])
def test_coordinator_restarts_after_refusals_of_any_round(simulated: SimulatedCoordinator, round_number: int) -> None:
    simulated.coordinator.record_refusal("ann", round_number, "malformed: \ud800 \x1b[2J")
    assert simulated.coordinator.state.refused["ann", "malformed"] == 1
    restart(simulated)


def test_coordinator_restarts_after_an_update_of_finite_but_huge_values(simulated: SimulatedCoordinator) -> None:
    with pytest.raises(UpdateRejected, match=r"^not finite: a change of 1.9"):
        simulated.send_update("ann", change=1e17)
    restart(simulated)


@pytest.mark.parametrize("text", ["", "\ud800", "a\x1b[2J", "x" * 201])
def test_coordinator_rejects_text_that_is_not_printable(simulated: SimulatedCoordinator, text: str) -> None:
    with pytest.raises(UpdateRejected, match=r"^text: "):
        simulated.coordinator.set_text(text)
    simulated.coordinator.leave("ann", "on request")
    simulated.coordinator.leave("bob", "on request")
    simulated.coordinator.state.round = None
    with pytest.raises(UpdateRejected, match=r"^text: ") as rejected:
        simulated.coordinator.join("cid", 4, text)
    assert "\x1b" not in str(rejected.value)


def test_coordinator_continues_a_swarm_with_every_kind_of_event(simulated: SimulatedCoordinator) -> None:
    coordinator = simulated.coordinator
    simulated.send_update("ann")
    coordinator.record_refusal("bob", 0, "damaged: its checksum is wrong")
    restart(simulated)
    coordinator = simulated.coordinator
    simulated.send_update("bob")
    simulated.tick_until(1.0)
    coordinator.leave("bob", "on request")
    coordinator.join("cid", 1e300, "text")
    simulated.send_update("ann")
    coordinator.set_text("other")
    simulated.now += 100.0
    coordinator.tick()
    restart(simulated)
    recorded = {event["kind"] for event in read_jsonl(simulated.coordinator.journal.path)}
    assert recorded == {
        *("initialized", "joined", "left", "text", "opened", "resumed", "accepted", "refused", "dropped", "committed")
    }


# -- errors after the commit -------------------------------------------------------------------------------------------


def test_coordinator_applies_committed_round_before_the_next_one_when_the_first_attempt_failed(
    simulated: SimulatedCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    coordinator = simulated.coordinator
    for node in ("ann", "bob"):
        simulated.send_update(node)
    fail_once(monkeypatch, "apply_round")
    with pytest.raises(OSError, match="Too many"):
        coordinator.tick()
    assert (coordinator.state.committed, coordinator.state.round) == (1, None)
    coordinator.tick()
    assert coordinator.state.round is not None
    assert coordinator.store.base_digests() == coordinator.state.weight_digests(1)
    for node in ("ann", "bob"):
        simulated.send_update(node)
    coordinator.tick()
    assert simulated.committed_nodes == [["ann", "bob"]] * 2


# -- damaged files -----------------------------------------------------------------------------------------------------


def empty_file(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize("damage", [truncate_file, empty_file])
@pytest.mark.parametrize("remove", [Path.unlink, empty_file])
def test_coordinator_names_damaged_weights_also_without_journal(
    tmp_path: Path, damage: Callable[[Path], None], remove: Callable[[Path], None]
) -> None:
    run = tiny_swarm_run(tmp_path)
    coordinator = Coordinator(run, tmp_path, initial_pieces(run))
    coordinator.journal.close()
    damage(coordinator.store.base)
    remove(coordinator.journal.path)
    with pytest.raises(UserError, match=r"model = .* is damaged: .*base.safetensors"):
        Coordinator(run, tmp_path, initial_pieces(run))


# -- the wrong text ----------------------------------------------------------------------------------------------------


def test_coordinator_keeps_updates_on_another_text_out_of_the_open_round(simulated: SimulatedCoordinator) -> None:
    coordinator = simulated.coordinator
    simulated.send_update("ann")
    coordinator.set_text("right")
    assert not coordinator.state.round.updates
    assert coordinator.state.refused["ann", "another text"] == 1
    with pytest.raises(UpdateRejected, match=r"^another text"):
        simulated.send_update("bob")
    coordinator.join("bob", 4, "right")
    simulated.send_update("bob")
    simulated.tick_until(1.0)
    assert simulated.committed_nodes == [["bob"]]


def test_coordinator_aggregates_again_when_the_text_changes_meanwhile(
    simulated: SimulatedCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    coordinator = simulated.coordinator
    for node in ("ann", "bob"):
        simulated.send_update(node)
    aggregate_round = SwarmStore.aggregate_round

    def change_text_meanwhile(*arguments: object, **named: object) -> dict[str, str]:
        monkeypatch.setattr(SwarmStore, "aggregate_round", aggregate_round)
        coordinator.set_text("right")
        return aggregate_round(*arguments, **named)

    monkeypatch.setattr(SwarmStore, "aggregate_round", change_text_meanwhile)
    coordinator.tick()
    assert not simulated.committed_nodes
    coordinator.tick()
    assert simulated.committed_nodes == [[]]


# -- ignored targets ---------------------------------------------------------------------------------------------------


def test_coordinator_accepts_update_without_targets_and_leaves_it_out_of_means(simulated: SimulatedCoordinator) -> None:
    """The text of the node's steps had no target that counts."""
    simulated.send_update("ann", targets=0)
    simulated.send_update("bob")
    simulated.coordinator.tick()
    assert simulated.committed_nodes == [["bob"]]
