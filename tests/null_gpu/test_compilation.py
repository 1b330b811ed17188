"""Compiled layouts on the null GPU: blocks are whole graphs, and other documents cause no recompilation."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from phalanx.spec.run import RunSpec
from phalanx.testing import rank_pool
from tests.helpers.small_runs import MOE, make_trainer, small_run, train_until, write_documents
from tests.null_gpu.layouts import BF16, COVERING, PIPELINES, SINGLE_AXES, Case

RECOMPUTE = "layout.activation_checkpointing"
FP8 = {"training.precision": "fp8"}  # widths of multiples of 16
CASES: dict[str, Case] = {
    **{name: SINGLE_AXES[name] for name in ("single", "zero3", "zero3-sublayer", "tp", "ring", "ulysses-zero3", "moe")},
    **{name: SINGLE_AXES[name] for name in ("moe-ep-zero3", "moe-ep-tp-zero1", "moe-ep-zero3-full")},
    **{name: PIPELINES[name] for name in ("1f1b-pp2-alone", "zb-v-pp2-alone", "interleaved-pp2-zero1")},
    "full": (1, {RECOMPUTE: "full"}),
    "norms": (1, {RECOMPUTE: "norms"}),
    "tp-norms": (2, {"layout.tp": 2, RECOMPUTE: "norms"}),
    "selective": (1, {RECOMPUTE: "selective"}),
    "recomputed-block": (1, {RECOMPUTE: "full", "layout.recomputed_blocks": 1}),
    "window": (1, {"model.sliding_window": 8}),
    "sinks": (1, {"model.attention_sinks": True}),
    "fp8": (1, FP8),
    "fp8-full": (1, {**FP8, RECOMPUTE: "full"}),
    "experts-full": (1, {"model": MOE, RECOMPUTE: "full"}),
    **{f"covering-{name}": case for name, case in COVERING.items()},
}


def compile_a_run(run: RunSpec) -> tuple[int, int, list[str]]:
    """Train on this rank; return the graphs of the first two steps, those of the next three, and the graph breaks."""
    import torch
    from torch._dynamo.utils import counters

    from tests.null_gpu.given_numbers import give_numbers

    give_numbers()
    torch._dynamo.reset()
    counters.clear()
    compiler = torch.compile

    def compile_without_kernels(function: Any, **options: Any) -> Any:
        # Compiling kernels takes seconds each, and tests nothing more.
        return compiler(function, **{**options, "backend": "aot_eager"})

    with mock.patch("torch.compile", compile_without_kernels):
        trainer = make_trainer(run, "cuda")
        train_until(trainer, 2)
        first = counters["stats"]["unique_graphs"]
        train_until(trainer, 5)
    return first, counters["stats"]["unique_graphs"] - first, list(counters["graph_break"])


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", CASES)
def test_compiled_layouts_have_no_graph_breaks_and_no_later_graphs(name: str, tmp_path: Path) -> None:
    ranks, changes = CASES[name]
    write_documents(tmp_path)
    run = small_run(tmp_path, tmp_path / "out", {**BF16, **changes, "training.compile": True})
    results = rank_pool(ranks, "cuda").run(compile_a_run, run, timeout=240)
    servers = run.layout.num_servers if run.layout.data_parallel == "parameter_server" else 0  # servers compute nothing
    for rank, (first, later, breaks) in enumerate(results):
        assert not breaks
        assert (first > 0) == (rank >= servers)
        assert later == 0
