"""Run commands for tests."""

import json
import subprocess
import sys
from typing import Any

from typer.testing import CliRunner

from phalanx.cli.main import app


def command_output(*arguments: object, width: int = 120, exit_code: int = 0) -> str:
    """Return the stdout of a command that runs in this process; its UserError is raised."""
    return _invoke(arguments, width, exit_code).stdout


def command_stderr(*arguments: object) -> str:
    """Return the stderr of a command."""
    return _invoke(arguments, 120, 0).stderr


def _invoke(arguments: tuple[object, ...], width: int, exit_code: int) -> Any:
    strings, columns = [str(argument) for argument in arguments], {"COLUMNS": str(width)}
    result = CliRunner().invoke(app, strings, catch_exceptions=False, env=columns)
    assert result.exit_code == exit_code
    return result


def command_json(*arguments: object, exit_code: int = 0) -> Any:
    """Return the JSON that a command prints."""
    return json.loads(command_output(*arguments, "--json", exit_code=exit_code))


def imported_packages(*arguments: object) -> set[str]:
    """Return the slow packages that a command imports in its own process."""
    program = (
        "import sys; from phalanx.cli.main import app; app(sys.argv[1:], standalone_mode=False); "
        "print(*({'numpy', 'pydantic', 'torch'} & set(sys.modules)), file=sys.stderr)"
    )
    command = [sys.executable, "-c", program, *map(str, arguments)]
    done = subprocess.run(command, check=True, timeout=60, capture_output=True, text=True)
    return set(done.stderr.splitlines()[-1].split())
