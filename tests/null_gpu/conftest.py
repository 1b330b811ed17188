"""These tests are for the GPU that computes nothing (make test-null-gpu): elsewhere there is none to collect."""

from __future__ import annotations

import os

collect_ignore_glob = [] if "libnullgpu" in os.environ.get("LD_PRELOAD", "") else ["test_*.py"]
