"""`phalanx swarm` as it is typed: real processes, real TLS; one of the nodes has two ranks, another is killed."""

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

from phalanx.cost.exact.parameter_shapes import parameter_shapes
from phalanx.model.huggingface.export import export_hf
from phalanx.model.init import initial_weight
from phalanx.spec.errors import UserError
from phalanx.spec.files.load import load_model_spec
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
    """Certificates and a run file."""
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
    """Starts commands, each in a session of its own, and leaves none behind."""
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
        if found := re.search(r"nodes join (127\.0\.0\.1:\d+)", line):
            return lead, found[1]
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
        said = {name: process.communicate(timeout=TIMEOUT_SECONDS)[0] for name, process in nodes.items()}
        assert {name: process.returncode for name, process in nodes.items()} == {"ann": 0, "bob": 0}, said
        out, _ = lead.communicate(timeout=TIMEOUT_SECONDS)
        assert lead.returncode == 0, out
    assert "round 25 of 25" in out
    losses = [re.search(r"held-out loss ([\d.]+)", text) for text in said.values()]
    assert None not in losses, said
    assert float(losses[0][1]) == pytest.approx(float(losses[1][1]), abs=1e-3)
    assert float(losses[0][1]) < 4.5  # of 257 bytes 5.55 know nothing
    base = load_file(swarm_directory / "runs" / "tiny" / "model" / "base.safetensors")
    for name in nodes:
        mine = load_file(swarm_directory / "nodes" / name / "base.safetensors")
        assert all(torch.equal(mine[key], value) for key, value in base.items())
    events = [
        json.loads(line) for line in (swarm_directory / "runs" / "tiny" / "journal.jsonl").read_text().splitlines()
    ]
    left = [event for event in events if event["kind"] == "left" and event["node"] == "cid"]
    assert {event["reason"] for event in left} == {"no heartbeat"}
    opened = [event for event in events if event["kind"] == "opened"]
    assert {node for of in opened[-1]["owners"] for node in of} == {"ann", "bob"}
    rounds = [json.loads(line) for line in (swarm_directory / "nodes" / "ann" / "swarm.jsonl").read_text().splitlines()]
    first = rounds[0]["round"]  # the other two may have begun without it
    assert [spent["round"] for spent in rounds] == list(range(first, 25))
    assert first < 12
    assert all(spent["sent_bytes"] > 0 and spent["refused"] == "" for spent in rounds)
    assert all(spent["held_bytes"] > 0 for spent in rounds)
    (found,) = command_json("report", swarm_directory / "nodes" / "ann")["runs"]
    update_bytes = [event["bytes"] for event in events if event["kind"] == "accepted" and event["node"] == "ann"]
    assert found["swarm"]["rounds"]["bytes"]["sent"] == update_bytes
    assert "rounds 25 of 25" in command_output("report", swarm_directory / "runs" / "tiny")
    said = [
        command_output("generate", swarm_directory / place, "--prompt", "def ") for place in ("runs/tiny", "nodes/bob")
    ]
    assert said[0] == said[1]


@pytest.mark.parametrize("layouts", [("tp", "ep"), ("ep", "tp")], ids=" and ".join)
def test_swarm_with_two_ranks_per_node_matches_one_rank_per_node(
    swarm_directory: Path, layouts: tuple[str, str]
) -> None:
    """By columns or one by one: what the swarm learns is what it learns of nodes with one rank."""
    file = write_swarm_run_file(swarm_directory, 12)
    first, second = ([], []), tuple(["--nproc", "2", "--set", f"layout.{axis}=2"] for axis in layouts)
    results = []
    for number, nodes in enumerate((first, second)):
        with command_processes() as start:
            file.write_text(re.sub('name = "tiny.*"', f'name = "tiny{number}"', file.read_text()))
            lead, address = start_coordinator(start, file)
            ends = [
                start("join", address, "--certs", f"certs/{name}", *words)
                for name, words in zip(("ann", "bob"), nodes, strict=True)
            ]
            said = [process.communicate(timeout=TIMEOUT_SECONDS)[0] for process in (*ends, lead)]
            assert [process.returncode for process in (*ends, lead)] == [0, 0, 0], said
        results.append(load_file(swarm_directory / "runs" / f"tiny{number}" / "model" / "base.safetensors"))
        for name in ("ann", "bob"):
            mine = load_file(swarm_directory / "nodes" / name / "base.safetensors")
            assert all(torch.equal(mine[key], value) for key, value in results[-1].items())
    for key, expected in results[0].items():
        assert (results[1][key] - expected).norm() < 1e-4 * expected.norm()  # a step of coding here and there


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
    """Connections of a stranger that sends nothing."""
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
        said = [process.communicate(timeout=TIMEOUT_SECONDS)[0] for process in nodes]
        assert [process.returncode for process in nodes] == [0, 0], said


def test_swarm_plan_predicts_round_bytes_and_utilization_by_method(swarm_directory: Path) -> None:
    """SPES-7B among four nodes at 1 Gbit/s: a round of 100 steps of 5.5 s."""
    file = swarm_directory / "7b.toml"
    file.write_text(
        '[model]\npreset = "spes-7b"\n[training]\nsteps = 1000\nseq_len = 2048\ntokens_per_step = 524288\n'
        "[swarm]\nnodes = 4\n"
    )
    words = ("swarm", "plan", file, "--link", "1000", "--step-seconds", "5.5")
    rows = {(row["method"], row["codec"]): row for row in json.loads(command_output(*words, "--json"))}
    whole, best = rows["diloco", "fp32"], rows["spes+", "int8"]
    assert whole["up_bytes"] + whole["down_bytes"] == pytest.approx(58.67e9, rel=1e-3)
    assert best["up_bytes"] + best["down_bytes"] == pytest.approx(8.35e9, rel=1e-3)
    assert (best["chosen"], whole["chosen"]) == (True, False)
    assert whole["state_bytes"] == pytest.approx(117.3e9, rel=1e-3)
    assert rows["spes", "fp32"]["state_bytes"] == pytest.approx(59.4e9, rel=1e-3)
    assert whole["wire_seconds"] == pytest.approx(58.67e9 / 125e6, rel=1e-3)
    each = rows["ddp", "fp32"]  # it exchanges as much a hundred times, and nodes have no moments
    assert (each["up_bytes"], each["down_bytes"]) == (100 * whole["up_bytes"], 100 * whole["down_bytes"])
    assert each["state_bytes"] == whole["state_bytes"] / 2
    assert each["utilization"] == pytest.approx(550 / (550 + 5867e9 / 125e6), rel=1e-3)
    assert best["utilization"] == pytest.approx(550 / (550 + 8.35e9 / 125e6), rel=1e-3)
    hidden = json.loads(command_output(*words, "--json", "--set", "swarm.delay=20"))[-1]
    assert hidden["utilization"] == 1.0
    assert "spes+, int8 (chosen)" in command_output(*words)
    with pytest.raises(UserError, match="--link = 'fast': is not a bandwidth"):
        command_output("swarm", "plan", file, "--link", "fast")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("join", "127.0.0.1", "--certs", "certs/ann"), "ADDRESS = '127.0.0.1': is not an address"),
        (("join", "127.0.0.1:1", "--certs", "nowhere"), "has no certificate"),
        (("serve", "plain.toml", "--certs", "certs/lead"), "swarm: is missing"),
        (("serve", "swarm.toml", "--certs", "certs/lead", "--listen", "x:y"), "--listen = 'x:y': is not an address"),
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
