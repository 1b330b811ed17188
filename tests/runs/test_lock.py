"""The lock of a run directory, and how long others wait for it."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from phalanx.launch.preflight import preflight
from phalanx.runs.create import claim_run_directory
from phalanx.runs.lock import SHUTDOWN_GRACE_SECONDS, acquire_run_lock
from phalanx.spec.errors import UserError
from phalanx.spec.resolved_run import ResolvedRun
from tests.helpers.small_runs import small_run


def test_preflight_waits_for_run_lock_when_run_has_several_nodes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On one machine, ranks end with their launcher; on other nodes, they may wait for a collective until it times
    out."""
    changes = {"training.collective_timeout_seconds": 30, "cluster.device": "cpu", "cluster.nproc_per_node": 1}
    single_node, two_nodes = (
        small_run(Path(json.__file__).parent, tmp_path, {**changes, "cluster.nodes": n}) for n in (1, 2)
    )
    directory = Path(single_node.output_dir) / single_node.name
    claim_run_directory(directory)
    lock = acquire_run_lock(directory)
    assert lock is not None
    with pytest.raises(UserError, match="is in use by process"):
        preflight(ResolvedRun(single_node, 2), resume=True)
    with pytest.raises(UserError, match="is in use by process"):
        preflight(ResolvedRun(two_nodes, 2), resume=False)
    assert capsys.readouterr().err == ""
    threading.Timer(SHUTDOWN_GRACE_SECONDS + 2, lock.close).start()
    preflight(ResolvedRun(two_nodes, 2), resume=True)
    assert f"waiting for up to 35 s: {directory} is in use" in capsys.readouterr().err
