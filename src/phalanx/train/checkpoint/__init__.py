"""Checkpoints on disk and in memory."""

import warnings

# DCP warns about a run of one process, which is intended here.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
