"""Training from a model on a stub of the hub: downloads, the recorded commit, the local cache."""

import json
import shutil
import sys

import pytest

from phalanx.data.tokenizer import train_bpe
from phalanx.model.huggingface.export import export_hf
from phalanx.runs.metrics import read_metrics
from phalanx.spec.files.tables import read_toml
from phalanx.testing.processes import run_python
from tests.helpers.random_models import build_model
from tests.helpers.stub_hub import StubRepo, serve_hub

TOKEN = "hf_secret_of_the_user"
FIRST = "1" * 40
SECOND = "2" * 40


@pytest.fixture(scope="module")
def model_files(tmp_path_factory, text):
    """Return a model in several files, with others that must not be downloaded."""
    folder = tmp_path_factory.mktemp("hub")
    tokenizer = train_bpe((file.read_text() for file in text.glob("*.py")), 300)
    tokenizer.save(folder / "tokenizer.json")
    model = build_model(vocab_size=tokenizer.vocab)
    export_hf(
        model.spec, dict(model.named_parameters()), folder / "model", folder / "tokenizer.json", shard_bytes=40_000
    )
    (folder / "model" / "pytorch_model.bin").write_bytes(b"pickled")
    (folder / "model" / "modeling_tiny.py").write_text("raise SystemExit")
    return folder / "model"


def write_run_file(tmp_path, text):
    file = tmp_path / "run.toml"
    file.write_text(f"""
        name = "first"
        output_dir = "{tmp_path}/runs"
        model = {{from_hf = "org/tiny"}}
        data = {{train = ["{text}"], cache = "{tmp_path}/tokens"}}
        training = {{steps = 1, seq_len = 32, tokens_per_step = 64, precision = "fp32"}}
        optimizer = {{learning_rate = 1e-3}}
        evaluation = {{tokens = 64}}
        recovery = {{max_restarts = 0}}
    """)
    return file


def train(environment, *arguments):
    command = [sys.executable, "-m", "phalanx", "train", *map(str, arguments), "--nproc", "1"]
    done = run_python(command, env=environment, text=True)
    assert done.returncode == 0, done.stderr
    return done.stderr


def test_run_trains_from_the_hub_and_keeps_its_commit(tmp_path, text, model_files):
    repo = StubRepo(model_files, FIRST, token=TOKEN, cuts={"model-00002-of-00004.safetensors": 1, "tokenizer.json": 1})
    run_file = write_run_file(tmp_path, text)
    cache = tmp_path / "cache"
    with serve_hub(tiny=repo) as hub:
        log = train(hub.environment(cache, HF_TOKEN=TOKEN), run_file)
        weights = [file.name for file in sorted(model_files.glob("*.safetensors"))]
        assert len(weights) == 4
        needed = {file.name for file in model_files.iterdir() if file.suffix not in (".bin", ".py")}
        assert set(hub.downloads) == needed
        # The rest of a cut file is requested, not the file again.
        assert repo.cuts == {"model-00002-of-00004.safetensors": 0, "tokenizer.json": 0}
    snapshot = cache / "hub" / "models--org--tiny" / "snapshots" / FIRST
    for name in [*weights, "tokenizer.json"]:
        assert (snapshot / name).read_bytes() == (model_files / name).read_bytes()
    run_directory = tmp_path / "runs" / "first"
    recorded = read_toml(run_directory / "run.toml")
    assert recorded["model"]["from_hf"] == recorded["data"]["tokenizer"] == f"org/tiny@{FIRST}"
    assert TOKEN not in log
    assert all(TOKEN.encode() not in file.read_bytes() for file in run_directory.rglob("*") if file.is_file())

    # The server has ended: the cache is enough, without the token.
    train(hub.environment(cache, HF_HUB_OFFLINE="1"), run_file, "--set", "name=second")
    losses = [next(iter(read_metrics(tmp_path / "runs" / name)))["loss"] for name in ("first", "second")]
    assert losses[0] == losses[1]

    # The branch moves to another model.
    (cache / "hub" / "models--org--tiny" / "refs" / "main").write_text(SECOND)
    other = snapshot.with_name(SECOND)
    shutil.copytree(snapshot, other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.5}))
    train(hub.environment(cache, HF_HUB_OFFLINE="1"), run_file, "--resume", "--set", "training.steps=2")
    recorded = read_toml(run_directory / "run.toml")
    assert recorded["model"]["from_hf"] == recorded["data"]["tokenizer"] == f"org/tiny@{FIRST}"
    assert recorded["model"]["norm_eps"] != 0.5
