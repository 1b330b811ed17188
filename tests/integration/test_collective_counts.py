"""What every layer sends, read from steps that really ran: the published counts."""

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
    """How often each was asked for in a step of one micro-batch."""
    under_way = make_trainer(run)
    train_until(under_way, 2)
    batches = prefetch(under_way.loader, 2, 3)
    with CollectiveRecorder(REQUESTED_OPERATION.get) as recorder:
        under_way.train_step(batches)
    return Counter(call.operation for call in recorder.calls)


def count_layer_collectives(
    text: Path, out: Path, model: dict[str, Any], world_size: int, changes: dict[str, Any]
) -> Counter[str]:
    """The difference that a layer makes."""
    found = []
    for layers in (2, 3):
        run = small_run(text, out / str(layers), {"model": {**model, "num_layers": layers}, **changes})
        each = rank_pool(world_size).run(count_step_collectives, run)
        assert each == [each[0]] * world_size
        found.append(each[0])
    found[1].subtract(found[0])
    return Counter({name: count for name, count in found[1].items() if count})


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    for number in range(3):
        (folder / f"{number}.py").write_text(Path(__file__).read_text())
    return folder


def test_tensor_parallel_layer_runs_two_all_reduces_each_pass(text: Path, tmp_path: Path) -> None:
    """Two pairs in a layer, attention and MLP; none between the products of a pair (Megatron-LM, section 3)."""
    changes = {"layout.tp": 2, "layout.sequence_parallel": False}
    assert count_layer_collectives(text, tmp_path, DENSE, 2, changes) == {"all_reduce": 2 + 2}


def test_sequence_parallel_layer_runs_6_all_gathers_and_4_reduce_scatters(text: Path, tmp_path: Path) -> None:
    """Forward and backward one of each for a pair, and backward one more gather: of the input, which is kept in shares
    (arXiv 2205.05198, section 4.2.2)."""
    found = count_layer_collectives(text, tmp_path, DENSE, 2, {"layout.tp": 2})
    assert found == {"all_gather": 2 + 2 + 2, "reduce_scatter": 2 + 2}


def test_gathered_heads_add_one_all_gather_and_one_reduce_scatter(text: Path, tmp_path: Path) -> None:
    """The layout for heads that ranks cannot divide: in addition to the two pairs, queries and keys are gathered
    forward, and their gradients summed to where they belong backward; values stay where they are."""
    model = {**DENSE, "num_heads": 3, "num_kv_heads": 3, "hidden_size": 36}
    changes = {"layout.tp": 2, "layout.sequence_parallel": False, "layout.tp_attention": "gathered"}
    expected = {"all_reduce": 2 + 2, "all_gather": 1, "reduce_scatter": 1}
    assert count_layer_collectives(text, tmp_path, model, 2, changes) == expected


def test_expert_parallel_layer_runs_4_token_and_1_count_all_to_all(text: Path, tmp_path: Path) -> None:
    """Dispatch and combine (GShard, section 3.2); one more, of counts, tells how many rows will come."""
    found = count_layer_collectives(text, tmp_path, MOE, 2, {"layout.ep": 2})
    assert found["all_to_all"] == 1 + 2 + 2


@pytest.mark.parametrize(("kind", "expected"), [("ring", {"send": 4, "recv": 4}), ("ulysses", {"all_to_all": 2 + 2})])
def test_context_parallel_ring_uses_p2p_and_ulysses_all_to_all(
    kind: str, expected: dict[str, int], text: Path, tmp_path: Path
) -> None:
    """A ring of two: forward keys and values move once; backward once, and their gradients twice, the last time home.
    Ulysses: there and back, forward and backward."""
    found = count_layer_collectives(text, tmp_path, DENSE, 2, {"layout.cp": 2, "layout.cp_method": kind})
    assert {name: found[name] for name in expected} == expected
