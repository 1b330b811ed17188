"""Who is at work in a run directory, and how long others wait for it."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from phalanx.launch.preflight import preflight
from phalanx.runs.create import claim_run_directory
from phalanx.runs.lock import SHUTDOWN_GRACE_SECONDS, acquire_run_lock
from phalanx.spec.errors import UserError
from tests.helpers.small_runs import small_run


def test_preflight_waits_for_run_lock_when_run_has_several_nodes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On one machine they end with the launcher; elsewhere they wait until a collective's time is over."""
    changes = {"training.collective_timeout_seconds": 30, "cluster.device": "cpu", "cluster.nproc_per_node": 1}
    one, two = (small_run(Path(json.__file__).parent, tmp_path, {**changes, "cluster.nodes": n}) for n in (1, 2))
    directory = Path(one.output_dir) / one.name
    claim_run_directory(directory)
    held = acquire_run_lock(directory)
    assert held is not None
    with pytest.raises(UserError, match="is in use by process"):
        preflight(one, 2, resume=True)
    with pytest.raises(UserError, match="is in use by process"):
        preflight(two, 2, resume=False)
    assert capsys.readouterr().err == ""
    threading.Timer(SHUTDOWN_GRACE_SECONDS + 2, held.close).start()
    preflight(two, 2, resume=True)
    assert f"waiting for up to 35 s: {directory} is in use" in capsys.readouterr().err
