"""Messages about what is happening, through Python's logging: every module logs below the logger "phalanx".

As a library, Phalanx installs no handler. Its own processes, which are commands and ranks, call `log_to_stderr`, and so
does `phalanx.run_rank` if `LEVELS_VARIABLE` is set.
"""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import TextIO

from phalanx.spec.errors import UserError
from phalanx.spec.formatting import printable

LEVELS_VARIABLE = "PHALANX_LOG"
"""Variable with the minimum level of messages, such as "debug", or "info,train.checkpoint=debug" for one module."""
LEVELS = {name: getattr(logging, name.upper()) for name in ("debug", "info", "warning", "error")}
PROGRESS = "phalanx.train.progress"
"""Logger of the steps of a run. Its lines have no prefix."""
RESULT = "phalanx.result"
"""Logger of the results that a rank prints, which a command writes to stdout."""
PACKAGE = Path(__file__).parents[1]


def log_to_stderr() -> None:
    """Write the messages of this process to stderr, from the levels of `PHALANX_LOG` on.

    Another call replaces the levels. Raises UserError if the variable is invalid."""
    levels = parse_levels(os.environ.get(LEVELS_VARIABLE, ""))
    ours = (name for name in list(logging.root.manager.loggerDict) if name.startswith("phalanx."))
    for name, level in {**dict.fromkeys(ours, logging.NOTSET), RESULT: logging.INFO, **levels}.items():
        logging.getLogger(name).setLevel(level)
    logger = logging.getLogger("phalanx")
    for handler in logger.handlers[:]:
        if isinstance(handler, StandardStreamHandler):
            logger.removeHandler(handler)
    handler = StandardStreamHandler()
    handler.setFormatter(MessageFormatter(has_origin=logging.DEBUG in levels.values()))
    logger.addHandler(handler)
    # Otherwise, a handler that user code installs on the root logger would print every message a second time.
    logger.propagate = False


def parse_levels(text: str) -> dict[str, int]:
    """Return the levels of loggers by name, from the value of `PHALANX_LOG`."""
    levels = {"phalanx": logging.INFO}
    for part in filter(None, text.replace(" ", "").split(",")):
        module, _, level = part.rpartition("=")
        if level.lower() not in LEVELS:
            fix = f"use one of {', '.join(LEVELS)}, also for one module: info,train.checkpoint=debug"
            raise UserError(LEVELS_VARIABLE, text, f"has an unknown level {level!r}", fix)
        path = PACKAGE.joinpath(*module.split("."))
        if not (path.is_dir() or path.with_name(f"{path.name}.py").exists()):
            fix = "name a folder or a file of the package phalanx, such as launch or train.checkpoint"
            raise UserError(LEVELS_VARIABLE, text, f"has an unknown module {module!r}", fix)
        levels[".".join(filter(None, ("phalanx", module)))] = LEVELS[level.lower()]
    return levels


def level_name(level: int) -> str:
    """Return the name of the highest level of `LEVELS` that is not above a level of logging."""
    return max((name for name in LEVELS if LEVELS[name] <= level), key=LEVELS.__getitem__, default="debug")


class StandardStreamHandler(logging.StreamHandler[TextIO]):
    """Handler that writes results to stdout and other messages to stderr, whichever streams these are at the time."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write a message."""
        self.stream = sys.stdout if record.name == RESULT else sys.stderr
        super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 -- logging's name
        """Raise the error of a result that cannot be written. A message that cannot be written is lost."""
        if record.name == RESULT:
            raise  # logging calls this while the error is handled


class MessageFormatter(logging.Formatter):
    """Format of messages: "phalanx: [rank 3] text"; with `has_origin` also their time, level and module."""

    def __init__(self, has_origin: bool) -> None:
        super().__init__()
        self.has_origin = has_origin

    def format(self, record: logging.LogRecord) -> str:
        """Return a message as printable text."""
        text = printable(super().format(record))
        if record.name == RESULT or (record.name == PROGRESS and not self.has_origin):
            return text
        rank = (
            f"[rank {os.environ['RANK']}] " if "RANK" in os.environ and os.environ.get("WORLD_SIZE", "1") != "1" else ""
        )
        if not self.has_origin:
            # An indented text continues the previous message.
            return text if text.startswith("  ") else f"phalanx: {rank}{text}"
        time = f"{self.formatTime(record, '%H:%M:%S')}.{int(record.msecs):03d}"
        return f"{time} {record.levelname.lower()} {record.name}: {rank}{text}"
