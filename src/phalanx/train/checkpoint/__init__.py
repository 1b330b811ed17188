"""Checkpoints on disk and in memory."""
