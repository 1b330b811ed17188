"""Collectives of each layer, counted in real steps, compared with published counts."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from phalanx.data.loader import prefetch
from phalanx.parallel.comm.collectives import REQUESTED_OPERATION
from phalanx.spec.run import RunSpec
from phalanx.testing import rank_pool
from phalanx.train.profiling.collective_recorder import CollectiveRecorder
from tests.helpers.small_runs import DENSE, MOE, make_trainer, small_run, train_until


def count_step_collectives(run: RunSpec) -> Counter[str]:
    """Count the collectives that a step of one micro-batch requests."""
    trainer = make_trainer(run)
    train_until(trainer, 2)
    batches = prefetch(trainer.loader, 2, 3)
    with CollectiveRecorder(REQUESTED_OPERATION.get) as recorder:
        trainer.train_step(batches)
    return Counter(call.operation for call in recorder.calls)


def count_layer_collectives(
    text: Path, out: Path, model: dict[str, Any], world_size: int, changes: dict[str, Any]
) -> Counter[str]:
    """Return the collectives that one more layer adds."""
    counts = []
    for layers in (2, 3):
        run = small_run(text, out / str(layers), {"model": {**model, "num_layers": layers}, **changes})
        rank_counts = rank_pool(world_size).run(count_step_collectives, run)
        assert rank_counts == [rank_counts[0]] * world_size
        counts.append(rank_counts[0])
    counts[1].subtract(counts[0])
    return Counter({name: count for name, count in counts[1].items() if count})


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    for number in range(3):
        (folder / f"{number}.py").write_text(Path(__file__).read_text())
    return folder


def test_tensor_parallel_layer_runs_two_all_reduces_each_pass(text: Path, tmp_path: Path) -> None:
    """Attention and MLP all-reduce once each, forward and backward (Megatron-LM, section 3)."""
    changes = {"layout.tp": 2, "layout.sequence_parallel": False}
    assert count_layer_collectives(text, tmp_path, DENSE, 2, changes) == {"all_reduce": 2 + 2}


def test_sequence_parallel_layer_runs_6_all_gathers_and_4_reduce_scatters(text: Path, tmp_path: Path) -> None:
    """Attention and MLP each gather and reduce-scatter once per pass; the backward pass also gathers the input, which
    is stored sharded (arXiv 2205.05198, section 4.2.2)."""
    counts = count_layer_collectives(text, tmp_path, DENSE, 2, {"layout.tp": 2})
    assert counts == {"all_gather": 2 + 2 + 2, "reduce_scatter": 2 + 2}


def test_gathered_heads_add_one_all_gather_and_one_reduce_scatter(text: Path, tmp_path: Path) -> None:
    """This layout is for heads that the ranks cannot divide. In addition to the all-reduces, it gathers queries and
    keys forward, and reduce-scatters their gradients backward. Values are not exchanged."""
    model = {**DENSE, "num_heads": 3, "num_kv_heads": 3, "hidden_size": 36}
    changes = {"layout.tp": 2, "layout.sequence_parallel": False, "layout.tp_attention": "gathered"}
    expected = {"all_reduce": 2 + 2, "all_gather": 1, "reduce_scatter": 1}
    assert count_layer_collectives(text, tmp_path, model, 2, changes) == expected


def test_expert_parallel_layer_runs_4_token_and_1_count_all_to_all(text: Path, tmp_path: Path) -> None:
    """Tokens are dispatched and combined in both passes (GShard, section 3.2); another all-to-all exchanges their
    counts."""
    counts = count_layer_collectives(text, tmp_path, MOE, 2, {"layout.ep": 2})
    assert counts["all_to_all"] == 1 + 2 + 2


@pytest.mark.parametrize(("kind", "expected"), [("ring", {"send": 4, "recv": 4}), ("ulysses", {"all_to_all": 2 + 2})])
def test_context_parallel_ring_uses_p2p_and_ulysses_all_to_all(
    kind: str, expected: dict[str, int], text: Path, tmp_path: Path
) -> None:
    """In a ring of two, keys and values are sent once forward and once backward, and their gradients twice, the last
    time to their owner. Ulysses exchanges to heads and back in both passes."""
    counts = count_layer_collectives(text, tmp_path, DENSE, 2, {"layout.cp": 2, "layout.cp_method": kind})
    assert {name: counts[name] for name in expected} == expected
