"""The parameter server: synchronous, asynchronous within its bound, and who holds what."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from parity.trajectory import MOE, described, steps, trainer, trajectory

from phalanx.parallel.parameter_server import Server, Worker
from phalanx.spec.layout import spread
from phalanx.spec.run import RunSpec
from phalanx.testing import ranks

SERVER = {"parallel.data": "parameter_server"}


@pytest.fixture(scope="module")
def text() -> Path:
    return Path(json.__file__).parent


@pytest.mark.parametrize("changes", [{}, {"parallel.servers": 2}, {"optimizer.name": "muon", "model": MOE}])
def test_asynchronous_with_staleness_0_is_synchronous_bit_for_bit(changes: Any, text: Path, tmp_path: Path) -> None:
    changes = {**SERVER, "training.precision": "bf16", **changes}
    synchronous = ranks(4).run(trajectory, described(text, tmp_path, changes))
    assert ranks(4).run(trajectory, described(text, tmp_path, {**changes, "parallel.staleness": 0})) == synchronous


def one_worker_is_slow(run: RunSpec) -> list[dict[str, Any]]:
    """The records of a run in which the last rank takes longer for its first three backward passes."""
    under_way = trainer(run)
    if dist.get_rank() == dist.get_world_size() - 1:
        forward = under_way.strategy.model.forward
        calls = iter(range(1000))

        def slow(*arguments: Any) -> Any:
            time.sleep(0.3 if next(calls) < 3 else 0)
            return forward(*arguments)

        under_way.strategy.model.forward = slow  # type: ignore[method-assign]
    from phalanx.data.loader import prefetch

    batches = prefetch(under_way.loader, 0, run.training.steps)
    records = [under_way.train_step(batches) for _ in range(run.training.steps)]
    under_way.evaluate()
    return records


@pytest.mark.parametrize("servers", [1, 2])
def test_staleness_is_used_bounded_and_reported(servers: int, text: Path, tmp_path: Path) -> None:
    changes = {**SERVER, "parallel.staleness": 2, "parallel.servers": servers, "training.steps": 40}
    results = ranks(4).run(one_worker_is_slow, described(text, tmp_path, changes))
    stale = [record["staleness"] for record in results[0]]
    assert max(stale) <= 2
    assert max(stale) > 0, "nobody went ahead of the slow worker"
    assert [record["step"] for record in results[0]] == list(range(1, 41))
    for worker in results[servers:]:
        assert all(index + 1 - 2 <= record["step"] <= index + 1 for index, record in enumerate(worker))
    losses = [record["loss"] for record in results[0]]
    assert losses[-1] < losses[0] - 1


def held(run: RunSpec) -> tuple[int, int, int]:
    """Elements of weights, gradients and optimizer state that this rank holds after a step."""
    under_way = trainer(run)
    steps(under_way, 1)
    strategy = under_way.strategy
    state = sum(
        value.numel()
        for optimizer in under_way.optimizers
        for values in optimizer.state.values()
        for value in values.values()
        if value.numel() > 1
    )
    if isinstance(strategy, Server):
        return strategy.weights.numel(), strategy.sum.numel(), state
    assert isinstance(strategy, Worker)
    return sum(w.numel() for w in strategy.weights), sum(s.numel() for s in strategy.sums), state


@pytest.mark.parametrize(("optimizer", "states"), [("adamw", 2), ("sgd", 1)])
def test_workers_hold_weights_and_gradients_whatever_the_optimizer(
    optimizer: str, states: int, text: Path, tmp_path: Path
) -> None:
    run = described(text, tmp_path, {**SERVER, "parallel.servers": 2, "optimizer.name": optimizer})
    *servers, first, second = ranks(4).run(held, run)
    whole = first[0]
    assert first == second == (whole, whole, 0)
    assert sum(server[0] for server in servers) == whole
    assert all(server == (server[0], server[0], states * server[0]) for server in servers)
    assert max(server[0] for server in servers) < 0.55 * whole


@given(st.dictionaries(st.text(max_size=3), st.integers(1, 1000), min_size=1, max_size=30), st.integers(1, 6))
def test_parameters_are_spread_by_size(sizes: dict[str, int], servers: int) -> None:
    owner = spread(sizes, servers)
    assert owner.keys() == sizes.keys()
    load = [sum(size for name, size in sizes.items() if owner[name] == server) for server in range(servers)]
    # The rule of longest processing time: at most 4/3 - 1/(3m) of the best (Graham 1969), which is at least this.
    best = max(sum(sizes.values()) / servers, max(sizes.values()))
    assert max(load) <= best * 2
    assert max(load) - min(load) <= max(sizes.values())
