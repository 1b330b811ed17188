"""Files that options name: written, but never over one that Phalanx did not write."""

from __future__ import annotations

from pathlib import Path

import pytest

from phalanx.cli.common.output_file import write_file
from phalanx.spec.errors import UserError
from tests.helpers.cli_runner import command_output


def test_write_file_replaces_only_what_phalanx_wrote(tmp_path: Path) -> None:
    file = tmp_path / "out.toml"
    write_file("--out", file, "# By phalanx\n1")
    write_file("--out", file, "# By phalanx\n2")
    assert file.read_text() == "# By phalanx\n2"
    file.write_text("# mine\n")
    with pytest.raises(UserError, match=r"--out = .*is there already, and not written by phalanx"):
        write_file("--out", file, "# By phalanx\n3")
    assert file.read_text() == "# mine\n"


def test_write_file_says_why_it_cannot_write(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="No such file or directory"):
        write_file("--out", tmp_path / "none" / "out.toml", "# By phalanx\n")


@pytest.mark.parametrize("ending", [".svg", ".html", ".png"])
def test_plan_replaces_its_own_files(ending: str, tmp_path: Path) -> None:
    """What it writes is known as its own."""
    run, out, picture = tmp_path / "run.toml", tmp_path / "out.toml", tmp_path / f"picture{ending}"
    run.write_text('[model]\npreset = "tiny"\n[training]\ntokens_per_step = 8192\n')
    words = ("plan", run, "--machine", "h100", "--nproc", 1, "--out", out, "--picture", picture)
    for _ in range(2):
        command_output(*words)
