"""Equal micro-batches, blocks and chunks are traced once, with the same result as a full trace."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from phalanx.schedule.registry import layout_schedule
from phalanx.schedule.schedule import Action
from phalanx.spec.files.load import run_from_table
from phalanx.spec.layout import MAX_BF16_SUMS, Layout
from phalanx.spec.resolved_run import ResolvedRun
from phalanx.spec.run import RunSpec
from phalanx.verify.dry_run import Traced, trace_ranks
from phalanx.verify.repetition import first_of_phases, traced_actions

SMALL = {
    "num_layers": 4,
    "hidden_size": 64,
    "num_heads": 4,
    "vocab_size": 1024,
    "ffn_hidden_size": 128,
    "max_seq_len": 64,
}
WIDE = {**SMALL, "num_layers": 2, "hidden_size": 512, "vocab_size": 32_768, "max_seq_len": 256}
"""Rows and logits of a micro-batch are several chunks."""
EIGHT_LAYERS = {**SMALL, "num_layers": 8}
LONG = {**SMALL, "max_seq_len": 512}
"""Activations need more memory than the optimizer's temporary tensors, so the peak is in the blocks."""
SIX_LAYERS = {**LONG, "num_layers": 6}
TWELVE_LAYERS = {**LONG, "num_layers": 12}
WINDOWS = {
    **TWELVE_LAYERS,
    "sliding_window": 40,
    "full_attention_layers": [1, 3, 5, 7, 9, 11],
    "attention_sinks": True,
}
"""Two kinds of blocks alternate, six of each."""
DEEP = {**LONG, "num_layers": 24}
FOURTEEN_LAYERS = {**LONG, "num_layers": 14}
DEEP_EXPERTS = {**SIX_LAYERS, "moe": {"num_experts": 4, "top_k": 2, "expert_ffn_size": 64}}
EXPERTS = {**SMALL, "moe": {"num_experts": 4, "top_k": 2, "expert_ffn_size": 64}}


def repeated_run(
    world_size: int, micro_batches: int, model: dict[str, Any] = SMALL, precision: str = "bf16", **layout: Any
) -> RunSpec:
    shared = layout.get("tp", 1) * layout.get("pp", 1) * layout.get("cp", 1)
    tokens = model["max_seq_len"]
    return run_from_table(
        {
            "model": model,
            "training": {
                "seq_len": tokens,
                "precision": precision,
                "tokens_per_step": tokens * micro_batches * world_size // shared,
            },
            "layout": {"micro_batch_size": 1, **layout},
        }
    )


CASES: dict[str, tuple[int, RunSpec]] = {
    "chunks": (2, repeated_run(2, 3, WIDE, data_parallel="zero1")),
    "zero1": (2, repeated_run(2, 14, data_parallel="zero1")),
    "zero2-fp32": (2, repeated_run(2, 8, precision="fp32", data_parallel="zero2")),
    "zero3-tp": (4, repeated_run(4, 14, tp=2, data_parallel="zero3")),
    "hsdp": (4, repeated_run(4, 14, data_parallel="hsdp", dp_shard=2)),
    "ddp-cp": (4, repeated_run(4, 14, cp=2, data_parallel="ddp")),
    "offload": (2, repeated_run(2, 14, data_parallel="zero2", offload="cpu")),
    "1f1b-zero1": (4, repeated_run(4, 20, pp=4, data_parallel="zero1")),
    "gpipe": (2, repeated_run(2, 14, pp=2, schedule="gpipe")),
    "interleaved": (2, repeated_run(2, 16, EIGHT_LAYERS, pp=2, schedule="interleaved", virtual_stages=2)),
    "zb-h2-zero3": (4, repeated_run(4, 16, pp=2, schedule="zb-h2", data_parallel="zero3")),
    "zb-v-tied": (4, repeated_run(4, 16, {**EIGHT_LAYERS, "tie_embeddings": True}, pp=2, schedule="zb-v")),
    "dualpipe-v-tp": (4, repeated_run(4, 16, EIGHT_LAYERS, pp=2, tp=2, schedule="dualpipe-v")),
    "experts": (4, repeated_run(4, 16, EXPERTS, ep=2, pp=2, data_parallel="zero1")),
}
BLOCK_CASES: dict[str, tuple[int, RunSpec]] = {
    "one rank": (1, repeated_run(1, 3, SIX_LAYERS)),
    "ddp": (2, repeated_run(2, 3, SIX_LAYERS, data_parallel="ddp")),
    "zero1": (2, repeated_run(2, 12, SIX_LAYERS, data_parallel="zero1")),
    "zero2-fp32": (2, repeated_run(2, 3, SIX_LAYERS, precision="fp32", data_parallel="zero2")),
    "zero3-tp-norms": (
        4,
        repeated_run(4, 3, SIX_LAYERS, tp=2, data_parallel="zero3", activation_checkpointing="norms"),
    ),
    "hsdp-cp": (8, repeated_run(8, 3, SIX_LAYERS, cp=2, data_parallel="hsdp", dp_shard=2)),
    "zero1-selective": (2, repeated_run(2, 3, SIX_LAYERS, data_parallel="zero1", activation_checkpointing="selective")),
    "fp8": (2, repeated_run(2, 3, SIX_LAYERS, precision="fp8", data_parallel="zero3")),
    "one unit": (2, repeated_run(2, 3, SIX_LAYERS, data_parallel="zero3", fsdp_unit="model")),
    "offload": (2, repeated_run(2, 3, SIX_LAYERS, data_parallel="zero3", offload="cpu")),
    "servers": (4, repeated_run(4, 3, SIX_LAYERS, data_parallel="parameter_server")),
    "experts-ep": (4, repeated_run(4, 3, DEEP_EXPERTS, ep=2, data_parallel="zero1")),
    "experts-zero3-full": (
        2,
        repeated_run(2, 3, DEEP_EXPERTS, data_parallel="zero3", activation_checkpointing="full"),
    ),
    "1f1b-tp": (4, repeated_run(4, 12, TWELVE_LAYERS, pp=2, tp=2, data_parallel="zero1")),
    "interleaved": (2, repeated_run(2, 12, DEEP, pp=2, schedule="interleaved", virtual_stages=2)),
    "some recomputed": (
        2,
        repeated_run(
            2, 3, FOURTEEN_LAYERS, data_parallel="zero3", activation_checkpointing="full", recomputed_blocks=6
        ),
    ),
    "some norms": (1, repeated_run(1, 3, FOURTEEN_LAYERS, activation_checkpointing="norms", recomputed_blocks=6)),
    "zero1-full": (2, repeated_run(2, 3, SIX_LAYERS, data_parallel="zero1", activation_checkpointing="full")),
    "experts-ep-zero2-full": (
        4,
        repeated_run(4, 3, DEEP_EXPERTS, ep=2, data_parallel="zero2", activation_checkpointing="full"),
    ),
    "tied-tp": (4, repeated_run(4, 3, {**SIX_LAYERS, "tie_embeddings": True}, tp=2, data_parallel="zero1")),
    "ulysses-selective": (
        4,
        repeated_run(
            4, 3, SIX_LAYERS, cp=2, cp_method="ulysses", data_parallel="zero1", activation_checkpointing="selective"
        ),
    ),
    "windows": (2, repeated_run(2, 3, WINDOWS, data_parallel="zero1")),
}


@pytest.mark.parametrize("name", BLOCK_CASES)
def test_trace_of_repeated_blocks_equals_full_trace(name: str) -> None:
    repeated, full = _tracing_of_equal_results(*BLOCK_CASES[name])
    assert repeated["traced_blocks"] < repeated["blocks"] == full["traced_blocks"]


@pytest.mark.parametrize(
    "layout",
    [
        {"data_parallel": "zero3", "fsdp_unit": "sublayer"},
        {"data_parallel": "zero3", "ep": 2},
        {"activation_checkpointing": "offload"},
        {"activation_checkpointing": "full", "data_parallel": "ddp"},
        {"pp": 2, "schedule": "zb-h1"},
    ],
    ids=str,
)
def test_blocks_that_need_their_neighbors_are_all_traced(layout: dict[str, Any]) -> None:
    """FSDP units inside blocks, inputs that another block gathers, autocast copies that live until the end of the
    forward pass, and graphs that a later pass continues."""
    model = DEEP_EXPERTS if "ep" in layout else {**SMALL, "num_layers": 12}
    run = repeated_run(4, 4, model, **layout)
    tracing = _trace_last_rank(run, 4, full=False)["tracing"]
    assert tracing["traced_blocks"] == tracing["blocks"]


@pytest.mark.parametrize("name", CASES)
def test_trace_of_repeated_work_equals_full_trace(name: str) -> None:
    """Bytes of every part, calls and bytes of every collective, and FLOPs are equal."""
    repeated, full = _tracing_of_equal_results(*CASES[name])
    if name != "chunks":
        assert repeated["traced_micro_batches"] < full["traced_micro_batches"]


def _tracing_of_equal_results(world_size: int, run: RunSpec) -> tuple[Traced, Traced]:
    """Return the traced amount of the last rank, with and without repetition, after comparing all other results."""
    repeated, full = (_trace_last_rank(run, world_size, full=full) for full in (False, True))
    tracing = repeated.pop("tracing"), full.pop("tracing")
    assert repeated == full
    return tracing


def _trace_last_rank(run: RunSpec, world_size: int, full: bool) -> Traced:
    (traced,) = trace_ranks(ResolvedRun(run, world_size), [world_size - 1], full=full)
    return traced


def test_first_of_phases_are_before_and_after_sums_become_fp32_and_the_last() -> None:
    assert sorted(first_of_phases(["B"] * 64)) == [0, 1, 2, 8, 9, 10, 11, 63]
    assert MAX_BF16_SUMS == 8
    assert sorted(first_of_phases(["B"] * 5)) == [0, 1, 2, 4]
    assert first_of_phases([]) == set()


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1", "zb-v", "dualpipe-v"])
def test_traced_actions_precede_their_repetitions_and_are_of_their_kind(schedule: Any) -> None:
    layout = Layout(pp=4, schedule=schedule)
    for rank in range(4):
        actions = list(layout_schedule(layout, 32).actions(rank))
        traced = traced_actions(actions)
        position = {action: index for index, action in enumerate(actions)}
        assert all(
            (action.stage, action.kind) == (model.stage, model.kind) and position[model] <= position[action]
            for action, model in traced.items()
        )
        assert 0 < Counter(map(_is_traced, traced.items()))[True] < len(actions)
        # A traced backward pass needs the activations of a traced forward pass.
        micros = {kind: {a.micro for a, model in traced.items() if a == model and a.kind == kind} for kind in "FBI"}
        assert micros["B"] | micros["I"] <= micros["F"]


def _is_traced(item: tuple[Action, Action]) -> bool:
    return item[0] == item[1]
