"""A swarm whose coordinator and nodes are killed at random; `python -m benchmarks.swarm_kills` runs it for longer."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from benchmarks.swarm_kills import soak

SECONDS = 60.0


@pytest.mark.alone
@pytest.mark.timeout(600)
def test_swarm_loses_no_accepted_update_when_processes_are_killed(tmp_path: Path) -> None:
    seed = random.randrange(1000)
    print(f"seed {seed}")
    figures = soak(tmp_path / "swarm", SECONDS, seed)
    print(figures)
    assert figures["rounds"] >= 5
    assert not figures["violations"]
