"""Commands of README.md, guides and course run, in the order of the page, with the `phalanx` of this checkout.

Training commands use few steps of little text in fp32 (`SHORT_RUN`), unless the command sets other values. Pages
with long commands run in `make test-all` only (tests/thorough.tsv). `pytest -s` prints the number of commands of
each page, and the reasons for those that are left out."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.doc_commands import FencedBlock, fenced_blocks, lines_outside_fences

ROOT = Path(__file__).parents[2]
FOLDERS = (ROOT / "docs", ROOT / "docs" / "guides", ROOT / "docs" / "course")
PAGES = [page for folder in FOLDERS for page in sorted(folder.glob("*.md")) if page.name != "log.md"]
PAGES.insert(0, ROOT / "README.md")
RUN_SECONDS = 600
PAGE_SECONDS = 1800
"""Limits for a hang; a page takes 10 to 90 s of processor time."""
SHORT_RUN = {
    "PHALANX_TRAINING__STEPS": "5",
    "PHALANX_TRAINING__TOKENS_PER_STEP": "2048",
    "PHALANX_TRAINING__PRECISION": "fp32",
    "PHALANX_EVALUATION__TOKENS": "512",
    "PHALANX_DATA__TRAIN": json.dumps([str(Path(json.__file__).parent)]),
}
"""Values of the run file for commands that train. The environment is stronger than the file, and weaker than --set."""
TRAINS = re.compile(r"phalanx (train|bench) (?!.*--print-config)")
PROGRAM = re.compile(r"(\$ )?(phalanx|make|torchrun|python -m|pip|kubectl|sbatch|srun|sky) ")


def page_id(page: Path) -> str:
    """Return the name of a page below docs/."""
    return str(page.relative_to(ROOT)).removeprefix("docs/")


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Return an environment with the `phalanx` and `python` of this checkout, and with its own home directory."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, command in (("phalanx", "-m phalanx"), ("python", "")):
        program = programs / name
        program.write_text(f'#!/bin/sh\nexec "{sys.executable}" {command} "$@"\n')
        program.chmod(0o755)
    path = os.pathsep.join([str(programs), os.environ["PATH"]])
    python_path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    return os.environ | {"PATH": path, "PYTHONPATH": python_path, "HOME": str(tmp_path), "COLUMNS": "120"}


@pytest.mark.timeout(PAGE_SECONDS)
@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_commands_of_page_succeed(page: Path, environment: dict[str, str], tmp_path: Path) -> None:
    folder = tmp_path / "work"
    folder.mkdir()
    run, left_out = 0, []
    for block in fenced_blocks(page.read_text()):
        if block.title:
            (folder / block.title).write_text("\n".join(block.body) + "\n")
        if block.not_run:
            left_out.append(f"{len(block.commands)} (line {block.line}): {block.not_run}")
            continue
        for command in block.commands:
            _run(command, block, folder, environment)
            run += 1
    print(f"\n{page_id(page)}: {run} commands ran; not run: {'; '.join(left_out) or 'none'}")


def _run(command: str, block: FencedBlock, folder: Path, environment: dict[str, str]) -> None:
    variables = environment | (SHORT_RUN if TRAINS.search(command) else {})
    run_files = [folder / word for word in command.split() if word.endswith(".toml") and (folder / word).exists()]
    # The file of `phalanx init` has an example of a mixture, as a comment.
    own_data = ("\n[[data.source]]", '\nformat = "preference"')
    if any(mark in file.read_text() for file in run_files for mark in own_data):
        variables.pop("PHALANX_DATA__TRAIN", None)
    command_words = ["bash", "-euo", "pipefail", "-c", command]
    done = subprocess.run(
        command_words,
        cwd=folder,
        env=variables,
        timeout=RUN_SECONDS,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, f"block of line {block.line}: {command}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_commands_of_page_stand_in_console_blocks(page: Path) -> None:
    text = page.read_text()
    outside = [f"line {number}: {line}" for number, line in lines_outside_fences(text) if PROGRAM.match(line.lstrip())]
    for block in fenced_blocks(text):
        if block.language == "console":
            assert block.commands, f"line {block.line}: a console block without a line that starts with `$ `"
        elif block.language in ("", "bash", "sh", "shell"):
            outside += [f"line {block.line}: {line}" for line in block.body if PROGRAM.match(line)]
    assert outside == []


def test_blocks_have_commands_with_continuation_lines() -> None:
    page = '```toml title="a.toml"\nx = 1\n```\n<!-- not run: a GPU -->\n```console\n$ a \\\n    b\nout\n$ c\n```\n'
    file, commands = fenced_blocks(page)
    assert (file.title, file.body, file.commands) == ("a.toml", ("x = 1",), [])
    assert (commands.not_run, commands.commands) == ("a GPU", ["a \\\n    b", "c"])


def test_blocks_may_be_indented_and_have_here_documents() -> None:
    (block,) = fenced_blocks(
        "note\n    ```console\n    $ cat > a <<'EOF'\n    x\n    EOF\n    output\n    $ b\n    ```\n"
    )
    assert block.commands == ["cat > a <<'EOF'\nx\nEOF", "b"]


def test_block_without_end_is_an_error() -> None:
    with pytest.raises(ValueError, match="line 2: the fenced block does not end"):
        list(fenced_blocks("text\n```console\n$ a\n"))
