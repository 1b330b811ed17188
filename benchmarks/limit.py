"""Memory limit for a process: a cgroup if one can be created (as root, on Linux), otherwise RLIMIT_DATA.

The limit of a cgroup covers resident memory and the page cache of files that the process used, including mapped files.
The kernel reclaims page cache when it needs memory. RLIMIT_DATA covers allocated private memory, used or not, and no
mapped files."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

V1, V2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")
RLIMIT_SLACK_BYTES = 192 * 2**20
"""Allowance for stacks and arenas of threads, which count for RLIMIT_DATA although they are mostly unused."""

BASE = """
import torch, phalanx.train.worker
from tensorboard.summary.writer.record_writer import RecordWriter
layer = torch.nn.Linear(512, 512).bfloat16()
optimizer = torch.optim.AdamW(layer.parameters(), fused=True)
layer(torch.ones(512, 512).bfloat16()).float().logsumexp(-1).sum().backward()
optimizer.step()
print(open("/proc/self/status").read())
"""


@dataclass(frozen=True)
class Limit:
    """Environment with a memory limit in which a command runs."""

    kind: str
    prefix: list[str]
    """Words before the command."""
    group: Path | None

    def peak_bytes(self) -> int | None:
        """Return the peak memory including page cache, or None if it was not counted."""
        for name in ("memory.max_usage_in_bytes", "memory.peak"):
            if self.group is not None and (self.group / name).exists():
                return int((self.group / name).read_text())
        return None


@contextmanager
def memory_limit(limit_bytes: int | None) -> Iterator[Limit]:
    """Yield a limit for commands; None only counts. Processes that still run in it at the end are killed."""
    group = _make_group(limit_bytes)
    if group is None:
        set_limit = f"ulimit -d {limit_bytes // 1024} && " if limit_bytes is not None else ""
        yield Limit("RLIMIT_DATA", ["sh", "-c", f'{set_limit}exec "$@"', "sh"], None)
        return
    try:
        yield Limit("cgroup", ["sh", "-c", 'echo $$ > "$0"/cgroup.procs && exec "$@"', str(group)], group)
    finally:
        _remove(group)


def _make_group(limit_bytes: int | None) -> Path | None:
    version_1 = (V1 / "memory.limit_in_bytes").exists()
    group = (V1 if version_1 else V2) / f"phalanx-{os.getpid()}-{time.monotonic_ns()}"
    names = ["memory.limit_in_bytes", "memory.memsw.limit_in_bytes"] if version_1 else ["memory.max", "memory.swap.max"]
    try:
        group.mkdir()
    except OSError:
        return None
    try:
        if limit_bytes is not None:
            (group / names[0]).write_text(str(limit_bytes))
            if (group / names[1]).exists():  # no swap: memory beyond the limit must be in files
                (group / names[1]).write_text(str(limit_bytes) if version_1 else "0")
        elif not (group / names[0]).exists():
            raise OSError("this cgroup has no memory controller")
    except OSError:
        group.rmdir()
        return None
    return group


def _remove(group: Path) -> None:
    for _ in range(100):
        for process in (group / "cgroup.procs").read_text().split():
            os.kill(int(process), 9)
        try:
            group.rmdir()
            return
        except OSError:  # the killed processes have not exited yet
            time.sleep(0.1)


def base_bytes(kind: str) -> int:
    """Return the memory of Python, torch and Phalanx before a model exists, as this kind of limit counts memory.

    The page cache is not included, because the kernel can reclaim it.
    """
    stdout = subprocess.run([sys.executable, "-c", BASE], capture_output=True, text=True, check=True).stdout
    sizes = {line.split(":")[0]: line.split()[1] for line in stdout.splitlines() if line.endswith("kB")}
    if kind == "cgroup":
        return int(sizes["RssAnon"]) * 1024
    return int(sizes["VmData"]) * 1024 + RLIMIT_SLACK_BYTES
