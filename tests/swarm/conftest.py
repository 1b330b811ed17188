"""Fixtures of a swarm's tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.local_swarm import tiny_swarm_run
from tests.helpers.simulated_coordinator import SimulatedCoordinator


@pytest.fixture
def simulated(tmp_path: Path) -> Iterator[SimulatedCoordinator]:
    """Provide a coordinator in the first round, with two nodes."""
    simulated = SimulatedCoordinator(tiny_swarm_run(tmp_path), tmp_path)
    yield simulated
    simulated.coordinator.journal.close()
