"""Access of checks to a machine: files, paths, outputs of programs, and environment variables.

The machine is the local one, or a snapshot: a directory with files under their paths, and outputs under commands/.

Why: `docs/design/decisions/checks-ask-a-machine.md`.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from contextlib import suppress
from functools import cached_property, partial
from glob import glob
from itertools import islice
from pathlib import Path

from phalanx.doctor.subprocesses import CommandOutput, run_command
from phalanx.runs.host import host_name

COMMANDS_FOLDER = "commands"
ENVIRONMENT_FILE = "environment"
RECORDED_VARIABLES = re.compile(
    r"(NCCL|GLOO|TORCH_NCCL|CUDA|UCX)_\w+|MASTER_ADDR|OMP_NUM_THREADS|LD_LIBRARY_PATH|"
    r"SLURM(D_NODENAME|_GPUS_ON_NODE|_(JOB|STEP)_NODELIST)"
)
"""Environment variables that checks may read and snapshots may contain."""
SYSTEM_NCCL_CONF = "/etc/nccl.conf"
USER_NCCL_CONF = "~/.nccl.conf"
"""The files in which NCCL looks for variables; NCCL_CONF_FILE replaces the user's."""
HOSTNAME = "/proc/sys/kernel/hostname"
COMMAND_SECONDS = 10
"""Twice the time in which nvidia-smi must respond for Primus (smi latency > 5 s is a failure)."""
PIECE_BYTES = 1 << 16
MAX_PIECES = 1024
"""Number of pieces of a file that are read, 64 MiB in total (a log of NCCL).

Under /proc/sys the kernel rejects reads of megabytes at once.
"""
CANNOT_RUN = 126
"""A shell's exit code for a program that exists and cannot be executed."""
STATUS_PATTERN = re.compile(r"\n?\[(exit (-?\d+)|no answer)\]\s*$")
"""The last line of a recorded output whose program failed or did not respond."""


class CommandTimeout(Exception):  # noqa: N818
    """A program that did not finish in time."""

    def __init__(self, command: str, seconds: float) -> None:
        self.command = command
        self.seconds = seconds
        super().__init__(f"{command}: no answer in {seconds:g} s")


class Machine:
    """The local machine, or a snapshot in `root`. All that checks read is recorded in `record`."""

    def __init__(self, root: Path | None = None, record: Path | None = None) -> None:
        self.root = root
        self.record = record
        variables = {name: value for name, value in os.environ.items() if RECORDED_VARIABLES.fullmatch(name)}
        self.process_environment: Mapping[str, str] = (
            variables if root is None else _parse_variables(self.read(f"/{ENVIRONMENT_FILE}"))
        )
        """Variables of the environment, without those of NCCL's files."""
        if record is not None:
            lines = [f"{name}={value}\n" for name, value in sorted(variables.items())]
            self._record_file(ENVIRONMENT_FILE, "".join(lines))

    @property
    def host(self) -> str:
        """The host's name: Slurm's if Slurm started this process, since srun --exclude accepts no other."""
        slurm = self.process_environment.get("SLURMD_NODENAME")
        return slurm or self.read(HOSTNAME) or (host_name() if self.root is None else "unknown")

    @cached_property
    def environment(self) -> Mapping[str, str]:
        """Variables of the environment, and those of NCCL's files that the environment does not set.

        The user's file takes precedence over the system's (NCCL's src/misc/param.cc).
        """
        files = SYSTEM_NCCL_CONF, self.process_environment.get("NCCL_CONF_FILE") or USER_NCCL_CONF
        file_variables = {name: value for file in files for name, value in _parse_variables(self.read(file)).items()}
        return {
            **{name: value for name, value in file_variables.items() if RECORDED_VARIABLES.fullmatch(name)},
            **self.process_environment,
        }

    def read(self, path: str) -> str | None:
        """Return the stripped text of a file, or None if it does not exist or is not readable.

        `~` is the user's home directory, in a snapshot too. During recording, all checks get the text of the first
        read.
        """
        with suppress(OSError):
            if self.record and (recorded := (self.record / path.lstrip("/")).read_text().strip()):
                return recorded
        try:
            with self._resolve_path(path).open("rb") as file:
                pieces = islice(iter(partial(file.read, PIECE_BYTES), b""), MAX_PIECES)
                text = b"".join(pieces).decode(errors="replace").replace("\0", "").strip()
        except OSError:
            return None
        self._record_file(path, text + "\n")
        return text

    def glob(self, pattern: str) -> list[str]:
        """Return the sorted paths that match a shell pattern."""
        paths = sorted(f"/{path}" for path in glob(pattern.lstrip("/"), root_dir=self.root or "/"))
        for path in paths if self.record else []:
            self._record_file(path, None if self._resolve_path(path).is_dir() else "")
        return paths

    def run(self, name: str, *argv: str, seconds: float = COMMAND_SECONDS) -> CommandOutput | None:
        """Run a program, and return its output, or None if it is not installed.

        Raises CommandTimeout if the program did not finish in time.
        """
        answer = self._read_recorded_output(name) if self.root else _try_command(argv, seconds)
        if answer is None:
            return None
        status_line = "" if answer.code == 0 else "[no answer]\n" if answer.code is None else f"[exit {answer.code}]\n"
        self._record_file(f"{COMMANDS_FOLDER}/{name}.txt", f"{answer.text.rstrip()}\n{status_line}")
        if answer.code is None:
            raise CommandTimeout(" ".join(argv), seconds)
        return answer

    def _read_recorded_output(self, name: str) -> CommandOutput | None:
        text = self.read(f"/{COMMANDS_FOLDER}/{name}.txt")
        if text is None:
            return None
        status = STATUS_PATTERN.search(text)
        if status is None:
            return CommandOutput(text)
        return CommandOutput(text[: status.start()], int(status[2]) if status[2] else None)

    def _resolve_path(self, path: str) -> Path:
        return Path(os.path.expanduser(path)) if self.root is None else self.root / path.lstrip("/")

    def _record_file(self, path: str, text: str | None) -> None:
        """Record a file or a directory. A file that was read is not replaced by one that was only listed."""
        if self.record is None:
            return
        target = self.record / path.lstrip("/")
        if text is None:
            target.mkdir(parents=True, exist_ok=True)
        elif text or not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            # Another check may read it at the same time.
            temporary = target.with_name(f"{target.name}.{os.getpid()}")
            temporary.write_text(text)
            temporary.replace(target)


def _try_command(argv: tuple[str, ...], seconds: float) -> CommandOutput | None:
    try:
        return run_command(argv, seconds)
    except OSError as error:
        executable = shutil.which(argv[0])
        return CommandOutput(f"{argv[0]}: {error.strerror or error}", CANNOT_RUN) if executable else None


def _parse_variables(text: str | None) -> dict[str, str]:
    lines = [line for line in (text or "").splitlines() if not line.startswith("#")]
    return {name: value for name, equals, value in (line.partition("=") for line in lines) if equals}
