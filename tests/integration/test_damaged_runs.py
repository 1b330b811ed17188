"""Every program that reads a run directory, with any of its files damaged."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest

from phalanx.runs.create import is_run_directory
from phalanx.runs.events import append_event
from phalanx.runs.hang_dumps import write_failure
from phalanx.spec.errors import UserError
from tests.helpers.cli_runner import command_json, command_output
from tests.helpers.damaged_files import damage, remove_entry
from tests.helpers.damaged_runs import MAKERS, READERS, readers_of

READS = 240
"""Damaged reads of `make test`."""
ALL_READS = 3000
MAX_SECONDS = 30
"""Time after which a read counts as hung; a read takes some hundredths of a second."""
READERS_PER_DAMAGE = 4
ESCAPES = "\x1b]8;;\x1b[2J\x9b"


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of run directories of every kind."""
    folder = tmp_path_factory.mktemp("intact")
    for make in MAKERS.values():
        make(folder)
    return folder


@pytest.fixture
def copy(intact: Path, tmp_path: Path) -> Callable[[str], Path]:
    """Copies of a run directory by its kind, to damage."""
    return lambda kind: Path(shutil.copytree(intact / kind, tmp_path / kind))


@contextmanager
def _limited_time() -> Iterator[None]:
    def fail(*_: Any) -> None:
        pytest.fail(f"the read took more than {MAX_SECONDS} s")

    before = signal.signal(signal.SIGALRM, fail)
    signal.alarm(MAX_SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def _files(directory: Path) -> list[Path]:
    """Return the files that programs of Phalanx read."""
    return sorted(path for path in directory.rglob("*") if path.is_file() and path.parent.name != "tensorboard")


def _read(reader: str, directory: Path) -> None:
    """Read a directory; only a UserError is allowed."""
    try:
        with _limited_time():
            output = READERS[reader](directory)
    except UserError:
        return
    assert "\x1b" not in output


@pytest.mark.parametrize("kind", MAKERS)
def test_every_reader_reads_intact_run(kind, copy):
    directory = copy(kind)
    for reader in readers_of(kind):
        READERS[reader](directory)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", MAKERS)
def test_no_reader_raises_exception_for_damaged_file(kind, seed, intact, tmp_path, pytestconfig):
    reads = (ALL_READS if pytestconfig.getoption("all") else READS) // (4 * len(MAKERS))
    directory = Path(shutil.copytree(intact / kind, tmp_path / kind))
    files = [file.relative_to(directory) for file in _files(directory)]
    random = Random(f"{kind} {seed}")
    while reads > 0:
        name = random.choice(files)
        damage_seed = random.randrange(10**9)
        description = damage(directory / name, Random(damage_seed))
        for reader in random.sample(readers_of(kind), READERS_PER_DAMAGE):
            reads -= 1
            try:
                _read(reader, directory)
            except (Exception, pytest.fail.Exception) as error:
                error.add_note(f"{reader} of {kind}/{name}, damage seed {damage_seed}: {description}")
                raise
        remove_entry(directory / name)
        for changed in (name, *Path(name).parent.glob("SHA256SUMS")):
            shutil.copy(intact / kind / changed, directory / changed)


def test_every_damage_of_every_file_changes_it(intact, tmp_path):
    """Otherwise the test above would read intact files."""
    random = Random(0)
    changed = []
    for file in _files(intact):
        copied = Path(shutil.copy(file, tmp_path / file.name))
        damage(copied, random)
        changed.append(copied.is_symlink() or not copied.is_file() or copied.read_bytes() != file.read_bytes())
        remove_entry(copied)
    assert sum(changed) / len(changed) > 0.9


DAMAGED: dict[str, tuple[str, bytes, str]] = {
    "metrics": ("metrics.jsonl", b'{"step": null, "step_seconds": 1}\n', "metrics.jsonl: 1 lines cannot be read"),
    "a record of a rank": ("trace/rank-00001.jsonl", b"\xff\x00\n", "trace/rank-00001.jsonl: 1 lines cannot be read"),
    "another rank": ("trace/rank-00001.jsonl", b"[" * 100_000 + b"\n", "trace/rank-00001.jsonl: 1 lines"),
    "measurements": ("measured/rank-00002.json", b'{"held_bytes": 1e400}', "measured/rank-00002.json cannot be read"),
    "events": ("events.jsonl", b'{"kind": "started", "time": 1e400}\n', "events.jsonl: 1 lines cannot be read"),
    "a failure": ("failures/rank-00000.json", b'{"rank": 0', "failures/rank-00000.json cannot be read"),
}


@pytest.mark.parametrize("file", DAMAGED)
def test_report_lists_damaged_file_as_problem(file, copy):
    directory = copy("finished")
    name, content, problem = DAMAGED[file]
    (directory / name).parent.mkdir(exist_ok=True)
    before = (directory / name).read_bytes() if (directory / name).exists() and name.endswith("l") else b""
    (directory / name).write_bytes(before + content)
    (run,) = command_json("report", directory)["runs"]
    assert any(problem in text for text in run["problems"]), run["problems"]


def test_debug_lists_damaged_files(copy):
    directory = copy("hung")
    (directory / "hangs" / "rank-00002.json").write_text("{")
    (directory / "hangs" / "rank-00000.calls").write_text("[" * 100_000 + "\n")
    expected = ["hangs/rank-00002.json cannot be read", "hangs/rank-00000.calls cannot be read"]
    assert command_json("debug", directory)["problems"] == expected
    assert all(f"! {problem}" in command_output("debug", directory) for problem in expected)


# -- text of files in a terminal ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["report", "debug", "watch", "live view"])
def test_control_characters_and_markup_of_files_reach_terminal_as_text(command, copy):
    directory = copy("hung" if command == "debug" else "finished")
    host = f"[bold]node[/italic]{ESCAPES}:smile:"
    for rank in range(4):
        file = directory / "trace" / f"rank-{rank:05d}.jsonl"
        file.write_text(file.read_text().replace('"host": "', f'"host": {_json_text(host)[:-1]}'))
    append_event(directory, "rolled_back", after=5, to=4, reason=host)
    append_event(directory, "failed", rank=1, step=5, reason=host, verdict=[host])
    append_event(directory, "started", ranks=4, step=4, host=host)
    if command == "watch":
        metrics = (directory / "metrics.jsonl").read_text().splitlines(keepends=True)
        (directory / "metrics.jsonl").write_text("".join(metrics[:4]))
        write_failure(directory, {"rank": 0, "time": 1.0, "reason": host})
    output = READERS[command](directory)
    assert not {"\x1b", "\x9b"} & set(output)
    assert r"[bold]node[/italic]\x1b]8;;\x1b[2J\x9b:smile:" in output.replace("\n", "")


def _json_text(text: str) -> str:
    return '"' + "".join(f"\\u{ord(c):04x}" for c in text) + '"'


def test_generated_text_reaches_terminal_without_control_characters(copy, monkeypatch):
    monkeypatch.setattr("phalanx.cli.commands.generate.pieces", lambda *_: iter(["a", ESCAPES]))
    output = command_output("generate", copy("finished"), "--tokens", 1, "--prompt", "x")
    assert output == r"xa\x1b]8;;\x1b[2J\x9b" + "\n"


# -- links in the place of files ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("exists", [False, True])
def test_report_replaces_link_in_place_of_its_page(exists, copy, tmp_path):
    directory = copy("finished")
    target = tmp_path / "target"
    if exists:
        target.write_text("<!-- Written by: phalanx -->")
    (directory / "report.html").symlink_to(target)
    command_output("report", directory)
    assert target.exists() == exists
    assert not exists or target.read_text() == "<!-- Written by: phalanx -->"
    assert not (directory / "report.html").is_symlink()
    assert (directory / "report.html").read_text().endswith("</html>\n")
    assert not list(directory.glob("*.partial"))


def test_report_refuses_dangling_link_as_output(copy, tmp_path):
    directory = copy("finished")
    (tmp_path / "page.html").symlink_to(tmp_path / "nowhere")
    with pytest.raises(UserError, match="is a link to a file that does not exist"):
        command_output("report", directory, "--html", tmp_path / "page.html")


def test_generate_replaces_link_in_place_of_tokenizer(copy, tmp_path):
    directory = copy("lead")
    (directory / "tokenizer.json").unlink()
    (directory / "tokenizer.json").symlink_to(tmp_path / "nowhere")
    command_output("generate", directory, "--tokens", 1)
    assert not (tmp_path / "nowhere").exists()
    assert not (directory / "tokenizer.json").is_symlink()
    assert is_run_directory(directory)
