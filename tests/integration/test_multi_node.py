"""Runs of several nodes, each a host in a network of its own: one is lost, cut off, and comes back."""

from __future__ import annotations

import signal
from pathlib import Path

from phalanx.runs.checkpoints import checkpoints
from phalanx.spec.errors import EXIT_STOPPED
from phalanx.testing.processes import wait_until
from tests.helpers.multi_node_runs import nodes, of_one_process
from tests.helpers.small_runs import DENSE
from tests.helpers.training_processes import events, reaches, trained


def test_multi_node_run_survives_node_loss_and_return(tmp_path: Path) -> None:
    """The other goes on alone, in a layout for its two ranks, and with four again when the node is back; all the time
    they learn what one process learns."""
    directory = tmp_path / "parity"
    with nodes(tmp_path, {}) as at:
        at.start("first")
        at.start("second")
        wait_until(lambda: checkpoints(directory / "checkpoints"), "a checkpoint")
        at.kill("second")
        wait_until(lambda: len(events(directory, "started")) > 1, "a start of those who are left")
        at.start("second")
        wait_until(lambda: len(events(directory, "started")) > 2, "a start of all")
        wait_until(reaches(directory, events(directory, "started")[-1]["step"] + 5), "some steps of all")
        at.at["second"].send_signal(signal.SIGTERM)
        assert at.ends("second") == EXIT_STOPPED, at.said("second")
        wait_until(lambda: len(events(directory, "started")) > 3, "a start of those who stay")
        at.at["first"].send_signal(signal.SIGTERM)
        assert at.ends("first") == EXIT_STOPPED, at.said("first")
        for met in ("2 of 2 nodes met: 4 ranks start", "1 of 2 nodes met: 2 ranks start"):
            assert met in at.said("first")
    assert [event["ranks"] for event in events(directory, "started")] == [4, 2, 4, 2]
    assert [event["reason"] for event in events(directory, "failed")] == ["lost ranks of another node"]
    learned = trained(directory)
    assert learned == of_one_process(tmp_path, len(learned))


def test_multi_node_run_survives_network_cut_and_rendezvous_host_loss(tmp_path: Path) -> None:
    """A node that is cut off comes back by itself; where nodes meet, one that is started again finds others waiting."""
    directory = tmp_path / "parity"
    with nodes(tmp_path, {}) as at:
        at.start("first")
        at.start("second")
        wait_until(lambda: checkpoints(directory / "checkpoints"), "a checkpoint")
        at.network.disconnect("second")
        wait_until(lambda: len(events(directory, "started")) > 1, "a start of the node where they meet")
        at.network.reconnect("second")
        wait_until(lambda: len(events(directory, "started")) > 2, "a start of both")
        wait_until(reaches(directory, events(directory, "started")[-1]["step"] + 2), "some steps of both")
        at.kill("first")
        at.start("first")
        wait_until(lambda: len(events(directory, "started")) > 3, "a start of both again")
        wait_until(reaches(directory, events(directory, "started")[-1]["step"] + 2), "some more steps")
    assert [event["ranks"] for event in events(directory, "started")] == [4, 2, 4, 4]
    learned = trained(directory)
    assert learned == of_one_process(tmp_path, len(learned))


ODD = {
    "training.seq_len": 31,
    "training.tokens_per_step": 7 * 31,
    "cluster.nproc_per_node": 1,
    "training.steps": 12,
    "layout.data_parallel": "zero3",
    "model": {**DENSE, "num_layers": 1, "num_heads": 3, "num_kv_heads": 3, "hidden_size": 48, "ffn_hidden_size": 51},
}


def test_multi_node_run_puts_surplus_node_on_standby(tmp_path: Path) -> None:
    """Seven sequences a step are for seven ranks or one: of two nodes one trains, and both end well."""
    directory = tmp_path / "parity"
    with nodes(tmp_path, ODD, "1:7") as at:
        at.start("first")
        at.start("second")
        assert (at.ends("first"), at.ends("second")) == (0, 0), at.said("first") + at.said("second")
        assert "1 of 2 ranks train, as no layout fits more" in at.said("first")
        assert "which 2 data-parallel ranks cannot share" in at.said("first")
    assert [event["ranks"] for event in events(directory, "started")] == [1]
    assert len(trained(directory)) == 12


def test_rendezvous_timeout_reports_missing_nodes(tmp_path: Path) -> None:
    with nodes(tmp_path, {"recovery": {"rendezvous_timeout_seconds": 3, "last_call_timeout_seconds": 1}}, "2") as at:
        at.start("second")
        assert at.ends("second") == 1  # what starts it again may have more luck
        at.start("first")
        assert at.ends("first") == 1
        assert "nobody answered in 3 s" in at.said("second")
        assert "fewer than 2 nodes came in 3 s" in at.said("first")


def test_rendezvous_rejects_second_run_on_same_port(tmp_path: Path) -> None:
    """The second finds the port taken, and the first does not notice."""
    directory = tmp_path / "parity"
    with nodes(tmp_path, {}, "1") as at:
        at.start("first")
        wait_until(reaches(directory, 1), "a step")
        first = at.at["first"]
        at.run = at.run.with_name("other.toml")
        at.run.write_text((tmp_path / "run.toml").read_text().replace('name = "parity"', 'name = "other"'))
        at.start("first")
        assert at.ends("first") == 2
        assert "another run" in at.said("first")
        last = len(trained(directory))
        wait_until(reaches(directory, last + 2), "steps of the first run")
        at.at["first"] = first


def test_multi_node_run_fails_when_no_layout_fits_remaining_ranks(tmp_path: Path) -> None:
    """Where the model does not fit what is left, the run says so and ends, and its checkpoint stays."""
    directory = tmp_path / "parity"
    with nodes(tmp_path, {"cluster.memory_bytes": 10**7}) as at:
        at.start("first")
        at.start("second")
        wait_until(lambda: checkpoints(directory / "checkpoints"), "a checkpoint")
        at.kill("second")
        assert at.ends("first") == 2
        assert "no layout of" in at.said("first")
        assert checkpoints(directory / "checkpoints")
