"""`phalanx bench` on the command line: its parts, its sizes, its error messages, and measurements of real ranks."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from phalanx.cli.commands.bench import parse_size_sweep
from phalanx.spec.errors import UserError
from phalanx.testing.processes import run_python
from tests.helpers import cli_runner
from tests.helpers.nccl_tests_output import AVERAGE, ROW

measure_output = partial(cli_runner.command_output, "bench")

SMALL_RUN = """
[model]
vocab_size = 300
hidden_size = 32
num_layers = 1
num_heads = 2
ffn_hidden_size = 64
max_seq_len = 32
[training]
seq_len = 32
tokens_per_step = 128
precision = "fp32"
[layout]
data_parallel = "zero1"
"""


@pytest.fixture
def run(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(SMALL_RUN)
    return path


def test_parse_size_sweep_doubles_from_first_to_last_size() -> None:
    assert parse_size_sweep("4KiB:16KiB") == [4096, 8192, 16384]
    assert parse_size_sweep("1M:5M") == [2**20, 2**21, 2**22]
    assert parse_size_sweep("100:100") == [100]


@pytest.mark.parametrize("text", ["4KiB", "16MiB:4KiB", "0:8", "4kb:8kb", "x:y", ":", "-4:8", "4KiB:8GiBB"])
def test_parse_size_sweep_rejects_invalid_range(text: str) -> None:
    with pytest.raises(UserError, match=r"--sweep = .* is not a range of sizes"):
        parse_size_sweep(text)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("matmul",), "bench = 'matmul' requires a run file"),
        (("memory", "run.toml"), r"bench = 'memory run.toml' is not \[PART\] RUN.toml"),
        (("matmul", "{run}", "--sweep", "1:2"), "--sweep = '1:2' does not apply to matmul"),
        (("collectives", "{run}", "--nproc", 1), "--nproc = 1 leaves no peer to communicate with"),
        (("{run}", "--nproc", 3, "--set", "layout.tp=2"), "layout.tp = 2 does not divide the 3 ranks that compute"),
        (("{run}", "--set", "training.precision=fp8"), "training.precision = 'fp8' is not measured"),
        (
            ("{run}", "--nproc", 2, "--set", "cluster.nodes=2"),
            "cluster.nodes = 2 is more than the one node",
        ),
        (("{run}", "--nproc", 2, "--sweep", "1GiB:1024GiB"), "--sweep = .* takes 4.4e[+]03 GB of memory"),
    ],
)
def test_bench_raises_user_error_for_invalid_arguments(arguments: tuple[object, ...], message: str, run: Path) -> None:
    with pytest.raises(UserError, match=message):
        measure_output(*(str(argument).format(run=run) for argument in arguments))


def test_bench_rejects_invalid_layout_before_importing_torch(run: Path) -> None:
    program = (
        "import sys; from phalanx.cli.main import app; from phalanx.spec.errors import UserError\n"
        "try: app(sys.argv[1:], standalone_mode=False)\n"
        "except UserError: print('torch' in sys.modules)"
    )
    arguments = "bench", str(run), "--nproc", "3", "--set", "layout.tp=2"
    done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=60)
    assert done.stdout == "False\n"


# -- in processes of their own, as ranks are started -------------------------------------------------------------------


def measure_process_output(*arguments: object) -> str:
    command = [sys.executable, "-m", "phalanx", "bench", *map(str, arguments)]
    return run_python(command, check=True, text=True, timeout=120).stdout


def test_bench_collectives_prints_nccl_tests_format(run: Path, tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    arguments = "--nproc", 2, "--iterations", 2, "--sweep", "1KiB:4KiB", "--out", file
    text = measure_process_output("collectives", run, *arguments)
    collectives = json.loads(file.read_text())["collectives"]
    assert [entry["operation"] for entry in collectives] == ["reduce_scatter", "all_gather"]
    assert all(entry["groups"] == [[0, 1]] for entry in collectives)
    rows = ROW.findall(text)
    sizes = [result["size"] for entry in collectives for result in entry["nccl_tests"]["results"]]
    assert [int(row[0]) for row in rows] == sizes
    assert {row[8] for row in rows} == {row[12] for row in rows} == {"0"}
    assert len(AVERAGE.findall(text)) == len(collectives)
    assert len(re.findall(r"^# t = .* maximum \d+%$", text, re.MULTILINE)) == len(collectives)
    assert all(line.startswith("#") or not line.strip() or ROW.match(line) for line in text.splitlines())


def test_bench_on_one_rank_skips_collectives(run: Path) -> None:
    result = json.loads(measure_process_output(run, "--nproc", 1, "--iterations", 1, "--json"))
    assert result["collectives"] == []
    assert {row["kernel"] for row in result["bandwidth"]} == {"copy", "triad"}
    assert [row["layers"] for row in result["matmul"]] == [["wq", "wk", "wv", "wo"], ["gate", "up"], ["down"], ["head"]]
    assert [row["heads"] for row in result["attention"]] == [2]


def test_bench_matmul_table_names_layers(run: Path) -> None:
    text = measure_process_output("matmul", run, "--nproc", 1, "--iterations", 1)
    assert re.search(r"^wq, wk, wv, wo +4 +128 +32 +32 ", text, re.MULTILINE), text
    assert "attention" not in text


def test_launch_benchmarks_reports_error_of_failed_rank(run: Path) -> None:
    program = (
        "import sys; from phalanx.spec.files.load import load_run; from phalanx.bench.ranks import launch_benchmarks\n"
        "sys.exit(launch_benchmarks(load_run(sys.argv[1]), 2, ['--parts', 'attention', '--iterations', '0']))"
    )
    done = subprocess.run([sys.executable, "-c", program, str(run)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert re.search(r"^phalanx: rank [01]: StatisticsError: no median for empty data$", done.stderr, re.MULTILINE)
    assert "Traceback" in done.stderr
