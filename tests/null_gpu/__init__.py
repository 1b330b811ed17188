"""The CUDA path on a null GPU, which computes nothing: docs/contributing/tests.md."""

import os


def is_null_gpu() -> bool:
    """Return whether the library of native/ stands in for CUDA in this process."""
    return "libnullgpu" in os.environ.get("LD_PRELOAD", "")
