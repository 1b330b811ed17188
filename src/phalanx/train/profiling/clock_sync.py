"""Clock synchronization: the offset of each rank's clock from that of rank 0.

Ranks on one host share a clock. For each other host one rank requests the time of rank 0 several times, and uses the
fastest reply. The remote time lies between request and reply, so the maximum error of the offset is half of the round
trip (Cristian's algorithm, Distributed Computing 3, 1989)."""

from __future__ import annotations

import hashlib
import os
import socket
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from phalanx.parallel.comm.collectives import all_gather

NUM_PROBES = 8
BOOT_ID_FILE = Path("/proc/sys/kernel/random/boot_id")
TIME_NAMESPACE_FILE = Path("/proc/self/ns/time")


@dataclass(frozen=True)
class ClockOffset:
    """The seconds to add to time.perf_counter() of a rank to obtain that of rank 0."""

    seconds: float = 0.0
    error_seconds: float = 0.0
    """Maximum error in either direction."""


def clock_domain() -> str:
    """Return an identifier that is equal for processes with the same clock."""
    boot = BOOT_ID_FILE.read_text().strip() if BOOT_ID_FILE.exists() else ""
    namespace = os.stat(TIME_NAMESPACE_FILE).st_ino if TIME_NAMESPACE_FILE.exists() else ""
    return f"{socket.gethostname()} {boot} {namespace}"


def measure_clock_offset(device: torch.device, timeout_seconds: float, occasion: str = "start") -> ClockOffset:
    """Return this rank's clock offset. This is a collective, called at most once per `occasion`, equal on all ranks."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return ClockOffset()
    first_rank_in_domain = _first_ranks_by_clock(device)
    rank = dist.get_rank()
    timeout = timedelta(seconds=timeout_seconds)
    offset = ClockOffset()
    for client in sorted(set(first_rank_in_domain) - {0}):
        key = f"phalanx/clock/{occasion}/{client}"
        ping_pong = ClockPingPong(dist.distributed_c10d._get_default_store(), key, timeout)
        if rank == 0:
            ping_pong.serve()
        elif rank == client:
            offset = ping_pong.estimate_offset()
    gathered = torch.empty(dist.get_world_size(), 2, dtype=torch.float64, device=device)
    all_gather(gathered, torch.tensor([[offset.seconds, offset.error_seconds]], dtype=torch.float64, device=device))
    return ClockOffset(*gathered.tolist()[first_rank_in_domain[rank]])


def _first_ranks_by_clock(device: torch.device) -> list[int]:
    """Return for each rank the first rank with the same clock (a collective)."""
    domain = int.from_bytes(hashlib.sha256(clock_domain().encode()).digest()[:7], "big")
    gathered = torch.empty(dist.get_world_size(), dtype=torch.int64, device=device)
    all_gather(gathered, torch.tensor([domain], device=device))
    domains = gathered.tolist()
    return [domains.index(domain) for domain in domains]


@dataclass(frozen=True)
class ClockPingPong:
    """Exchange of time between two ranks, through a store that both can reach."""

    store: Any
    key: str
    timeout: timedelta

    def estimate_offset(self) -> ClockOffset:
        """Request the remote time several times, and return the offset of the fastest reply."""
        answers = []
        for number in range(NUM_PROBES):
            sent_at = time.perf_counter()
            self.store.set(f"{self.key}/{number}/request", "")
            remote_time = float(self._wait_for(f"{self.key}/{number}/reply"))
            half_round_trip = (time.perf_counter() - sent_at) / 2
            answers.append(ClockOffset(remote_time - (sent_at + half_round_trip), half_round_trip))
        return min(answers, key=lambda answer: answer.error_seconds)

    def serve(self) -> None:
        """Reply to all time requests."""
        for number in range(NUM_PROBES):
            self._wait_for(f"{self.key}/{number}/request")
            self.store.set(f"{self.key}/{number}/reply", repr(time.perf_counter()))

    def _wait_for(self, key: str) -> bytes:
        self.store.wait([key], self.timeout)
        return bytes(self.store.get(key))
