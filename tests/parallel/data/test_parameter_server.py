"""The parameter server: synchronous, asynchronous with bounded staleness, and the memory of servers and workers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from phalanx.cost.exact.traffic import traffic_by_role
from phalanx.data.loader import prefetch
from phalanx.data.packing import Batch
from phalanx.parallel.data.parameter_server import ParameterServer, ParameterServerWorker, build_parameter_server
from phalanx.spec.errors import UserError
from phalanx.spec.layout import Layout, assign_parameters_to_servers
from phalanx.spec.resolved_run import ResolvedRun
from phalanx.spec.run import RunSpec
from phalanx.testing import rank_pool
from phalanx.train.profiling.collective_recorder import CollectiveRecorder
from phalanx.train.step_metrics import ReadRecord
from phalanx.train.trainer import Trainer
from tests.helpers.small_runs import DENSE, MOE, make_trainer, small_run, train_until, training_trajectory

PARAMETER_SERVER = {"layout.data_parallel": "parameter_server"}


@pytest.mark.parametrize("changes", [{}, {"layout.num_servers": 2}, {"optimizer.name": "muon", "model": MOE}])
def test_parameter_server_staleness_0_is_bitwise_equal_to_sync(changes: Any, text: Path, tmp_path: Path) -> None:
    changes = {**PARAMETER_SERVER, "training.precision": "bf16", **changes}
    synchronous = rank_pool(4).run(training_trajectory, small_run(text, tmp_path, changes))
    assert (
        rank_pool(4).run(training_trajectory, small_run(text, tmp_path, {**changes, "layout.max_staleness": 0}))
        == synchronous
    )


def delay_last_worker(trainer: Trainer) -> None:
    """Delay the second step of the last rank until the first worker is as far ahead as it may be."""
    run, last = trainer.run, dist.get_world_size() - 1
    max_steps_ahead = min(1 + (run.layout.max_staleness or 0), run.training.steps)
    waiting = dist.new_group([run.layout.num_servers, last], backend="gloo")
    launch_step, done = trainer.launch_step, iter(range(1, 1000))

    def delayed_step(batches: Iterator[Batch]) -> ReadRecord:
        launched, steps_done = launch_step(batches), next(done)
        if steps_done == (1 if dist.get_rank() == last else max_steps_ahead):
            dist.barrier(waiting)
        return launched

    if dist.get_rank() in (run.layout.num_servers, last):
        trainer.launch_step = delayed_step  # type: ignore[method-assign]


def train_with_slow_worker(run: RunSpec) -> list[dict[str, Any]]:
    """Return the records of a run in which the first worker is, at first, as far ahead of the last as it may be."""
    trainer = make_trainer(run)
    delay_last_worker(trainer)
    batches = prefetch(trainer.loader, 0, run.training.steps)
    records = [trainer.train_step(batches) for _ in range(run.training.steps)]
    trainer.evaluate()
    return records


@pytest.mark.parametrize("servers", [1, 2])
def test_parameter_server_bounds_and_reports_staleness(servers: int, text: Path, tmp_path: Path) -> None:
    changes = {**PARAMETER_SERVER, "layout.max_staleness": 2, "layout.num_servers": servers, "training.steps": 40}
    results = rank_pool(4).run(train_with_slow_worker, small_run(text, tmp_path, changes))
    stale = [record["staleness"] for record in results[0]]
    assert max(stale) <= 2
    assert max(stale) > 0, "nobody went ahead of the slow worker"
    assert [record["step"] for record in results[0]] == list(range(1, 41))
    for worker in results[servers:]:
        assert all(index + 1 - 2 <= record["step"] <= index + 1 for index, record in enumerate(worker))
    losses = [record["loss"] for record in results[0]]
    assert losses[-1] < losses[0] - 1


def evaluate_before_first_update(run: RunSpec) -> float:
    """Return the step of this rank's first record, in a run whose server updates only after all workers have made a
    step."""
    trainer = make_trainer(run)
    batches, all_ranks = prefetch(trainer.loader, 0, run.training.steps), dist.new_group(backend="gloo")
    update = trainer.strategy.update

    def delayed_update(optimizers: Any) -> None:
        trainer.strategy.update = update  # type: ignore[method-assign]
        dist.barrier(all_ranks)
        update(optimizers)

    if not trainer.strategy.runs_model:
        trainer.strategy.update = delayed_update  # type: ignore[method-assign]
    first = trainer.train_step(batches)["step"]
    if trainer.strategy.runs_model:
        dist.barrier(all_ranks)
    trainer.train_step(batches)
    trainer.evaluate()
    return float(first)


def test_parameter_server_evaluates_before_workers_receive_an_update(text: Path, tmp_path: Path) -> None:
    changes = {**PARAMETER_SERVER, "layout.max_staleness": 4, "training.steps": 2, "optimizer.warmup_steps": 1}
    assert rank_pool(3).run(evaluate_before_first_update, small_run(text, tmp_path, changes), timeout=60) == [1, 0, 0]


def train_until_one_worker_stops(run: RunSpec) -> tuple[int, int]:
    """Return the step after which this rank stops when the first worker requests it at once, and the number of steps
    that the rank made."""
    trainer = make_trainer(run)
    trainer.stop_requested = dist.get_rank() == run.layout.num_servers
    batches, steps_done = prefetch(trainer.loader, 0, run.training.steps), 0
    while not trainer.should_stop:
        trainer.train_step(batches)
        steps_done += 1
    trainer.evaluate()
    return trainer.step, steps_done


@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_parameter_server_ranks_stop_after_same_step(servers: int, staleness: int, text: Path, tmp_path: Path) -> None:
    changes = {
        **PARAMETER_SERVER,
        "layout.max_staleness": staleness,
        "layout.num_servers": servers,
        "training.steps": 100,
    }
    results = rank_pool(4).run(train_until_one_worker_stops, small_run(text, tmp_path, changes), timeout=60)
    assert results == [(2 + staleness, 2 + staleness)] * 4


def measure_traffic_bytes(run: RunSpec) -> dict[str, float]:
    """Return the bytes that this rank sends and receives in ten updates, including those in flight at the end."""
    trainer = make_trainer(run)
    batches = prefetch(trainer.loader, 0, 10)
    with CollectiveRecorder() as recorder:
        for _ in range(10):
            trainer.train_step(batches)
        trainer.strategy.drain_pending_updates()
    total = Counter[str]()
    for call in recorder.calls:
        total[call.operation] += call.size_bytes
    return dict(total)


def test_async_parameter_server_traffic_matches_formula(text: Path, tmp_path: Path) -> None:
    """Workers receive updates, and servers post receives, ahead of time."""
    model = {**DENSE, "hidden_size": 64, "num_heads": 4, "num_kv_heads": 2, "vocab_size": 1024}
    run = small_run(text, tmp_path, {**PARAMETER_SERVER, "layout.max_staleness": 1, "model": model})
    server, *workers = rank_pool(3).run(measure_traffic_bytes, run)
    predicted = traffic_by_role(ResolvedRun(run, 3))
    for traffic_bytes, role in ((server, "server"), (workers[0], "worker"), (workers[1], "worker")):
        for traffic in predicted[role]:
            ahead = 2 * traffic.bytes if (role, traffic.operation) == ("server", "recv") else 0  # posted, not yet sent
            assert traffic_bytes[traffic.operation] == pytest.approx(10 * traffic.bytes + ahead, rel=0.01), (
                role,
                traffic,
            )


def test_build_parameter_server_rejects_mixed_parameter_dtypes() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double())
    with pytest.raises(UserError, match=r"1.bias in torch.float64"):
        build_parameter_server(module, Layout(data_parallel="parameter_server"), torch.device("cpu"))


def count_resident_elements(run: RunSpec) -> tuple[int, int, int]:
    """Return the elements of weights, gradients and optimizer state that this rank has after a step."""
    trainer = make_trainer(run)
    train_until(trainer, 1)
    strategy = trainer.strategy
    state = sum(
        value.numel()
        for optimizer in trainer.optimizers
        for values in optimizer.state.values()
        for value in values.values()
        if value.numel() > 1
    )
    if isinstance(strategy, ParameterServer):
        return strategy.weights.numel(), strategy.sum.numel(), state
    assert isinstance(strategy, ParameterServerWorker)
    return sum(w.numel() for w in strategy.weights), sum(s.numel() for s in strategy.sums), state


@pytest.mark.parametrize(("optimizer", "states"), [("adamw", 2), ("sgd", 1)])
def test_parameter_server_keeps_optimizer_state_on_servers_only(
    optimizer: str, states: int, text: Path, tmp_path: Path
) -> None:
    run = small_run(text, tmp_path, {**PARAMETER_SERVER, "layout.num_servers": 2, "optimizer.name": optimizer})
    *servers, first, second = rank_pool(4).run(count_resident_elements, run)
    num_elements = first[0]
    assert first == second == (num_elements, num_elements, 0)
    assert sum(server[0] for server in servers) == num_elements
    assert all(server == (server[0], server[0], states * server[0]) for server in servers)
    assert max(server[0] for server in servers) < 0.55 * num_elements


@given(st.dictionaries(st.text(max_size=3), st.integers(1, 1000), min_size=1, max_size=30), st.integers(1, 6))
def test_assign_parameters_to_servers_balances_load_within_bound(sizes: dict[str, int], servers: int) -> None:
    owner = assign_parameters_to_servers(sizes, servers)
    assert owner.keys() == sizes.keys()
    load = [sum(size for name, size in sizes.items() if owner[name] == server) for server in range(servers)]
    # Any list scheduling: at most 2 - 1/m of the best (Graham 1969, theorem 1), which is at least this.
    best = max(sum(sizes.values()) / servers, max(sizes.values()))
    assert max(load) <= best * (2 - 1 / servers) * (1 + 1e-12)
    assert max(load) - min(load) <= max(sizes.values())
