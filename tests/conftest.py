"""Tests share two cores with the pool's ranks: this process computes with one thread."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
