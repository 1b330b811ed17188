"""The program that draws the course's pictures agrees with the package."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[2] / "docs" / "course" / "images" / "make.py"


def test_course_pictures_are_drawn() -> None:
    pyplot = pytest.importorskip("matplotlib.pyplot")
    with pyplot.rc_context():
        pictures = runpy.run_path(str(PROGRAM))["PICTURES"]
        for draw in pictures.values():
            pyplot.close(draw())
    assert all((PROGRAM.parent / name).is_file() for name in pictures)
