from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from phalanx.program.fsdp_units import (
    EMBEDDING,
    HEAD,
    ROOT,
    backward_order,
    backward_prefetches,
    forward_prefetches,
    fsdp_units,
)
from phalanx.program.rank_tensors import RankTensors, rank_tensors
from phalanx.spec.layout import Layout
from phalanx.spec.parameter_shapes import parameter_shapes
from phalanx.spec.resolved_run import ResolvedRun
from phalanx.spec.run import RunSpec
from phalanx.testing import rank_pool
from tests.helpers.dry_run_cases import DENSE, MOE, TIED


def unit_names(names: list[str], **layout: Any) -> list[str]:
    shapes = dict.fromkeys(names, (4, 4))
    rank = RankTensors(dense=shapes, shards=2, expert={}, expert_shards=1, names=tuple(names))
    return [unit.name for unit in fsdp_units(rank, Layout(data_parallel="zero3", **layout))]


MODEL = ["embedding.weight", "blocks.0.attention.wq", "blocks.0.mlp.up", "norm.weight", "head.weight"]


def test_units_are_embedding_blocks_and_head() -> None:
    assert unit_names(MODEL) == [EMBEDDING, "blocks.0", HEAD]


def test_sublayers_are_units_unless_their_block_is_recomputed() -> None:
    assert unit_names(MODEL, fsdp_unit="sublayer") == [EMBEDDING, "blocks.0.attention", "blocks.0.mlp", HEAD]
    recomputed = unit_names(MODEL, fsdp_unit="sublayer", activation_checkpointing="full")
    assert recomputed == [EMBEDDING, "blocks.0", HEAD]


def test_root_owns_tied_embeddings_ends_of_pipelines_and_whole_models() -> None:
    assert unit_names(MODEL[:-1]) == unit_names(MODEL, pp=2) == [ROOT, "blocks.0"]
    assert unit_names(MODEL, fsdp_unit="model") == [ROOT]


def test_backward_pass_of_root_starts_first() -> None:
    assert backward_order(["root", "a", "b", "c"], has_root=True) == ["root", "c", "b", "a"]
    assert backward_order(["a", "b", "c"], has_root=False) == ["c", "b", "a"]


def test_backward_prefetches_are_next_units() -> None:
    assert backward_prefetches("cba", 2) == [["b", "a"], ["a"], []]
    assert backward_prefetches("cba", 0) == [[], [], []]


def test_forward_prefetches_of_unit_with_inner_unit_reach_one_further() -> None:
    assert forward_prefetches("aAbBc", "AB", 1) == [["A", "b"], [], ["B", "c"], [], []]
    assert forward_prefetches("aAbBc", "AB", 0) == [[], [], [], [], []]


def get_trainer_units(run: RunSpec) -> list[tuple[set[str], list[set[str]]]]:
    """Return the parameters of each unit of the trainer, and of the units that it gathers ahead in backward passes."""
    from phalanx.parallel.data.fsdp import FSDP
    from tests.helpers.small_runs import make_trainer

    strategy = make_trainer(run).strategy
    assert isinstance(strategy, FSDP)
    names = {id(parameter): name for name, parameter in strategy.trainable_parameters.items()}

    def parameters(state: Any) -> set[str]:
        group = state._fsdp_param_group
        return {names[id(parameter.sharded_param)] for parameter in group.fsdp_params} if group else set()

    states = [unit._get_fsdp_state() for unit in strategy.units]
    return [
        (parameters(state), [parameters(ahead) for ahead in state._states_to_backward_prefetch])
        for state in states
        if parameters(state)
    ]


@pytest.mark.parametrize(
    ("world_size", "model", "layout"),
    [
        (2, DENSE, {"fsdp_prefetch": 2}),
        (2, DENSE, {"fsdp_unit": "sublayer", "activation_checkpointing": "selective"}),
        (2, DENSE, {"fsdp_unit": "sublayer", "activation_checkpointing": "full"}),
        (2, TIED, {"fsdp_unit": "block"}),
        (4, MOE, {"ep": 2, "fsdp_unit": "block"}),
        (4, MOE, {"ep": 2, "fsdp_unit": "model"}),
    ],
)
def test_units_and_prefetches_equal_those_of_trainer(
    world_size: int, model: dict[str, Any], layout: dict[str, Any], text: Path, tmp_path: Path
) -> None:
    pytest.importorskip("torch")
    from tests.helpers.small_runs import small_run

    changes = {"model": model, "layout.data_parallel": "zero3", **{f"layout.{key}": layout[key] for key in layout}}
    run = small_run(text, tmp_path, changes)
    units = fsdp_units(rank_tensors(ResolvedRun(run, world_size))[0], run.layout)
    starts = backward_order(units, has_root=units[0].name == ROOT)
    ahead = backward_prefetches(starts, run.layout.fsdp_prefetch)
    prefetches = {unit.name: prefetched for unit, prefetched in zip(starts, ahead, strict=True)}
    # The last unit of the trainer has itself, because FSDP2 would choose a unit for an empty list.
    prefetches[starts[-1].name] = starts[-1:]
    expected = [(set(unit.shapes), [set(other.shapes) for other in prefetches[unit.name]]) for unit in units]
    assert rank_pool(world_size).run(get_trainer_units, run) == [expected] * world_size


def test_units_of_model_have_all_parameters_once() -> None:
    from phalanx.spec.files.load import load_model_spec

    shapes = parameter_shapes(load_model_spec("tiny"))
    rank = RankTensors(dense=shapes, shards=2, expert={}, expert_shards=1, names=tuple(shapes))
    for wrap in ("model", "block", "sublayer"):
        units = fsdp_units(rank, Layout(data_parallel="zero3", fsdp_unit=wrap))
        assert [name for unit in units for name in unit.shapes] == list(shapes)
