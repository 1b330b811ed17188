"""The command `phalanx` as a shell sees it: completion, and messages."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PROGRAM = """
import sys
from phalanx.cli.main import main
sys.argv = ["phalanx"]
try:
    main()
finally:
    assert "torch" not in sys.modules
"""


def complete(line: str, shell: str = "bash") -> subprocess.CompletedProcess[str]:
    """Return the completions of the last word of a command line, as a shell asks for them."""
    words = line.split(" ")
    variables = {"COMP_WORDS": "\n".join(words), "COMP_CWORD": str(len(words) - 1), "_TYPER_COMPLETE_ARGS": line}
    variables["_TYPER_COMPLETE_FISH_ACTION"] = "get-args"
    environment = {**os.environ, **variables, "_PHALANX_COMPLETE": f"complete_{shell}"}
    return subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("phalanx pl", ["plan", "placement"]),
        ("phalanx train run.toml --no", ["--nodes"]),
        ("phalanx plan run.toml --machine h20", ["h20", "h200"]),
        ("phalanx info llama3-8", ["llama3-8b"]),
        ("phalanx swarm se", ["serve"]),
        ("phalanx train runs/fi", []),  # the shell completes files
    ],
)
def test_completion_offers_commands_options_and_presets_without_torch(line: str, expected: list[str]) -> None:
    done = complete(line)
    assert (done.returncode, done.stdout.split(), done.stderr) == (0, expected, "")


def test_completion_of_unknown_command_prints_nothing() -> None:
    done = complete("phalanx bogus --mach")
    assert (done.stdout, done.stderr) == ("", "")


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_completion_answers_other_shells(shell: str) -> None:
    done = complete("phalanx repo", shell)
    assert "report" in done.stdout
    assert done.stderr == ""
