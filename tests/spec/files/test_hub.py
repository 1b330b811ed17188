"""Names of models on the hub, and their files from a stub of the hub and from the local cache."""

import json
import sys

import pytest

from phalanx.model.huggingface.export import export_hf
from phalanx.spec.errors import UserError
from phalanx.spec.files.hub import HubName, hub_name
from phalanx.spec.files.load import load_model_spec
from phalanx.testing.processes import run_python
from tests.helpers.random_models import build_model
from tests.helpers.stub_hub import StubRepo, serve_hub

COMMIT = "c" * 40


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("org/name", HubName("org/name", "main")),
        ("org/name@v1.0", HubName("org/name", "v1.0")),
        ("org/name@refs/pr/3", HubName("org/name", "refs/pr/3")),
        ("Qwen/Qwen3-0.6B", HubName("Qwen/Qwen3-0.6B", "main")),
        *((path, None) for path in ("llama3-8b", "models/tokenizer.json", "runs/run.toml", "./org/name", "../name")),
        *((path, None) for path in ("~/models", "/models/name", "a/b/c", "here/name", "org/", "hf://org/name")),
    ],
)
def test_names_of_the_hub_are_no_local_paths(tmp_path, monkeypatch, source, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here" / "name").mkdir(parents=True)
    assert hub_name(source) == name


def test_names_of_the_hub_require_its_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(UserError, match=r"requires huggingface_hub, .*\n  fix: .*pip install '\.\[train\]'"):
        load_model_spec("org/name")
    assert load_model_spec("llama3-8b").num_layers == 32


@pytest.fixture(scope="module")
def model_files(tmp_path_factory):
    directory = tmp_path_factory.mktemp("hub") / "model"
    model = build_model()
    export_hf(model.spec, dict(model.named_parameters()), directory)
    return directory


def read_configs(environment, *names):
    """Return the width of each model, or the message of the error, from a process of its own."""
    command = [sys.executable, "-m", "tests.helpers.read_hub_configs", *names]
    done = run_python(command, env=environment, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_errors_say_what_is_wrong_with_a_name(tmp_path, model_files):
    open_repo = StubRepo(model_files, COMMIT)
    empty = StubRepo(tmp_path / "empty", COMMIT)
    private = StubRepo(model_files, COMMIT, token="hf_secret")
    with serve_hub(open=open_repo, empty=empty, private=private, gated=StubRepo(model_files, gated=True)) as hub:
        names = ["org/nothing", "org/private", "org/gated", "org/open@v9", "org/empty", "org/a--b", "org/open"]
        environment = hub.environment(tmp_path / "cache", HF_TOKEN="hf_wrong")
        *problems, width = read_configs(environment, *names)
        assert width == 32
        for name, problem, expected in zip(
            names,
            problems,
            [
                "is neither a local path nor a model on",
                "is neither a local path nor a model on",
                "is gated",
                "is not a revision of this model",
                "has no config.json on",
                "is neither a local path nor a model on",
            ],
            strict=False,
        ):
            assert problem.startswith(f"model.from_hf = '{name}' {expected}")
            assert "hf_" not in problem.replace("from_hf", "")
        assert read_configs(environment | {"HF_TOKEN": "hf_secret"}, "org/private") == [32]
    offline = hub.environment(tmp_path / "cache", HF_HUB_OFFLINE="1")
    lacking = "model.from_hf = 'org/nothing' is not a local path, and "
    width, problem = read_configs(offline, "org/open", "org/nothing")
    assert width == 32
    assert problem.startswith(f"{lacking}the local cache lacks its config.json, while HF_HUB_OFFLINE is set")
    # The server has ended.
    width, problem = read_configs(hub.environment(tmp_path / "cache"), f"org/open@{COMMIT}", "org/nothing")
    assert width == 32
    assert problem.startswith(f"{lacking}127.0.0.1:")
    assert "(ConnectError)" in problem
