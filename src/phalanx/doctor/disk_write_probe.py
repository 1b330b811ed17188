"""Write and sync a file that has no name, and print how long it took.

`python -m phalanx.doctor.disk_write_probe DIRECTORY MIB`. The file has no name so that nothing is left behind, however
the probe ends. On a slow disk the probe writes less.
"""

import os
import sys
import tempfile
import time

BLOCK = os.urandom(1 << 20)
"""Zeros are not written at all by some file systems."""
BLOCKS_PER_SYNC = 16
MAX_SECONDS = 5
"""After so many pieces it is synced, and after so long it ends: a slow disk is told from one that hangs."""


def main() -> None:
    directory = sys.argv[1]
    pieces = int(sys.argv[2])
    with tempfile.TemporaryFile(dir=directory) as file:
        start = time.perf_counter()
        written = 0
        seconds = 0.0
        while written < pieces and seconds < MAX_SECONDS:
            count = min(BLOCKS_PER_SYNC, pieces - written)
            for _ in range(count):
                file.write(BLOCK)
            file.flush()
            os.fsync(file.fileno())
            written, seconds = written + count, time.perf_counter() - start
        print(f"{written * len(BLOCK)} bytes in {seconds:.4f} s")


if __name__ == "__main__":
    main()
