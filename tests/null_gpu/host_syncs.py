"""Count the places in a step at which the host waits for the device."""

from __future__ import annotations

import ctypes
import json
import traceback
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from phalanx.data.packing import Batch
from phalanx.train.step_metrics import ReadRecord
from phalanx.train.trainer import Trainer

PACKAGE = "/src/phalanx/"
OUTSIDE = "torch"
"""Place of a wait outside of Phalanx."""

_counts: Counter[str] = Counter()


@ctypes.CFUNCTYPE(None, ctypes.c_char_p)
def _count(_: bytes) -> None:
    frames = [frame for frame in traceback.extract_stack() if PACKAGE in frame.filename]
    _counts[f"{frames[-1].filename.rpartition(PACKAGE)[2]}:{frames[-1].name}" if frames else OUTSIDE] += 1


def write_host_syncs(file: Path) -> None:
    """From now on, write the places and numbers of the waits from the start of each step to that of the next to a file.

    The last step but one remains in the file: at the end of the last step, all results are read."""
    ctypes.c_void_p.in_dll(ctypes.CDLL(None), "null_on_host_sync").value = ctypes.cast(_count, ctypes.c_void_p).value
    launch_step = Trainer.launch_step

    def counted_step(trainer: Trainer, batches: Iterator[Batch]) -> ReadRecord:
        file.write_text(json.dumps(_counts))
        _counts.clear()
        return launch_step(trainer, batches)

    Trainer.launch_step = counted_step
