"""Files that options name are written, but never over a file of another program."""

from __future__ import annotations

import os
from itertools import permutations
from pathlib import Path

import pytest

from phalanx.cli.common.output_file import check_replaceable, write_file
from phalanx.spec.errors import UserError
from phalanx.spec.files.template import run_file_template
from phalanx.spec.formatting import WRITTEN_BY
from tests.helpers.cli_runner import command_output


def test_write_file_replaces_only_what_phalanx_wrote(tmp_path: Path) -> None:
    file = tmp_path / "out.sbatch"
    new = f"#!/bin/bash\n# {WRITTEN_BY} launch\n3"
    for number in "12":
        write_file("--out", file, new + number)
        assert file.read_text() == new + number
    for content in ("# mine\n", "# A Phalanx run\n", run_file_template("run.toml", "run.schema.json")):
        file.write_text(content)
        with pytest.raises(UserError, match=r"--out = .*exists, and was not written by phalanx"):
            write_file("--out", file, new)
        assert file.read_text() == content


def test_write_file_replaces_no_file_of_another_kind(tmp_path: Path) -> None:
    file = tmp_path / "out"
    heads = [f"# {WRITTEN_BY} {command}\n" for command in ("plan", "calibrate", "launch run.toml --to kubernetes")]
    heads += [f"<!doctype html><!-- {WRITTEN_BY} -->", f"<svg><!-- {WRITTEN_BY} -->", f'{{"comment": "{WRITTEN_BY}"}}']
    for existing, new in permutations(heads, 2):
        file.write_text(existing)
        with pytest.raises(UserError, match="exists with another kind of content") as error_info:
            write_file("--out", file, new)
        assert error_info.value.fix == "choose another name, or remove it"
        assert file.read_text() == existing


def test_plan_and_launch_keep_a_run_file_that_the_user_completed(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    plan = ("plan", "tiny", "--machine", "cpu", "--nproc", 1, "--out", file)
    command_output(*plan)
    completed = file.read_text().replace('"stdlib"', '"/my/text"')
    assert "/my/text" in completed
    file.write_text(completed)
    with pytest.raises(UserError, match="is a run file with other content"):
        command_output(*plan)
    run = tmp_path / "run.toml"
    run.write_text('[model]\npreset = "tiny"\n')
    with pytest.raises(UserError, match="run file instead of job file"):
        command_output("launch", run, "--to", "slurm", "--nproc", 1, "--out", file)
    assert file.read_text() == completed


def test_write_file_says_why_it_cannot_write(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="No such file or directory"):
        write_file("--out", tmp_path / "none" / "out.toml", f"# {WRITTEN_BY}\n")


@pytest.mark.parametrize("ending", [".svg", ".html", ".png"])
def test_plan_replaces_its_own_files(ending: str, tmp_path: Path) -> None:
    run, out, picture = tmp_path / "run.toml", tmp_path / "out.toml", tmp_path / f"picture{ending}"
    run.write_text('[model]\npreset = "tiny"\n[training]\ntokens_per_step = 8192\n')
    machine = ("--machine", "h100", "--nproc", 1)
    for _ in range(2):
        command_output("plan", run, *machine, "--out", out)
        command_output("plan", "explain", run, *machine, "--picture", picture)


@pytest.mark.parametrize("ending", [".svg", ".png", ".json", ".csv"])
def test_pipeline_show_replaces_its_own_files_and_no_others(ending: str, tmp_path: Path) -> None:
    out = tmp_path / f"schedule{ending}"
    arguments = ("pipeline", "show", "1f1b", "--stages", 2, "--microbatches", 4, "--out", out)
    for _ in range(2):
        command_output(*arguments)
    out.write_text("my file")
    with pytest.raises(UserError, match="exists, and"):
        command_output(*arguments)
    assert out.read_text() == "my file"


def test_check_replaceable_does_not_read_from_pipes(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    check_replaceable("--out", tmp_path / "pipe", "png")
