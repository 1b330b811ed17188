"""Layout options that the installed PyTorch lacks, determined without importing it."""

from __future__ import annotations

from importlib.metadata import version

from phalanx.spec.errors import UserError
from phalanx.spec.layout import Layout

FIRST_BUCKET_TORCH_VERSION = (2, 13)
"""First PyTorch version whose DDP accepts bucket_cap_mb_list."""


def check_torch_supports(layout: Layout) -> None:
    """Raise UserError for an option that the installed PyTorch does not support."""
    installed = version("torch")
    major, minor, *_ = installed.split(".")
    if layout.first_bucket_mb is not None and (int(major), int(minor)) < FIRST_BUCKET_TORCH_VERSION:
        required = ".".join(map(str, FIRST_BUCKET_TORCH_VERSION))
        fix = f"install torch {required} or later, or remove layout.first_bucket_mb"
        raise UserError("layout.first_bucket_mb", layout.first_bucket_mb, f"is not supported by torch {installed}", fix)
