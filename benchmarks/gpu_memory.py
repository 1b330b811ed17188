"""What the plan says that a rank on a GPU allocates and reserves, against PyTorch's own allocator on a null GPU.

    python -m benchmarks.gpu_memory --python NULLENV/bin/python --null OUT [--only llama3-8b] [--record FILE]

A null GPU computes nothing, but PyTorch's CUDA build runs on it: the caching allocator, autograd, FSDP2 and
ProcessGroupNCCL are real, so that bytes are those of a GPU. `--python` has PyTorch's CUDA build, and OUT the libraries
that are preloaded (`lib/` and `libnullcuda.so`). Each row is a rank of a run, in a process of its own, in its third
step; `--record` writes what was found for `tests/cost/exact/test_cuda_memory.py`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from phalanx.cost.exact.rank_memory import RankMemory, rank_memory
from phalanx.spec.files.load import load_run
from phalanx.spec.parallel_dims import parallel_dims, pipeline_stage_groups
from phalanx.spec.run import RunSpec

WARMUP_STEPS = 2
SHORT, LONG = "training.seq_len=4096", "training.seq_len=8192"
DENSE_LAYOUTS = {
    "zero3 none": (8, "data_parallel=zero3"),
    "zero3 selective": (8, "data_parallel=zero3 activation_checkpointing=selective"),
    "zero3 full": (8, "data_parallel=zero3 activation_checkpointing=full"),
    "hsdp 8 selective": (32, "data_parallel=hsdp dp_shard=8 activation_checkpointing=selective"),
    "hsdp 16 full": (32, "data_parallel=hsdp dp_shard=16 activation_checkpointing=full"),
    "tp2 zero3 none": (16, "data_parallel=zero3 tp=2"),
    "tp4 zero1 full": (32, "data_parallel=zero1 tp=4 activation_checkpointing=full"),
    "tp8 zero3 selective": (64, "data_parallel=zero3 tp=8 activation_checkpointing=selective"),
    "pp2 1f1b zero1 full": (16, "data_parallel=zero1 pp=2 activation_checkpointing=full"),
    "pp4 tp2 zb-v zero1 none": (32, "data_parallel=zero1 pp=4 tp=2 schedule=zb-v"),
    "cp2 ring zero3 none": (16, "data_parallel=zero3 cp=2"),
    "cp4 ulysses zero3 full": (32, "data_parallel=zero3 cp=4 cp_method=ulysses activation_checkpointing=full"),
}
MOE_LAYOUTS = {
    "zero3 full": (64, "data_parallel=zero3 activation_checkpointing=full"),
    "zero3 selective": (64, "data_parallel=zero3 activation_checkpointing=selective"),
    "ep8 zero3 full": (64, "data_parallel=zero3 ep=8 activation_checkpointing=full"),
    "ep8 zero3 selective": (64, "data_parallel=zero3 ep=8 activation_checkpointing=selective"),
    "ep4 zero3 none": (64, "data_parallel=zero3 ep=4"),
    "ep8 zero1 full": (64, "data_parallel=zero1 ep=8 activation_checkpointing=full"),
    "ep4 hsdp 16 full": (64, "data_parallel=hsdp dp_shard=16 ep=4 activation_checkpointing=full"),
    "tp2 zero3 full": (64, "data_parallel=zero3 tp=2 activation_checkpointing=full"),
    "ep8 tp2 zero3 full": (64, "data_parallel=zero3 ep=8 tp=2 activation_checkpointing=full"),
    "ep4 pp2 1f1b zero1 full": (64, "data_parallel=zero1 ep=4 pp=2 activation_checkpointing=full"),
    "ep8 cp2 ring zero3 full": (64, "data_parallel=zero3 ep=8 cp=2 activation_checkpointing=full"),
    "ep4 cp2 ulysses zero3 none": (64, "data_parallel=zero3 ep=4 cp=2 cp_method=ulysses"),
}
FEW_EXPERTS_LAYOUTS = {  # 8 experts that more ranks share are padded to one for each
    **MOE_LAYOUTS,
    "zero3 full": (8, MOE_LAYOUTS["zero3 full"][1]),
    "zero3 selective": (8, MOE_LAYOUTS["zero3 selective"][1]),
    "tp2 zero3 full": (16, MOE_LAYOUTS["tp2 zero3 full"][1]),
}
MODELS = {
    "llama3-8b": ([LONG], DENSE_LAYOUTS),
    "llama3-70b": ([LONG, "model.num_layers=8"], DENSE_LAYOUTS),
    "qwen3-30b-a3b": ([SHORT, "model.num_layers=16"], MOE_LAYOUTS),
    "mixtral-8x7b": ([SHORT, "model.num_layers=8"], FEW_EXPERTS_LAYOUTS),
}
"""Fewer layers than the model has where all of them do not fit 80 GB in most of the layouts."""


@dataclass(frozen=True)
class Row:
    """A rank, and the most that it allocated and reserved in a step."""

    model: str
    layout: str
    world_size: int
    rank: int
    settings: list[str]
    """As given to `--set`."""
    allocated: int = 0
    reserved: int = 0
    problem: str = ""


def all_rows() -> Iterator[Row]:
    """Each layout of each model: of a pipeline its first and its last rank."""
    for model, (settings, layouts) in MODELS.items():
        for name, (world_size, words) in layouts.items():
            masks = "true" if "selective" in name or "full" in name else "false"
            changes = [f"layout.{word}" for word in words.split()]
            row = Row(
                model,
                name,
                world_size,
                0,
                [f"model.preset={model}", *settings, f"data.mask_documents={masks}", *changes],
            )
            run = described_run(row)
            stages = pipeline_stage_groups(parallel_dims(run.layout, world_size))
            for stage in sorted({0, len(stages) - 1}):
                yield replace(row, rank=stages[stage][0], layout=name + (f" pp{stage}" if len(stages) > 1 else ""))


def described_run(row: Row) -> RunSpec:
    """The run of a row on H100s: of each rank at least four micro-batches of one sequence in a pipeline, else two."""
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "run.toml"
        file.write_text(f'name = "gpu-memory"\n[model]\npreset = "{row.model}"\n[cluster]\npreset = "h100"\n')
        run = load_run(file, row.settings, environment={})
        dims = parallel_dims(run.layout, row.world_size)
        sequences = dims.dp_size * (2 if run.layout.pp == 1 else 4 * run.layout.pp)
        tokens = f"training.tokens_per_step={sequences * run.training.seq_len}"
        return load_run(file, [*row.settings, tokens, "layout.micro_batch_size=1"], environment={})


def planned(row: Row) -> RankMemory:
    """What the plan says of the rank."""
    run = described_run(row)
    stage = parallel_dims(run.layout, row.world_size).coordinates(row.rank)["pp"]
    return list(rank_memory(run, row.world_size).values())[stage]


def measure(row: Row, python: str, null: Path) -> Row:
    """The row with what a process of this rank allocated and reserved on the null GPU."""
    environment = {
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
        **os.environ,
        "LD_LIBRARY_PATH": f"{null}/lib",
        "LD_PRELOAD": f"{null}/lib/libnullgpu.so",
        "NULL_GPU_ALONE": "1",  # no other rank comes to a communicator
        "OMP_NUM_THREADS": "1",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }
    command = [python, "-m", "benchmarks.gpu_memory", "--run", json.dumps(asdict(row))]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    if done.returncode:
        return replace(row, problem=(done.stderr.strip() or f"exit {done.returncode}").splitlines()[-1])
    return replace(row, **json.loads(done.stdout.splitlines()[-1]))


def run_steps(row: Row) -> dict[str, int]:
    """Three steps of a rank in this process, on the GPU that computes nothing; the most bytes in the third."""
    import torch
    import torch.distributed as dist

    import phalanx.model.moe as moe
    import phalanx.model.transformer as transformer
    import phalanx.parallel.expert.expert_parallel as expert_parallel
    import phalanx.parallel.pipeline.split_backward as split_backward
    from phalanx.parallel.mesh import build_mesh
    from phalanx.train.learner import Learner
    from phalanx.verify.dry_run import run_step

    class LonelyStore(dist.Store):
        """A store in which everything stands that a rank waits for: identifiers of NCCL's communicators."""

        def __init__(self) -> None:
            super().__init__()
            self.values: dict[str, bytes] = {}

        def set(self, key: str, value: bytes | str) -> None:
            self.values[key] = value if isinstance(value, bytes) else value.encode()

        def get(self, key: str) -> bytes:
            return self.values.get(key, bytes(128))

        def wait(self, keys: list[str], timeout: object = None) -> None:
            pass

        def check(self, keys: list[str]) -> bool:
            return all(key in self.values for key in keys)

        def add(self, key: str, amount: int) -> int:
            self.values[key] = str(int(self.values.get(key, b"0")) + amount).encode()
            return int(self.values[key])

    def balanced(counts: torch.Tensor, total: int) -> list[int]:
        quotient, remainder = divmod(total, len(counts))
        return [quotient + (index < remainder) for index in range(len(counts))]

    def one_document_a_row(starts_BT: torch.Tensor) -> torch.Tensor:
        return torch.arange(0, starts_BT.numel() + 1, starts_BT.shape[1], dtype=torch.int32, device="cuda")

    transformer.document_bounds = one_document_a_row  # there are no numbers: what depends on some is given
    moe.to_host_list = expert_parallel.to_host_list = split_backward.to_host_list = balanced
    dist.distributed_c10d._store_based_barrier = lambda *arguments, **named: None
    torch.cuda.set_device(0)
    torch.backends.cuda.enable_cudnn_sdp(False)  # not without a driver
    store = LonelyStore()  # whose Python half lives as long as this name
    dist.init_process_group("nccl", store=store, rank=row.rank, world_size=row.world_size)
    run = described_run(row)
    mesh = build_mesh(run.layout, row.world_size, "cuda")
    learner = Learner(run, mesh, torch.device("cuda", 0), lambda name, shape: torch.empty(shape))
    for _ in range(WARMUP_STEPS):
        run_step(learner)
    torch.cuda.reset_peak_memory_stats()
    run_step(learner)
    return {"allocated": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}


def show(row: Row) -> str:
    """A line of the table."""
    memory = planned(row)
    words = [row.model, str(row.world_size), row.layout]
    if row.problem:
        return f"| {' | '.join(words)} | {memory.total / 1e9:.1f} | {row.problem[:90]} |"
    pairs = (memory.total, row.allocated), (memory.reserved, row.reserved)
    words += [f"{plan / 1e9:.2f} | {found / 1e9:.2f} | {plan / found - 1:+.1%}" for plan, found in pairs]
    return f"| {' | '.join(words)} |"


def main() -> None:
    parser = argparse.ArgumentParser("benchmarks.gpu_memory", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--python", default=os.environ.get("NULL_GPU_PYTHON"))
    parser.add_argument("--null", type=Path, default=os.environ.get("NULL_GPU"))
    parser.add_argument("--only", default="", help="rows whose model and layout contain this")
    parser.add_argument("--record", type=Path)
    parser.add_argument("--run", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.run:
        row = Row(**json.loads(arguments.run))
        print(json.dumps(run_steps(row)))
        sys.stdout.flush()
        os._exit(0)
    rows = []
    for row in all_rows():
        if arguments.only in f"{row.model} {row.layout}":
            rows.append(measure(row, arguments.python, arguments.null))
            print(show(rows[-1]), flush=True)
            if arguments.record:
                arguments.record.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


if __name__ == "__main__":
    main()
