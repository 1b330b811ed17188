"""Calls of the server without a network."""

from __future__ import annotations

import json
from typing import Any

import grpc
import pytest

from phalanx.swarm.rpc.connections import StrangerLimit
from phalanx.swarm.rpc.server import SwarmService
from tests.helpers.simulated_coordinator import SimulatedCoordinator


class AbortedCall(Exception):  # noqa: N818 - the end of a call
    """A call that was ended with a status."""


class CallContext:
    """The context of a call of a node."""

    def peer(self) -> str:
        return "ipv4:127.0.0.1:7077"

    def auth_context(self) -> dict[str, list[bytes]]:
        return {"x509_common_name": [b"ann"]}

    def abort(self, code: grpc.StatusCode, reason: str) -> None:
        raise AbortedCall(f"{code.name}: {reason}")


def make_service(simulated: SimulatedCoordinator) -> Any:
    return SwarmService(simulated.coordinator, {}, "lead", StrangerLimit(0, max_strangers=1))


UPDATE: dict[str, Any] = {"round": 0, "offset": 0, "bytes": 10, "mark": "x", "tokens": 100, "steps": 3}


@pytest.mark.parametrize(
    "requests",
    [
        [],
        [b"x"],
        [b"{}"],
        [b"[" * 100_000],
        [b'{"round":1e999}'],
        [b'{"round":"\\ud800"}'],
        [b'{"round":' + b"9" * 4000 + b"}"],
        *([json.dumps(UPDATE | head).encode()] for head in ({"round": -7}, {"round": 10**19}, {"offset": "\x1b"})),
        [json.dumps(UPDATE | {"mark": "\ud800"}).encode()],
        [json.dumps(UPDATE | {"bytes": 0}).encode(), b"[" * 100_000],
    ],
)
def test_put_refuses_unreadable_messages_and_the_swarm_can_restart(
    simulated: SimulatedCoordinator, requests: list[bytes]
) -> None:
    with pytest.raises(AbortedCall, match=r"malformed|closed|not open yet"):
        make_service(simulated).put(iter(requests), CallContext())
    assert sum(simulated.coordinator.state.refused.values()) == 1
    simulated.start()
    assert sum(simulated.coordinator.state.refused.values()) == 1


def test_get_names_the_weights_that_cannot_be_read(simulated: SimulatedCoordinator) -> None:
    simulated.coordinator.store.base.unlink()
    with pytest.raises(
        AbortedCall, match=r"DATA_LOSS: damaged model: a copy of .*base.safetensors cannot be read: No such file"
    ):
        list(make_service(simulated).get(b"{}", CallContext()))
    assert "[Errno" not in simulated.coordinator.problem


def test_get_refuses_deeply_nested_messages(simulated: SimulatedCoordinator) -> None:
    with pytest.raises(AbortedCall, match="INVALID_ARGUMENT: malformed"):
        list(make_service(simulated).get(b"[" * 100_000, CallContext()))
