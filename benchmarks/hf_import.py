"""Measure memory and time in which ranks read weights of Hugging Face, and in which a checkpoint is exported.

    python -m benchmarks.hf_import --large 20   # prints the tables, writes docs/results/benchmarks/hf_import.md
    python -m benchmarks.hf_import --small 1.5  # measures the second table, and keeps the first

The large model is read by two ranks of a layout of 64, each in 3 GiB of memory, and exported in 3 GiB. The small one
is trained for one step by two ranks whose state is in files, and exported. Needs twice the large size on disk, or
20 times the small one."""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.limit import memory_limit
from benchmarks.pages import write_results
from phalanx.model.huggingface.checkpoint import open_hf_weights
from phalanx.model.huggingface.export import export_hf
from phalanx.model.huggingface.safetensors_file import FileTensor, write_safetensors
from phalanx.model.huggingface.tensor_names import parameter_shapes
from phalanx.parallel.apply import apply_layout
from phalanx.parallel.dtensor_shards import local_shape_and_offset, local_tensor
from phalanx.parallel.mesh import build_mesh
from phalanx.spec.files.load import load_model_spec
from phalanx.spec.layout import Layout
from phalanx.spec.model import ModelSpec
from phalanx.train.checkpoint.stored_tensors import open_checkpoint

PAGE = Path(__file__).parents[1] / "docs" / "results" / "benchmarks" / "hf_import.md"
LIMIT_BYTES = 3 * 2**30
RANKS = 64
MEASURED_RANKS = (0, 37)
LAYOUT = Layout(data_parallel="zero3")
NUMBERS = torch.randn(2**20 + 7, generator=torch.Generator().manual_seed(0)).mul_(0.02).to(torch.bfloat16)
"""Values of all weights, which begin elsewhere for each name."""
PIECE_ROWS = 4096


@dataclass(frozen=True)
class SyntheticTensor:
    """A weight whose rows are made where they are used."""

    name: str
    shape: torch.Size

    def __getitem__(self, rows: Any) -> Tensor:
        if isinstance(rows, int):
            return self[rows : rows + 1][0]
        first, stop, _ = slice(*((None,) if rows is ... else (rows.start, rows.stop))).indices(self.shape[0])
        shape = (stop - first, *self.shape[1:])
        width = self.shape[1:].numel()
        begin = (zlib.crc32(self.name.encode()) + first * width) % len(NUMBERS)
        count = (stop - first) * width
        return NUMBERS.repeat((begin + count) // len(NUMBERS) + 1)[begin : begin + count].view(shape)

    def pieces(self) -> Iterator[Tensor]:
        """Yield the rows in pieces."""
        for first in range(0, self.shape[0], PIECE_ROWS):
            yield self[first : first + PIECE_ROWS]


def synthetic_model(spec: ModelSpec) -> dict[str, SyntheticTensor]:
    return {name: SyntheticTensor(name, shape) for name, shape in parameter_shapes(spec).items()}


def llama(gigabytes: float, wide: bool) -> ModelSpec:
    """Return a model with the widths of Llama 3 8B, or of TinyLlama 1.1B, whose bf16 weights have about this size."""
    table = (
        {"hidden_size": 4096, "ffn_hidden_size": 14336, "num_heads": 32, "num_kv_heads": 8, "vocab_size": 128256}
        if wide
        else {"hidden_size": 2048, "ffn_hidden_size": 5632, "num_heads": 32, "num_kv_heads": 4, "vocab_size": 32000}
    )
    sizes = [
        sum(
            shape.numel()
            for shape in parameter_shapes(ModelSpec(**table, num_layers=layers, max_seq_len=2048)).values()
        )
        for layers in (1, 2)
    ]
    layers = max(1, round((gigabytes * 1e9 / 2 - sizes[0]) / (sizes[1] - sizes[0])) + 1)
    return ModelSpec(**table, num_layers=layers, max_seq_len=2048)


def mixture(gigabytes: float) -> ModelSpec:
    """Return a model with the widths and experts of Qwen3 30B-A3B, of about this size."""
    layers = max(1, round((gigabytes - 1.24) / 1.24))
    return load_model_spec("qwen3-30b-a3b").replace(num_layers=layers)


@dataclass(frozen=True)
class Measurement:
    """A command that has ended."""

    seconds: float
    process_bytes: int
    """Largest anonymous memory of one of its processes: neither mapped files nor page cache."""
    stdout: str

    def row(self) -> str:
        return f"{self.seconds:.0f} | {self.process_bytes / 1e9:.2f}"


def measure(*commands: Sequence[str]) -> list[Measurement]:
    """Run commands at the same time; raise CalledProcessError if one fails."""
    started_at = time.perf_counter()
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for command in commands]
    peaks = [0] * len(processes)
    seconds = [0.0] * len(processes)
    while not all(seconds):
        time.sleep(0.02)
        for index, process in enumerate(processes):
            peaks[index] = max(peaks[index], *map(anonymous_bytes, process_tree(process.pid)))
            if process.poll() is not None and not seconds[index]:
                seconds[index] = time.perf_counter() - started_at
    for command, process in zip(commands, processes, strict=True):
        if process.returncode:
            raise subprocess.CalledProcessError(process.returncode, command)
    return [
        Measurement(second, peak, process.stdout.read() if process.stdout else "")
        for second, peak, process in zip(seconds, peaks, processes, strict=True)
    ]


def process_tree(pid: int) -> list[int]:
    """Return a process and those that it has started."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return [pid]
    return [pid, *(descendant for child in children for descendant in process_tree(int(child)))]


def anonymous_bytes(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


def role(name: str, *arguments: object) -> list[str]:
    """Return the command of a part of this program in its own process."""
    return [sys.executable, "-m", "benchmarks.hf_import", "--role", name, *map(str, arguments)]


def read_as_rank(directory: str, rank: str, how: str) -> None:
    """Read the part of one rank of a layout, and print the time as JSON. `how`: only the part, or whole tensors."""
    spec = load_model_spec(directory)
    dist.init_process_group("fake", store=FakeStore(), rank=int(rank), world_size=RANKS)
    mesh = build_mesh(LAYOUT, RANKS, "cpu")
    stored = open_hf_weights(directory, spec)
    started_at = time.perf_counter()
    weights = stored if how == "part" else lambda name, shape: stored(name, shape)
    strategy = apply_layout(spec, LAYOUT, mesh, torch.device("cpu"), weights)
    seconds = time.perf_counter() - started_at
    size = 0
    for name, parameter in strategy.trainable_parameters.items():
        local = local_tensor(parameter.detach())
        size += local.nbytes
        rows = local_shape_and_offset(parameter)[1][0]
        if not torch.equal(local.to(torch.bfloat16), SyntheticTensor(name, parameter.shape)[rows : rows + len(local)]):
            raise ValueError(f"{name} of rank {rank} is not that of the files")
    print(json.dumps({"seconds": seconds, "bytes": size}))


def export_checkpoint(checkpoint: str, source: str, directory: str) -> None:
    """Export a checkpoint of the model that a config.json describes."""
    tensors = {name.removeprefix("model."): tensor for name, tensor in open_checkpoint(Path(checkpoint)).items()}
    export_hf(load_model_spec(source), tensors, directory, dtype="bf16")


def copy_with_transformers(source: str, directory: str) -> None:
    """Read and write a model with transformers."""
    from transformers import AutoModelForCausalLM

    started_at = time.perf_counter()
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    read_at = time.perf_counter()
    model.save_pretrained(directory)
    print(json.dumps({"read": read_at - started_at, "write": time.perf_counter() - read_at}))


def write_checkpoint(spec: ModelSpec, directory: Path) -> None:
    """Write two files as those of a checkpoint of two ranks, each with half of the tensors."""
    directory.mkdir()
    entries = {
        f"model.{name}": FileTensor(torch.bfloat16, tensor.shape, tensor.pieces)
        for name, tensor in synthetic_model(spec).items()
    }
    for number in range(2):
        file = directory / f"shard-{number + 1:05d}-model-00001-of-00001.safetensors"
        write_safetensors(file, dict(list(entries.items())[number::2]))


def check_files(spec: ModelSpec, directory: Path) -> None:
    """Raise ValueError unless the files have the weights of the model."""
    weights = open_hf_weights(directory, spec)
    for name, tensor in synthetic_model(spec).items():
        first = 0
        for piece in tensor.pieces():
            part = (slice(first, first + len(piece)), *(slice(0, size) for size in tensor.shape[1:]))
            if not torch.equal(weights.part(name, tensor.shape, part), piece):
                raise ValueError(f"{name} differs")
            first += len(piece)


def num_bytes(directory: Path) -> float:
    return sum(file.stat().st_size for file in directory.rglob("*.safetensors"))


def describe(spec: ModelSpec, directory: Path) -> str:
    kind = "experts" if spec.moe else "dense"
    return f"{num_bytes(directory) / 1e9:.1f} GB, {kind}, {spec.num_layers} layers, width {spec.hidden_size}"


def measure_reading(spec: ModelSpec, folder: Path, how: str) -> Iterator[str]:
    """Yield rows of the table of ranks that read their parts, of files in `folder`."""
    with ExitStack() as stack:
        limits = [stack.enter_context(memory_limit(LIMIT_BYTES)) for _ in MEASURED_RANKS]
        commands = [
            [*limit.prefix, *role("read", folder, rank, how)]
            for limit, rank in zip(limits, MEASURED_RANKS, strict=True)
        ]
        for rank, result in zip(MEASURED_RANKS, measure(*commands), strict=True):
            read = json.loads(result.stdout)
            what = "its part" if how == "part" else "whole tensors"
            yield (
                f"| {describe(spec, folder)} | rank {rank} of {RANKS} reads {what} | {read['seconds']:.1f} | "
                f"{result.process_bytes / 1e9:.2f} | {read['bytes'] / 1e9:.2f} |"
            )


def measure_large(spec: ModelSpec, experts: ModelSpec, folder: Path) -> list[str]:
    rows = []
    for model, hows in ((experts, ("whole", "part")), (spec, ("part",))):
        export_hf(model, synthetic_model(model), folder / "hf", dtype="bf16")
        for how in hows:
            rows += measure_reading(model, folder / "hf", how)
        shutil.copytree(folder / "hf", folder / "config", ignore=shutil.ignore_patterns("*.safetensors"))
        shutil.rmtree(folder / "hf")
        if model is experts:
            shutil.rmtree(folder / "config")
    write_checkpoint(spec, folder / "checkpoint")
    with memory_limit(LIMIT_BYTES) as limit:
        command = [*limit.prefix, *role("export", folder / "checkpoint", folder / "config", folder / "hf")]
        [result] = measure(command)
    shutil.rmtree(folder / "checkpoint")
    check_files(spec, folder / "hf")
    rows.append(f"| {describe(spec, folder / 'hf')} | export of a checkpoint | {result.row()} | |")
    shutil.rmtree(folder / "hf")
    return rows


def measure_small(spec: ModelSpec, folder: Path) -> list[str]:
    export_hf(spec, synthetic_model(spec), folder / "hf", dtype="bf16")
    model = describe(spec, folder / "hf")
    (folder / "offload").mkdir()
    (folder / "run.toml").write_text(f"""
        name = "small"
        output_dir = "{folder}"
        model = {{from_hf = "{folder}/hf"}}
        data = {{train = ["{Path(json.__file__).parent}"], tokenizer = "bytes", cache = "{folder}/tokens"}}
        training = {{steps = 1, seq_len = 64, tokens_per_step = 128, precision = "fp32"}}
        layout = {{data_parallel = "zero3", offload = "nvme", offload_directory = "{folder}/offload"}}
        optimizer = {{learning_rate = 1e-5}}
        evaluation = {{tokens = 128}}
    """)
    phalanx = [sys.executable, "-m", "phalanx"]
    [trained] = measure([*phalanx, "train", str(folder / "run.toml"), "--nproc", "2", "--force"])
    [exported] = measure(
        [*phalanx, "export", str(folder / "small"), "--to", "hf", str(folder / "exported"), "--dtype", "bf16"]
    )
    shutil.rmtree(folder / "small")
    [copied] = measure(role("transformers", folder / "hf", folder / "copied"))
    times = json.loads(copied.stdout.splitlines()[-1])
    return [
        f"| {model} | Phalanx: 2 ranks start, read, train one step (zero3, state in files), save | {trained.row()} |",
        f"| | Phalanx: `phalanx export` of this checkpoint | {exported.row()} |",
        f"| | transformers: from_pretrained ({times['read']:.0f} s) and save_pretrained ({times['write']:.0f} s) | "
        f"{copied.row()} |",
    ]


def measured_rows(page: str) -> tuple[str, str]:
    """Return the rows of the two tables of a page."""
    tables = [table.partition("\n\n")[0].strip() for table in re.split(r"\|---[|:-]*\|\n", page)[1:]]
    return (tables[0], tables[1]) if tables else ("", "")


def main() -> None:
    """Measure, print the tables and write the page."""
    parser = argparse.ArgumentParser("benchmarks.hf_import")
    parser.add_argument("--large", type=float, metavar="GB")
    parser.add_argument("--small", type=float, metavar="GB")
    parser.add_argument("--role", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.role:
        roles = {"read": read_as_rank, "export": export_checkpoint, "transformers": copy_with_transformers}
        roles[args.role[0]](*args.role[1:])
        return
    with memory_limit(LIMIT_BYTES) as limit:
        kind = limit.kind
    large, small = measured_rows(PAGE.read_text() if PAGE.is_file() else "")
    if args.large:
        with tempfile.TemporaryDirectory(prefix="phalanx-hf-import-") as name:
            large = "\n".join(measure_large(llama(args.large, wide=True), mixture(min(args.large, 4)), Path(name)))
    if args.small:
        with tempfile.TemporaryDirectory(prefix="phalanx-hf-import-") as name:
            small = "\n".join(measure_small(llama(args.small, wide=False), Path(name)))
    page = f"""# Memory and time in which Hugging Face weights are read and written

Each process has {LIMIT_BYTES / 2**30:.0f} GiB ({kind}). GB are the largest anonymous memory of a process: Python and
PyTorch (about 0.3 GB), its parameters in fp32, and what it copies. Pages of mapped files, which the kernel can take
back, are not part of it. What was read and written is compared with the source, number by number.

| bf16 files | process | s | GB | GB of parameters |
|---|---|---:|---:|---:|
{large}

Two ranks of zero3 on {RANKS} ranks read at the same time. The other ranks are a fake process group, because this
machine cannot have them. "Whole tensors" is the previous way: all experts of a layer are stacked, of which a rank
keeps its part.

Without a limit, on one machine with two ranks:

| bf16 files | command | s | GB of its largest process |
|---|---|---:|---:|
{small}

transformers maps the files too, and neither trains nor converts the weights. Training has them in fp32, with gradients.

One thread a process on a shared CPU ({platform.machine()}, {os.cpu_count()} cores) and a disk that writes about 0.15
GB/s; torch {torch.__version__}. Times vary with the load of the machine.

- Written by `python -m benchmarks.hf_import --large GB --small GB`. Each option measures its table, and the
  commit is that of the last.
"""
    print(page)
    write_results(PAGE, page)


if __name__ == "__main__":
    main()
