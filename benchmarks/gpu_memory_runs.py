"""Ranks whose memory `benchmarks.gpu_memory` measures: four models with twelve layouts each, and OTHER_RUNS."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from phalanx.spec.files.load import load_run
from phalanx.spec.parallel_dims import parallel_dims, pipeline_stage_groups
from phalanx.spec.run import RunSpec

NONE, NORMS, SELECTIVE, FULL = (f"activation_checkpointing={kind}" for kind in ("none", "norms", "selective", "full"))
DENSE_LAYOUTS = {
    "zero3 none": (8, f"data_parallel=zero3 {NONE}"),
    "zero3 selective": (8, f"data_parallel=zero3 {SELECTIVE}"),
    "zero3 full": (8, f"data_parallel=zero3 {FULL}"),
    "hsdp 8 selective": (32, f"data_parallel=hsdp dp_shard=8 {SELECTIVE}"),
    "hsdp 16 full": (32, f"data_parallel=hsdp dp_shard=16 {FULL}"),
    "tp2 zero3 none": (16, f"data_parallel=zero3 tp=2 {NONE}"),
    "tp4 zero1 full": (32, f"data_parallel=zero1 tp=4 {FULL}"),
    "tp8 zero3 selective": (64, f"data_parallel=zero3 tp=8 {SELECTIVE}"),
    "pp2 1f1b zero1 full": (16, f"data_parallel=zero1 pp=2 {FULL}"),
    "pp4 tp2 zb-v zero1 none": (32, f"data_parallel=zero1 pp=4 tp=2 schedule=zb-v {NONE}"),
    "cp2 ring zero3 none": (16, f"data_parallel=zero3 cp=2 {NONE}"),
    "cp4 ulysses zero3 full": (32, f"data_parallel=zero3 cp=4 cp_method=ulysses {FULL}"),
}
MOE_LAYOUTS = {
    "zero3 full": (64, f"data_parallel=zero3 {FULL}"),
    "zero3 selective": (64, f"data_parallel=zero3 {SELECTIVE}"),
    "ep8 zero3 full": (64, f"data_parallel=zero3 ep=8 {FULL}"),
    "ep8 zero3 selective": (64, f"data_parallel=zero3 ep=8 {SELECTIVE}"),
    "ep4 zero3 none": (64, f"data_parallel=zero3 ep=4 {NONE}"),
    "ep8 zero1 full": (64, f"data_parallel=zero1 ep=8 {FULL}"),
    "ep4 hsdp 16 full": (64, f"data_parallel=hsdp dp_shard=16 ep=4 {FULL}"),
    "tp2 zero3 full": (64, f"data_parallel=zero3 tp=2 {FULL}"),
    "ep8 tp2 zero3 full": (64, f"data_parallel=zero3 ep=8 tp=2 {FULL}"),
    "ep4 pp2 1f1b zero1 full": (64, f"data_parallel=zero1 ep=4 pp=2 {FULL}"),
    "ep8 cp2 ring zero3 full": (64, f"data_parallel=zero3 ep=8 cp=2 {FULL}"),
    "ep4 cp2 ulysses zero3 none": (64, f"data_parallel=zero3 ep=4 cp=2 cp_method=ulysses {NONE}"),
}
FEW_EXPERTS_LAYOUTS = MOE_LAYOUTS | {  # with more ranks than experts, FSDP would pad the experts to one per rank
    name: (ranks, MOE_LAYOUTS[name][1])
    for name, ranks in (("zero3 full", 8), ("zero3 selective", 8), ("tp2 zero3 full", 16))
}
MODELS = {
    "llama3-8b": (32, DENSE_LAYOUTS),
    "llama3-70b": (8, DENSE_LAYOUTS),
    "qwen3-30b-a3b": (16, MOE_LAYOUTS),
    "mixtral-8x7b": (8, FEW_EXPERTS_LAYOUTS),
}
"""Number of layers, and layouts. Models that do not fit 80 GB in most layouts have fewer layers than published."""
OTHER_RUNS = (
    ("llama3-8b", 32, "zero1 full", 16, f"data_parallel=zero1 {FULL}"),
    ("llama3-8b", 32, "zero2 full", 16, f"data_parallel=zero2 {FULL}"),
    ("llama3-8b", 32, "tp4 zero3 none", 32, f"data_parallel=zero3 tp=4 {NONE}"),
    ("llama3-8b", 32, "cp2 ulysses hsdp 8 none", 32, f"data_parallel=hsdp dp_shard=4 cp=2 cp_method=ulysses {NONE}"),
    ("llama3-8b", 4, "ddp none", 8, f"data_parallel=ddp {NONE}"),
    ("llama3-70b", 80, "tp8 zero3 full", 64, f"data_parallel=zero3 tp=8 {FULL}"),
    ("qwen3-30b-a3b", 48, "zero3 full", 64, f"data_parallel=zero3 {FULL}"),
    ("mixtral-8x7b", 32, "tp8 zero3 full", 64, f"data_parallel=zero3 tp=8 {FULL}"),
    ("llama3-8b", 32, "zero3 norms", 8, f"data_parallel=zero3 {NORMS}"),
    ("llama3-8b", 32, "cp8 ring zero3 norms, T 131,072", 8, f"data_parallel=zero3 cp=8 {NORMS}"),
    ("llama3-8b", 32, "cp64 ring zero3 full, T 1,048,576", 64, f"data_parallel=zero3 cp=64 {FULL}"),
)


@dataclass(frozen=True)
class Row:
    """Rank of a run, and the peak bytes that it allocated and reserved in a step."""

    model: str
    layout: str
    world_size: int
    rank: int
    settings: list[str]
    """Values of `--set`."""
    allocated: int = 0
    reserved: int = 0
    problem: str = ""


def all_rows() -> Iterator[Row]:
    """Yield a row for each layout of each model; pipelines have a row for their first and their last rank."""
    runs = [(model, layers, name, *run) for model, (layers, layouts) in MODELS.items() for name, run in layouts.items()]
    for model, layers, name, world_size, words in (*runs, *OTHER_RUNS):
        tokens = int(name.partition(", T ")[2].replace(",", "") or (8192 if model.startswith("llama") else 4096))
        settings = [f"model.preset={model}", f"model.num_layers={layers}", f"training.seq_len={tokens}"]
        if tokens > 8192:
            settings += [f"model.max_seq_len={tokens}", f"training.tokens_per_step={tokens}"]
        settings += ["training.compile=false", f"data.mask_documents={str(NONE not in words).lower()}"]
        row = Row(model, name, world_size, 0, settings + [f"layout.{word}" for word in words.split()])
        stages = pipeline_stage_groups(parallel_dims(make_run(row).layout, world_size))
        for stage in sorted({0, len(stages) - 1}):
            stage_name = f" pp{stage}" if len(stages) > 1 else ""
            yield replace(row, rank=stages[stage][0], layout=name + stage_name)


def make_run(row: Row) -> RunSpec:
    """Return the run of a row on H100s, with two micro-batches per rank, or four per stage in a pipeline."""
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "run.toml"
        file.write_text('name = "gpu-memory"\n[cluster]\npreset = "h100"\n')
        run = load_run(file, row.settings, environment={})
        dims = parallel_dims(run.layout, row.world_size)
        sequences = dims.dp_size * (2 if run.layout.pp == 1 else 4 * run.layout.pp)
        tokens = f"training.tokens_per_step={sequences * run.training.seq_len}"
        return load_run(file, [*row.settings, tokens, "layout.micro_batch_size=1"], environment={})
