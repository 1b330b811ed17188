"""`phalanx swarm` as a user types it: real processes with TLS; one of the nodes has two ranks, another is killed."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from phalanx.model.huggingface.export import export_hf
from phalanx.model.init import initial_weight
from phalanx.spec.errors import UserError
from phalanx.spec.files.load import load_model_spec
from phalanx.spec.parameter_shapes import parameter_shapes
from phalanx.testing.processes import run_python, start_python
from tests.helpers.cli_runner import command_json, command_output

TIMEOUT_SECONDS = 240
RUN = """
name = "tiny"
[model]
vocab_size = 257
hidden_size = 32
num_layers = 2
num_heads = 2
ffn_hidden_size = 64
max_seq_len = 32
tie_embeddings = false
moe = {{ num_experts = 4, top_k = 2, expert_ffn_size = 32 }}
[data]
train = ["{text}"]
held_out = ["{held_out}"]
tokenizer = "bytes"
cache = "{cache}"
[training]
steps = {steps}
seq_len = 32
tokens_per_step = 256
precision = "fp32"
[optimizer]
warmup_steps = 2
[evaluation]
tokens = 512
[cluster]
device = "cpu"
[swarm]
nodes = 2
every = 4
round = {{ lease_seconds = 12.0, grace_seconds = 30.0 }}
"""


@pytest.fixture
def swarm_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with certificates and text."""
    lines = [path.read_text(errors="replace") for path in sorted(Path(json.__file__).parent.glob("*.py"))]
    (tmp_path / "text.txt").write_text("".join(lines))
    (tmp_path / "held.txt").write_text(lines[0])
    monkeypatch.chdir(tmp_path)
    command_output("swarm", "certs", "certs", "lead", "--host", "127.0.0.1")
    command_output("swarm", "certs", "certs", "ann", "bob", "cid")
    return tmp_path


def write_swarm_run_file(folder: Path, steps: int) -> Path:
    file = folder / "swarm.toml"
    names = {"text": folder / "text.txt", "held_out": folder / "held.txt", "cache": folder / "cache"}
    file.write_text(RUN.format(steps=steps, **names))
    return file


@contextmanager
def command_processes() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Provide a function that starts commands, each in a session of its own; kill them at the end."""
    started: list[subprocess.Popen[str]] = []

    def start(*words: object) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "phalanx", "swarm", *map(str, words)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        process = start_python(command, **pipes, text=True, start_new_session=True, env=environment)
        started.append(process)
        return process

    try:
        yield start
    finally:
        for process in started:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(TIMEOUT_SECONDS)


def start_coordinator(start: Callable[..., subprocess.Popen[str]], file: Path) -> tuple[subprocess.Popen[str], str]:
    lead = start("serve", file, "--certs", "certs/lead", "--listen", "127.0.0.1:0")
    lines = []
    for line in lead.stdout:  # notices may come first
        lines.append(line)
        if match := re.search(r"nodes join (127\.0\.0\.1:\d+)", line):
            return lead, match[1]
    pytest.fail("".join(lines))


def swarm_status(address: str) -> dict[str, object]:
    command = [sys.executable, "-m", "phalanx", "swarm", "status", address, "--certs", "certs/ann", "--json"]
    return json.loads(run_python(command, text=True, timeout=TIMEOUT_SECONDS, check=True).stdout)


def test_swarm_trains_identical_model_on_two_nodes_after_third_is_killed(swarm_directory: Path) -> None:
    with command_processes() as start:
        lead, address = start_coordinator(start, write_swarm_run_file(swarm_directory, 100))
        doomed = start("join", address, "--certs", "certs/cid")
        nodes = {
            "ann": start("join", address, "--certs", "certs/ann"),
            "bob": start(
                "join", address, "--certs", "certs/bob", "--nproc", "2", "--set", "layout.data_parallel=zero1"
            ),
        }
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while len(swarm_status(address)["nodes"]) < 3:
            assert time.monotonic() < deadline
        os.killpg(doomed.pid, signal.SIGKILL)
        outputs = {name: process.communicate(timeout=TIMEOUT_SECONDS)[0] for name, process in nodes.items()}
        assert {name: process.returncode for name, process in nodes.items()} == {"ann": 0, "bob": 0}, outputs
        out, _ = lead.communicate(timeout=TIMEOUT_SECONDS)
        assert lead.returncode == 0, out
    assert "round 25 of 25" in out
    losses = [re.search(r"held-out loss ([\d.]+)", text) for text in outputs.values()]
    assert None not in losses, outputs
    assert float(losses[0][1]) == pytest.approx(float(losses[1][1]), abs=1e-3)
    assert float(losses[0][1]) < 4.5  # a uniform distribution over 257 tokens has 5.55
    base = load_file(swarm_directory / "runs" / "tiny" / "model" / "base.safetensors")
    for name in nodes:
        node_base = load_file(swarm_directory / "nodes" / name / "base.safetensors")
        assert all(torch.equal(node_base[key], value) for key, value in base.items())
    events = [
        json.loads(line) for line in (swarm_directory / "runs" / "tiny" / "journal.jsonl").read_text().splitlines()
    ]
    left = [event for event in events if event["kind"] == "left" and event["node"] == "cid"]
    assert {event["reason"] for event in left} == {"no heartbeat"}
    opened = [event for event in events if event["kind"] == "opened"]
    assert {node for owners in opened[-1]["owners"] for node in owners} == {"ann", "bob"}
    rounds = [json.loads(line) for line in (swarm_directory / "nodes" / "ann" / "swarm.jsonl").read_text().splitlines()]
    first = rounds[0]["round"]  # the other two may have started without it
    assert [record["round"] for record in rounds] == list(range(first, 25))
    assert first < 12
    assert all(record["sent_bytes"] > 0 and record["refused"] == "" for record in rounds)
    assert all(record["held_bytes"] > 0 for record in rounds)
    (report,) = command_json("report", swarm_directory / "nodes" / "ann")["runs"]
    update_bytes = [event["bytes"] for event in events if event["kind"] == "accepted" and event["node"] == "ann"]
    assert report["swarm"]["rounds"]["bytes"]["sent"] == update_bytes
    assert "rounds 25 of 25" in command_output("report", swarm_directory / "runs" / "tiny")
    texts = [
        command_output("generate", swarm_directory / name, "--prompt", "def ") for name in ("runs/tiny", "nodes/bob")
    ]
    assert texts[0] == texts[1]


@pytest.mark.parametrize("layouts", [("tp", "ep"), ("ep", "tp")], ids=" and ".join)
def test_swarm_with_two_ranks_per_node_matches_one_rank_per_node(
    swarm_directory: Path, layouts: tuple[str, str]
) -> None:
    """Nodes shard experts by columns (tp) or one by one (ep)."""
    file = write_swarm_run_file(swarm_directory, 12)
    first, second = ([], []), tuple(["--nproc", "2", "--set", f"layout.{axis}=2"] for axis in layouts)
    results = []
    for number, nodes in enumerate((first, second)):
        with command_processes() as start:
            file.write_text(re.sub('name = "tiny.*"', f'name = "tiny{number}"', file.read_text()))
            lead, address = start_coordinator(start, file)
            node_processes = [
                start("join", address, "--certs", f"certs/{name}", *words)
                for name, words in zip(("ann", "bob"), nodes, strict=True)
            ]
            outputs = [process.communicate(timeout=TIMEOUT_SECONDS)[0] for process in (*node_processes, lead)]
            assert [process.returncode for process in (*node_processes, lead)] == [0, 0, 0], outputs
        results.append(load_file(swarm_directory / "runs" / f"tiny{number}" / "model" / "base.safetensors"))
        for name in ("ann", "bob"):
            node_base = load_file(swarm_directory / "nodes" / name / "base.safetensors")
            assert all(torch.equal(node_base[key], value) for key, value in results[-1].items())
    for key, expected in results[0].items():
        # Some values are quantized to another level.
        assert (results[1][key] - expected).norm() < 1e-4 * expected.norm()


def test_swarm_nodes_and_coordinator_exit_cleanly_on_sigterm(swarm_directory: Path) -> None:
    with command_processes() as start:
        lead, address = start_coordinator(start, write_swarm_run_file(swarm_directory, 40_000))
        nodes = [start("join", address, "--certs", f"certs/{name}") for name in ("ann", "bob")]
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while swarm_status(address)["round"] < 2:
            assert time.monotonic() < deadline
        for process in nodes:
            os.kill(process.pid, signal.SIGTERM)
        assert [process.wait(TIMEOUT_SECONDS) for process in nodes] == [0, 0]
        assert swarm_status(address)["nodes"] == []
        os.kill(lead.pid, signal.SIGTERM)
        assert lead.wait(TIMEOUT_SECONDS) == 0


@contextmanager
def idle_connections(address: str, count: int) -> Iterator[None]:
    """Open connections that send nothing."""
    host, port = address.split(":")
    soft_limit, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft_limit, count + 500), hard_limit))
    try:
        with ExitStack() as stack:
            for _ in range(count):
                connection = stack.enter_context(socket.socket())
                connection.setblocking(False)
                connection.connect_ex((host, int(port)))
            yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft_limit, hard_limit))


def test_swarm_trains_and_admits_node_with_2000_idle_connections_and_1024_descriptors(swarm_directory: Path) -> None:
    with command_processes() as start:
        lead, address = start_coordinator(start, write_swarm_run_file(swarm_directory, 40_000))
        resource.prlimit(lead.pid, resource.RLIMIT_NOFILE, (1024, 1024))
        start("join", address, "--certs", "certs/ann")
        start("join", address, "--certs", "certs/bob")
        deadline = time.monotonic() + TIMEOUT_SECONDS

        def wait_until(condition: Callable[[dict[str, object]], bool]) -> None:
            while not condition(swarm_status(address)):
                assert time.monotonic() < deadline
                assert lead.poll() is None

        wait_until(lambda status: status["round"] >= 1)
        with idle_connections(address, 2000):
            start("join", address, "--certs", "certs/cid")
            wait_until(lambda status: len(status["nodes"]) == 3)
            first_round = swarm_status(address)["round"]
            wait_until(lambda status: status["round"] >= first_round + 5)
        descriptors = len(list(Path(f"/proc/{lead.pid}/fd").iterdir()))
        assert descriptors < 1024 - 256


def test_swarm_upcycles_dense_model_available_only_to_coordinator(swarm_directory: Path) -> None:
    spec = load_model_spec(str(write_swarm_run_file(swarm_directory, 8))).replace(moe=None)
    shapes = {name: torch.Size(shape) for name, shape in parameter_shapes(spec).items()}
    export_hf(
        spec, {name: initial_weight(spec, name, shape, 0) for name, shape in shapes.items()}, swarm_directory / "dense"
    )
    file = swarm_directory / "swarm.toml"
    start_from = '[model]\nfrom_hf = "dense"\nupcycle_reinit_fraction = 0.5'
    file.write_text(
        file.read_text().replace("[model]", start_from).replace("expert_ffn_size = 32", "expert_ffn_size = 64")
    )
    with command_processes() as start:
        _, address = start_coordinator(start, file)
        (swarm_directory / "dense").rename(swarm_directory / "gone")
        nodes = [start("join", address, "--certs", f"certs/{name}") for name in ("ann", "bob")]
        outputs = [process.communicate(timeout=TIMEOUT_SECONDS)[0] for process in nodes]
        assert [process.returncode for process in nodes] == [0, 0], outputs


def test_swarm_plan_predicts_round_bytes_and_utilization_by_method(swarm_directory: Path) -> None:
    """SPES-7B on four nodes at 1 Gbit/s: a round has 100 steps of 5.5 s."""
    file = swarm_directory / "7b.toml"
    file.write_text(
        '[model]\npreset = "spes-7b"\n[training]\nsteps = 1000\nseq_len = 2048\ntokens_per_step = 524288\n'
        "[swarm]\nnodes = 4\n"
    )
    words = ("swarm", "plan", file, "--link", "1000", "--step-seconds", "5.5")
    rows = {(row["method"], row["codec"]): row for row in json.loads(command_output(*words, "--json"))}
    diloco, spes = rows["diloco", "fp32"], rows["spes+", "int8"]
    assert diloco["up_bytes"] + diloco["down_bytes"] == pytest.approx(58.67e9, rel=1e-3)
    assert spes["up_bytes"] + spes["down_bytes"] == pytest.approx(8.35e9, rel=1e-3)
    assert (spes["chosen"], diloco["chosen"]) == (True, False)
    assert diloco["state_bytes"] == pytest.approx(117.3e9, rel=1e-3)
    assert rows["spes", "fp32"]["state_bytes"] == pytest.approx(59.4e9, rel=1e-3)
    assert diloco["wire_seconds"] == pytest.approx(58.67e9 / 125e6, rel=1e-3)
    ddp = rows["ddp", "fp32"]  # it exchanges as much in each of 100 steps, and nodes have no moments
    assert (ddp["up_bytes"], ddp["down_bytes"]) == (100 * diloco["up_bytes"], 100 * diloco["down_bytes"])
    assert ddp["state_bytes"] == diloco["state_bytes"] / 2
    assert ddp["utilization"] == pytest.approx(550 / (550 + 5867e9 / 125e6), rel=1e-3)
    assert spes["utilization"] == pytest.approx(550 / (550 + 8.35e9 / 125e6), rel=1e-3)
    overlapped = json.loads(command_output(*words, "--json", "--set", "swarm.delay=20"))[-1]
    assert overlapped["utilization"] == 1.0
    assert "spes+, int8 (chosen)" in command_output(*words)
    with pytest.raises(UserError, match="--link = 'fast' is not a bandwidth"):
        command_output("swarm", "plan", file, "--link", "fast")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("join", "127.0.0.1", "--certs", "certs/ann"), "ADDRESS = '127.0.0.1' is not an address"),
        (("join", "127.0.0.1:1", "--certs", "nowhere"), "has no certificate"),
        (("serve", "plain.toml", "--certs", "certs/lead"), "swarm is missing"),
        (("serve", "swarm.toml", "--certs", "certs/lead", "--listen", "x:y"), "--listen = 'x:y' is not an address"),
        (("certs", "certs", "../eve"), "is not a valid member name"),
        (("certs", "certs", "ann"), "already has a certificate"),
    ],
)
def test_swarm_raises_user_error_for_invalid_arguments(
    swarm_directory: Path, arguments: tuple[str, ...], message: str
) -> None:
    write_swarm_run_file(swarm_directory, 8)
    (swarm_directory / "plain.toml").write_text('[model]\npreset = "tiny"\n')
    with pytest.raises(UserError, match=message):
        command_output("swarm", *arguments)


def test_train_rejects_swarm_run_file(swarm_directory: Path) -> None:
    with pytest.raises(UserError, match="is a run of several sites, which phalanx train does not start"):
        command_output("train", write_swarm_run_file(swarm_directory, 8))
