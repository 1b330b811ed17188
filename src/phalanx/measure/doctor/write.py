"""`python -m phalanx.measure.doctor.write DIRECTORY MIB`: writes and syncs a file that has no name, so that nothing is
left behind however this ends, and says how long it took."""

import os
import sys
import tempfile
import time

PIECE = os.urandom(1 << 20)
"""Zeros are not written at all by some file systems."""


def main() -> None:
    directory, pieces = sys.argv[1], int(sys.argv[2])
    with tempfile.TemporaryFile(dir=directory) as file:
        begun = time.perf_counter()
        for _ in range(pieces):
            file.write(PIECE)
        file.flush()
        os.fsync(file.fileno())
        print(f"{pieces * len(PIECE)} bytes in {time.perf_counter() - begun:.4f} s")


if __name__ == "__main__":
    main()
