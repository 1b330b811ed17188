"""Real runs that are slow for one known reason: the verdict names the reason and the rank."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from phalanx.report.bottlenecks import Bottleneck, find_bottlenecks
from phalanx.report.run_data import read_run
from phalanx.report.step_breakdown import step_times
from phalanx.runs.create import read_run_directory
from phalanx.spec.files.load import run_from_table
from phalanx.spec.run import RunSpec
from phalanx.testing import rank_pool
from phalanx.testing.network_namespaces import NamespacesUnavailable, star_network
from phalanx.train.callbacks.standard import build_record_writers
from phalanx.train.create_run import create_run
from phalanx.train.trainer import Trainer
from phalanx.train.training_data import open_training_data
from tests.helpers.small_runs import train_to_end

pytestmark = pytest.mark.alone
STEPS, FROM_STEP = 20, 9
MODEL = {
    "vocab_size": 257,
    "hidden_size": 128,
    "num_layers": 4,
    "num_heads": 4,
    "num_kv_heads": 4,
    "ffn_hidden_size": 512,
    "max_seq_len": 128,
}
THREE_LAYERS = {**MODEL, "num_layers": 3}
MOE = {
    **MODEL,
    "num_layers": 2,
    "moe": {"num_experts": 4, "top_k": 2, "expert_ffn_size": 512, "bias_update_rate": 1e-6},
}


def build_run_spec(out: Path, model: dict[str, Any] = MODEL, **layout: Any) -> RunSpec:
    return run_from_table(
        {
            "name": "run",
            "output_dir": str(out),
            "model": model,
            "data": {"train": [str(Path(json.__file__).parent)], "tokenizer": "bytes", "cache": str(out / "cache")},
            "training": {"steps": STEPS, "seq_len": 128, "tokens_per_step": 16 * 128, "precision": "fp32"},
            "layout": layout,
            "evaluation": {"tokens": 128},
            "cluster": {"device": "cpu", "nproc_per_node": 2},
        }
    )


# It ends on SIGTERM, or with the rank, and always leaves the rank running.
PAUSER = """
import os, signal, sys, time
rank, ended = int(sys.argv[1]), []
signal.signal(signal.SIGTERM, lambda *_: ended.append(1))
while not ended and os.getppid() == rank:
    os.kill(rank, signal.SIGSTOP)
    time.sleep(0.03)
    os.kill(rank, signal.SIGCONT)
    time.sleep(0.03)
"""


@contextmanager
def no_slowdown(trainer: Trainer) -> Iterator[None]:
    yield


@contextmanager
def slow_rank(trainer: Trainer) -> Iterator[None]:
    """Let another process stop rank 1 half of the time, from a step on."""
    pausers: list[subprocess.Popen[bytes]] = []
    step = trainer.launch_step

    def launch_step(batches: Any) -> Any:
        if trainer.step + 1 == FROM_STEP and trainer.mesh.rank == 1:
            pausers.append(subprocess.Popen([sys.executable, "-c", PAUSER, str(os.getpid())]))
        return step(batches)

    trainer.launch_step = launch_step  # type: ignore[method-assign]
    try:
        yield
    finally:
        for pauser in pausers:
            pauser.send_signal(signal.SIGTERM)
            pauser.wait(timeout=30)


@contextmanager
def starved_loader(trainer: Trainer) -> Iterator[None]:
    """Delay each read of rank 1 by twice its computing time."""
    step = trainer.loader.step

    def delayed_step(number: int) -> Any:
        computing = (
            sum(sum(kinds.values()) for kinds in trainer.step_record["stages"].values()) if trainer.step_record else 0.5
        )
        time.sleep(2 * computing)
        return step(number)

    if trainer.mesh.rank == 1:
        trainer.loader.step = delayed_step  # type: ignore[method-assign]
    yield


@contextmanager
def hot_expert(trainer: Trainer) -> Iterator[None]:
    """Make all tokens choose expert 3, which is on rank 1."""
    for router in trainer.routers.values():
        router.bias[3] = 10.0
    yield


SLOWDOWNS: dict[str, Callable[[Trainer], Any]] = {
    "nothing": no_slowdown,
    "slow_rank": slow_rank,
    "starved_loader": starved_loader,
    "hot_expert": hot_expert,
}


def train_with_slowdown(directory: Path, slowdown: str) -> None:
    """Train this rank's part of a run that is slowed down."""
    run, data = read_run_directory(directory)
    trainer = Trainer(run, open_training_data(run, data, True), directory, torch.device("cpu"), 1e11)
    with SLOWDOWNS[slowdown](trainer):
        train_to_end(trainer, build_record_writers(run))


def read_bottlenecks(directory: Path) -> tuple[Bottleneck, str]:
    recorded = read_run(directory)
    times = step_times(recorded)
    assert times is not None
    assert recorded.problems == []
    bottlenecks = find_bottlenecks(recorded, times)
    return bottlenecks[0], "\n".join(map(str, bottlenecks))


@pytest.mark.parametrize(
    ("slowdown", "model", "layout", "is_expected"),
    [
        ("slow_rank", MODEL, {}, lambda it: (it.kind, it.rank) == ("straggler", 1) and abs(it.since - FROM_STEP) <= 2),
        ("slow_rank", MODEL, {"data_parallel": "zero3"}, lambda it: (it.kind, it.rank) == ("straggler", 1)),
        ("starved_loader", MODEL, {}, lambda it: (it.kind, it.rank) == ("input", 1)),
        ("hot_expert", MOE, {"ep": 2}, lambda it: (it.kind, it.rank) == ("expert", 1) and it.expert[1] == 3),
        ("nothing", THREE_LAYERS, {"pp": 2, "micro_batch_size": 1}, lambda it: (it.kind, it.stage) == ("stage", 0)),
        ("nothing", MODEL, {"pp": 2, "micro_batch_size": 8}, lambda it: it.kind == "bubble"),
        ("nothing", MODEL, {}, lambda it: it.kind in ("compute", "communication")),
    ],
    ids=[
        "slow-rank",
        "slow-rank-zero3",
        "starved-loader",
        "hot-expert",
        "unbalanced-stage",
        "few-micro-batches",
        "well",
    ],
)
def test_find_bottlenecks_identifies_cause_of_slowed_training_run(
    tmp_path: Path,
    slowdown: str,
    model: dict[str, Any],
    layout: dict[str, Any],
    is_expected: Callable[[Bottleneck], bool],
) -> None:
    for attempt in ("first", "second"):  # another process may use a core meanwhile
        directory = create_run(build_run_spec(tmp_path / attempt, model, **layout), 2, resume=False)
        rank_pool(2).run(train_with_slowdown, directory, slowdown)
        first, verdicts = read_bottlenecks(directory)
        if is_expected(first):
            break
    assert is_expected(first), verdicts


@pytest.fixture
def slow_link_prefixes() -> Iterator[list[list[str]]]:
    """Provide command prefixes that give two processes a network each, with a link of 40 Mbit/s between them."""
    try:
        with star_network(["far"], 40) as network:
            far = network.hosts["far"]
            ends = ((network.hub, f"h{far.interface}"), (far, far.interface))
            yield [[*host.prefix, "env", f"GLOO_SOCKET_IFNAME={end}"] for host, end in ends]
    except NamespacesUnavailable as unavailable:
        pytest.skip(f"this process may not make networks: {unavailable}")


def test_find_bottlenecks_reports_communication_for_slow_link(
    tmp_path: Path, slow_link_prefixes: list[list[str]]
) -> None:
    directory = create_run(build_run_spec(tmp_path), 2, resume=False)
    variables = {"MASTER_ADDR": "10.77.0.1", "MASTER_PORT": "29511", "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [*prefix, sys.executable, "-m", "phalanx.train", str(directory)],
            env={**os.environ, **variables, "RANK": str(rank), "LOCAL_RANK": "0"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, prefix in enumerate(slow_link_prefixes)
    ]
    try:
        stderrs = [process.communicate(timeout=200)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], stderrs
    first, verdicts = read_bottlenecks(directory)
    assert first.kind == "communication", verdicts
