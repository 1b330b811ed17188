"""`phalanx debug` on what ranks left behind."""

from __future__ import annotations

from pathlib import Path

import pytest
from measure.test_hang import Op, run

from phalanx.measure.incident import write_dump
from phalanx.spec.errors import UserError
from phalanx.spec.layout import Degrees
from tests.cli.commands import known, shown

RUN = 'name = "first"\n[model]\npreset = "tiny"\n'


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    sizes = Degrees(3, 1, 1, 1, 1)
    program = [Op("all", "all_reduce", 4, 10), Op("all", "all_gather", 4, 20)]
    dumps = run([program, program[1:], program], sizes)
    assert dumps is not None
    (tmp_path / "run.toml").write_text(RUN)
    for told in dumps.values():
        write_dump(tmp_path, told)
    return tmp_path


def test_it_names_the_rank_and_what_every_rank_did(directory: Path) -> None:
    lines = shown("debug", directory).splitlines()
    assert lines[0] == (
        "in collective 1 of all ranks, rank 1 (dp=1) called all_gather of [4] Float at mine/model.py:20 (step), "
        "where rank 0 (dp=0) and rank 2 (dp=2) called all_reduce of [4] Float at mine/model.py:10 (step)"
    )
    assert lines[1].startswith("what to do: every rank must call the same collectives in the same order")
    assert lines[2] == "the last step that all ranks which told finished: 3"
    assert [line[:17] for line in lines[4:]] == ["  rank 0 (dp=0): ", "> rank 1 (dp=1): ", "  rank 2 (dp=2): "]


def test_json_is_the_same(directory: Path) -> None:
    found = known("debug", directory)
    assert (found["verdict"]["kind"], found["verdict"]["ranks"], found["step"]) == ("mismatch", [1], 3)
    assert found["verdict"]["said"] == shown("debug", directory).splitlines()[0]


def test_what_is_no_run_is_said(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has no run\.toml"):
        shown("debug", tmp_path)


def test_a_run_that_left_nothing_is_not_explained(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(RUN)
    assert "no rank left word" in shown("debug", tmp_path)
