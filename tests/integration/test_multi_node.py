"""Runs on several nodes, each with a network of its own, that lose a node, a link or the rendezvous host."""

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
    """The remaining node continues with a layout for its two ranks, and the run has four ranks again when the node
    returns. Losses stay those of a single process."""
    directory = tmp_path / "parity"
    with multi_node_run(tmp_path, {}) as nodes:
        nodes.start("first")
        nodes.start("second")
        wait_until(lambda: checkpoints(directory / "checkpoints"), "a checkpoint")
        nodes.kill("second")
        wait_until(lambda: len(events_of_kind(directory, "started")) > 1, "a start of the remaining node")
        nodes.start("second")
        wait_until(lambda: len(events_of_kind(directory, "started")) > 2, "a start of all")
        wait_until(
            has_reached_step(directory, events_of_kind(directory, "started")[-1]["step"] + 5), "some steps of all"
        )
        nodes.processes["second"].send_signal(signal.SIGTERM)
        assert nodes.wait_for_exit("second") == EXIT_STOPPED, nodes.log_text("second")
        wait_until(lambda: len(events_of_kind(directory, "started")) > 3, "a start of the remaining node")
        nodes.processes["first"].send_signal(signal.SIGTERM)
        assert nodes.wait_for_exit("first") == EXIT_STOPPED, nodes.log_text("first")
        for message in ("2 of 2 nodes joined; starting 4 ranks", "1 of 2 nodes joined; starting 2 ranks"):
            assert message in nodes.log_text("first")
    assert [event["ranks"] for event in events_of_kind(directory, "started")] == [4, 2, 4, 2]
    assert [event["reason"] for event in events_of_kind(directory, "failed")] == ["lost the ranks of another node"]
    losses = recorded_losses(directory)
    assert losses == single_process_losses(tmp_path, TRAINING_CHANGES, len(losses))


def test_multi_node_run_survives_network_cut_and_rendezvous_host_loss(tmp_path: Path) -> None:
    """A node whose network was cut rejoins by itself, and a restarted rendezvous host finds the other node waiting."""
    directory = tmp_path / "parity"
    with multi_node_run(tmp_path, {}) as nodes:
        nodes.start("first")
        nodes.start("second")
        wait_until(lambda: checkpoints(directory / "checkpoints"), "a checkpoint")
        nodes.network.disconnect("second")
        wait_until(lambda: len(events_of_kind(directory, "started")) > 1, "a start of the rendezvous host")
        nodes.network.reconnect("second")
        wait_until(lambda: len(events_of_kind(directory, "started")) > 2, "a start of both")
        wait_until(
            has_reached_step(directory, events_of_kind(directory, "started")[-1]["step"] + 2), "some steps of both"
        )
        nodes.kill("first")
        nodes.start("first")
        wait_until(lambda: len(events_of_kind(directory, "started")) > 3, "a start of both again")
        wait_until(has_reached_step(directory, events_of_kind(directory, "started")[-1]["step"] + 2), "some more steps")
    assert [event["ranks"] for event in events_of_kind(directory, "started")] == [4, 2, 4, 4]
    losses = recorded_losses(directory)
    assert losses == single_process_losses(tmp_path, TRAINING_CHANGES, len(losses))


UNEVEN_BATCH = {
    "training.seq_len": 31,
    "training.tokens_per_step": 7 * 31,
    "cluster.nproc_per_node": 1,
    "training.steps": 12,
    "layout.data_parallel": "zero3",
    "model": {**DENSE, "num_layers": 1, "num_heads": 3, "num_kv_heads": 3, "hidden_size": 48, "ffn_hidden_size": 51},
}


def test_multi_node_run_puts_surplus_node_on_standby(tmp_path: Path) -> None:
    """Seven sequences per step fit seven ranks or one: only one of the two nodes trains, and both exit with 0."""
    directory = tmp_path / "parity"
    with multi_node_run(tmp_path, UNEVEN_BATCH, "1:7") as nodes:
        nodes.start("first")
        nodes.start("second")
        for name in ("first", "second"):
            assert nodes.wait_for_exit(name) == 0, nodes.log_text(name)
        assert "training on 1 of 2 ranks, because no layout fits more" in nodes.log_text("first")
        assert "which 2 data-parallel ranks cannot divide" in nodes.log_text("first")
    assert [event["ranks"] for event in events_of_kind(directory, "started")] == [1]
    assert len(recorded_losses(directory)) == 12


def test_rendezvous_timeout_reports_missing_nodes(tmp_path: Path) -> None:
    with multi_node_run(
        tmp_path, {"recovery": {"rendezvous_timeout_seconds": 3, "last_call_timeout_seconds": 1}}, "2"
    ) as nodes:
        nodes.start("second")
        assert nodes.wait_for_exit("second") == 1  # not a user error: another attempt may succeed
        nodes.start("first")
        assert nodes.wait_for_exit("first") == 1
        assert "does not answer within 3 s" in nodes.log_text("second")
        assert "was joined by fewer than 2 nodes within 3 s" in nodes.log_text("first")


def test_rendezvous_rejects_second_run_on_same_port(tmp_path: Path) -> None:
    """The second run finds the port in use, and the first one continues."""
    directory = tmp_path / "parity"
    with multi_node_run(tmp_path, {}, "1") as nodes:
        nodes.start("first")
        wait_until(has_reached_step(directory, 1), "a step")
        first = nodes.processes["first"]
        nodes.run = nodes.run.with_name("other.toml")
        nodes.run.write_text((tmp_path / "run.toml").read_text().replace('name = "parity"', 'name = "other"'))
        nodes.start("first")
        assert nodes.wait_for_exit("first") == 2
        assert "use a port that no other run uses" in nodes.log_text("first")
        last = len(recorded_losses(directory))
        wait_until(has_reached_step(directory, last + 2), "steps of the first run")
        nodes.processes["first"] = first


def test_multi_node_run_fails_when_no_layout_fits_remaining_ranks(tmp_path: Path) -> None:
    """The model does not fit on the remaining node: the run ends with an error and keeps its checkpoint."""
    directory = tmp_path / "parity"
    with multi_node_run(tmp_path, {"cluster.memory_bytes": 10**7}) as nodes:
        nodes.start("first")
        nodes.start("second")
        wait_until(lambda: checkpoints(directory / "checkpoints"), "a checkpoint")
        nodes.kill("second")
        assert nodes.wait_for_exit("first") == 2
        assert "none of" in nodes.log_text("first")
        assert checkpoints(directory / "checkpoints")
