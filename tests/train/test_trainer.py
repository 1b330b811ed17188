"""The training loop: metrics, skipped steps, evaluation, signals and failures."""

from __future__ import annotations

import json
import math
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.distributed import TCPStore

from phalanx.cost.exact.flops import forward_flops, training_flops_per_token
from phalanx.data.loader import prefetch
from phalanx.data.packing import IGNORE_INDEX
from phalanx.debug.collective_log import is_peer_loss
from phalanx.launch.failures import read_failures
from phalanx.launch.process import LAUNCHER_PID_ENV
from phalanx.parallel.comm.device_clock import DeviceClock, Timestamp
from phalanx.runs.create import is_finished
from phalanx.runs.errors import DivergenceError
from phalanx.runs.metrics import MetricsRecord, read_metrics
from phalanx.spec.errors import EXIT_INTERRUPTED, EXIT_STOPPED
from phalanx.spec.files.load import run_from_table
from phalanx.spec.files.write import to_toml
from phalanx.spec.run import RunSpec
from phalanx.testing import rank_pool
from phalanx.testing.processes import rank_pids, run_python, start_python, wait_until
from phalanx.train.callbacks.records import JsonLines, TensorBoard
from phalanx.train.create_run import create_run
from phalanx.train.trainer import Trainer
from tests.helpers.small_runs import DENSE, MOE, make_trainer, small_run, train_to_end, train_until
from tests.helpers.training_processes import wait_for_steps


def make_gradients_infinite(trainer: Trainer, at: set[int]) -> None:
    """Make the gradient infinite at some steps (counted from 1)."""
    forward = trainer.strategy.model.forward

    def poisoned(*arguments: Any) -> Any:
        logits, auxiliary = forward(*arguments)
        return (logits * math.inf if trainer.step + 1 in at else logits), auxiliary

    trainer.strategy.model.forward = poisoned  # type: ignore[method-assign]


def test_loss_of_capped_logits_is_that_of_the_models_output(text: Path, tmp_path: Path) -> None:
    model = DENSE | {"logits_softcap": 0.1}
    trainer = make_trainer(small_run(text, tmp_path, {"model": model, "data.mask_documents": False}))
    micro = trainer.micro_batches(trainer.loader.step(0))[0]
    logits, _ = trainer.module(micro.tokens)
    expected = F.cross_entropy(
        logits.flatten(0, 1), micro.targets.flatten(), ignore_index=IGNORE_INDEX, reduction="sum"
    )
    loss, _ = trainer.compute_losses(trainer.module, micro)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-12)


def test_trainer_skips_and_counts_nonfinite_steps(text: Path, tmp_path: Path) -> None:
    trainer = make_trainer(small_run(text, tmp_path, {"model": MOE}))
    make_gradients_infinite(trainer, {2, 4})
    batches = prefetch(trainer.loader, 0, 5)
    before = [p.detach().clone() for p in trainer.strategy.trainable_parameters.values()]
    records = []
    for step in range(1, 6):
        records.append(trainer.train_step(batches))
        same = all(
            torch.equal(a, b) for a, b in zip(before, trainer.strategy.trainable_parameters.values(), strict=True)
        )
        assert same == (step in {2, 4})
        before = [p.detach().clone() for p in trainer.strategy.trainable_parameters.values()]
    assert [record["skipped_steps"] for record in records] == [0, 1, 1, 2, 2]
    assert [math.isfinite(record["grad_norm"]) for record in records] == [True, False, True, False, True]


def test_trainer_raises_divergence_error_after_max_nonfinite_steps(text: Path, tmp_path: Path) -> None:
    trainer = make_trainer(small_run(text, tmp_path, {"training.max_nonfinite_steps": 3}))
    make_gradients_infinite(trainer, {2, 5, 6, 7})
    with pytest.raises(DivergenceError, match=r"step 7: 3 consecutive steps were not finite \(loss nan.*learning_rate"):
        train_to_end(trainer)


def test_trainer_writes_metrics_of_every_step(text: Path, tmp_path: Path) -> None:
    changes = {"training.steps": 6, "evaluation": {"every": 3}, "model": MOE, "layout.activation_checkpointing": "full"}
    run = small_run(text, tmp_path, changes)
    create_run(run, 1, resume=False)
    trainer = make_trainer(run)
    trainer.utilization.peak_flops = peak = 1e15
    evaluation = train_to_end(trainer, {"metrics": JsonLines(), "tensorboard": TensorBoard()})
    records = read_metrics(trainer.directory)
    trained = [record for record in records if "loss" in record]
    assert [record["step"] for record in trained] == [1, 2, 3, 4, 5, 6]
    assert [record["step"] for record in records if "held_out_loss" in record] == [3, 6]
    assert records[-1].items() >= evaluation.items()
    assert [record["time"] for record in records] == sorted(record["time"] for record in records)
    parts = ("data_seconds", "passes_seconds", "reduce_seconds", "optimizer_seconds")
    flops = training_flops_per_token(run.model, run.training.seq_len)
    recomputed_flops = forward_flops(run.model, run.training.seq_len).blocks
    for record in trained:
        assert record["step_seconds"] == pytest.approx(sum(record[part] for part in parts))
        assert record["tokens"] == record["step"] * 256
        assert record["tokens_per_second"] == pytest.approx(256 / record["step_seconds"])
        assert record["mfu"] == pytest.approx(record["tokens_per_second"] * flops / peak)
        assert record["hfu"] == pytest.approx(record["tokens_per_second"] * (flops + recomputed_flops) / peak)
        assert record["peak_memory_bytes"] > 1e6
        assert record["exposed_communication_seconds"] == 0.0
        assert 1 <= record["hot_expert_share"] <= 4
    assert trained[0]["learning_rate"] == pytest.approx(0.01 / 3)
    board = EventAccumulator(str(trainer.directory / "tensorboard")).Reload()
    assert [event.value for event in board.Scalars("loss")] == pytest.approx([r["loss"] for r in trained])


@pytest.mark.parametrize("model", [{}, MOE], ids=["dense", "experts"])
def test_divergence_error_names_ignored_targets_as_cause(model: Any, text: Path, tmp_path: Path) -> None:
    dataset = {"class": f"{__name__}:MaskedSamples", "every": 1000, "first": 999}
    changes = {"training.max_nonfinite_steps": 2, "data.dataset": dataset, **({"model": model} if model else {})}
    trainer = make_trainer(small_run(text, tmp_path, changes))
    with pytest.raises(
        DivergenceError, match=r"step 2: 2 .* not finite \(all targets are -100\); .*data\.dataset"
    ) as caught:
        train_to_end(trainer)
    assert "learning_rate" not in str(caught.value)


class MaskedSamples:
    """A dataset in whose samples few positions have a target."""

    def __init__(self, seq_len: int, every: int = 4, first: int = 0) -> None:
        tokens = list(range(seq_len))
        self.sample = (tokens, [token if token % every == first else IGNORE_INDEX for token in tokens])

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        return self.sample


@pytest.mark.parametrize("ranks", [1, 2])
def test_masked_targets_count_for_speed_and_not_for_loss(ranks: int, text: Path, tmp_path: Path) -> None:
    run = small_run(text, tmp_path, {"data.dataset": f"{__name__}:MaskedSamples", "training.steps": 4})
    records, resumed = rank_pool(ranks).run(train_masked, run)[0]
    flops = training_flops_per_token(run.model, run.training.seq_len)
    for record in (*records, resumed):
        assert (record["tokens"], record["targets"]) == (record["step"] * 256, record["step"] * 64)
        assert record["tokens_per_second"] == pytest.approx(256 / record["step_seconds"])
        assert record["targets_per_second"] == pytest.approx(64 / record["step_seconds"])
        assert record["mfu"] == pytest.approx(record["tokens_per_second"] * flops / 1e15 / ranks)
    assert 4 < records[0]["loss"] < 7, "a mean over targets"


def train_masked(run: RunSpec) -> tuple[list[MetricsRecord], MetricsRecord]:
    """Return the records of three steps, and of one after a resume from a checkpoint."""
    trainer, resumed = make_trainer(run), make_trainer(run)
    batches = prefetch(trainer.loader, 0, 4)
    trainer.utilization.peak_flops = resumed.utilization.peak_flops = 1e15
    records = [trainer.train_step(batches) for _ in range(3)]
    trainer.save()
    trainer.checkpointer.wait()
    if dist.is_initialized():
        dist.barrier()
    resumed.resume()
    return records, resumed.train_step(prefetch(resumed.loader, 3, 4))


def test_checkpoint_without_count_of_targets_resumes_with_that_of_tokens(text: Path, tmp_path: Path) -> None:
    """Earlier versions counted only targets, and called them tokens."""
    trainer = make_trainer(small_run(text, tmp_path, {}))
    train_until(trainer, 1)
    manifest = {**trainer._build_manifest(), "step": 1}
    del manifest["targets"]
    trainer._restore_progress(manifest)
    assert (trainer.tokens, trainer.targets) == (256, 256)


def test_trainer_asks_clock_of_device_once_per_step(text: Path, tmp_path: Path) -> None:
    """Each question waits for the GPU."""

    class CountingClock(DeviceClock):
        num_questions = 0

        def resolve(self, timestamps: Sequence[Timestamp]) -> list[float]:
            self.num_questions += 1
            return super().resolve(timestamps)

    trainer = make_trainer(small_run(text, tmp_path, {}))
    trainer.strategy.clock = clock = CountingClock(trainer.device)
    train_until(trainer, 3)
    assert clock.num_questions == 3


def test_utilization_never_exceeds_measured_peak_of_cpu(text: Path, tmp_path: Path) -> None:
    """A measured peak that is too low is raised to what steps reach; a peak of the run file stays."""
    run = small_run(text, tmp_path, {"training.steps": 2})
    for peak_of_run_file, is_capped in ((None, True), (1.0, False)):
        cluster = run.cluster.model_copy(update={"peak_flops": peak_of_run_file})
        create_run(run, 1, resume=False)
        trainer = make_trainer(run.model_copy(update={"cluster": cluster}))
        trainer.utilization.peak_flops = 1.0
        record = trainer.train_step(prefetch(trainer.loader, 0, 1))
        assert (record["hfu"] <= 1.0) == is_capped


def test_evaluation_is_independent_of_micro_batch_size_and_layout(text: Path, tmp_path: Path) -> None:
    reference = make_trainer(small_run(text, tmp_path, {"layout.micro_batch_size": 8})).evaluate()
    small_micro_batches = make_trainer(small_run(text, tmp_path, {"layout.micro_batch_size": 1})).evaluate()
    sharded = rank_pool(2).run(evaluate_held_out, small_run(text, tmp_path, {"layout.data_parallel": "zero3"}))
    for other in (small_micro_batches, *sharded):
        for name in ("held_out_loss", "held_out_bits_per_byte", "held_out_tokens"):
            assert other[name] == pytest.approx(reference[name], rel=1e-12)
    # Bytes are tokens of one byte, but for the token at the end of each document.
    assert reference["held_out_bits_per_byte"] == pytest.approx(reference["held_out_loss"] / math.log(2), rel=0.01)


def evaluate_held_out(run: Any) -> dict[str, Any]:
    return make_trainer(run).evaluate()


def test_router_bias_update_balances_experts(text: Path, tmp_path: Path) -> None:
    """The auxiliary losses are off, so only the bias balances experts."""
    moe = {**MOE["moe"], "balance_loss_coef": 0.0, "z_loss_coef": 0.0, "bias_update_rate": 0.02}
    trainer = make_trainer(small_run(text, tmp_path, {"model": {**MOE, "moe": moe}, "training.steps": 60}))
    batches = prefetch(trainer.loader, 0, 60)
    shares = [trainer.train_step(batches)["hot_expert_share"] for _ in range(60)]
    assert sum(shares[-10:]) < sum(shares[:10])


def test_trainer_reduces_loss_with_every_optimizer(text: Path, tmp_path: Path) -> None:
    for optimizer in ("adamw", "sgd", "muon"):
        rate = 0.3 if optimizer == "sgd" else 0.01
        changes = {"optimizer.name": optimizer, "optimizer.learning_rate": rate, "training.precision": "fp32"}
        losses = [loss for loss, _ in train_until(make_trainer(small_run(text, tmp_path, changes)), 20)]
        assert losses[-1] < losses[0] - 0.5, optimizer


LONG = {"training.steps": 100_000, "training.precision": "fp32"}


def start_training(run: Any, tmp_path: Path, *more: str, nproc: int = 2) -> subprocess.Popen[str]:
    file = tmp_path / "run.toml"
    file.write_text(to_toml(run))
    command = [sys.executable, "-m", "phalanx", "train", str(file), "--nproc", str(nproc), *more]
    return start_python(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)


@contextmanager
def sighup_disposition(handler: signal.Handlers) -> Iterator[None]:
    """Set what processes that start meanwhile do on SIGHUP."""
    before = signal.signal(signal.SIGHUP, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)


def test_torchrun_training_matches_single_process(text: Path, tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(to_toml(small_run(text, tmp_path, {"layout.data_parallel": "zero3"})))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*torchrun, "-m", "phalanx.train", str(file), "--set", "training.steps=4"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert "held-out loss" in result.stdout
    single_process = train_until(make_trainer(small_run(text, tmp_path / "one", {"training.steps": 4})), 4)
    trained = [record for record in read_metrics(tmp_path / "parity") if "loss" in record]
    assert [(r["loss"], r["grad_norm"]) for r in trained] == [pytest.approx(step, rel=1e-10) for step in single_process]


@pytest.mark.parametrize(
    ("signal_number", "nproc", "exit_code"),
    [
        (signal.SIGTERM, 2, EXIT_STOPPED),
        (signal.SIGINT, 2, EXIT_INTERRUPTED),
        (signal.SIGINT, 1, EXIT_INTERRUPTED),
        (signal.SIGHUP, 2, EXIT_STOPPED),  # the terminal was closed
    ],
)
def test_stop_signal_saves_checkpoint_and_sets_exit_code(
    signal_number: int, nproc: int, exit_code: int, text: Path, tmp_path: Path
) -> None:
    run = small_run(text, tmp_path, LONG)
    with sighup_disposition(signal.SIG_DFL):  # these tests may be under nohup
        process = start_training(run, tmp_path, nproc=nproc)
    wait_for_steps(process, tmp_path / "parity", 3)
    os.killpg(process.pid, signal_number)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == exit_code
    last = read_metrics(tmp_path / "parity")[-1]["step"]
    assert f"stopped by a signal after step {last}" in out
    assert (tmp_path / "parity" / "checkpoints" / "latest").read_text() == f"step-{last:08d}\n"


@pytest.mark.parametrize(("nproc", "max_restarts"), [(2, 3), (1, 0)], ids=["launcher", "launcher-is-rank"])
def test_stopped_run_exits_with_code_of_kubeflow(nproc: int, max_restarts: int, text: Path, tmp_path: Path) -> None:
    recovery = {"exit_codes": "kubeflow", "max_restarts": max_restarts}
    process = start_training(small_run(text, tmp_path, {**LONG, "recovery": recovery}), tmp_path, nproc=nproc)
    wait_for_steps(process, tmp_path / "parity", 3)
    os.killpg(process.pid, signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM


def test_run_under_nohup_survives_sighup(text: Path, tmp_path: Path) -> None:
    with sighup_disposition(signal.SIG_IGN):
        process = start_training(small_run(text, tmp_path, LONG), tmp_path)
    wait_for_steps(process, tmp_path / "parity", 3)
    os.killpg(process.pid, signal.SIGHUP)
    last = read_metrics(tmp_path / "parity")[-1]["step"]
    wait_for_steps(process, tmp_path / "parity", last + 5)
    os.killpg(process.pid, signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == EXIT_STOPPED


def test_missing_gpu_is_recorded_as_failure_of_its_rank(text: Path, tmp_path: Path) -> None:
    """It is not an error of the user, and the rank must not train on the CPU instead."""
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    directory = create_run(small_run(text, tmp_path, {}), 2, resume=False)
    variables = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    variables[LAUNCHER_PID_ENV] = str(os.getpid())
    command = [sys.executable, "-m", "phalanx.train", str(directory), "--device", "cuda"]
    result = run_python(command, env={**os.environ, **variables}, timeout=100)
    assert result.returncode == 1
    (failure,) = read_failures(directory)
    assert (failure["rank"], failure["code"], failure["final"]) == (1, 1, False)
    assert not is_peer_loss(failure["reason"])


def test_standby_rank_exits_as_stopped_on_sigterm(text: Path, tmp_path: Path) -> None:
    """A rank that is killed by the signal would leave the others no time to save."""
    directory = create_run(small_run(text, tmp_path, {}), 1, resume=False)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    variables = {"RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    command = [sys.executable, "-m", "phalanx.train", str(directory), "--ranks", "1"]
    with start_python(command, env={**os.environ, **variables}, stderr=subprocess.DEVNULL) as process:
        try:
            sigterm_bit = 1 << (signal.SIGTERM - 1)
            status = Path(f"/proc/{process.pid}/status")
            wait_until(
                lambda: int(status.read_text().split("SigCgt:\t")[1][:16], 16) & sigterm_bit, "it listens for signals"
            )
            process.terminate()
            assert process.wait(timeout=60) == EXIT_STOPPED
        finally:
            process.kill()


def test_standby_rank_that_starts_after_the_end_exits_at_once(text: Path, tmp_path: Path) -> None:
    """Rank 0 keeps its store until the standby rank has connected."""
    directory = create_run(small_run(text, tmp_path, {"training.steps": 4}), 1, resume=False)
    command = [sys.executable, "-m", "phalanx.train", str(directory), "--layout", "{}", "--ranks", "1"]
    environment = {**os.environ, "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    with socket.create_server(("127.0.0.1", 0)) as probe:
        environment["MASTER_PORT"] = str(probe.getsockname()[1])
    with start_python(command, env={**environment, "RANK": "0"}) as training_rank:
        try:
            wait_until(lambda: is_finished(directory), "the end of training")
            standby_rank = run_python(command, env={**environment, "RANK": "1"}, timeout=60)
            assert (standby_rank.returncode, training_rank.wait(timeout=60)) == (0, 0)
        finally:
            training_rank.kill()


def test_divergence_of_all_ranks_prints_one_message(text: Path, tmp_path: Path) -> None:
    changes = {"optimizer.learning_rate": 1e30, "optimizer.max_grad_norm": 0.0, "training.precision": "fp32"}
    process = start_training(small_run(text, tmp_path, {**changes, "optimizer.name": "sgd"}), tmp_path)
    _, stderr = process.communicate(timeout=100)
    assert process.returncode == 1
    assert stderr.count("phalanx: ") == 1
    assert "not finite" in stderr
    assert "learning_rate" in stderr
    assert "Traceback" not in stderr


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"layout.data_parallel": "parameter_server"},
        {"layout.data_parallel": "parameter_server", "layout.max_staleness": 1},
    ],
    ids=["ddp", "parameter-server", "parameter-server-async"],
)
def test_failure_report_names_killed_rank_not_its_peers(changes: dict[str, Any], text: Path, tmp_path: Path) -> None:
    """The other ranks fail because they lost rank 1, which is a worker of the parameter server if there is one."""
    run = small_run(text, tmp_path, {**LONG, "recovery.max_restarts": 0, **changes})
    process = start_training(run, tmp_path, nproc=3 if changes else 2)
    wait_for_steps(process, tmp_path / "parity", 3)
    os.kill(rank_pids(tmp_path / "parity")[1], signal.SIGKILL)
    _, stderr = process.communicate(timeout=100)
    assert process.returncode == 1
    assert "phalanx: rank 1 was killed by SIGKILL" in stderr
    assert stderr.count("phalanx: ") == 1
    assert f"there is no checkpoint yet; start over with: phalanx train {tmp_path / 'parity'} --resume" in stderr
    failure = json.loads((tmp_path / "parity" / "failures" / "rank-00001.json").read_text())
    assert failure["reason"].startswith("was killed by SIGKILL")


def test_wait_for_uploads_ends_before_a_stopped_run_is_killed(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make_trainer(small_run(text, tmp_path, {"checkpoint.directory": "s3://bucket/runs"}))
    limits: list[tuple[float, bool]] = []

    def record_limits(seconds: float, should_end: Callable[[], bool]) -> list[str]:
        limits.append((seconds, should_end()))
        return []

    monkeypatch.setattr(trainer.checkpointer, "finish_uploads", record_limits)
    trainer.finish_uploads()
    trainer.stop_requested = True
    assert trainer.stop_requested_at is not None
    trainer.stop_requested_at -= 400
    trainer.stop_requested = True  # by a second signal
    trainer.finish_uploads()
    trainer.stop_requested_at -= 200
    trainer.finish_uploads()
    assert limits == [(600, False), (pytest.approx(140, abs=30), False), (pytest.approx(-60, abs=30), True)]


def stop_step(run: Any, signaled_rank: int) -> int | None:
    """Return the step after which this rank stops if only one rank receives a signal, before the second step."""
    trainer = make_trainer(run)
    batches = prefetch(trainer.loader, 0, run.training.steps)
    trainer.train_step(batches)
    trainer.stop_requested = trainer.mesh.rank == signaled_rank
    trainer.train_step(batches)
    return trainer.stop_after_step


@pytest.mark.parametrize("changes", [{"layout.tp": 2}, {"layout.cp": 2}, {"layout.pp": 2}, {"layout.ep": 2}])
@pytest.mark.parametrize("signaled_rank", [0, 1])
def test_all_ranks_stop_at_same_step_when_one_is_signaled(changes: Any, signaled_rank: int, tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.mkdir()
    for number in range(3):
        (text / f"{number}.py").write_text(Path(__file__).read_text())
    run = small_run(text, tmp_path, {"model": MOE, "layout.micro_batch_size": 1, **changes})
    assert rank_pool(2).run(stop_step, run, signaled_rank) == [2, 2]


def expert_metrics(run: Any) -> tuple[list[tuple[float, ...]], list[list[int]]]:
    """Return the expert metrics of three steps, and the number of tokens of each expert in them."""
    trainer = make_trainer(run)
    batches = prefetch(trainer.loader, 0, run.training.steps)
    names = ("auxiliary_loss", "hot_expert_share", "dropped_share")
    records = [trainer.train_step(batches) for _ in range(3)]
    assert all(("all_to_all_seconds" in record) == (run.layout.ep > 1) for record in records)
    trainer.experts.start_interval()
    counts = trainer.evaluate()["expert_tokens"]
    assert [sum(layer_counts) for layer_counts in counts] == [3 * 8 * 32 * run.model.moe.top_k] * len(counts)
    trainer.experts.start_interval()
    assert not any(map(sum, trainer.evaluate()["expert_tokens"])), "counted since the evaluation before"
    return [tuple(record[name] for name in names if name in record) for record in records], counts


NO_SEQUENCE_PARALLEL = {"layout.tp": 2, "layout.sequence_parallel": False}
EXPERT_LAYOUTS: list[tuple[Any, int, float | None]] = [
    *(({"layout.ep": 2}, 2, capacity) for capacity in (None, 0.75)),
    *((NO_SEQUENCE_PARALLEL, 2, capacity) for capacity in (None, 0.75)),
    *(({"layout.pp": 2, "layout.ep": 2, "layout.micro_batch_size": 1}, 4, capacity) for capacity in (None, 0.75)),
    ({"layout.tp": 2}, 2, None),
    ({"layout.cp": 2}, 2, None),
    ({"layout.ep": 2, "layout.tp": 2}, 4, None),
    ({"layout.ep": 2, "layout.activation_checkpointing": "full"}, 2, None),
    ({"layout.pp": 2, "layout.schedule": "zb-h1", "layout.activation_checkpointing": "full"}, 2, None),
]


@pytest.mark.parametrize(("changes", "world_size", "capacity"), EXPERT_LAYOUTS, ids=map(str, EXPERT_LAYOUTS))
def test_expert_metrics_are_independent_of_layout(
    changes: Any, world_size: int, capacity: float | None, tmp_path: Path
) -> None:
    text = tmp_path / "text"
    text.mkdir()
    for number in range(3):
        (text / f"{number}.py").write_text(Path(__file__).read_text())
    model = {**MOE, "moe": {**MOE["moe"], **({} if capacity is None else {"capacity_factor": capacity})}}
    records, counts = expert_metrics(small_run(text, tmp_path / "one", {"model": model}))
    assert len(records[0]) == (2 if capacity is None else 3)
    assert capacity is None or all(0 < dropped_share < 1 for *_, dropped_share in records)
    for rank in rank_pool(world_size).run(
        expert_metrics, small_run(text, tmp_path / "many", {"model": model, **changes})
    ):
        assert rank == ([pytest.approx(step, rel=1e-10) for step in records], counts)


@pytest.mark.parametrize(
    ("missing", "expected"),
    [([], "checkpoints uploaded to s3://bucket/run"), (["step-00000008"], "not in s3://bucket/run")],
)
def test_end_of_a_run_says_whether_its_checkpoints_are_in_the_store(
    missing: list[str], expected: str, caplog: pytest.LogCaptureFixture
) -> None:
    checkpointer = SimpleNamespace(wait_for_all_ranks=lambda: None, directory=Path("runs/run/checkpoints"))
    trainer = SimpleNamespace(
        checkpointer=checkpointer,
        run=run_from_table({"checkpoint": {"directory": "s3://bucket"}}),
        is_main=True,
        finish_uploads=lambda: missing,
        _report_checkpoint=lambda: None,
    )
    with caplog.at_level("INFO"):
        Trainer.finish_checkpoint(trainer)  # type: ignore[arg-type]
    assert expected in caplog.text
