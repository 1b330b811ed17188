"""Write and sync an anonymous file, and print the time.

`python -m phalanx.doctor.disk_write_probe DIRECTORY MIB` runs it. The file is anonymous so that nothing remains,
however the probe ends. On a slow disk the probe writes less.
"""

import os
import sys
import tempfile
import time

BLOCK = os.urandom(1 << 20)
"""Random data, because some file systems do not write zeros."""
BLOCKS_PER_SYNC = 16
MAX_SECONDS = 5
"""Number of blocks between syncs, and the time limit, which distinguishes slow disks from hung ones."""


def main() -> None:
    """Run the probe."""
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
            written += count
            seconds = time.perf_counter() - start
        print(f"{written * len(BLOCK)} bytes in {seconds:.4f} s")  # noqa: T201 -- the result


if __name__ == "__main__":
    main()
