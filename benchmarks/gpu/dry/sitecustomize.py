"""Supply the numbers that a null GPU does not compute to child processes of a dry run (PYTHONPATH).

Only processes that train or measure need them. The import takes seconds, and the doctor starts twenty other processes.
"""

import sys

RANKS = {"phalanx.train", "phalanx.launch.fork_server", "phalanx.testing.rank_worker", "phalanx.bench.ranks"}
if RANKS & set(sys.orig_argv):
    from tests.null_gpu.given_numbers import give_numbers

    give_numbers()
