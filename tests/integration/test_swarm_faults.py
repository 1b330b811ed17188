"""Faults of a swarm: nodes that die, join late, are slow or send invalid updates, and links and coordinators that
break. The others continue, accepted updates count, and the sender of an invalid update is named."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
import xxhash

from phalanx.cost.exact.swarm import encoded_bytes
from phalanx.spec.errors import UserError
from phalanx.spec.parameter_shapes import parameter_shapes
from phalanx.swarm.coordinator.update_checks import UpdateRejected
from phalanx.swarm.expert_ownership import experts_of
from phalanx.swarm.pieces import model_pieces, pieces_sent_by
from phalanx.swarm.rpc.certificates import certificate_member, create_certificate_authority, issue_certificate
from phalanx.swarm.rpc.client import SwarmClient, update_id
from phalanx.swarm.rpc.protocol import PROTOCOL_VERSION, SERVICE, pack
from phalanx.swarm.tensor_files import TensorFile
from phalanx.testing.processes import wait_until
from tests.helpers.local_swarm import (
    NODES,
    TIMEOUT_SECONDS,
    LocalSwarm,
    WorkerThreads,
    certificates,
    read_pieces,
    serve_local_swarm,
    tiny_swarm_run,
)
from tests.helpers.swarm_updates import current_owners, join_and_wait_for_round, write_node_update

# -- invalid updates ---------------------------------------------------------------------------------------------------


def test_coordinator_rejects_update_of_experts_owned_by_another_node(tmp_path):
    """The certificate identifies the node. An update of its own experts is accepted afterwards."""
    run = tiny_swarm_run(tmp_path, codec="fp32")
    with serve_local_swarm(run, tmp_path) as swarm:
        links = join_and_wait_for_round(run, swarm)
        foreign_experts = experts_of(current_owners(swarm), "bob")
        with pytest.raises(UpdateRejected, match=r"foreign: it contains .*, which the node does not train"):
            links["ann"].upload_update(write_node_update(swarm, tmp_path, "ann", experts=foreign_experts), 0, 100, 3)
        links["ann"].upload_update(write_node_update(swarm, tmp_path, "ann"), 0, 100, 3)
        (ann, _) = swarm.coordinator.status()["nodes"]
        assert (ann["node"], ann["has_update"], ann["refused"]) == ("ann", True, {"foreign": 1})


def _write_nan_piece(path: Path) -> Path:
    item = model_pieces(TINY_RUN.model)[0]
    with TensorFile(path, writable=True) as file:
        file.write_raw(item.key, b"\xff" * encoded_bytes(item.num_elements, "fp32"))
    return path


TINY_RUN = tiny_swarm_run(Path("/tmp"))
INVALID_UPDATES: dict[str, tuple[str, Callable[[LocalSwarm, Path], Path]]] = {
    "nan": (
        "not finite: values of embedding",
        lambda swarm, path: _write_nan_piece(write_node_update(swarm, path, "ann")),
    ),
    "no file": ("malformed: .*not a valid safetensors", lambda swarm, path: _write_raw_file(path, b"x" * 1000)),
    "too large": ("oversized", lambda swarm, path: _write_raw_file(path, b"x" * 2**25)),
    "nothing": ("malformed", lambda swarm, path: _write_raw_file(path, b"")),
    "one piece": ("malformed: .* is missing", lambda swarm, path: _write_single_piece(path)),
    "pickle": (
        "malformed: .*not a valid safetensors",
        lambda swarm, path: _write_raw_file(path, b"\x80\x04\x95" + b"0" * 100),
    ),
}


def _write_raw_file(folder: Path, content: bytes) -> Path:
    path = folder / "invalid"
    path.write_bytes(content)
    return path


def _write_single_piece(folder: Path) -> Path:
    item = model_pieces(TINY_RUN.model)[0]
    TensorFile.create(folder / "invalid", {item.key: (encoded_bytes(item.num_elements, "fp32"),)}, "U8").close()
    return folder / "invalid"


@pytest.mark.parametrize("invalid_update", INVALID_UPDATES)
def test_coordinator_rejects_invalid_update_and_records_its_sender(tmp_path, invalid_update):
    run = tiny_swarm_run(tmp_path, codec="fp32")
    message, make = INVALID_UPDATES[invalid_update]
    with serve_local_swarm(run, tmp_path) as swarm:
        links = join_and_wait_for_round(run, swarm)
        with pytest.raises(UpdateRejected, match=message):
            links["ann"].upload_update(make(swarm, tmp_path), 0, 100, 3)
        assert sum(swarm.coordinator.state.refused.values()) == 1
        assert {node for node, _ in swarm.coordinator.state.refused} == {"ann"}
        before = swarm.base()
        for name, link in links.items():  # a valid update of the same node is accepted
            link.upload_update(write_node_update(swarm, tmp_path, name, 0.01 if name == "ann" else 0.03), 0, 100, 3)
        links["ann"].wait(committed=1)
        for item in model_pieces(run.model):
            if item.expert is None:
                torch.testing.assert_close(swarm.base()[item.key], before[item.key] + 0.02, rtol=0, atol=1e-6)


def send_raw_update(link: SwarmClient, head: dict[str, Any], content: bytes) -> None:
    """Upload bytes in a way that no client does."""
    digest = pack({"checksum": head.get("checksum", xxhash.xxh3_128(content).hexdigest())})
    link._channel.stream_unary(f"/{SERVICE}/put")(iter([pack(head), content, digest]), timeout=TIMEOUT_SECONDS)


@pytest.mark.parametrize(
    ("head", "code", "reason"),
    [
        ({"checksum": "0" * 32}, grpc.StatusCode.INVALID_ARGUMENT, "damaged"),
        ({"round": 7}, grpc.StatusCode.FAILED_PRECONDITION, "not open yet"),
        ({"tokens": -1}, grpc.StatusCode.INVALID_ARGUMENT, "malformed"),
        ({"tokens": 10**400}, grpc.StatusCode.INVALID_ARGUMENT, "malformed"),
        ({"steps": 4}, grpc.StatusCode.INVALID_ARGUMENT, "malformed"),
        ({"tokens": "x"}, grpc.StatusCode.INVALID_ARGUMENT, "malformed"),
        ({"offset": 99}, grpc.StatusCode.INVALID_ARGUMENT, "malformed"),
        ({"bytes": 10}, grpc.StatusCode.RESOURCE_EXHAUSTED, "oversized"),
        ({"bytes": 10**9}, grpc.StatusCode.RESOURCE_EXHAUSTED, "oversized"),
        ({"round": None}, grpc.StatusCode.INVALID_ARGUMENT, "malformed"),
    ],
)
def test_coordinator_rejects_malformed_raw_upload_and_continues_round(tmp_path, head, code, reason):
    """A flipped bit, another round, no tokens, another size: refused, counted, and the round continues."""
    run = tiny_swarm_run(tmp_path, codec="fp32")
    with serve_local_swarm(run, tmp_path) as swarm:
        links = join_and_wait_for_round(run, swarm)
        content = write_node_update(swarm, tmp_path, "ann").read_bytes()
        right = {"round": 0, "offset": 0, "bytes": len(content), "mark": "x", "tokens": 100, "steps": 3}
        with pytest.raises(grpc.RpcError) as caught:
            send_raw_update(links["ann"], right | head, content)
        assert caught.value.code() == code
        assert swarm.coordinator.state.refused["ann", reason] == 1
        send_raw_update(links["ann"], right, content)
        with pytest.raises(grpc.RpcError) as caught:  # the same once more
            send_raw_update(links["ann"], right, content)
        assert caught.value.code() == grpc.StatusCode.ALREADY_EXISTS
        assert swarm.coordinator.state.refused["ann", "already sent"] == 1


def test_coordinator_rejects_repeated_update_of_previous_round(tmp_path):
    run = tiny_swarm_run(tmp_path, codec="fp32")
    with serve_local_swarm(run, tmp_path) as swarm:
        links = join_and_wait_for_round(run, swarm)
        old = {name: write_node_update(swarm, tmp_path, name) for name in links}
        for name, link in links.items():
            link.upload_update(old[name], 0, 100, 3)
        links["ann"].wait(round=1)
        with pytest.raises(UpdateRejected, match="already sent: round 0"):
            links["ann"].upload_update(old["ann"], 0, 100, 3)


def test_coordinator_rejects_outlier_update(tmp_path):
    run = tiny_swarm_run(tmp_path, codec="fp32", nodes=4, outlier=10.0)
    with serve_local_swarm(run, tmp_path) as swarm:
        links = join_and_wait_for_round(run, swarm, NODES)
        for name in NODES[:3]:
            links[name].upload_update(write_node_update(swarm, tmp_path, name), 0, 100, 3)
        with pytest.raises(UpdateRejected, match="outlying: a change of"):
            links["dee"].upload_update(write_node_update(swarm, tmp_path, "dee", 1.0), 0, 100, 3)
        links["dee"].upload_update(write_node_update(swarm, tmp_path, "dee", 0.02), 0, 100, 3)


def test_coordinator_excludes_first_update_when_outlying_at_round_close(tmp_path):
    """When the first update arrives, there is nothing to compare it with; it is excluded when the round closes. Its
    node learns this from the download."""
    run = tiny_swarm_run(tmp_path, codec="fp32", nodes=4)
    with serve_local_swarm(run, tmp_path) as swarm:
        links, before = join_and_wait_for_round(run, swarm, NODES), swarm.base()
        links["ann"].upload_update(write_node_update(swarm, tmp_path, "ann", 1e15), 0, 100, 3)
        for name in NODES[1:]:
            links[name].upload_update(write_node_update(swarm, tmp_path, name), 0, 100, 3)
        links["ann"].wait(committed=1)
        assert swarm.coordinator.state.refused["ann", "outlying"] == 1
        for item in model_pieces(run.model):
            change = 0.0 if item.expert is not None and "ann" in current_owners(swarm)[item.expert] else 0.01
            torch.testing.assert_close(swarm.base()[item.key], before[item.key] + change, rtol=0, atol=1e-6)
        sizes = {item.key: (4 * item.num_elements,) for item in model_pieces(run.model)}
        for name in ("ann", "bob"):
            own_experts = [
                item.key
                for item in pieces_sent_by(model_pieces(run.model), current_owners(swarm), name)
                if item.expert is not None
            ]
            links[name].download_round(tmp_path / f"{name}-down", 0, own_experts, sizes.__getitem__)
            assert links[name].was_included == (name != "ann")
            with TensorFile(tmp_path / f"{name}-down") as down:
                assert not set(own_experts) & set(down.shapes)


def test_coordinator_retains_one_partial_update_file_per_node(tmp_path):
    run = tiny_swarm_run(tmp_path)
    with serve_local_swarm(run, tmp_path) as swarm:
        join_and_wait_for_round(run, swarm)
        for mark in "abc":
            with swarm.coordinator.receiving_update("ann", 0, mark) as (path, _):
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(b"some")
        assert list(swarm.coordinator.store.round(0).glob("*.part")) == [path]


def test_swarm_trimmed_mean_bounds_effect_of_poisoned_update(tmp_path):
    run = tiny_swarm_run(tmp_path, codec="fp32", nodes=4, outlier=0.0, robust="trimmed")
    with serve_local_swarm(run, tmp_path) as swarm:
        links = join_and_wait_for_round(run, swarm, NODES)
        before = swarm.base()
        for name, change in zip(NODES, (0.01, 0.02, 0.03, 1e6), strict=True):
            links[name].upload_update(write_node_update(swarm, tmp_path, name, change), 0, 100, 3)
        links["ann"].wait(committed=1)
        for item in model_pieces(run.model):
            if item.expert is None:
                difference = swarm.base()[item.key] - before[item.key]
                torch.testing.assert_close(difference, torch.full_like(difference, 0.025), rtol=0, atol=1e-5)


# -- dead, late and slow nodes -----------------------------------------------------------------------------------------


def test_coordinator_closes_round_without_dead_node_and_reassigns_experts(tmp_path):
    """The mean is over the nodes that sent an update; the experts of the dead node do not change in this round."""
    run = tiny_swarm_run(tmp_path, codec="fp32", nodes=3, round={"lease_seconds": 1.0, "grace_seconds": 30})
    with serve_local_swarm(run, tmp_path) as swarm:
        links = join_and_wait_for_round(run, swarm, NODES[:3])
        before, lost_experts = swarm.base(), experts_of(current_owners(swarm), "cid")
        for name, change in (("ann", 0.01), ("bob", 0.03)):
            links[name].upload_update(write_node_update(swarm, tmp_path, name, change), 0, 100, 3)
        wait_until(
            lambda: links["ann"].heartbeat() and links["bob"].heartbeat() and swarm.coordinator.state.committed == 1,
            "the round is committed without cid",
        )
        base = swarm.base()
        for item in model_pieces(run.model):
            difference = base[item.key] - before[item.key]
            expected = 0.02 if item.expert is None else 0.0 if item.expert in lost_experts else None
            if expected is not None:
                torch.testing.assert_close(difference, torch.full_like(difference, expected), rtol=0, atol=1e-6)
        links["ann"].wait(round=1)
        assert current_owners(swarm)
        assert {node for owners in current_owners(swarm) for node in owners} == {"ann", "bob"}


def test_swarm_node_rejoins_after_its_lease_expired(tmp_path):
    """Its link was cut for longer than its lease: it joins again by itself, and takes part in the next round."""
    run = tiny_swarm_run(
        tmp_path, {"training.steps": 60}, codec="fp32", round={"lease_seconds": 1.0, "grace_seconds": 30}
    )
    with serve_local_swarm(run, tmp_path) as swarm:
        links = join_and_wait_for_round(run, swarm)
        links["bob"].upload_update(write_node_update(swarm, tmp_path, "bob"), 0, 100, 3)
        wait_until(
            lambda: links["bob"].heartbeat() and "ann" not in swarm.coordinator.state.members, "the lease of ann ends"
        )
        links["bob"].wait(round=1)
        rejoined = ThreadPoolExecutor(1).submit(links["ann"].wait, 1)
        wait_until(lambda: links["bob"].heartbeat() and "ann" in swarm.coordinator.state.members, "ann is back")
        links["bob"].upload_update(write_node_update(swarm, tmp_path, "bob"), 1, 100, 3)
        wait_until(lambda: links["bob"].heartbeat() and rejoined.done(), "ann is in a round")
        assert rejoined.result().round == 2
        assert len(rejoined.result().owned) == 2


def test_coordinator_closes_round_unchanged_when_all_nodes_are_gone(tmp_path):
    """The weights do not change, and nodes that join later continue."""
    run = tiny_swarm_run(tmp_path, codec="fp32", round={"lease_seconds": 0.5, "grace_seconds": 30})
    with serve_local_swarm(run, tmp_path) as swarm:
        join_and_wait_for_round(run, swarm)
        before = swarm.base()
        wait_until(
            lambda: swarm.coordinator.state.committed == 1 and not swarm.coordinator.state.members,
            "the round is closed",
        )
        late = swarm.joined_client("cid")
        assert late.wait(round=1).round == 1
        assert all(torch.equal(value, before[key]) for key, value in swarm.base().items())


def test_coordinator_closes_round_at_quorum_and_weights_updates_by_tokens(tmp_path):
    """After three of four updates and the grace period, the round closes, and the fourth update is rejected. In the
    next round, the late node sends an update of fewer tokens."""
    run = tiny_swarm_run(
        tmp_path, codec="fp32", nodes=4, round={"grace_seconds": 0.5, "timeout_multiplier": 3.0, "lease_seconds": 60}
    )
    with serve_local_swarm(run, tmp_path) as swarm:
        links = join_and_wait_for_round(run, swarm, NODES)
        late = write_node_update(swarm, tmp_path, "dee")
        for name in NODES[:3]:
            links[name].upload_update(write_node_update(swarm, tmp_path, name), 0, 100, 3)
        wait_until(lambda: swarm.coordinator.state.committed == 1, "the round is committed")
        with pytest.raises(UpdateRejected, match="closed"):
            links["dee"].upload_update(late, 0, 100, 3)
        assert links["dee"].wait(round=1).closes_in_seconds is not None  # it receives the time that is left
        before = swarm.base()
        for name in NODES[:3]:
            links[name].upload_update(write_node_update(swarm, tmp_path, name, 0.04), 1, 300, 3)
        links["dee"].upload_update(write_node_update(swarm, tmp_path, "dee", 0.0), 1, 100, 1)
        links["dee"].wait(committed=2)
        item = model_pieces(run.model)[0]
        difference = swarm.base()[item.key] - before[item.key]
        torch.testing.assert_close(difference, torch.full_like(difference, 0.04 * 900 / 1000), rtol=0, atol=1e-6)


def test_swarm_node_joins_running_swarm_at_round_boundary(tmp_path):
    """The other nodes train meanwhile, and own its experts until then."""
    run = tiny_swarm_run(tmp_path, {"training.steps": 45})
    with serve_local_swarm(run, tmp_path) as swarm:
        members = WorkerThreads(swarm, tmp_path, NODES[:2])
        wait_until(lambda: swarm.coordinator.state.committed >= 1, "a round is committed")
        later = WorkerThreads(swarm, tmp_path, ["cid"])
        for threads in (members, later):
            threads.wait_all()
        rounds = [record["round"] for record in later.rounds["cid"]]
        assert rounds == list(range(rounds[0], 15))
        assert rounds[0] >= 1
        assert later.evaluations["cid"]["held_out_loss"] == pytest.approx(
            members.evaluations["ann"]["held_out_loss"], rel=1e-6
        )
        opened = swarm.events("opened")
        assert {node for owners in opened[0]["owners"] for node in owners} == {"ann", "bob"}
        assert {node for owners in opened[-1]["owners"] for node in owners} == {"ann", "bob", "cid"}


def test_coordinator_restart_resumes_open_round_with_accepted_updates(tmp_path):
    """The update that was accepted before the restart counts; nodes notice only a pause."""
    run = tiny_swarm_run(tmp_path, {"training.steps": 24}, codec="fp32")
    swarm = LocalSwarm(run, tmp_path / "lead")
    links = join_and_wait_for_round(run, swarm)
    links["ann"].upload_update(write_node_update(swarm, tmp_path, "ann", 0.01), 0, 100, 3)
    update = write_node_update(swarm, tmp_path, "bob", 0.03)
    before, owners, port = swarm.base(), current_owners(swarm), swarm.port
    swarm.stop()
    swarm = LocalSwarm(run, tmp_path / "lead", port)
    try:
        assert current_owners(swarm) == owners
        assert set(swarm.coordinator.state.round.updates) == {"ann"}
        links["bob"].upload_update(update, 0, 100, 3)
        links["bob"].wait(committed=1)
        item = model_pieces(run.model)[0]
        difference = swarm.base()[item.key] - before[item.key]
        torch.testing.assert_close(difference, torch.full_like(difference, 0.02), rtol=0, atol=1e-6)
    finally:
        swarm.stop()


def test_swarm_workers_continue_training_through_coordinator_restart(tmp_path):
    run = tiny_swarm_run(tmp_path, {"training.steps": 30})
    swarm = LocalSwarm(run, tmp_path / "lead")
    members = WorkerThreads(swarm, tmp_path, NODES[:2])
    wait_until(lambda: swarm.coordinator.state.committed >= 2, "two rounds are committed")
    swarm.stop()
    swarm = LocalSwarm(run, tmp_path / "lead", swarm.port)
    try:
        members.wait_all()
        assert swarm.coordinator.state.done
        assert [record["round"] for record in members.rounds["ann"]] == list(range(10))
    finally:
        swarm.stop()


@pytest.mark.parametrize("crash_point", ["before the journal", "after the journal"])
def test_coordinator_restart_after_crash_in_round_close_gives_same_weights(tmp_path, monkeypatch, crash_point):
    """The coordinator repeats what was interrupted."""
    run = tiny_swarm_run(tmp_path)
    weights = []
    for crashes in (False, True):
        folder = tmp_path / str(crashes)
        folder.mkdir()
        swarm = LocalSwarm(run, folder / "lead")
        links = join_and_wait_for_round(run, swarm)
        if crashes:
            swarm.over.set()
            swarm.ticking.join(TIMEOUT_SECONDS)
        for name, link in links.items():
            link.upload_update(write_node_update(swarm, folder, name), 0, 100, 3)
        if crashes:
            method = "apply_round" if crash_point == "after the journal" else "aggregate_round"
            with monkeypatch.context() as patched:
                patched.setattr(f"phalanx.swarm.coordinator.store.SwarmStore.{method}", _raise_keyboard_interrupt)
                with pytest.raises(KeyboardInterrupt):
                    swarm.coordinator.tick()
            swarm.stop()
            swarm = LocalSwarm(run, folder / "lead", swarm.port)
        wait_until(lambda swarm=swarm: swarm.coordinator.state.committed == 1, "the round is committed")
        weights.append(swarm.base())
        swarm.stop()
    assert all(torch.equal(weights[1][key], value) for key, value in weights[0].items())


def _raise_keyboard_interrupt(*_: Any, **__: Any) -> None:
    raise KeyboardInterrupt


def test_swarm_client_resumes_interrupted_upload_at_offset(tmp_path):
    run = tiny_swarm_run(tmp_path, codec="fp32")
    with serve_local_swarm(run, tmp_path) as swarm:
        links = join_and_wait_for_round(run, swarm)
        path = write_node_update(swarm, tmp_path, "ann")
        content = path.read_bytes()
        half = len(content) // 2
        part = swarm.coordinator.store.partial_update_path(0, "ann", update_id(path))
        part.parent.mkdir(parents=True, exist_ok=True)
        part.write_bytes(content[:half])
        links["ann"].upload_update(path, 0, 100, 3)
        assert links["ann"].sent_bytes == len(content) - half
        assert "ann" in swarm.coordinator.state.round.updates


def test_swarm_client_resumes_interrupted_model_download(tmp_path, monkeypatch):
    """The link breaks after a few tensors, and a round ends before it works again: the remaining tensors are of the
    same weights as the first ones."""
    run = tiny_swarm_run(tmp_path)
    with serve_local_swarm(run, tmp_path) as swarm:
        links = join_and_wait_for_round(run, swarm)
        before, shapes = swarm.base(), parameter_shapes(run.model)
        receive_tensor, keys = SwarmClient._receive_tensor, list[str]()

        def receive_or_break(self: SwarmClient, file: TensorFile, key: str, *rest: Any, **named: Any) -> memoryview:
            keys.append(key)
            if len(keys) == 4:
                for name, link in links.items():
                    link.upload_update(write_node_update(swarm, tmp_path, name), 0, 100, 3)
                links["ann"].wait(committed=1)
                raise UnavailableRpcError
            return receive_tensor(self, file, key, *rest, **named)

        monkeypatch.setattr(SwarmClient, "_receive_tensor", receive_or_break)
        newcomer = swarm.client("cid")
        assert newcomer.download_round(tmp_path / "weights", None, (), shapes.__getitem__) == 0
        assert sorted(keys) == sorted([*shapes, keys[3]])
        received = read_pieces(run, tmp_path / "weights")
        assert all(torch.equal(received[key], value) for key, value in before.items())
        assert any(not torch.equal(received[key], value) for key, value in swarm.base().items())


class UnavailableRpcError(grpc.RpcError):
    """An RPC error as gRPC raises it for a broken link."""

    def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.UNAVAILABLE

    def details(self) -> str:
        return "the link broke"


# -- authentication ----------------------------------------------------------------------------------------------------


def test_swarm_server_rejects_clients_without_certificate_of_its_authority(tmp_path, monkeypatch):
    monkeypatch.setattr("phalanx.swarm.rpc.client.FIRST_CONNECT_SECONDS", 0.5)
    create_certificate_authority(tmp_path / "others")
    issue_certificate(tmp_path / "others", "ann", [])
    run = tiny_swarm_run(tmp_path)
    with serve_local_swarm(run, tmp_path) as swarm:
        with pytest.raises(
            UserError, match="cannot be reached: the coordinator's certificate is from another authority"
        ):
            SwarmClient(f"127.0.0.1:{swarm.port}", tmp_path / "others" / "ann").status()
        mixed = tmp_path / "mixed"
        mixed.mkdir()
        for file in ("key.pem", "cert.pem"):
            (mixed / file).write_bytes((tmp_path / "others" / "ann" / file).read_bytes())
        (mixed / "ca.pem").write_bytes((certificates() / "ca.pem").read_bytes())
        with pytest.raises(UserError, match="cannot be reached"):
            SwarmClient(f"127.0.0.1:{swarm.port}", mixed).status()
        call = grpc.insecure_channel(f"127.0.0.1:{swarm.port}").unary_unary(f"/{SERVICE}/status")
        with pytest.raises(grpc.RpcError):
            call(pack({}), timeout=5)


def test_certificate_member_rejects_expired_certificate(tmp_path, monkeypatch):
    create_certificate_authority(tmp_path / "certs")
    directory = issue_certificate(tmp_path / "certs", "old", [], days=-0.02)
    with pytest.raises(UserError, match="expired on"):
        certificate_member(directory)


def test_swarm_client_reports_address_without_listener(monkeypatch):
    monkeypatch.setattr("phalanx.swarm.rpc.client.FIRST_CONNECT_SECONDS", 0.5)
    with pytest.raises(UserError, match="cannot be reached: no server listens at this address"):
        SwarmClient("127.0.0.1:9", certificates() / "ann").status()


def test_swarm_server_reports_port_already_in_use(tmp_path):
    run = tiny_swarm_run(tmp_path)
    with serve_local_swarm(run, tmp_path) as swarm, pytest.raises(UserError, match="Address already in use"):
        LocalSwarm(run, tmp_path / "second", swarm.port)


def test_coordinator_rejects_join_with_wrong_version_data_or_capacity(tmp_path):
    run = tiny_swarm_run(tmp_path)
    with serve_local_swarm(run, tmp_path) as swarm:
        with pytest.raises(UpdateRejected, match=f"version: the swarm has protocol {PROTOCOL_VERSION}, this node 1"):
            swarm.client("ann").join(capacity=4, text="text", version=1)
        swarm.joined_client("ann")
        with pytest.raises(UpdateRejected, match="text: other differs from the other nodes' text text"):
            swarm.joined_client("bob", text="other")
        for capacity in (0, float("nan"), float("inf")):
            with pytest.raises(UpdateRejected, match="capacity"):
                swarm.joined_client("bob", capacity=capacity)


def test_coordinator_waits_until_capacity_covers_all_experts(tmp_path):
    run = tiny_swarm_run(tmp_path)
    with serve_local_swarm(run, tmp_path) as swarm:
        for node in NODES[:2]:
            swarm.joined_client(node, capacity=1)
        wait_until(
            lambda: swarm.coordinator.status()["waits_for"] == "memory for 2 more experts of each layer",
            "it waits for memory",
        )
        swarm.joined_client("cid", capacity=2)
        swarm.client("cid").wait(round=0)
        counts = {node: len(experts_of(current_owners(swarm), node)) for node in NODES[:3]}
        assert counts == {"ann": 1, "bob": 1, "cid": 2}
