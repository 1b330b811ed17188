"""Tests share two cores with the pool's ranks: this process computes with one thread, and no example has a deadline."""

import os

from hypothesis import settings

os.environ.setdefault("OMP_NUM_THREADS", "1")
settings.register_profile("shared machine", deadline=None)
settings.load_profile("shared machine")
