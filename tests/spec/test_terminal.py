"""Text of files in a terminal is shown exactly, without control sequences."""

from __future__ import annotations

import re
import sys
from io import StringIO
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.live import Live
from rich.table import Table
from rich.text import Text

from phalanx.spec.formatting import printable
from phalanx.spec.terminal import Terminal, printable_output

SOURCES = Path(__file__).parents[2] / "src" / "phalanx"
HOSTILE = "[red]node[/blue]\x1b[2J\x9b1m\u202ecod.exe\ud800:smile:"
SHOWN = r"[red]node[/blue]\x1b[2J\x9b1m\u202ecod.exe\ud800:smile:"


@given(st.text())
def test_printable_keeps_letters_and_line_breaks_and_encodes(text: str) -> None:
    printed = printable(text)
    printed.encode()
    assert printable(printed) == printed
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", printed)
    if text.isprintable():
        assert printed == text


@pytest.mark.parametrize("renderable", [HOSTILE, Text(HOSTILE), [HOSTILE]])
def test_terminal_prints_text_of_files_as_it_is(renderable: object) -> None:
    screen = StringIO()
    terminal = Terminal(file=screen, width=200, color_system=None)
    if isinstance(renderable, list):
        table = Table(HOSTILE, title=HOSTILE)
        table.add_row(HOSTILE)
        terminal.print(table)
        assert screen.getvalue().count(SHOWN) == 3
    else:
        terminal.print(renderable)
        assert screen.getvalue() == f"{SHOWN}\n"


def test_terminal_keeps_colors_and_cursor_of_rich() -> None:
    screen = StringIO()
    terminal = Terminal(file=screen, force_terminal=True, color_system="standard", width=80)
    terminal.print(Text("fast", "bold"))
    with Live(console=terminal, auto_refresh=False) as live:
        live.update(Text("one\ntwo"), refresh=True)
        live.update(Text("three\nfour"), refresh=True)
    assert "\x1b[1mfast\x1b[0m" in screen.getvalue()
    assert "\x1b[1A" in screen.getvalue()


def test_printable_output_covers_print_and_leaves_rich_its_colors(capsys: pytest.CaptureFixture[str]) -> None:
    with printable_output():
        print(HOSTILE)
        print(HOSTILE, file=sys.stderr)
        Terminal(force_terminal=True, color_system="standard").print(Text("fast", "bold"))
    out, err = capsys.readouterr()
    assert out == f"{SHOWN}\n\x1b[1mfast\x1b[0m\n"
    assert err == f"{SHOWN}\n"


def test_no_other_file_makes_consoles_of_rich() -> None:
    pattern = re.compile(r"import [^\n]*\bConsole\b|rich\.print|from rich import print")
    files = {file.relative_to(SOURCES).as_posix() for file in SOURCES.rglob("*.py") if pattern.search(file.read_text())}
    assert files == {"spec/terminal.py"}
