"""Commands with wrong paths or in wrong directories: each ends with one clear message and changes no file of the
user."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from phalanx.cli.main import main
from phalanx.runs.create import claim_run_directory, is_run_directory
from phalanx.spec.files.template import run_file_template
from phalanx.testing.fault_injection import NotAllowed, small_disk
from phalanx.train.create_run import create_run
from phalanx.train.rank_options import RankOptions
from phalanx.train.worker import run_rank
from tests.helpers.small_runs import make_trainer, small_run, train_to_end

RUN = """# my run, with my notes
name = "mine"
[model]
preset = "tiny"
vocab_size = 257
[data]
train = ["stdlib"]
tokenizer = "bytes"
"""
INTO_FOLDER = ("--nproc", "1", "--set", "output_dir=.", "--set")

CASES: list[tuple[tuple[str, ...], str]] = [
    (("train", "."), "phalanx train run.toml"),
    (("train", ".", "--resume"), "phalanx train run.toml"),
    (("train", "mine"), "phalanx train mine/run.toml"),
    (("train", "mine", "--resume"), "phalanx train mine/run.toml"),
    (("train", "with space/ünï"), "phalanx train 'with space/ünï/run.toml'"),
    (("train", "empty"), "is not a run directory"),
    (("train", "ours"), "does not exist"),
    (("train", "file"), "not valid TOML"),
    (("train", "none.toml"), "does not exist"),
    (("train", "binary.toml"), "not valid TOML"),
    (("train", "link"), "phalanx train link/run.toml"),
    (("train", "link.toml", *INTO_FOLDER, "name=mine"), "contains files"),
    (("train", "run.toml", "--set", "output_dir=."), "contains files"),
    (("train", "run.toml", "--set", "output_dir=.", "--resume"), "contains files"),
    (("train", "run.toml", *INTO_FOLDER, "name=link"), "contains files"),
    (("train", "with space/ünï/run.toml", *INTO_FOLDER, "name=with space"), "letters"),
    (("train", "run.toml", "--set", "output_dir=file"), "is not a writable directory"),
    (("train", "run.toml", "--set", "output_dir=/proc/none"), "another disk"),
    (("train", "run.toml", "--set", "data.train=['none']"), "does not exist"),
    (("plan", ".", "--machine", "h100"), "is a directory"),
    (("plan", "mine", "--machine", "h100"), "is a directory"),
    (("plan", "none.toml", "--machine", "h100"), "does not exist"),
    (("plan", "run.toml", "--machine", "h100", "--out", "run.toml"), "is the run file itself"),
    (("plan", "run.toml", "--machine", "h100", "--out", "mine"), "it is a directory"),
    (("plan", "run.toml", "--machine", "h100", "--out", "none/x.toml"), "there is no directory none"),
    (("plan", "explain", "run.toml", "--machine", "h100", "--picture", "drawing.svg"), "was not written by phalanx"),
    (("export", "mine", "out"), "has no checkpoint yet"),
    (("export", "none", "out"), "does not exist"),
    (("export", "ours", "out"), "has no run.toml"),
    (("report", "mine"), "was not created by phalanx train"),
    (("report", "none"), "does not exist"),
    (("report", "file"), "is a file"),
    (("report", "empty"), "has no run.toml"),
    (
        ("launch", "run.toml", "--to", "slurm", "--nproc", "1", "--out", "run.toml"),
        "was not written by phalanx",
    ),
    (("launch", "run.toml", "--to", "slurm", "--nproc", "1", "--out", "made.toml"), "was not written by phalanx"),
    (
        ("pipeline", "show", "1f1b", "--stages", "2", "--microbatches", "4", "--out", "drawing.svg"),
        "was not written by phalanx",
    ),
    (("train", "marked"), "phalanx train marked/run.toml"),
    (("init", "run.toml"), "--force"),
    (("data", "tokenizer", "stdlib", "--out", "file"), "--force"),
]


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's folder: run files, notes, folders of theirs, and one directory of a run that never began."""
    monkeypatch.chdir(tmp_path)
    for folder in (".", "mine", "with space/ünï"):
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        (tmp_path / folder / "run.toml").write_text(RUN)
        (tmp_path / folder / "notes.txt").write_text("my notes")
    (tmp_path / "made.toml").write_text(run_file_template("made.toml", "run.schema.json"))
    (tmp_path / "marked").mkdir()
    (tmp_path / "marked" / "run.toml").write_text(RUN)
    (tmp_path / "marked" / "phalanx.json").write_text('{"plan": []}')
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("some text")
    (tmp_path / "drawing.svg").write_text("<svg>my drawing</svg>")
    (tmp_path / "binary.toml").write_bytes(bytes(range(256)))
    (tmp_path / "link").symlink_to("mine")
    (tmp_path / "link.toml").symlink_to("run.toml")
    claim_run_directory(tmp_path / "ours")
    return tmp_path


def contents(folder: Path) -> dict[str, object]:
    return {
        str(path): path.read_bytes() if path.is_file() else path.is_symlink() and path.readlink()
        for path in folder.rglob("*")
    }


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with texts/ and runs/mine, trained on them by their relative path."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "texts").mkdir()
    for name in "abcdefgh":
        (folder / "texts" / f"{name}.py").write_text(f"def {name}(x):\n    return x\n" * 40)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        changes = {"name": "mine", "data.train": ["texts"], "data.held_out": [], "training.steps": 2}
        run = small_run(Path("texts"), Path("runs"), {**changes, "optimizer.warmup_steps": 1})
        create_run(run, 1, resume=False)
        train_to_end(make_trainer(run))
    return folder


@pytest.fixture
def moved_folder(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The trained folder, moved elsewhere with its contents; it is the current directory."""
    folder = tmp_path / "moved"
    shutil.copytree(trained, folder)
    away = trained.rename(trained.with_name("away"))
    monkeypatch.chdir(folder)
    yield folder
    away.rename(trained)


def run_main(words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> int:
    """Run a command in this process; return its exit code."""
    monkeypatch.setattr(sys, "argv", ["phalanx", *words])
    with pytest.raises(SystemExit) as raised:
        main()
    return int(raised.value.code or 0)


SOURCES_HERE = ("--set", "data.train=['texts']")

MOVED_CASES: list[tuple[tuple[str, ...], int, str]] = [
    (("report", "runs/mine", "--html", "../page.html"), 0, ""),
    (("train", "runs/mine"), 2, "add --resume"),
    (("train", "runs/mine", "--resume"), 0, "the run is complete"),
    (("train", "runs/mine", "--resume", "--set", "training.steps=9"), 2, "texts' does not exist"),
    (("train", "runs/mine", "--resume", "--print-config"), 2, "texts' does not exist"),
    (("train", "runs/mine", "--resume", "--print-config", *SOURCES_HERE), 0, ""),
]


@pytest.mark.parametrize(
    ("words", "exit_code", "expected_text"), MOVED_CASES, ids=[" ".join(c[0]) for c in MOVED_CASES]
)
def test_command_on_moved_run_and_moved_data_changes_nothing(
    words: tuple[str, ...],
    exit_code: int,
    expected_text: str,
    moved_folder: Path,
    trained: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    before = contents(moved_folder)
    assert run_main(words, monkeypatch) == exit_code
    printed = capsys.readouterr()
    assert expected_text in printed.err
    assert exit_code == 0 or "fix: " in printed.err
    assert contents(moved_folder) == before
    assert not trained.exists()
    if "--print-config" in words and exit_code == 0:
        assert f'output_dir = "{moved_folder / "runs"}"' in printed.out


AS_ANOTHER_USER = """
import sys
from phalanx.cli.main import main
for words in {commands!r}:
    sys.argv = ["phalanx", *words]
    try:
        main()
    except SystemExit as ended:
        print("exit", ended.code, file=sys.stderr, flush=True)
"""


def test_run_of_another_user_is_read_and_never_changed(trained: Path, tmp_path: Path) -> None:
    """The commands run as root, without its right to read and write every file, in the folder of another user's run."""
    setpriv = shutil.which("setpriv")
    if setpriv is None or os.getuid() != 0:
        pytest.skip("needs root and setpriv, for a run of another user")
    for name, mode in (("theirs", 0o755), ("closed", 0o700)):
        shutil.copytree(trained, tmp_path / name)
        for path in (tmp_path / name, *(tmp_path / name).rglob("*")):
            os.chown(path, 65534, 65534)
        (tmp_path / name).chmod(mode)
    out = tmp_path / "export"
    commands = [
        ("train", "theirs/runs/mine", "--resume"),
        ("train", "theirs/runs/mine", "--resume", "--print-config"),
        ("report", "theirs/runs/mine"),
        ("export", "theirs/runs/mine", str(out)),
        ("export", "theirs/runs/mine", "theirs/export"),
        ("train", "closed/runs/mine", "--resume"),
        ("report", "closed/runs/mine"),
        ("export", "closed/runs/mine", str(out.with_name("none"))),
    ]
    before = [contents(tmp_path / name) for name in ("theirs", "closed")]
    program = AS_ANOTHER_USER.format(commands=commands)
    dropped = "-dac_override,-dac_read_search"
    result = subprocess.run(
        [setpriv, "--bounding-set", dropped, "--inh-caps", dropped, sys.executable, "-c", program],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "Traceback" not in result.stderr
    exit_codes = [line for line in result.stderr.splitlines() if line.startswith("exit")]
    assert exit_codes == ["exit 2", "exit 2", "exit 2", "exit 0", *["exit 2"] * 4], result.stderr
    assert result.stderr.count("is not a writable directory") == 2
    assert "report.html' cannot be written: Permission denied" in result.stderr
    assert "directory = 'theirs/export' is not writable" in result.stderr
    assert result.stderr.count("cannot be accessed: permission denied\n  fix: ") == 3
    assert [contents(tmp_path / name) for name in ("theirs", "closed")] == before
    assert (out / "config.json").is_file()


@pytest.mark.parametrize(("words", "expected_text"), CASES, ids=[" ".join(words)[:70] for words, _ in CASES])
def test_command_in_wrong_place_says_so_and_changes_nothing(
    words: tuple[str, ...],
    expected_text: str,
    places: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    before = contents(places)
    exit_code = run_main(words, monkeypatch)
    stderr = capsys.readouterr().err
    assert exit_code == 2, stderr
    assert expected_text in stderr
    assert "fix: " in stderr
    assert "Traceback" not in stderr
    assert contents(places) == before


def test_train_refuses_disk_that_is_mounted_read_only(
    places: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        with small_disk(places / "disk", 2**20):
            subprocess.run(["mount", "-o", "remount,ro", str(places / "disk")], check=True)
            monkeypatch.setattr(sys, "argv", ["phalanx", "train", "run.toml", "--set", "output_dir=disk"])
            with pytest.raises(SystemExit, match="2"):
                main()
        assert "output_dir = 'disk' is not a writable directory" in capsys.readouterr().err
    except NotAllowed as not_allowed:
        pytest.skip(str(not_allowed))


def test_torchrun_rank_leaves_no_failure_in_folder_that_phalanx_did_not_make(places: Path) -> None:
    before = contents(places)
    assert run_rank(places / "mine", RankOptions(resume=False, device="cpu")) == 2
    assert contents(places) == before


def test_run_directory_without_marker_is_known_by_its_data(places: Path) -> None:
    """Earlier versions wrote no marker; the next start adds it."""
    old = places / "old"
    old.mkdir()
    (old / "run.toml").write_text(RUN)
    (old / "data.json").write_text('{"train": "a", "held_out": "b", "tokenizer": "c"}')
    assert is_run_directory(old)
    claim_run_directory(old)
    assert (old / "phalanx.json").is_file()
