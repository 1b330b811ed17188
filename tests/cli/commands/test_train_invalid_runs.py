"""Invalid runs exit with code 2 and one message that names field, value and fix,
before any process starts or any file is written."""

from __future__ import annotations

import json
import re
import shutil
import sys
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest

from phalanx.cli.main import main
from phalanx.cost.exact.cuda_process import CONTEXT_BYTES
from phalanx.cost.exact.model_state import checkpoint_bytes
from phalanx.cost.exact.rank_memory import RankMemory, rank_memory, worker_memories
from phalanx.data.indexed_dataset import IndexedDataset, IndexedWriter
from phalanx.data.pair_metadata import write_pair_metadata
from phalanx.data.tokenizer import train_bpe
from phalanx.launch import preflight, supervisor
from phalanx.launch.preflight import MAX_SEARCHED_LAYERS, check_memory
from phalanx.plan.advice import oom
from phalanx.runs.create import claim_run_directory, run_directory
from phalanx.spec.errors import UserError
from phalanx.spec.files.load import load_run
from phalanx.spec.resolved_run import ResolvedRun
from phalanx.testing.processes import run_python
from phalanx.train import create_run

MDS_SHARDS = Path(__file__).parents[2] / "data" / "mds_shards"
VALID_RUN = """
name = "bad"
output_dir = "OUT"
[model]
preset = "tiny"
vocab_size = 257
[data]
train = ["TEXT"]
tokenizer = "bytes"
cache = "OUT/cache"
[training]
steps = 10
seq_len = 32
tokens_per_step = 256
[optimizer]
warmup_steps = 2
"""

FOUR_HEADS = {"model.num_heads": 4, "model.head_dim": 48}
NVME = {"layout.data_parallel": '"zero1"', "layout.offload": '"nvme"'}

# Settings (or an edit of the run file), more arguments, and texts of the message: field, value, fix.
INVALID_SETTINGS: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({"training.stepz": 3}, ("training.stepz = 3", "did you mean 'steps'")),
    ({"trainin.steps": 3}, ("trainin", "did you mean 'training'")),
    ({"training.steps": '"ten"'}, ("training.steps = 'ten'", "whole number")),
    ({"training.steps": 1.5}, ("training.steps = 1.5", "whole number")),
    ({"checkpoint.every": '"auto2"'}, ("checkpoint.every = 'auto2'", "must be 'auto'", "write a whole number")),
    ({"training.steps": 0}, ("training.steps = 0", "greater than 0")),
    ({"training.steps": -5}, ("training.steps = -5", "greater than 0")),
    ({"training.compile": '"yes"'}, ("training.compile = 'yes'", "true")),
    ({"training.precision": '"fp16"'}, ("training.precision = 'fp16'", "bf16")),
    ({"training.tokens_per_step": 250}, ("training.tokens_per_step = 250", "training.seq_len (32)", "use 256")),
    ({"training.tokens_per_step": 32}, ("training.tokens_per_step = 32", "2 data-parallel ranks", "fix: use")),
    (
        {"training.tokens_per_step": 96, "layout.data_parallel": '"zero2"'},
        ("training.tokens_per_step = 96", "2 data-parallel ranks", "fix: use"),
    ),
    ({"training.batch_scaling": '"linear"'}, ("training.base_dp_size", "linear", "set both")),
    (
        {"training.batch_scaling": '"sqrt"', "training.base_dp_size": 3},
        ("training.base_dp_size = 3", "8 sequences", "1, 2, 4"),
    ),
    ({"training": 5}, ("training = 5",)),
    ({"layout.micro_batch_size": 3}, ("layout.micro_batch_size = 3", "4 sequences", "1, 2, 4")),
    ({"layout.data_parallel": '"fsdp"'}, ("layout.data_parallel = 'fsdp'", "zero3")),
    (
        {"layout.data_parallel": '"parameter_server"', "layout.num_servers": 2},
        ("layout.num_servers = 2", "no worker among the 2 ranks", "use at most 1"),
    ),
    ({"layout.num_servers": 2}, ("layout.num_servers = 2", "cannot be combined", "parameter_server")),
    (
        {"layout.data_parallel": '"parameter_server"', "layout.max_staleness": -1},
        ("layout.max_staleness = -1", "increase max_staleness"),
    ),
    ({"layout.data_parallel": '"hsdp"'}, ("layout.dp_shard", "1, 2")),
    (
        {"layout.data_parallel": '"hsdp"', "layout.dp_shard": 3},
        ("layout.dp_shard = 3", "2 data-parallel ranks", "1, 2"),
    ),
    ({"layout.dp_shard": 2}, ("layout.dp_shard = 2", "cannot be combined")),
    (
        {"layout.data_parallel": '"hsdp"', "layout.dp_shard": 1, "layout.offload": '"cpu"'},
        ("layout.dp_shard = 1", "which requires sharded state", "1, 2"),
    ),
    (
        {"layout.tp": 2, "model.num_heads": 3, "model.num_kv_heads": 3, "model.head_dim": 32},
        ("layout.tp = 2", "does not divide model.num_heads (3)", 'layout.tp_attention = "gathered"'),
    ),
    (
        {
            "layout.tp": 2,
            "layout.tp_attention": "gathered",
            "model.num_heads": 6,
            "model.num_kv_heads": 3,
            "model.head_dim": 32,
        },
        ("layout.tp_attention = 'gathered'", "requires model.num_kv_heads (3) to equal", '"split"'),
    ),
    (
        {"model.side_mixer.kind": '"mamba2"', "model.side_mixer.num_heads": 4, "model.norm_position": '"after"'},
        ("model.norm_position = 'after'", "is not supported with model.side_mixer", "'before'"),
    ),
    (
        {"model.gate_scale": 0.5, "model.moe.num_experts": 4, "model.moe.top_k": 1, "model.moe.expert_ffn_size": 8},
        ("model.gate_scale = 0.5", "is not supported with experts", "remove it"),
    ),
    (
        {"layout.tp": 2, "layout.tp_attention": "gathered", "model.attention_gate": "head", **FOUR_HEADS},
        ("layout.tp_attention = 'gathered'", "model.attention_gate = 'head'", '"split"'),
    ),
    (
        {"layout.tp": 2, "model.num_heads": 6, "model.num_kv_heads": 3, "model.head_dim": 32},
        ("layout.tp = 2", "neither divides model.num_kv_heads (3)", "use a divisor or a multiple"),
    ),
    (
        {"layout.tp": 2, **FOUR_HEADS, "model.ffn_hidden_size": 301},
        ("layout.tp = 2", "does not divide model.ffn_hidden_size (301)", "a tensor-parallel"),
    ),
    (
        {"layout.tp": 2, **FOUR_HEADS, "training.seq_len": 31, "training.tokens_per_step": 248},
        ("layout.tp = 2", "training.seq_len (31)", "sequence_parallel = false"),
    ),
    ({"layout.sequence_parallel": "false"}, ("layout.sequence_parallel = False", "layout.tp = 1", "2 or more")),
    ({"layout.cp_method": "ulysses"}, ("layout.cp_method = 'ulysses'", "layout.cp = 1", "2 or more")),
    (
        {"layout.cp": 2, "training.seq_len": 30, "training.tokens_per_step": 240},
        ("layout.cp = 2", "training.seq_len (30)", "multiple of 4", "training.seq_len = 32"),
    ),
    (
        {
            "layout.cp": 2,
            "layout.cp_method": "ulysses",
            "model.num_heads": 3,
            "model.num_kv_heads": 3,
            "model.head_dim": 32,
        },
        (
            "layout.cp = 2",
            "does not divide the 3 units of a tensor-parallel rank (model.num_heads = 3)",
            'layout.cp_method = "ring"',
        ),
    ),
    ({"layout.ep": 2}, ("layout.ep = 2", "without experts", "layout.ep = 1")),
    ({"layout.ep": 3}, ("layout.ep = 3", "2 ranks", "1, 2")),
    (
        {"layout.ep": 2, "model.moe.num_experts": 3, "model.moe.top_k": 1, "model.moe.expert_ffn_size": 8},
        ("layout.ep = 2", "does not divide model.moe.num_experts (3)", "1, 3"),
    ),
    (
        {
            "layout.cp": 2,
            "model.moe.num_experts": 4,
            "model.moe.top_k": 1,
            "model.moe.expert_ffn_size": 8,
            "model.moe.capacity_factor": 1.5,
        },
        ("model.moe.capacity_factor = 1.5", "layout.cp", "remove model.moe.capacity_factor or layout.cp"),
    ),
    (
        {"layout.tp": 2, "layout.data_parallel": "parameter_server"},
        ("layout.data_parallel = 'parameter_server'", "layout.tp", "zero1"),
    ),
    (
        {
            "layout.ep": 2,
            "layout.micro_batch_size": 1,
            "training.tokens_per_step": 224,
            "model.moe.num_experts": 4,
            "model.moe.top_k": 1,
            "model.moe.expert_ffn_size": 8,
        },
        ("training.tokens_per_step = 224", "layout.ep = 2", "requires equal numbers", "multiple"),
    ),
    (
        {
            "layout.tp": 2,
            "layout.ep": 2,
            "layout.sequence_parallel": "false",
            "model.moe.num_experts": 4,
            "model.moe.top_k": 1,
            "model.moe.expert_ffn_size": 8,
            **FOUR_HEADS,
        },
        ("layout.ep = 2", "different tokens", "sequence_parallel = true"),
    ),
    (
        {"layout.tp": 2, "layout.gradient_compression": "powersgd", **FOUR_HEADS},
        ("layout.gradient_compression = 'powersgd'", "layout.tp = 2", "remove layout.gradient_compression"),
    ),
    (
        {"layout.pp": 2, "layout.data_parallel": "zero3", "layout.reshard_after_forward": "false"},
        ("layout.reshard_after_forward = False", "cannot be combined with a pipeline", "remove it"),
    ),
    (
        {"layout.pp": 2, "layout.gradient_compression": "bf16"},
        ("layout.gradient_compression = 'bf16'", "cannot be combined with a pipeline", "remove it"),
    ),
    (
        {"layout.pp": 2, "layout.schedule_file": "none.csv"},
        ("layout.schedule_file = 'none.csv'", "cannot be read", "CSV file"),
    ),
    (
        {"layout.pp": 2, "layout.schedule_file": "none.csv", "layout.schedule": "gpipe"},
        ("layout.schedule_file = 'none.csv'", "cannot be combined", "remove one"),
    ),
    (
        {"layout.pp": 2, "layout.data_parallel": '"parameter_server"'},
        ("layout.data_parallel = 'parameter_server'", "with a pipeline", "zero1"),
    ),
    ({"layout.pp": 2, "model.num_layers": 1}, ("layout.pp = 2", "1 layers", "a deeper model")),
    (
        {"layout.pp": 2, "layout.schedule": "dualpipe-v", "model.num_layers": 4, "layout.micro_batch_size": 4},
        ("layout.schedule = 'dualpipe-v'", "2 micro-batches", "less than the 4 stages", "layout.micro_batch_size"),
    ),
    (
        {"layout.pp": 2, "layout.schedule": "interleaved"},
        ("layout.virtual_stages = 1", "cannot be combined with", "at least 2"),
    ),
    (
        {"layout.offload": '"cpu"'},
        ("layout.offload = 'cpu'", 'cannot be combined with layout.data_parallel = "ddp"', "zero1"),
    ),
    ({"layout.offload_directory": '"EMPTY"'}, ("layout.offload_directory = 'EMPTY'", "cannot be combined", "nvme")),
    (
        {"recovery.loss_spike_ratio": 2.0},
        ("phalanx: recovery.loss_spike_ratio = 2.0", "recovery.max_rollbacks = 0", "at least 1"),
    ),
    ({**NVME}, ("layout.offload_directory", "is required", "local disk")),
    ({**NVME, "layout.offload_directory": '"missing"'}, ("layout.offload_directory = 'missing'", "is not a directory")),
    ({**NVME, "layout.offload_directory": '"FILE"'}, ("layout.offload_directory = 'FILE'", "is not a directory")),
    (
        {**NVME, "layout.offload_directory": '"/proc"'},
        ("layout.offload_directory = '/proc'", "fix: set layout.offload_directory"),
    ),
    (
        {**NVME, "layout.offload_directory": '"/dev/shm"', "model.ffn_hidden_size": 10**12},
        ("layout.offload_directory = '/dev/shm'", "GB for optimizer state"),
    ),
    (
        {"training.precision": '"fp8"', "model.ffn_hidden_size": 500},
        (
            "training.precision = 'fp8'",
            "multiples of 16",
            "model.ffn_hidden_size is 500",
            "change model.ffn_hidden_size",
        ),
    ),
    (
        {"training.precision": '"fp8"', "model.num_heads": 3, "model.head_dim": 20},
        ("training.precision = 'fp8'", "model.num_heads x head_dim is 60", 'set training.precision = "bf16"'),
    ),
    ({"layout.gradient_compression": '"fp8"'}, ("layout.gradient_compression = 'fp8'", "powersgd")),
    (
        {"layout.data_parallel": '"zero2"', "layout.gradient_compression": '"bf16"'},
        ("layout.gradient_compression = 'bf16'", "cannot be combined"),
    ),
    ({"layout.fsdp_unit": '"model"'}, ("layout.fsdp_unit = 'model'", "cannot be combined", "zero3 or hsdp")),
    ({"layout.data_parallel": '"zero3"', "layout.bucket_mb": 1.0}, ("layout.bucket_mb = 1.0", "cannot be combined")),
    (
        {"layout.schedule": '"gpipe"'},
        ("layout.schedule = 'gpipe'", "cannot be combined with layout.pp = 1", "layout.pp to 2"),
    ),
    (
        {"layout.virtual_stages": 2},
        ("layout.virtual_stages = 2", "cannot be combined with layout.pp = 1", "2 or more"),
    ),
    (
        {"layout.ddp_static_graph": "true", "layout.data_parallel": '"zero3"'},
        (
            "layout.ddp_static_graph = True",
            'cannot be combined with layout.data_parallel = "zero3"',
            "layout.data_parallel to ddp",
        ),
    ),
    (
        {"layout.ddp_static_graph": "true", "layout.micro_batch_size": 2},
        ("layout.ddp_static_graph = True", "accumulation", "2 micro-batches", "layout.micro_batch_size = 4"),
    ),
    (  # DDP also averages over context-parallel ranks, without data-parallel ones too
        {"layout.ddp_static_graph": "true", "layout.cp": 2, "layout.micro_batch_size": 2},
        ("layout.ddp_static_graph = True", "accumulation", "4 micro-batches", "layout.micro_batch_size = 8"),
    ),
    ({"layout.tp": 3}, ("layout.tp",)),
    ({"model.preset": '"tinny"'}, ("model.preset = 'tinny'", "did you mean 'tiny'")),
    ({"model.num_heads": 7}, ("model.num_heads = 7", "model.hidden_size (192)", "use one of")),
    ({"model.num_kv_heads": 2}, ("model.num_kv_heads = 2", "model.num_heads (3)", "1, 3")),
    ({"model.head_dim": 63}, ("model.head_dim = 63", "even")),
    ({"model.vocab_size": 100}, ("model.vocab_size = 100", "257", "model.vocab_size = 257")),
    ({"model.moe": "{num_experts = 4, top_k = 8, expert_ffn_size = 8}"}, ("model.moe.top_k = 8", "4")),
    ({"model.moe": "{num_experts = 4, top_k = 2}"}, ("model.moe.expert_ffn_size", "set expert_ffn_size")),
    ({"model.from_hf": '"nowhere"'}, ("model.from_hf = 'nowhere'", "config.json")),
    ({"model.position_embedding": '"learned"', "model.max_seq_len": 16}, ("training.seq_len = 32", "16")),
    (
        {"model.sliding_window": 16, "layout.cp": 2},
        ("layout.cp_method = 'ring'", "model.sliding_window (16)", 'use "ulysses"'),
    ),
    ({"model.full_attention_layers": "[0]"}, ("model.full_attention_layers", "without a sliding window")),
    ({"cluster.preset": '"h1000"'}, ("cluster.preset = 'h1000'", "did you mean 'h100'")),
    (
        {"cluster.nodes": 2},
        ("--rendezvous is not set, which 2 nodes", "docs/guides/multi-node.md"),
    ),
    ({"cluster.device": '"cuda"'}, ("cluster.device = 'cuda'", "no GPU")),
    ({"data.train": '["missing.txt"]'}, ("data.train = 'missing.txt'",)),
    ({"data.train": "[]"}, ("data.train",)),
    ({"data.train": '"text"'}, ("data.train = 'text'", "does not exist")),
    ({"data.train": '["EMPTY"]'}, ("data.train", "EMPTY")),
    ({"data.train": '["CUT"]'}, ("data.train", "CUT", "bytes")),
    (
        {"data.train": '["PAIR"]', "data.tokenizer": '"bpe"', "model.vocab_size": 2048},
        ("data.tokenizer = 'bpe'", "PAIR"),
    ),
    ({"data.train": '["BROKEN.jsonl"]'}, ("BROKEN.jsonl", "1")),
    ({"data.train": '["FIELDS.jsonl"]', "data.text_key": '"body"'}, ("body", "FIELDS.jsonl")),
    ({"data.max_bad_records": -1}, ("data.max_bad_records = -1", "greater than or equal to 0")),
    (
        {"data.train": '["DIRTY.jsonl"]', "data.max_bad_records": 1},
        ("DIRTY.jsonl:2", "after 1 broken record", "increase data.max_bad_records"),
    ),
    ({"data.train": '["IMAGES.tar"]'}, ("IMAGES.tar:1 (0)", "has no text: its members are .jpg", "data.text_key")),
    ({"data.train": '["LINK.tar"]'}, ("LINK.tar", "member 0.txt, which is neither a file nor a folder")),
    ({"data.train": '["MDS"]'}, ("MDS/shard.00000.mds", "column 'other' of pickles", "'json'")),
    ({"data.train": '["MDS"]', "data.text_key": '"body"'}, ("MDS/shard.00000.mds", "pickles")),
    ({"data.train": '["MISSING"]'}, ("MISSING/index.json", "lists shard.00000.mds, which does not exist")),
    ({"data.train": '["ROWS.arrow"]'}, ("data.text_key = 'text'", "ROWS.arrow:1", "'body'")),
    ({"data.train": '["PAIR", "OTHER"]'}, ("data.train = 'OTHER'", "was tokenized with another tokenizer")),
    (
        {"data.train": "", "data.source": '[{name = "a", path = "EMPTY", weight = 1}]'},
        ("data.source[0].path", "EMPTY", "is a directory without a readable file"),
    ),
    (
        {"data.train": "", "data.source": '[{name = "a", path = "TEXT", split = "dev", weight = 1}]'},
        ("data.source[0].split = 'dev'", "belongs to Hugging Face datasets", "'TEXT'"),
    ),
    (
        {"data.train": "", "data.source": '[{name = "a", path = "hf:TEXT:en", config = "de", weight = 1}]'},
        ("data.source[0].config = 'de'", "is also in path"),
    ),
    ({"data.tokenizer": '"missing.json"'}, ("data.tokenizer = 'missing.json'",)),
    ({"data.tokenizer": '"BROKEN.jsonl"'}, ("data.tokenizer", "BROKEN.jsonl")),
    ({"data.held_out_fraction": 1.5}, ("data.held_out_fraction = 1.5", "less than 1")),
    ({"optimizer.name": '"adam"'}, ("optimizer.name = 'adam'", "adamw")),
    ({"optimizer.betas": "[0.9]"}, ("optimizer.betas",)),
    ({"optimizer.betas": "[0.9, 1.5]"}, ("optimizer.betas[1] = 1.5", "less than 1")),
    ({"optimizer.learning_rate": -1.0}, ("optimizer.learning_rate = -1.0", "greater than 0")),
    ({"name": '"a/b"'}, ("name = 'a/b'",)),
    ({"output_dir": '"FILE"'}, ("out", "FILE", "another directory")),
    ({"checkpoint.keep": 1_000_000_000}, ("checkpoint.keep = {'last': 1000000000}", "GB free")),
    ({"metrics.wandb": 3}, ("metrics.wandb = 3",)),
]
INVALID_ARGUMENTS: list[tuple[list[str], tuple[str, ...]]] = [
    (["--set", "training.steps"], ("--set = 'training.steps'", "KEY=VALUE")),
    (["--set", "name.inner=3"], ("uses name as a table, which is a value",)),
    (["--nproc", "9"], ("training.tokens_per_step = 256", "9 data-parallel ranks")),
    (
        ["--nproc", "3", "--set", "layout.data_parallel=zero3"],
        ("training.tokens_per_step = 256", "3 data-parallel ranks"),
    ),
    (["--nproc", "0"], ("--nproc", "0")),
    (["--nproc", "two"], ("--nproc", "two")),
    (["--resumee"], ("--resumee",)),
]


@pytest.fixture(scope="module")
def invalid_formats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with files of several formats, each with a fault."""
    folder = tmp_path_factory.mktemp("formats")
    (folder / "DIRTY.jsonl").write_text('{"text": 1}\n{"text": 2}\n{"text": "x"}\n')
    for name, member, kind in (("IMAGES.tar", "0.jpg", tarfile.REGTYPE), ("LINK.tar", "0.txt", tarfile.SYMTYPE)):
        info = tarfile.TarInfo(member)
        info.type = kind
        with tarfile.open(folder / name, "w") as archive:
            archive.addfile(info)
    shutil.copytree(MDS_SHARDS / "pickles", folder / "MDS")
    (folder / "MISSING").mkdir()
    shutil.copy(folder / "MDS" / "index.json", folder / "MISSING")
    rows = pyarrow.table({"body": ["x"]})
    with pyarrow.ipc.new_stream(folder / "ROWS.arrow", rows.schema) as arrow:
        arrow.write_table(rows)
    with IndexedWriter(folder / "OTHER", np.dtype(np.uint16)) as pair:
        pair.add(np.arange(200))
    write_pair_metadata(folder / "OTHER", train_bpe(["other text"], 257))
    return folder


@pytest.fixture
def workspace(tmp_path: Path, invalid_formats: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create a directory with a valid run file and with invalid data of every kind."""
    (tmp_path / "TEXT").mkdir()
    for name in "abcdefgh":
        (tmp_path / "TEXT" / f"{name}.txt").write_text("all the words of a small text " * 20)
    (tmp_path / "EMPTY").mkdir()
    (tmp_path / "FILE").touch()
    (tmp_path / "BROKEN.jsonl").write_text("{")
    (tmp_path / "FIELDS.jsonl").write_text('{"text": "x"}\n')
    for name in ("PAIR", "CUT"):
        with IndexedWriter(tmp_path / name, np.dtype(np.uint16)) as writer:
            writer.add(np.arange(200))
    (tmp_path / "CUT.bin").write_bytes((tmp_path / "CUT.bin").read_bytes()[:-7])
    shutil.copytree(invalid_formats, tmp_path, dirs_exist_ok=True)
    (tmp_path / "run.toml").write_text(VALID_RUN)
    monkeypatch.chdir(tmp_path)

    def spawned(*_: object) -> int:
        raise AssertionError("a process was spawned")

    monkeypatch.setattr(supervisor, "supervise_training", spawned)
    return tmp_path


def error_output(arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    """Return the stderr of a command that exits with 2."""
    monkeypatch.setattr(sys, "argv", ["phalanx", *arguments])
    with pytest.raises(SystemExit) as exit_info:
        main()
    captured = capsys.readouterr()
    assert exit_info.value.code == 2, captured.err
    assert "Traceback" not in captured.err
    assert captured.out == ""
    return captured.err


def directory_contents(folder: Path) -> dict[str, bytes | None]:
    return {str(path): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def without_free_space(message: str) -> str:
    """Leave out the free space of the disk, which other processes change."""
    return re.sub(r"[\d.]+ GB free", "GB free", message)


@pytest.mark.parametrize(
    ("changes", "expected_texts"),
    INVALID_SETTINGS,
    ids=[" ".join(f"{k}={v}" for k, v in c.items()) for c, _ in INVALID_SETTINGS],
)
def test_train_rejects_invalid_setting_and_writes_no_files(
    changes: Any, expected_texts: Any, workspace: Path, monkeypatch: Any, capsys: Any
) -> None:
    before = directory_contents(workspace)
    overrides = [argument for key, value in changes.items() for argument in ("--set", f"{key}={value}")]
    command = ["train", "run.toml", "--nproc", "2", *overrides]
    stderr = error_output(command, monkeypatch, capsys)
    for text in expected_texts:
        assert text in stderr
    assert stderr.count("phalanx: ") == 1
    if "cluster.nodes" not in changes:  # printing needs no rendezvous address
        printed = error_output([*command, "--print-config"], monkeypatch, capsys)
        assert without_free_space(printed) == without_free_space(stderr)
    assert directory_contents(workspace) == before


@pytest.mark.parametrize(
    ("arguments", "expected_texts"), INVALID_ARGUMENTS, ids=[" ".join(a) for a, _ in INVALID_ARGUMENTS]
)
def test_train_rejects_invalid_command_line_argument(
    arguments: Any, expected_texts: Any, workspace: Path, monkeypatch: Any, capsys: Any
) -> None:
    stderr = error_output(["train", "run.toml", *arguments], monkeypatch, capsys)
    for text in expected_texts:
        assert text in stderr


@pytest.mark.parametrize(
    ("file", "content", "expected_texts"),
    [
        ("none.toml", None, ("none.toml", "does not exist", "phalanx init")),
        (".", None, ("is not a run directory", "give a run file")),
        ("bad.toml", "[model\n", ("bad.toml", "not valid TOML", "line 1")),
        ("bad.toml", "\x00", ("bad.toml", "not valid TOML")),
        ("bad.toml", '[model]\npreset = "tiny"\nhidden_size = true\n', ("model.hidden_size = True", "whole number")),
    ],
)
def test_train_rejects_unreadable_or_invalid_run_file(
    file: str, content: str | None, expected_texts: Any, workspace: Path, monkeypatch: Any, capsys: Any
) -> None:
    if file == ".":
        (workspace / "run.toml").unlink()
    if content is not None:
        (workspace / file).write_text(content)
    stderr = error_output(["train", file], monkeypatch, capsys)
    for text in expected_texts:
        assert text in stderr


def test_train_does_not_overwrite_existing_run(workspace: Path, monkeypatch: Any, capsys: Any) -> None:
    claim_run_directory(workspace / "OUT" / "bad")
    (workspace / "OUT" / "bad" / "metrics.jsonl").write_text("{}\n")
    before = directory_contents(workspace)
    stderr = error_output(["train", "run.toml"], monkeypatch, capsys)
    assert "name = 'bad'" in stderr
    assert "--resume" in stderr
    assert directory_contents(workspace) == before


@pytest.mark.parametrize(
    ("arguments", "expected_texts"),
    [
        ((".",), ("run directory = '.'", "did not create it", "phalanx train run.toml")),
        ((".", "--resume"), ("run directory = '.'", "did not create it", "phalanx train run.toml")),
        (("runs/missing", "--resume"), ("run directory = 'runs/missing' does not exist",)),
        (("OUT",), ("run directory = 'OUT'", "is not a run directory")),
        (
            ("run.toml", "--set", "output_dir=..", "--set", "name=WORKSPACE"),
            ("contains files of no run", "--set name="),
        ),
        (("run.toml", "--resume", "--set", "output_dir=..", "--set", "name=WORKSPACE"), ("contains files of no run",)),
    ],
)
def test_train_does_not_write_into_directory_that_phalanx_did_not_make(
    arguments: tuple[str, ...], expected_texts: tuple[str, ...], workspace: Path, monkeypatch: Any, capsys: Any
) -> None:
    """The user's directory contains a run file, which the resolved one would overwrite."""
    (workspace / "OUT").mkdir(exist_ok=True)
    (workspace / "notes.txt").write_text("mine\n")
    before = directory_contents(workspace)
    stderr = error_output(
        ["train", *(word.replace("WORKSPACE", workspace.name) for word in arguments)], monkeypatch, capsys
    )
    for text in expected_texts:
        assert text in stderr
    assert directory_contents(workspace) == before


def test_train_resume_rejects_checkpoint_not_written_by_phalanx(workspace: Path, monkeypatch: Any, capsys: Any) -> None:
    foreign = workspace / "OUT" / "bad" / "checkpoints" / "step-00000010"
    claim_run_directory(workspace / "OUT" / "bad")
    foreign.mkdir(parents=True)
    (foreign / ".metadata").write_bytes(b"\x80\x04.")
    stderr = error_output(["train", "run.toml", "--resume"], monkeypatch, capsys)
    assert "is not a Phalanx checkpoint" in stderr


def test_train_rejects_unwritable_output_directory(workspace: Path, monkeypatch: Any, capsys: Any) -> None:
    """Not even root can create a directory in /proc."""
    usage = preflight.shutil.disk_usage(workspace)
    monkeypatch.setattr(preflight.shutil, "disk_usage", lambda _: usage)
    stderr = error_output(["train", "run.toml", "--set", "output_dir=/proc/phalanx"], monkeypatch, capsys)
    assert "output_dir = '/proc/phalanx/bad'" in stderr
    assert "another directory" in stderr


def test_train_rejects_run_when_disk_has_no_space_for_checkpoints(
    workspace: Path, monkeypatch: Any, capsys: Any
) -> None:
    """The error comes before the run starts, and states the needed space of the nearly full disk."""
    usage = preflight.shutil.disk_usage(workspace)
    monkeypatch.setattr(preflight.shutil, "disk_usage", lambda _: usage._replace(free=1_000_000))
    stderr = error_output(["train", "run.toml"], monkeypatch, capsys)
    assert "1.0 MB free" in stderr
    assert "checkpoint.keep" in stderr


def test_preflight_counts_existing_checkpoints_as_free_space_when_resuming(workspace: Path, monkeypatch: Any) -> None:
    """The disk was large enough when the run started."""
    run = load_run(workspace / "run.toml")
    usage, one_checkpoint = preflight.shutil.disk_usage(workspace), checkpoint_bytes(run)

    def free(checkpoints: float) -> None:
        monkeypatch.setattr(
            preflight.shutil, "disk_usage", lambda _: usage._replace(free=round(checkpoints * one_checkpoint))
        )

    claim_run_directory(run_directory(run))
    free(run.checkpoint.keep.last + 1)
    preflight.preflight(ResolvedRun(run, 1), resume=True)
    for step in range(run.checkpoint.keep.last):
        directory = run_directory(run) / "checkpoints" / f"step-{step:08d}"
        directory.mkdir(parents=True)
        manifest = {
            "format": "phalanx-checkpoint",
            "step": step,
            "world_size": 1,
            "tokens": 0,
            "skipped": 0,
            "loader": {},
            "rescaling": {"before": 1.0, "after": 1.0, "since": 0, "steps": 0},
            "model": run.model.model_dump(mode="json"),
        }
        (directory / "manifest.json").write_text(json.dumps({**manifest, "optimizer": run.optimizer.name}))
    free(1)
    preflight.preflight(ResolvedRun(run, 1), resume=True)
    free(0.9)
    with pytest.raises(UserError, match="MB free"):
        preflight.preflight(ResolvedRun(run, 1), resume=True)


def test_train_rejects_invalid_value_from_environment_variable(workspace: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setenv("PHALANX_TRAINING__STEPS", "many")
    assert "training.steps = 'many'" in error_output(["train", "run.toml"], monkeypatch, capsys)


def test_train_rejects_dataset_shorter_than_one_sequence(workspace: Path, monkeypatch: Any, capsys: Any) -> None:
    sizes = ["training.seq_len=8192", "training.tokens_per_step=16384"]
    stderr = error_output(
        ["train", "run.toml", *(word for size in sizes for word in ("--set", size))], monkeypatch, capsys
    )
    match = re.fullmatch(
        r"phalanx: data\.train: 8 files read\n"
        r"phalanx: data\.train = '(.+)' has ([\d,]+) tokens, but a sequence with its target needs 8,193\n"
        r"  fix: add text, or lower training\.seq_len\n",
        stderr,
    )
    assert match, stderr
    assert int(match[2].replace(",", "")) == IndexedDataset(match[1]).size


def test_train_rejects_empty_held_out_dataset(workspace: Path, monkeypatch: Any, capsys: Any) -> None:
    (workspace / "TEXT" / "end.txt").write_text("")
    stderr = error_output(["train", "run.toml", "--set", 'data.held_out=["TEXT/end.txt"]'], monkeypatch, capsys)
    fix = "use files that contain text, or the prefixes of .bin/.idx pairs"
    assert stderr == f"phalanx: data.held_out = ['TEXT/end.txt'] has no text\n  fix: {fix}\n"
    assert not (workspace / "OUT" / "bad").exists()


def test_train_process_exits_with_code_2_for_unknown_field(workspace: Path) -> None:
    command = [sys.executable, "-m", "phalanx", "train", "run.toml", "--set", "training.stepz=3"]
    process = run_python(command, text=True, timeout=60)
    assert (process.returncode, process.stdout) == (2, "")
    assert process.stderr.splitlines() == [
        "phalanx: training.stepz = 3 is not a known field",
        "  fix: did you mean 'steps'?",
    ]


def test_preflight_accepts_unmodified_base_run(workspace: Path) -> None:
    """The table of invalid runs changes a valid run, so that only the changed value is wrong."""
    run = load_run("run.toml", environment={})
    preflight.preflight(ResolvedRun(run, 2), resume=False)
    assert json.loads(run.model_dump_json())["name"] == "bad"


def test_train_refuses_run_that_needs_more_memory_than_machine(workspace: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setattr(create_run, "machine_memory_bytes", lambda: 24 * 2**30)
    long_sequences = ["training.seq_len=10000000", "training.tokens_per_step=20000000", "layout.micro_batch_size=1"]
    overrides = [argument for setting in long_sequences for argument in ("--set", setting)]
    command = ["train", "run.toml", "--nproc", "2", *overrides]
    stderr = error_output(command, monkeypatch, capsys)
    assert error_output([*command, "--print-config"], monkeypatch, capsys) == stderr
    assert "planned memory = " in stderr
    assert "machine (2 ranks)" in stderr
    assert "--force" in stderr
    assert not (workspace / "OUT").exists()


@pytest.mark.parametrize("setting", ["layout.pp=2", "layout.tp=3", "training.tokens_per_step=250", "data.train=['X']"])
def test_print_config_refuses_what_train_would_refuse_for_its_own_number_of_ranks(
    setting: str, workspace: Path, monkeypatch: Any, capsys: Any
) -> None:
    command = ["train", "run.toml", "--set", setting]
    stderr = error_output(command, monkeypatch, capsys)
    assert error_output([*command, "--print-config"], monkeypatch, capsys) == stderr
    assert not (workspace / "OUT").exists()


def test_train_on_one_node_needs_no_rendezvous(workspace: Path, monkeypatch: Any) -> None:
    """`phalanx launch` writes this command for one node of a run file with a range of nodes."""
    directories: list[Path] = []
    monkeypatch.setattr(
        supervisor, "supervise_training", lambda directory, *_, **__: directories.append(directory) or 0
    )
    command = ["train", "run.toml", "--nodes", "1", "--nproc", "1", "--set", "cluster.nodes=4"]
    monkeypatch.setattr(sys, "argv", ["phalanx", *command, "--set", "recovery.max_restarts=0"])
    with pytest.raises(SystemExit) as exit_info:
        main()
    assert exit_info.value.code == 0
    assert [load_run(directory / "run.toml").cluster.nodes for directory in directories] == [1]


def test_print_config_exits_as_one_of_several_nodes_does(workspace: Path, monkeypatch: Any) -> None:
    """A local error of one node is not an error of the run file: launch scripts continue with `phalanx doctor`."""
    monkeypatch.setattr(create_run, "machine_memory_bytes", lambda: 2**20)
    monkeypatch.setattr(sys, "argv", ["phalanx", "train", "run.toml", "--nodes", "2", "--print-config"])
    with pytest.raises(SystemExit) as exit_info:
        main()
    assert exit_info.value.code == 1


@pytest.mark.parametrize(("device", "sharing_ranks"), [("cpu", 2), ("cuda", 1)])
def test_check_memory_offers_settings_that_fit(device: str, sharing_ranks: int, workspace: Path) -> None:
    """Ranks on CPUs share the memory of the machine. Each rank on a GPU has its own."""
    settings = ["model.preset=llama3-8b", "model.vocab_size=128256", "training.seq_len=4096"]
    settings += ["training.tokens_per_step=16384", "layout.micro_batch_size=2"]
    run = load_run(workspace / "run.toml", settings)
    planned_bytes = max(memory.device for memory in rank_memory(ResolvedRun(run.on_device(device), 2)).values())
    planned_bytes += CONTEXT_BYTES if device == "cuda" else 0
    check_memory(run, 2, sharing_ranks * planned_bytes, device)
    with pytest.raises(UserError) as error_info:
        check_memory(run, 2, sharing_ranks * planned_bytes - 1, device)
    remedies = re.findall(r"--set (\S+)", error_info.value.fix)
    assert remedies
    changed = load_run(workspace / "run.toml", [*settings, *remedies])
    check_memory(changed, 2, sharing_ranks * planned_bytes - 1, device)


def test_check_memory_searches_deep_model_with_fewer_layers(workspace: Path, monkeypatch: Any) -> None:
    """The search plans a model some 70 times, and the time of a plan grows with the number of layers."""
    deep = MAX_SEARCHED_LAYERS + 80
    planned_layers: list[int] = []

    def count_layers(resolved: ResolvedRun) -> list[RankMemory]:
        planned_layers.append(resolved.run.model.num_layers)
        return worker_memories(resolved)

    for module in (preflight, oom):
        monkeypatch.setattr(module, "worker_memories", count_layers)
    run = load_run(workspace / "run.toml", [f"model.num_layers={deep}"])
    planned_bytes = max(memory.total for memory in rank_memory(ResolvedRun(run, 1)).values())
    with pytest.raises(UserError, match="planned memory") as error_info:
        check_memory(run, 1, planned_bytes - 1, "cpu")
    assert planned_layers.count(deep) == 2
    assert len(planned_layers) > 10
    settings = re.findall(r"--set (\S+)", error_info.value.fix)
    assert settings
    check_memory(load_run(workspace / "run.toml", [f"model.num_layers={deep}", *settings]), 1, planned_bytes - 1, "cpu")


def test_check_memory_counts_what_rests_in_memory_of_a_cpu(workspace: Path) -> None:
    """Offloading does not help, because offloaded state is in the same memory."""
    settings = ["model.preset=llama3-8b", "model.vocab_size=128256", "training.seq_len=64"]
    run = load_run(workspace / "run.toml", settings)
    with pytest.raises(UserError, match="planned memory") as error_info:
        check_memory(run, 2, 25 * 10**9, "cpu")
    assert "layout.tp=2" in error_info.value.fix
    assert "offload" not in error_info.value.fix
