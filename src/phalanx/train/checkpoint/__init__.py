"""Checkpoints on disk and in memory."""

import warnings

# DCP warns of a run of one process, which is no accident.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
