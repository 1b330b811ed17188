"""Errors for users, and exit codes."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from phalanx.spec.files.replace import replace_file


class UserError(ValueError):
    """An error that the user can fix: the field, its value, the problem and the fix.

    The problem is a predicate, such as "is below 1", so that field, value and problem are a sentence.

    A ValueError, so that pydantic's validators may raise one. The command line prints the error without a traceback and
    exits with 2. It is raised before any process is spawned.

    Example:
        >>> try:
        ...     phalanx.load_run("run.toml", ["layout.tpp=2"])
        ... except phalanx.UserError as error:
        ...     print(error)
        layout.tpp = 2 is not a known field
          fix: did you mean 'tp'?
    """

    def __init__(self, field: str, value: object, problem: str, fix: str = "") -> None:
        self.field = field
        self.value = value
        self.problem = problem
        self.fix = fix
        super().__init__(str(self))

    def __reduce__(self) -> tuple[type[UserError], tuple[str, object, str, str]]:
        return type(self), (self.field, self.value, self.problem, self.fix)

    def __str__(self) -> str:
        value_text = "" if self.value is None else f" = {self.value!r}"
        return f"{self.field}{value_text} {self.problem}" + (f"\n  fix: {self.fix}" if self.fix else "")

    def to_record(self) -> dict[str, Any]:
        """Return the error as JSON values."""
        value = json.loads(json.dumps(self.value, default=str))
        return {"field": self.field, "value": value, "problem": self.problem, "fix": self.fix}


class LocalNodeError(UserError):
    """An error of this machine only, which need not occur on other nodes or on the next start.

    On a run with several nodes, `phalanx train` then exits with 1 instead of ending the run.
    """


class UserErrorGroup(UserError):  # noqa: N818
    """Several errors in one file, reported together; its field, value, problem and fix are those of the first."""

    def __init__(self, errors: list[UserError]) -> None:
        self.errors = errors
        first = errors[0]
        super().__init__(first.field, first.value, first.problem, first.fix)

    def __reduce__(self) -> tuple[type[UserErrorGroup], tuple[list[UserError]]]:  # type: ignore[override]
        return type(self), (self.errors,)

    def __str__(self) -> str:
        return "\n".join(str(error) for error in self.errors)

    def to_record(self) -> dict[str, Any]:
        """Return the errors as JSON values."""
        return {"errors": [error.to_record() for error in self.errors]}


ERROR_FILE_VARIABLE = "PHALANX_ERROR_FILE"
"""Environment variable that names a file, to which a command writes the record of the UserError that ends it."""


def record_error(error: UserError) -> None:
    """Write the error that ends a command to the file of `ERROR_FILE_VARIABLE`, if that is set."""
    if file := os.environ.get(ERROR_FILE_VARIABLE):
        replace_file(Path(file), json.dumps(error.to_record()))


def error_from_record(record: dict[str, Any]) -> UserError:
    """Return the error of a record by `UserError.to_record`."""
    if "errors" in record:
        return UserErrorGroup([error_from_record(error) for error in record["errors"]])
    return UserError(record["field"], record["value"], record["problem"], record["fix"])


EXIT_STOPPED = 75
"""Exit code of a run that a signal stopped before its last step, with a checkpoint (EX_TEMPFAIL of sysexits.h)."""
EXIT_INTERRUPTED = 130
"""Exit code of a run that Ctrl-C stopped before its last step, as in shells."""
