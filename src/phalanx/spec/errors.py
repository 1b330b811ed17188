"""The one error that is meant for people."""

from __future__ import annotations


class UserError(ValueError):
    """Something the user can mend: which field, which value, what is wrong, what to do.

    It is a ValueError so that pydantic's validators may raise it. The command line prints it without a traceback and
    exits with 2. It is raised before any process is spawned.
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
        return f"{self.field}{value_text}: {self.problem}" + (f"\n  fix: {self.fix}" if self.fix else "")


class LocalNodeError(UserError):
    """Something of this one machine, which another has not, or this one the next time. As one of several nodes it ends
    `phalanx train` with 1: the run is not to be ended for it."""


class UserErrorGroup(UserError):  # noqa: N818
    """Several mistakes in one file, reported together."""

    def __init__(self, errors: list[UserError]) -> None:
        self.errors = errors
        ValueError.__init__(self, str(self))

    def __reduce__(self) -> tuple[type[UserErrorGroup], tuple[list[UserError]]]:  # type: ignore[override]
        return type(self), (self.errors,)

    def __str__(self) -> str:
        return "\n".join(str(error) for error in self.errors)


EXIT_STOPPED = 75
"""Exit code (EX_TEMPFAIL of sysexits.h) of a run that a signal ended before its last step, with a checkpoint."""


EXIT_INTERRUPTED = 130
"""That of one that Ctrl-C ended so, as shells have it."""
