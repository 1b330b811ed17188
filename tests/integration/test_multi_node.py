"""Runs of several nodes, each a host in a network of its own: one is lost, cut off, and comes back."""

from __future__ import annotations

import signal
from pathlib import Path

from phalanx.runs.checkpoints import checkpoints
from phalanx.spec.errors import EXIT_STOPPED
from phalanx.testing.processes import wait_until
from tests.helpers.multi_node_runs import TRAINING_CHANGES, multi_node_run
from tests.helpers.small_runs import DENSE
from tests.helpers.training_processes import events_of_kind, has_reached_step, recorded_losses, single_process_losses


def test_multi_node_run_survives_node_loss_and_return(tmp_path: Path) -> None:
    """The other continues alone, in a layout for its two ranks, and with four again when the node is back; all the time
    they learn what one process learns."""
    directory = tmp_path / "parity"
    with multi_node_run(tmp_path, {}) as at:
        at.start("first")
        at.start("second")
        wait_until(lambda: checkpoints(directory / "checkpoints"), "a checkpoint")
        at.kill("second")
        wait_until(lambda: len(events_of_kind(directory, "started")) > 1, "a start of those who are left")
        at.start("second")
        wait_until(lambda: len(events_of_kind(directory, "started")) > 2, "a start of all")
        wait_until(
            has_reached_step(directory, events_of_kind(directory, "started")[-1]["step"] + 5), "some steps of all"
        )
        at.processes["second"].send_signal(signal.SIGTERM)
        assert at.wait_for_exit("second") == EXIT_STOPPED, at.log_text("second")
        wait_until(lambda: len(events_of_kind(directory, "started")) > 3, "a start of those who stay")
        at.processes["first"].send_signal(signal.SIGTERM)
        assert at.wait_for_exit("first") == EXIT_STOPPED, at.log_text("first")
        for met in ("2 of 2 nodes joined; starting 4 ranks", "1 of 2 nodes joined; starting 2 ranks"):
            assert met in at.log_text("first")
    assert [event["ranks"] for event in events_of_kind(directory, "started")] == [4, 2, 4, 2]
    assert [event["reason"] for event in events_of_kind(directory, "failed")] == ["lost the ranks of another node"]
    learned = recorded_losses(directory)
    assert learned == single_process_losses(tmp_path, TRAINING_CHANGES, len(learned))


def test_multi_node_run_survives_network_cut_and_rendezvous_host_loss(tmp_path: Path) -> None:
    """A node that is cut off comes back by itself; where nodes meet, one that is started again finds others waiting."""
    directory = tmp_path / "parity"
    with multi_node_run(tmp_path, {}) as at:
        at.start("first")
        at.start("second")
        wait_until(lambda: checkpoints(directory / "checkpoints"), "a checkpoint")
        at.network.disconnect("second")
        wait_until(lambda: len(events_of_kind(directory, "started")) > 1, "a start of the node where they meet")
        at.network.reconnect("second")
        wait_until(lambda: len(events_of_kind(directory, "started")) > 2, "a start of both")
        wait_until(
            has_reached_step(directory, events_of_kind(directory, "started")[-1]["step"] + 2), "some steps of both"
        )
        at.kill("first")
        at.start("first")
        wait_until(lambda: len(events_of_kind(directory, "started")) > 3, "a start of both again")
        wait_until(has_reached_step(directory, events_of_kind(directory, "started")[-1]["step"] + 2), "some more steps")
    assert [event["ranks"] for event in events_of_kind(directory, "started")] == [4, 2, 4, 4]
    learned = recorded_losses(directory)
    assert learned == single_process_losses(tmp_path, TRAINING_CHANGES, len(learned))


UNEVEN_BATCH = {
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
    with multi_node_run(tmp_path, UNEVEN_BATCH, "1:7") as at:
        at.start("first")
        at.start("second")
        assert (at.wait_for_exit("first"), at.wait_for_exit("second")) == (0, 0), at.log_text("first") + at.log_text(
            "second"
        )
        assert "training on 1 of 2 ranks, because no layout fits more" in at.log_text("first")
        assert "which 2 data-parallel ranks cannot divide" in at.log_text("first")
    assert [event["ranks"] for event in events_of_kind(directory, "started")] == [1]
    assert len(recorded_losses(directory)) == 12


def test_rendezvous_timeout_reports_missing_nodes(tmp_path: Path) -> None:
    with multi_node_run(
        tmp_path, {"recovery": {"rendezvous_timeout_seconds": 3, "last_call_timeout_seconds": 1}}, "2"
    ) as at:
        at.start("second")
        assert at.wait_for_exit("second") == 1  # what starts it again may have more luck
        at.start("first")
        assert at.wait_for_exit("first") == 1
        assert "no answer within 3 s" in at.log_text("second")
        assert "fewer than 2 nodes joined within 3 s" in at.log_text("first")


def test_rendezvous_rejects_second_run_on_same_port(tmp_path: Path) -> None:
    """The second finds the port taken, and the first does not notice."""
    directory = tmp_path / "parity"
    with multi_node_run(tmp_path, {}, "1") as at:
        at.start("first")
        wait_until(has_reached_step(directory, 1), "a step")
        first = at.processes["first"]
        at.run = at.run.with_name("other.toml")
        at.run.write_text((tmp_path / "run.toml").read_text().replace('name = "parity"', 'name = "other"'))
        at.start("first")
        assert at.wait_for_exit("first") == 2
        assert "use a port that no other run uses" in at.log_text("first")
        last = len(recorded_losses(directory))
        wait_until(has_reached_step(directory, last + 2), "steps of the first run")
        at.processes["first"] = first


def test_multi_node_run_fails_when_no_layout_fits_remaining_ranks(tmp_path: Path) -> None:
    """Where the model does not fit what is left, the run says so and ends, and its checkpoint stays."""
    directory = tmp_path / "parity"
    with multi_node_run(tmp_path, {"cluster.memory_bytes": 10**7}) as at:
        at.start("first")
        at.start("second")
        wait_until(lambda: checkpoints(directory / "checkpoints"), "a checkpoint")
        at.kill("second")
        assert at.wait_for_exit("first") == 2
        assert "no layout of" in at.log_text("first")
        assert checkpoints(directory / "checkpoints")
