"""Processes that a dry run starts (PYTHONPATH) are given the numbers that a GPU that computes nothing does not have:
those that train or measure, for it takes them seconds, and the doctor starts twenty others."""

import sys

RANKS = {"phalanx.train", "phalanx.launch.fork_server", "phalanx.testing.rank_worker", "phalanx.bench.ranks"}
if RANKS & set(sys.orig_argv):
    from tests.null_gpu.given_numbers import give_numbers

    give_numbers()
